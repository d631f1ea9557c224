"""Entry point of `wide`: picks the command and turns its errors into one clear line.

A command is a module with a frozen dataclass `Args` (its fields become the options, its docstring
the help) and `main(args)`. Modules are imported only when their command is called, so that
`wide --help` is quick and starts no device.
"""

import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "demo": ("wide_jax.cli.demo", "the whole job on a real model: calibrate, evaluate, generate"),
    "calibrate": ("wide_jax.cli.calibrate", "train routers on a frozen model (stage 1)"),
    "recover": ("wide_jax.cli.recover", "train LoRA beside the routers (stage 2)"),
    "convert": ("wide_jax.cli.convert", "a checkpoint as a plain Hugging Face folder"),
    "dial": ("wide_jax.cli.dial", "move a trained model's sparsity to a target, and back"),
    "export": ("wide_jax.cli.export", "a run as a folder that plain transformers loads"),
    "generate": ("wide_jax.cli.generate", "continue a prompt with a dense or a WIDE model"),
    "check": ("wide_jax.cli.check", "is a checkpoint whole and read rightly? before any training"),
    "check kernels": (
        "wide_jax.cli.check_kernels",
        "does every kernel compute right on this card?",
    ),
    "doctor": ("wide_jax.cli.doctor", "check the installation: versions, devices, kernels, caches"),
    "tune": ("wide_jax.cli.tune", "find the fastest kernels on this card"),
    "bench kernels": ("wide_jax.cli.bench_kernels", "time every kernel beside dense and ideal"),
    "bench train": ("wide_jax.cli.bench_train", "time training on random weights: MFU, memory"),
    "bench e2e": ("wide_jax.cli.bench_e2e", "time prefill and decode of a whole model"),
    "report": ("wide_jax.cli.report", "one report from run folders"),
    "eval tasks": ("wide_jax.cli.eval_tasks", "tasks of lm-evaluation-harness, masks accounted"),
    "eval errors": ("wide_jax.cli.eval_errors", "distance from the dense model, layer by layer"),
    "eval ppl": ("wide_jax.cli.eval_ppl", "perplexity of a text, with what the masks skipped"),
}

# What bad input raises: shown as one line. Anything else is a fault of ours and keeps its trace.
USER_ERRORS = (ValueError, OSError, RuntimeError, NotImplementedError, FloatingPointError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `wide` with the given arguments (by default the process's); returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    name, rest = _command(argv)
    if name is None:
        asked = not argv or argv[0] in ("-h", "--help")
        print(usage(argv), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    import tyro

    module = importlib.import_module(COMMANDS[name][0])
    prog = f"wide {name}"
    try:
        if hasattr(module, "parse"):  # a command with arguments beyond its fields
            args = module.parse(rest, prog)
        else:
            args = tyro.cli(module.Args, args=rest, prog=prog)
        module.main(args)
    except USER_ERRORS as error:
        if os.environ.get("WIDE_JAX_TRACEBACK"):
            raise
        print(f"wide {name}: {error}", file=sys.stderr)
        print("(set WIDE_JAX_TRACEBACK=1 to see where this came from)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"wide {name}: interrupted", file=sys.stderr)
        return 130
    return 0


def usage(argv: Sequence[str]) -> str:
    """The overview of commands; after an unknown command it says so first."""
    known = [f"  wide {name:<14} {summary}" for name, (_, summary) in COMMANDS.items()]
    lines = [
        "wide: token-level dynamic width pruning for Llama- and Qwen-architecture models, in JAX.",
        "",
        "Commands (each has --help):",
        *known,
        "",
        "Start with `wide demo`. Models are folders or Hugging Face ids; without one, the embedded",
        "SmolLM2-135M-Instruct (Q4_1 weights, dequantised). Files made or fetched are kept in",
        "$WIDE_JAX_CACHE (default ~/.cache/wide-jax).",
    ]
    if argv and argv[0] not in ("-h", "--help"):
        lines.insert(0, f"wide: unknown command {' '.join(argv[:2])!r}\n")
    return "\n".join(lines)


def _command(argv: list[str]) -> tuple[str | None, list[str]]:
    """Split the arguments into a command of one or two words and the rest."""
    for words in (2, 1):
        name = " ".join(argv[:words])
        if name in COMMANDS:
            return name, argv[words:]
    return None, argv


if __name__ == "__main__":
    sys.exit(main())
