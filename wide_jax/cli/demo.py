"""`wide demo`: from a checkpoint to a calibrated, evaluated and generating WIDE model."""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from eval.perplexity import PerplexityConfig, PerplexityResult, evaluate_perplexity
from eval.text import Text, TokenizedText, read_text, tokenize
from train.config import TrainConfig
from train.loop import CalibrationResult, calibrate
from wide_jax.cli.demo_text import DemoText, python_reference, split_documents
from wide_jax.cli.files import check_writable_file, write_json
from wide_jax.cli.progress import advance_bytes, progress
from wide_jax.cli.start import Platform, start
from wide_jax.config import ModelConfig, WideConfig
from wide_jax.engine import use_kernels
from wide_jax.generate import generate
from wide_jax.hf.cache import cache_dir
from wide_jax.hf.config import read_config
from wide_jax.hf.embedded import EMBEDDED_MODEL
from wide_jax.hf.load import load_weights
from wide_jax.hf.pretrained import build, from_pretrained, new_routers, save_pretrained
from wide_jax.hf.resolve import resolve_model
from wide_jax.hf.save import check_target
from wide_jax.hf.tokenizer import load_tokenizer, text_encoder
from wide_jax.hf.wide_folder import base_folder
from wide_jax.model import WideForCausalLM
from wide_jax.routing import AllOn, Argmax

WINDOW = 512
NO_BENCHMARK = (
    "This is a demonstration, not a benchmark: a few minutes of training on {text}. It shows that "
    "the parts work together and which way the methods lean. Real calibration takes more than ten "
    "thousand times as many tokens (docs/train.md)."
)


@dataclasses.dataclass(frozen=True)
class Args:
    """The whole job on a real model, in minutes on a laptop.

    Fetches the model, calibrates routers (stage 1) for WIDE and, with the same text, updates and
    budget, for per-token depth routing; compares held-out perplexity; generates from a prompt;
    saves a WIDE model folder, loads it back and checks that it gives the same tokens.
    """

    model: str | None = None
    """A model folder or Hugging Face id; by default the embedded SmolLM2-135M-Instruct."""
    data: Path | None = None
    """Text to calibrate on (.txt or .jsonl, also .gz), its last eighth held out; by default the
    language reference inside Python itself."""
    out: Path | None = None
    """Folder to save the WIDE model in; by default one in the cache that every demo replaces."""
    json: Path | None = None
    """Also write every figure to this file."""
    prompt: str = "The capital of France is"
    """Text to continue."""
    new_tokens: int = 24
    """How many tokens to generate."""
    sparsity: float = 0.25
    """Part of each module to skip."""
    ffn_group_size: int = 64
    """FFN channels that are run or skipped together."""
    updates: int = 400
    """Training updates of each method."""
    tokens_per_update: int = 128
    """Tokens of text in an update. In a run this short, more and smaller updates teach the routers
    more than fewer and larger ones."""
    eval_windows: int = 12
    """Held-out windows of 512 tokens to evaluate on."""
    seed: int = 0
    """Of the routers' start, the noise and the order of the text."""
    platform: Annotated[Platform, tyro.conf.arg(metavar="{auto,cpu,gpu}")] = "auto"
    """Where to compute; `gpu` fails where there is none."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of the table: a model and its figures."""

    name: str
    perplexity: PerplexityResult
    training: CalibrationResult | None


