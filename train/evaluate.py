"""Held-out perplexity with the masks that inference will use, while a run goes on."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable

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

    size = config.micro_batch
    local = local_rows(mesh, size)

    def evaluate(trainable: Params, frozen: Params, rows: Rows, count: int) -> HeldOut:
        used = min(count, len(rows)) // size * size or size
        if used > len(rows):
            raise ValueError(f"{len(rows)} rows are fewer than one micro-batch of {size}")
        total, tokens, usages = 0.0, 0, []
        for start in range(0, used, size):
            batch = on_mesh(stack_rows([rows[start + row] for row in local]), mesh, count=size)
            sums, more = score(trainable, frozen, batch)
            total, tokens = total + float(sums.total), tokens + int(sums.count)
            usages.append(more.to_host())
        element = next(iter(frozen.values())).dtype.itemsize
        usage = functools.reduce(operator.add, usages)
        figures = account(usage, model, wide, weight_bytes=element, kv_bytes=element)
        return HeldOut(math.exp(min(total / max(tokens, 1), 700)), tokens, figures.summary())

    return evaluate
