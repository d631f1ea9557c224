"""What `wide calibrate` and `wide recover` share: device, cheap checks, bars and lines."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from train.evaluate import HeldOut
from train.records import UpdateRecord
from train.run import RunEvents, RunResult, check_start, start_processes
from train.run_config import CalibrateConfig, RecoverConfig
from wide_jax.cli.check import require_plausible
from wide_jax.cli.progress import Stages
from wide_jax.cli.start import start


def run(train: Callable[[Any, RunEvents], RunResult], config: CalibrateConfig) -> None:
    """Train, show how far it is, and say where the model lies."""
    console = Console()
    begun = check_start(config)
    if config.distributed:
        start_processes()  # before anything starts a device
    start("auto", console)
    if not begun and not isinstance(config, RecoverConfig):  # stage 1 has checked the same base
        require_plausible(console, config.model)
    bars = Stages(console)
    try:
        result = train(config, events(console, bars))
    finally:
        bars.close()
    console.print(f"WIDE model: [bold]{result.model_folder}[/bold]", soft_wrap=True)
    console.print("next: wide eval ppl, wide generate or wide export with --model that folder")


def events(console: Console, bars: Stages) -> RunEvents:
    """A bar for what goes on, a line for what happened."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    def tokenised(documents: int, tokens: int) -> None:
        bars.advance("tokenising", documents, None, f"{documents:,} documents, {tokens:,} tokens")

    def record(latest: UpdateRecord, settings: CalibrateConfig) -> None:
        skipped = f"attention {latest.hard_skip['attention']:.1%}"
        skipped += f", FFN {latest.hard_skip['ffn']:.1%} skipped"
        note = f"loss {latest.lm_loss:.3f}, {skipped}"
        bars.advance("training", latest.update + 1, settings.updates, note)

    def held_out(update: int, result: HeldOut) -> None:
        say(
            f"update {update}: held-out token perplexity {result.token_perplexity:.2f} with "
            f"argmax masks ({result.tokens:,} tokens, FLOPs {result.skip['flops']:.1%} skipped)"
        )

    return RunEvents(
        message=say,
        record=record,
        logged=lambda update, values: say(line(update, values)),
        held_out=held_out,
        tokenised=tokenised,
    )


# Names of a line's rates, in its order.
RATES = {
    "attention": "attention", "ffn": "FFN", "parameters": "parameters", "flops": "FLOPs",
    "bytes": "bytes",
}  # fmt: skip


def line(update: int, values: Mapping[str, Any]) -> str:
    """The values of a line of `metrics.jsonl`, for people."""
    loss = f"loss {values['lm_loss']:.3f}"
    if values["kl"]:
        loss += f", KL {values['kl']:.3f}"
    sampled, argmax = (
        ", ".join(f"{RATES[name]} {values[kind][name]:.1%}" for name in RATES)
        for kind in ("skip", "hard_skip")
    )
    speed = values["tokens_per_second"]
    parts = [
        f"update {update + 1}: {loss}, budget {values['budget_term']:.4f}",
        f"sampled masks skip {sampled}",
        f"argmax {argmax}",
        f"temperature {values['temperature']:.2f}, rate {values['learning_rate']:.2e}, "
        f"gradient {values['gradient_norm']:.2f}",
    ]
    if speed is not None:
        mfu = "" if values["mfu"] is None else f", MFU {values['mfu']:.1%}"
        parts.append(f"{speed:,.0f} tokens/s{mfu}")
    return " | ".join(parts)
