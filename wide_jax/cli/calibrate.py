"""`wide calibrate`: train routers on a frozen model (stage 1)."""

from collections.abc import Sequence

from train.run import calibrate_main
from train.run_config import CalibrateConfig as Args
from train.run_config import parse as parse_config
from wide_jax.cli.training import run


def parse(argv: Sequence[str], prog: str) -> Args:
    """`[--config FILE] [key=value ...] [--option value ...]`."""
    return parse_config(Args, argv, prog=prog)


def main(args: Args) -> None:
    """Start or resume the run."""
    run(calibrate_main, args)