def main(args: Args) -> None:
    """Run the demo and print what each step did."""
    console = Console()
    began = time.monotonic()
    out = cache_dir() / "demo" / "wide-model" if args.out is None else args.out
    check_target(out, overwrite=args.out is None)
    if args.json is not None:
        check_writable_file(args.json)
    start(args.platform, console)

    with progress(console, "fetching the model") as advance:
        folder = base_folder(resolve_model(args.model, progress=advance_bytes(advance)))
    name = EMBEDDED_MODEL.name if args.model is None else args.model
    config = read_config(folder)
    wide = WideConfig.for_model(config, ffn_group_size=args.ffn_group_size)
    with progress(console, "loading the weights") as advance:
        weights = load_weights(folder, config, progress=advance_bytes(advance))
    text = _text(args)
    tokenizer = load_tokenizer(folder)
    train_ids, held_out = _tokenize(text, tokenizer)
    train = _train_config(args, len(train_ids))
    console.print(
        f"\n[bold]{name}[/bold]: {config.num_hidden_layers} layers, hidden {config.hidden_size}, "
        f"{config.num_attention_heads} heads, intermediate {config.intermediate_size}\n"
        f"text: {text.source}, {len(train_ids):,} tokens to calibrate on, "
        f"{held_out.tokens:,} held out"
    )

    trained: dict[str, tuple[WideForCausalLM, CalibrationResult]] = {}
    for method, groups in (("WIDE", wide), ("depth routing", WideConfig.depth_routing(config))):
        model = _with_new_routers(config, groups, weights, args.seed)
        result = _calibrate(console, f"calibrating {method}", model, train_ids, train)
        trained[method] = (model, result)

    dense = build(config, None, weights, dtype=config.dtype)
    models = {"dense": (dense, None), **trained}
    settings = PerplexityConfig(window=WINDOW, max_windows=args.eval_windows)
    variants = [
        Variant(method, _evaluate(console, method, model, held_out, settings), result)
        for method, (model, result) in models.items()
    ]
    _print_table(console, variants, args)

    saved = _save(trained["WIDE"], out, folder, args, train, text)
    reloaded = from_pretrained(saved)
    for model in (dense, trained["WIDE"][0]):
        use_kernels(model, reloaded.kernels)  # as the saved model runs on this device
    samples = _generate(console, tokenizer, args, dense, trained["WIDE"][0], reloaded)
    console.print(f"\nsaved and loaded back with equal tokens: [bold]{saved}[/bold]")
    console.print(NO_BENCHMARK.format(text=text.source), style="yellow", highlight=False)
    seconds = time.monotonic() - began
    console.print(f"done in {seconds / 60:.1f} minutes")
    if args.json is not None:
        record = _record(args, name, config, wide, variants, samples, train, text, saved, seconds)
        write_json(args.json, record)
        console.print(f"figures: {args.json}")


