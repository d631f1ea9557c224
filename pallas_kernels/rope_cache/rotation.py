"""`Rotation`: how the tokens of a call are to be turned, for the attention that does it itself."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotation:
    """Angles of every token, and the head norm in front of them where a model has one (Qwen3).

    What it does to a head is said in `pallas_kernels.rope_cache`.

    Attributes:
        cos, sin: of every token's angles, float32; `half` is d / 2.
        norm: weight of the queries' head norm. None: they have none.
        eps: of that norm.
    """

    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]
    norm: Float[Array, " d"] | None = None
    eps: float = dataclasses.field(default=0.0, metadata={"static": True})

    def check(self, op: str, batch: int, tokens: int, d: int) -> None:
        """Raise `ValueError` unless this turns heads `[batch, tokens, heads, d]`."""
        if d % 2:
            raise ValueError(f"{op}: a rotation turns pairs, and heads of {d} leave one over")
        angles = (batch, tokens, d // 2)
        expected: dict[str, tuple[int, ...]] = {"cos": angles, "sin": angles}
        if self.norm is not None:
            expected["norm"] = (d,)
        for name, shape in expected.items():
            array = getattr(self, name)
            if array.shape != shape:
                raise ValueError(f"{op}: rotation.{name} is {array.shape}, expected {shape}")
        if self.cos.dtype != jnp.float32 or self.sin.dtype != jnp.float32:
            raise ValueError(
                f"{op}: rotation.cos and .sin are {self.cos.dtype} and {self.sin.dtype}, expected "
                "float32"
            )
