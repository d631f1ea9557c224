"""`wide bench kernels`: device time of every pruned operation beside dense, ideal and naive."""

from rich.console import Console

from eval.bench_kernels import BenchConfig as Args
from eval.bench_kernels import main as bench
from wide_jax.cli.start import start


def main(args: Args) -> None:
    """Measure on this machine's GPU; fails without one."""
    start("gpu", Console())
    bench(args)
