"""`wide recover`: train LoRA beside the routers of a finished calibration (stage 2)."""

from collections.abc import Sequence

from train.run import recover_main
from train.run_config import RecoverConfig as Args
from train.run_config import parse as parse_config
from wide_jax.cli.training import run


def parse(argv: Sequence[str], prog: str) -> Args:
    """`[--config FILE] [key=value ...] [--option value ...]`."""
    return parse_config(Args, argv, prog=prog)


def main(args: Args) -> None:
    """Start or resume the run."""
    run(recover_main, args)
