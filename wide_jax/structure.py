"""A model as jitted functions take it: what it is, hashed once, and its arrays."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from wide_jax.params import RouterParam


@jax.tree_util.register_static
class Structure(nnx.GraphDef):
    """`nnx.GraphDef` with the hash computed once.

    A jitted function hashes its static arguments at every call, and the graph of a model of 32
    layers takes milliseconds: as long as a decode step of it takes on a GPU.
    """

    _hash: int

    def __init__(self, graphdef: nnx.GraphDef) -> None:
        super().__init__(graphdef.nodes, graphdef.attributes, graphdef.num_leaves)
        object.__setattr__(self, "_hash", hash(graphdef))  # its base class is frozen

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure) or self._hash != other._hash:
            return False
        own, theirs = ((s.nodes, s.attributes, s.num_leaves) for s in (self, other))
        return own == theirs


@dataclasses.dataclass(frozen=True, eq=False)
class RouterLayout:
    """Which part of `PackedState.routers` is which array. Equal ones are one object.

    A jitted function hashes and compares it at every call: it is compared by identity.
    """

    tree: jax.tree_util.PyTreeDef
    shapes: tuple[tuple[int, ...], ...]  # of its leaves, in order


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rest", "routers"],
    meta_fields=["layout"],
)
@dataclasses.dataclass(frozen=True)
class PackedState:
    """A model's arrays, with those of its routers in one.

    The host reads and prepares every argument of a call, and four arrays a sublayer are 256 for 32
    layers. `state[name]` looks into `rest`.
    """

    rest: nnx.State
    routers: Any  # float32 [N], or the shape of it
    layout: RouterLayout

    def __getitem__(self, name: str) -> Any:
        return self.rest[name]


ModelState = PackedState | nnx.State


def split(model: Any) -> tuple[Structure, ModelState]:
    """`nnx.split` for functions that are called again and again; `merge` puts it together.

    The state holds plain arrays: JAX looks through them at every call, and a node around each, of
    Python, made it half a millisecond longer for a model of 32 layers. Routers are copied into one
    array (`PackedState`), their memory taken twice, unless they lie on several devices or there are
    none: the state is then an `nnx.State`. Of a model of shapes (`jax.ShapeDtypeStruct`) the
    packed array is one too.
    """
    graphdef, routers, rest = nnx.split(model, RouterParam, ...)
    structure = _first_equal(Structure(graphdef))
    routers, rest = nnx.as_pure(routers), nnx.as_pure(rest)
    leaves, tree = jax.tree.flatten(routers)
    if not leaves or len({device for leaf in leaves for device in _devices(leaf)}) > 1:
        return structure, nnx.merge_state(rest, routers)
    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    packed = jax.eval_shape(_concatenate, leaves) if abstract else _concatenate(leaves)
    return structure, PackedState(rest, packed, _layout(tree, tuple(x.shape for x in leaves)))


def unpacked(state: ModelState) -> nnx.State:
    """Every array by itself, inside a jitted function.

    A function with a loop calls it before the loop: XLA leaves in a loop what is taken apart there.
    """
    if isinstance(state, nnx.State):
        return state
    leaves, start = [], 0
    for shape in state.layout.shapes:
        stop = start + math.prod(shape)
        leaves.append(jax.lax.slice(state.routers, (start,), (stop,)).reshape(shape))
        start = stop
    return nnx.merge_state(state.rest, jax.tree.unflatten(state.layout.tree, leaves))


def merge(graphdef: nnx.GraphDef, state: ModelState) -> Any:
    """The model again, inside a jitted function: of `split`, `unpacked`, or `nnx.split`."""
    return nnx.merge(graphdef, unpacked(state))


@functools.lru_cache(maxsize=64)
def _first_equal(structure: Structure) -> Structure:
    """One object for equal structures: jitted functions then compare it with itself, at no cost."""
    return structure


_layout = functools.cache(RouterLayout)  # one object for equal layouts


@jax.jit
def _concatenate(leaves: Sequence[Float[Array, "..."]]) -> Float[Array, "N"]:
    return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])


def _devices(leaf: Any) -> frozenset[jax.Device]:
    return frozenset(getattr(getattr(leaf, "sharding", None), "device_set", ()))
