"""What `wide calibrate` and `wide recover` share: device, cheap checks, bars and lines."""

from collections.abc import Callable
from typing import Any

from rich.console import Console

from train.evaluate import HeldOut
from train.records import UpdateRecord
from train.run import RunEvents, RunResult, start_processes
from train.run_config import CalibrateConfig, RecoverConfig
from wide_jax.cli.check import require_plausible
from wide_jax.cli.progress import progress
from wide_jax.cli.start import start


def run(train: Callable[[Any, RunEvents], RunResult], config: CalibrateConfig) -> None:
    """Train, show how far it is, and say where the model lies."""
    console = Console()
    if config.distributed:
        start_processes()  # before anything starts a device
    start("auto", console)
    if not isinstance(config, RecoverConfig):  # stage 1 has checked the same base
        require_plausible(console, config.model)
    with progress(console, "training") as advance:

        def record(latest: UpdateRecord, settings: CalibrateConfig) -> None:
            skipped = f"attention {latest.hard_skip['attention']:.1%}"
            skipped += f", FFN {latest.hard_skip['ffn']:.1%} skipped"
            note = f"loss {latest.lm_loss:.3f}, {skipped}"
            advance(latest.update + 1, settings.updates, note)

        def held_out(update: int, result: HeldOut) -> None:
            console.print(
                f"update {update}: held-out token perplexity {result.token_perplexity:.2f} with "
                f"argmax masks ({result.tokens:,} tokens, FLOPs {result.skip['flops']:.1%} skipped)"
            )

        events = RunEvents(
            message=lambda text: console.print(text, highlight=False, soft_wrap=True),
            record=record,
            held_out=held_out,
        )
        result = train(config, events)
    console.print(f"WIDE model: [bold]{result.model_folder}[/bold]", soft_wrap=True)
    console.print("next: wide eval ppl, wide generate or wide export with --model that folder")
