"""`wide generate`: continue a prompt with a dense or a WIDE model."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import tyro
from rich.console import Console

from wide_jax.accounting import Usage, account
from wide_jax.cli.files import check_writable_file, write_json
from wide_jax.cli.models import find_model, load_found
from wide_jax.cli.start import Platform, start
from wide_jax.generate import Generation, check_prompts, generate
from wide_jax.hf.config import stop_token_ids
from wide_jax.hf.wide_folder import base_folder
from wide_jax.memory import estimate_generation
from wide_jax.model import WideForCausalLM
from wide_jax.routing import AllOn, Argmax
from wide_jax.sampling import Sampler


@dataclasses.dataclass(frozen=True)
class Args:
    """Continue a prompt. A WIDE model folder runs with its routers; --dense leaves them out.

    What memory it will take is printed before any weight is loaded.
    """

    prompt: str
    """Text to continue."""
    model: str | None = None
    """A model folder or Hugging Face id; by default the embedded SmolLM2-135M-Instruct."""
    dense: bool = False
    """Run every group, whatever routers the folder has."""
    chat: bool = False
    """Put the prompt into the model's chat template, as a user's message."""
    max_new_tokens: int = 128
    """Stop here at the latest."""
    temperature: float = 0.0
    """0 takes the most likely token each time."""
    top_k: int | None = None
    """Draw from the k most likely tokens only."""
    top_p: float | None = None
    """Draw from the smallest set of likely tokens whose probability reaches p."""
    min_p: float | None = None
    """Draw only tokens of at least min_p times the largest probability."""
    repetition_penalty: float = 1.0
    """Above 1: make tokens that have appeared less likely."""
    samples: int = 1
    """Continuations to draw, with seeds `seed`, `seed + 1`, ..."""
    seed: int = 0
    """Of the first continuation."""
    stream: bool = True
    """Show the text as it comes (one sample only)."""
    prefill_chunk: int | None = None
    """Run the prompt in pieces of so many tokens, to bound memory."""
    json: Path | None = None
    """Also write tokens, texts and accounting to this file."""
    platform: Annotated[Platform, tyro.conf.arg(metavar="{auto,cpu,gpu}")] = "auto"
    """Where to compute; `gpu` fails where there is none."""


def main(args: Args) -> None:
    """Say what memory it will take, generate, print the text and what was skipped."""
    console = Console()
    sampler = Sampler(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
    )
    counts = {"samples": args.samples, "max_new_tokens": args.max_new_tokens}
    for name, value in {**counts, "prefill_chunk": args.prefill_chunk}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if args.json is not None:
        check_writable_file(args.json)
    start(args.platform, console)
    found = find_model(console, args.model, dense=args.dense)
    tokenizer = found.tokenizer
    prompt = _prompt_ids(tokenizer, args)
    check_prompts(found.config, [prompt], args.max_new_tokens)
    memory = estimate_generation(
        found.config,
        found.wide,
        batch=args.samples,
        prompt=len(prompt),
        max_new_tokens=args.max_new_tokens,
        prefill_chunk=args.prefill_chunk,
        element_bytes=jnp.dtype(found.config.dtype).itemsize,
    )
    console.print(f"[dim]{memory.line()}[/dim]", highlight=False, soft_wrap=True)
    model = load_found(console, found).model
    streamed = _Stream(console, tokenizer) if args.stream and args.samples == 1 else None
    result = generate(
        model,
        [prompt] * args.samples,
        max_new_tokens=args.max_new_tokens,
        routing=AllOn() if model.wide is None else Argmax(),
        sampler=sampler,
        seeds=range(args.seed, args.seed + args.samples),
        stop_ids=stop_token_ids(base_folder(found.folder), model.config),
        prefill_chunk=args.prefill_chunk,
        on_tokens=streamed,
    )
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in result.rows()]
    if streamed is not None:
        console.print()
    else:
        _print_samples(console, texts, args.seed)
    skipped = _skipped(result, model)
    for phase, figures in skipped.items():
        console.print(f"[dim]{phase}: {figures['line']}[/dim]", highlight=False, soft_wrap=True)
    if args.json is not None:
        write_json(
            args.json,
            {"prompt": args.prompt, "texts": texts, "tokens": result.rows(), "skipped": skipped},
        )


class _Stream:
    """Prints the text of one row as its tokens come.

    Text is decoded from the row's start each time and only what is new is shown: a token's text
    can depend on its neighbours, and a character may need several tokens.
    """

    def __init__(self, console: Console, tokenizer: Any):
        self.console, self.tokenizer = console, tokenizer
        self.tokens: list[int] = []
        self.shown = 0

    def __call__(self, rows: list[list[int]]) -> None:
        self.tokens += rows[0]
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")  # a character still being spelt
        self.console.print(
            whole[self.shown :], end="", highlight=False, markup=False, soft_wrap=True
        )
        self.shown = max(self.shown, len(whole))


def _print_samples(console: Console, texts: list[str], first_seed: int) -> None:
    for number, text in enumerate(texts):
        if len(texts) > 1:
            console.rule(f"seed {first_seed + number}")
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _prompt_ids(tokenizer: Any, args: Args) -> list[int]:
    if not args.chat:
        return tokenizer(args.prompt)["input_ids"]
    if tokenizer.chat_template is None:
        raise ValueError("the model's tokenizer has no chat template: leave out --chat")
    message = [{"role": "user", "content": args.prompt}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _skipped(result: Generation, model: WideForCausalLM) -> dict[str, dict[str, Any]]:
    """Accounting of prefill and decode apart; empty where everything ran."""
    phases: dict[str, Usage | None] = {
        "prefill": result.prefill_usage,
        "decode": result.decode_usage,
    }
    size = model.dtype.itemsize
    found = {}
    for phase, used in phases.items():
        if used is None or model.wide is None:
            continue
        figures = account(
            used.to_host(), model.config, model.wide, weight_bytes=size, kv_bytes=size
        )
        found[phase] = {"line": figures.line(), **figures.to_json()}
    return found
