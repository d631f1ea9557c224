"""Variable types of the model's parameters: training selects what it trains by these types."""

from flax import nnx


class BaseParam(nnx.Param):
    """A weight of the checkpoint. Frozen in router calibration (stage 1)."""


class RouterParam(nnx.Param):
    """A weight of a router: float32 whatever the model's dtype."""
