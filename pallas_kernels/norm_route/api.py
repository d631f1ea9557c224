"""The public function of the fused norm and router."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels._common import triton_support
from pallas_kernels._common.checks import DTYPES

# A step's programs each read all of a token and of a row of the compressor, so there are to be few:
# beyond, the two kernels of many tokens.
STEP_TOKENS = 16
STEP_PROGRAMS = 1024
RouteImplementation = Literal["reference", "triton"]


class RouterWeights(NamedTuple):
    """A router's two linear maps, float32, `[out, in]`.

    Rows 2 g and 2 g + 1 of `router` are group g's execute and skip logits.
    """

    compressor: Float[Array, "R D"]
    compressor_bias: Float[Array, " R"]
    router: Float[Array, "G2 R"]
    router_bias: Float[Array, " G2"]

    @property
    def groups(self) -> int:
        """The number of groups that the router decides about."""
        return self.router.shape[0] // 2


def step_counter() -> Int32[Array, " C"]:
    """The counter of `norm_route_step` as its first call takes it: C zeros, one for every token."""
    return jnp.zeros((STEP_TOKENS,), jnp.int32)


def is_step(tokens: int, rank: int) -> bool:
    """Whether so many tokens are routed by the kernel whose programs meet at a counter."""
    return tokens <= STEP_TOKENS and tokens * rank <= STEP_PROGRAMS


def norm_route(
    x: Float[Array, "M D"],
    norm_weight: Float[Array, " D"],
    weights: RouterWeights,
    *,
    eps: float,
    threshold: float = 0.0,
    implementation: RouteImplementation | None = None,
) -> tuple[Float[Array, "M D"], Bool[Array, "M groups"]]:
    """What enters a sublayer, and which of its groups run.

    `normed = norm_weight * x / sqrt(mean(x^2) + eps)` (arXiv 1910.07467, float32 inside),
    `logits = (x compressor^T + compressor_bias) router^T + router_bias` from x *before* its norm,
    `mask[m, g] = logits[m, 2 g] - logits[m, 2 g + 1] >= threshold`. Routing is float32 at highest
    precision whatever x's dtype: TF32 would flip decisions near ties.

    Args:
        x: M tokens of the residual stream, bfloat16, float16 or float32.
        norm_weight: of x's dtype.
        weights: float32.
        eps: of the norm.
        threshold: how far the execute logit must lie above the skip logit.
        implementation: `reference` (jnp) or `triton`: runs or raises. None: `triton` on a CUDA
            device that can, else `reference`.

    Raises:
        ValueError: shapes or dtypes that do not fit together, with the numbers.
        NotImplementedError: the named implementation cannot run here; or the result of the kernel
            is being differentiated, or batched by `jax.vmap` where the kernel updates a buffer
            in place (`is_step`).
    """
    normed, mask, _ = norm_route_step(
        x,
        norm_weight,
        weights,
        step_counter(),
        eps=eps,
        threshold=threshold,
        implementation=implementation,
    )
    return normed, mask


def norm_route_step(
    x: Float[Array, "M D"],
    norm_weight: Float[Array, " D"],
    weights: RouterWeights,
    counter: Int32[Array, " C"],
    *,
    eps: float,
    threshold: float = 0.0,
    implementation: RouteImplementation | None = None,
) -> tuple[Float[Array, "M D"], Bool[Array, "M groups"], Int32[Array, " C"]]:
    """`norm_route` with the counter that its programs meet at, for loops that keep one.

    Of a few tokens the program that finishes one last decides, and counts for that. The counter
    (`step_counter`) is 0 before and after: passed on from call to call it is never written by
    anything else, where `norm_route` has XLA make zeros for every call (about a microsecond each).

    Returns:
        normed, mask, and the counter for the next call. Arguments and errors are `norm_route`'s.
    """
    check_norm_route("norm_route", x, norm_weight, weights, counter)
    match implementation or ("triton" if triton_support.runs_here() else "reference"):
        case "reference":
            from pallas_kernels.norm_route.reference import norm_route as run
        case "triton":
            if x.shape[0] == 0:  # nothing to launch
                from pallas_kernels.norm_route.reference import norm_route as run
            elif is_step(x.shape[0], weights.compressor.shape[0]):
                from pallas_kernels.norm_route.triton import few_tokens

                return few_tokens(x, norm_weight, weights, counter, eps, threshold)
            else:
                from pallas_kernels.norm_route.triton import many_tokens as run
        case _:
            raise ValueError(f"unknown {implementation=}; known: reference, triton")
    return *run(x, norm_weight, weights, eps, threshold), counter


def check_norm_route(
    op: str,
    x: jax.Array,
    norm_weight: jax.Array,
    weights: RouterWeights,
    counter: jax.Array,
) -> None:
    """Raise `ValueError` on operands that do not fit together, with the numbers."""
    if x.ndim != 2 or x.dtype.name not in DTYPES:
        raise ValueError(
            f"{op}: x must be [M, D] of {', '.join(DTYPES)}, got {x.dtype}{list(x.shape)}"
        )
    hidden = x.shape[1]
    if norm_weight.shape != (hidden,) or norm_weight.dtype != x.dtype:
        raise ValueError(
            f"{op}: norm_weight is {norm_weight.dtype}{list(norm_weight.shape)}, "
            f"expected {x.dtype}[{hidden}]"
        )
    rank, outputs = weights.compressor.shape[0], weights.router.shape[0]
    expected = ((rank, hidden), (rank,), (outputs, rank), (outputs,))
    for name, shape, array in zip(RouterWeights._fields, expected, weights, strict=True):
        if array.shape != shape or array.dtype.name != "float32":
            raise ValueError(
                f"{op}: {name} is {array.dtype}{list(array.shape)}, expected float32{list(shape)}"
            )
    if outputs == 0 or outputs % 2:
        raise ValueError(f"{op}: router has {outputs} rows, expected two a group")
    if counter.shape != (STEP_TOKENS,) or counter.dtype != jnp.int32:
        raise ValueError(
            f"{op}: counter is {counter.dtype}{list(counter.shape)}, expected int32"
            f"[{STEP_TOKENS}]: begin with step_counter()"
        )