def _text(args: Args) -> DemoText:
    if args.data is None:
        return python_reference()
    documents = list(read_text(args.data).documents)
    if len(documents) == 1:  # one long text: split it by paragraph
        documents = documents[0].split("\n\n")
    first_held_out = len(documents) - max(1, len(documents) // 8)
    train, held_out = documents[:first_held_out], documents[first_held_out:]
    return split_documents(str(args.data), train, held_out)


def _tokenize(text: DemoText, tokenizer: Any) -> tuple[np.ndarray, TokenizedText]:
    encode = text_encoder(tokenizer)
    train = tokenize(Text(text.train), encode, join=True).documents[0]
    return train, tokenize(Text(text.held_out), encode, join=True)


def _train_config(args: Args, train_tokens: int) -> TrainConfig:
    if train_tokens < args.tokens_per_update:
        raise ValueError(
            f"the text has {train_tokens} tokens to calibrate on, fewer than one update's "
            f"{args.tokens_per_update}: give more text"
        )
    return TrainConfig(
        sparsity=args.sparsity,
        budget="separate",
        updates=args.updates,
        sequences_per_update=1,
        sequence_length=args.tokens_per_update,
        seed=args.seed,
    )


def _with_new_routers(
    config: ModelConfig, wide: WideConfig, weights: Mapping[str, jax.Array], seed: int
) -> WideForCausalLM:
    """The base's weights (shared, not copied) under routers of the given sizes."""
    routers = new_routers(config, wide, seed=seed)
    return build(config, wide, {**weights, **routers}, dtype=config.dtype)


def _calibrate(
    console: Console, title: str, model: WideForCausalLM, ids: np.ndarray, config: TrainConfig
) -> CalibrationResult:
    with progress(console, title) as advance:

        def show(record) -> None:
            skipped = f"attention {record.hard_skip['attention']:.0%}"
            skipped += f", FFN {record.hard_skip['ffn']:.0%} skipped"
            advance(record.update + 1, config.updates, f"loss {record.lm_loss:.2f}, {skipped}")

        return calibrate(model, ids, config, on_update=show)


def _evaluate(
    console: Console,
    method: str,
    model: WideForCausalLM,
    text: TokenizedText,
    settings: PerplexityConfig,
) -> PerplexityResult:
    with progress(console, f"evaluating {method}") as advance:
        return evaluate_perplexity(
            model,
            text,
            settings,
            progress=lambda done, total, value: advance(done, total, f"perplexity {value:.1f}"),
        )


def _print_table(console: Console, variants: list[Variant], args: Args) -> None:
    first = variants[0].perplexity
    table = Table(
        title=f"Held-out text: {first.scored_tokens:,} tokens, {first.windows} windows of {WINDOW}",
        caption=f"target: skip {args.sparsity:.0%} of each module",
    )
    for heading in ("", "perplexity per token", "per word", "per byte", "x dense"):
        table.add_column(heading, justify="left" if not heading else "right")
    for variant in variants:
        found = variant.perplexity
        table.add_row(
            variant.name,
            f"{found.token_perplexity:.2f}",
            f"{found.word_perplexity:.1f}",
            f"{found.byte_perplexity:.3f}",
            f"{found.token_perplexity / first.token_perplexity:.2f}",
        )
    console.print()
    console.print(table)
    for variant in variants[1:]:
        line = variant.perplexity.accounting.line()
        console.print(f"{variant.name} {line}", highlight=False, soft_wrap=True)


def _save(
    trained: tuple[WideForCausalLM, CalibrationResult],
    out: Path,
    base: Path,
    args: Args,
    train: TrainConfig,
    text: DemoText,
) -> Path:
    model, result = trained
    last = result.history[-1]
    return save_pretrained(
        model,
        out,
        base=base,
        budget=train.budget,
        targets={"attention": args.sparsity, "ffn": args.sparsity},
        training={
            "stage": 1,
            "updates": train.updates,
            "tokens_per_update": train.tokens_per_update,
            "seed": train.seed,
            "data": text.source,
            "last_lm_loss": last.lm_loss,
        },
        overwrite=args.out is None,
    )


def _generate(
    console: Console,
    tokenizer: Any,
    args: Args,
    dense: WideForCausalLM,
    wide: WideForCausalLM,
    reloaded: WideForCausalLM,
) -> dict[str, dict[str, Any]]:
    """Greedy continuations. Raises RuntimeError if the saved model's differ from the trained."""
    prompt = tokenizer(args.prompt)["input_ids"]
    console.print(f"\nprompt: {args.prompt!r}, greedy")
    samples = {}
    for name, model, routing in (("dense", dense, AllOn()), ("WIDE", wide, Argmax())):
        result = generate(model, [prompt], max_new_tokens=args.new_tokens, routing=routing)
        tokens = result.rows()[0]
        samples[name] = {"tokens": tokens, "text": tokenizer.decode(tokens)}
        console.print(f"{name:>6}: {samples[name]['text']!r}", highlight=False)
    again = generate(reloaded, [prompt], max_new_tokens=args.new_tokens).rows()[0]
    if again != samples["WIDE"]["tokens"]:
        raise RuntimeError(
            f"the model loaded back from disk generates {again}, "
            f"the one that was saved {samples['WIDE']['tokens']}"
        )
    samples["WIDE, loaded back"] = {"tokens": again, "text": tokenizer.decode(again)}
    return samples


def _record(
    args: Args,
    name: str,
    config: ModelConfig,
    wide: WideConfig,
    variants: list[Variant],
    samples: Mapping[str, Any],
    train: TrainConfig,
    text: DemoText,
    saved: Path,
    seconds: float,
) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "model": name,
        "model_config": dataclasses.asdict(config),
        "wide_config": dataclasses.asdict(wide),
        "train_config": dataclasses.asdict(train),
        "data": text.source,
        "device": device.device_kind,
        "jax": jax.__version__,
        "seconds": seconds,
        "wide_model": str(saved),
        "variants": {
            variant.name: {
                "perplexity": variant.perplexity.to_json(),
                "training_seconds": variant.training and variant.training.seconds,
                "history": variant.training
                and [dataclasses.asdict(record) for record in variant.training.history],
            }
            for variant in variants
        },
        "prompt": args.prompt,
        "generated": samples,
        "note": NO_BENCHMARK.format(text=text.source),
    }
