"""One update's numbers on the host: from the device's sums to the figures people read."""

import dataclasses
import math

from train.step import StepMetrics
from wide_jax.accounting import account
from wide_jax.config import ModelConfig, WideConfig


@dataclasses.dataclass(frozen=True)
class UpdateRecord:
    """One update's numbers. Losses in nats, rates as fractions of 1.

    `skip` and `hard_skip` hold `attention`, `ffn`, `paper`, `parameters`, `flops` and `bytes`.
    """

    update: int  # from 0
    lm_loss: float
    kl: float  # to the dense teacher, nats per scored target; 0 without distillation
    budget_term: float  # before alpha
    skip: dict[str, float]  # of the masks trained with (sampled, straight-through)
    hard_skip: dict[str, float]  # of the argmax masks (no noise) from the same residual streams
    temperature: float
    learning_rate: float  # the one this update used
    gradient_norm: float  # before clipping
    tokens: int  # real tokens
    seconds: float  # since this process started training


class LossNotFiniteError(RuntimeError):
    """The loss or the gradient became NaN or infinite."""


def to_record(
    metrics: StepMetrics,
    model: ModelConfig,
    wide: WideConfig,
    *,
    element_bytes: int,
    seconds: float,
) -> UpdateRecord:
    """Fetch an update's metrics (waits for the device) and work out the figures."""

    def figures(usage):
        return account(
            usage, model, wide, weight_bytes=element_bytes, kv_bytes=element_bytes
        ).summary()

    return UpdateRecord(
        update=int(metrics.update),
        lm_loss=float(metrics.lm_loss),
        kl=float(metrics.kl),
        budget_term=float(metrics.budget_term),
        skip=figures(metrics.sampled),
        hard_skip=figures(metrics.hard),
        temperature=float(metrics.temperature),
        learning_rate=float(metrics.learning_rate),
        gradient_norm=float(metrics.gradient_norm),
        tokens=round(float(metrics.sampled.tokens)),
        seconds=seconds,
    )


def check_finite(record: UpdateRecord) -> None:
    """Stop a run whose numbers are broken.

    Raises:
        LossNotFiniteError: naming the update and the numbers.
    """
    numbers = (record.lm_loss, record.kl, record.budget_term, record.gradient_norm)
    if not all(math.isfinite(number) for number in numbers):
        raise LossNotFiniteError(
            f"update {record.update}: loss {record.lm_loss}, budget term {record.budget_term}, "
            f"gradient norm {record.gradient_norm} (learning rate {record.learning_rate:.3g}, "
            f"temperature {record.temperature:.3g}): the run stopped. Lower the learning rate, or "
            "look at this update's batch"
        )
