"""Variable types of the model's parameters: training selects what it trains by these types."""

from flax import nnx


class BaseParam(nnx.Param):
    """A weight of the checkpoint. Frozen in router calibration (stage 1)."""


class RouterParam(nnx.Param):
    """A weight of a router: float32 whatever the model's dtype."""


class LoRAParam(nnx.Param):
    """A low-rank factor: float32 whatever the model's dtype."""


class DropoutKey(nnx.Variable):
    """The random key of one LoRA's dropout. Not a parameter: the training step replaces it."""
