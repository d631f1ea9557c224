"""The masks that inference will use, while a run goes on: their perplexity, and what they skip."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.sharding import Mesh

from train.budget import masks_usage
from train.config import TrainConfig
from train.data import Rows, local_rows, on_mesh, stack_rows
from train.loss import LossSums, next_token_loss
from train.parts import ModelParts, Params
from wide_jax.accounting import Usage, account
from wide_jax.batch import TokenBatch
from wide_jax.config import ModelConfig, WideConfig
from wide_jax.routing import Argmax


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Perplexity per token over windows without overlap, and what the argmax masks skipped."""

    token_perplexity: float
    tokens: int  # scored
    skip: dict[str, float]


Evaluation = Callable[[Params, Params, Rows, int], HeldOut]
Skips = Callable[[Params, Params], dict[str, float]]


def make_evaluation(
    parts: ModelParts, model: ModelConfig, wide: WideConfig, config: TrainConfig, mesh: Mesh
) -> Evaluation:
    """A function of (trainable, frozen, rows, count) that scores the first `count` rows.

    Argmax masks, dropout off; whole micro-batches, at least one. One program serves all calls.
    """

    @jax.jit
    def score(trainable, frozen, batch: TokenBatch) -> tuple[LossSums, Usage]:
        whole = parts.merge(trainable, frozen)
        out = whole(batch, Argmax(), causal=config.causal)
        sums = next_token_loss(out.hidden, whole.logits, batch, chunk=config.logits_chunk)
        return sums, masks_usage(out.masks, batch.real, model, config)

    def evaluate(trainable: Params, frozen: Params, rows: Rows, count: int) -> HeldOut:
        batches = _batches(rows, count, config, mesh)
        results = [score(trainable, frozen, batch) for batch in batches]
        total = sum(float(sums.total) for sums, _ in results)
        tokens = sum(int(sums.count) for sums, _ in results)
        skip = _figures([used for _, used in results], frozen, model, wide)
        return HeldOut(math.exp(min(total / max(tokens, 1), 700)), tokens, skip)

    return evaluate


def make_skips(
    parts: ModelParts,
    model: ModelConfig,
    wide: WideConfig,
    config: TrainConfig,
    mesh: Mesh,
    rows: Rows,
) -> Skips:
    """A function of (trainable, frozen): what argmax masks skip of `rows`, in every measure.

    As `make_evaluation`'s `HeldOut.skip`, without the loss: no logits are computed.
    """

    @jax.jit
    def masks(trainable, frozen, batch: TokenBatch) -> Usage:
        out = parts.merge(trainable, frozen)(batch, Argmax(), causal=config.causal)
        return masks_usage(out.masks, batch.real, model, config)

    batches = tuple(_batches(rows, len(rows), config, mesh))

    def skips(trainable: Params, frozen: Params) -> dict[str, float]:
        used = [masks(trainable, frozen, batch) for batch in batches]
        return _figures(used, frozen, model, wide)

    return skips


def _batches(rows: Rows, count: int, config: TrainConfig, mesh: Mesh) -> Iterator[TokenBatch]:
    """The first `count` rows on the mesh: whole micro-batches, at least one."""
    size = config.micro_batch
    used = min(count, len(rows)) // size * size or size
    if used > len(rows):
        raise ValueError(f"{len(rows)} rows are fewer than one micro-batch of {size}")
    for start in range(0, used, size):
        local = [rows[start + row] for row in local_rows(mesh, size)]
        yield on_mesh(stack_rows(local), mesh, count=size)


def _figures(
    used: Sequence[Usage], frozen: Params, model: ModelConfig, wide: WideConfig
) -> dict[str, float]:
    """The figures of a report, from the sums of several batches."""
    usage = functools.reduce(operator.add, [more.to_host() for more in used])
    element = next(iter(frozen.values())).dtype.itemsize
    return account(usage, model, wide, weight_bytes=element, kv_bytes=element).summary()
