"""`wide tune`: measure which kernels and tile sizes are fastest on this card."""

from rich.console import Console

from eval.tune_kernels import TuneConfig as Args
from eval.tune_kernels import main as tune
from wide_jax.cli.start import start


def main(args: Args) -> None:
    """Measure on this machine's GPU; fails without one."""
    start("gpu", Console())
    tune(args)
