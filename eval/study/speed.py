"""How fast a row's own masks are: at the model's own shapes, and carried to a large model's.

Both in bf16 on the kernels of this GPU, on the text that perplexity is measured on, each against
the best dense form of the same run. The large shape has random weights; beside the row's masks it
is timed with as many skipped at random in every layer and module (`eval.carried_masks`).
"""

import gc
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import jax
from rich.console import Console

from eval import bench_e2e
from eval.bench_e2e import E2EConfig, tokens_needed
from eval.carried_masks import SourceMasks, source_masks
from eval.records import eval_record
from eval.speed import Speedup, measure_speedup
from eval.study.make import model_folder
from eval.study.plan import LARGE_SHAPE, OWN_SHAPE, Row
from eval.study.settings import Part, Settings
from eval.text import read_text
from wide_jax.cli.models import LoadedModel, load_model
from wide_jax.config import ModelConfig
from wide_jax.shapes import shape

TOKENS = 16_384  # of the large shape's prompt, and of its decode steps' context
KEPT = (  # of an end-to-end record
    *("phase", "mask", "tokens", "ffn_group", "attn_group", "ms", "samples_ms", "dense"),
    *("dense_ms", "speedup", "ideal_speedup", "accounting", "rates", "masks_of"),
)


def speeds(
    row: Row, shapes: Sequence[str], settings: Settings, console: Console
) -> Iterator[dict[str, Any]]:
    """A record a shape, whose `value` is the prefill's speedup and `speeds` has every figure.

    Raises:
        RuntimeError: there is no GPU, or the large shape does not fit.
    """
    if jax.default_backend() != "gpu":
        others = ",".join(part for part in get_args(Part) if part != "speed")
        raise RuntimeError(
            f"the study's part `speed` needs a CUDA device: choose others, as --parts {others}"
        )
    for name in shapes:
        yield _own(row, settings, console) if name == OWN_SHAPE else _large(row, settings, console)


def large_group(row: Row, own: ModelConfig, large: ModelConfig) -> int:
    """Channels of the large shape's FFN groups: the same share of the FFN, to a power of two below.

    So a row's group stands for one or two, and its masks are as coarse as what is timed.
    """
    assert row.ffn_group is not None
    share = row.ffn_group * large.intermediate_size // own.intermediate_size
    return 2 ** (share.bit_length() - 1)


def _own(row: Row, settings: Settings, console: Console) -> dict[str, Any]:
    loaded, ids = _loaded(row, settings, console)
    found = measure_speedup(loaded.model, ids)
    console.print(found.line(), highlight=False, soft_wrap=True)
    return _record(row, OWN_SHAPE, loaded.fingerprint(), own_speeds(found))


def own_speeds(found: Speedup) -> list[dict[str, Any]]:
    """Both phases, in the fields that the large shape's have."""
    return [
        {
            "phase": name,
            "mask": "trained",
            "tokens": found.shape.tokens,
            "ms": phase.wide_ms,
            "samples_ms": phase.samples_ms["wide"],
            "dense": phase.dense,
            "dense_ms": phase.dense_ms,
            "speedup": phase.measured,
            "ideal_speedup": phase.ideal,
            "accounting": phase.skipped,
        }
        for name, phase in (("prefill", found.prefill), ("decode", found.decode))
    ]


def _large(row: Row, settings: Settings, console: Console) -> dict[str, Any]:
    source, bench = _source(row, settings, console)
    gc.collect()  # the row's model is gone before the large one's weights come
    found = bench_e2e.measure(
        shape(LARGE_SHAPE), f"{LARGE_SHAPE}-shape", bench, console, source=source
    )
    kept = [{name: one[name] for name in KEPT} for one in found if one["masks_of"] is not None]
    return _record(row, LARGE_SHAPE, source.fingerprint, kept)


def _source(row: Row, settings: Settings, console: Console) -> tuple[SourceMasks, E2EConfig]:
    """The row's masks, and what the large shape is timed at."""
    loaded, ids = _loaded(row, settings, console)
    large = shape(LARGE_SHAPE)
    group = large_group(row, loaded.model.config, large)
    bench = E2EConfig(tokens=(TOKENS,), batches=(1,), sparsities=(), ffn_groups=(group,))
    needed = tokens_needed(large, bench)
    return source_masks(loaded.model, ids, needed, fingerprint=loaded.fingerprint()), bench


def _loaded(row: Row, settings: Settings, console: Console) -> tuple[LoadedModel, list[int]]:
    loaded = load_model(console, str(model_folder(row, settings)), dtype="bfloat16")
    return loaded, loaded.encode(read_text(settings.data_dir / settings.text).joined())


def _record(
    row: Row, name: str, fingerprint: str, found: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    [prompt] = [
        one
        for one in found
        if one["phase"] == "prefill" and one["mask"] in ("trained", "trained_statistics")
    ]
    return eval_record(
        model=fingerprint,
        task=name,
        metric="prefill_speedup",
        value=prompt["speedup"],
        stderr=None,
        n=prompt["tokens"],
        accounting=prompt["accounting"],
        recipe=row.recipe(),
        seed=row.seed,
        updates=row.updates,
        speeds=list(found),
    )
