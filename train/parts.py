"""A model taken apart by Variable type: what is trained, what is frozen, and how to join them.

Between steps parameters are plain dicts from Hugging Face names to arrays: the names that sharding
declarations, checkpoints and model folders use. The base never enters the gradient's arguments, so
nothing of it (gradient, moment, decay, share of the clip norm) can exist.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Key

from wide_jax import partition
from wide_jax.model import WideForCausalLM
from wide_jax.params import DropoutKey

Params = dict[str, Any]  # jax.Array, or jax.ShapeDtypeStruct where nothing is computed


@dataclasses.dataclass(frozen=True)
class ModelParts:
    """The structure of a model without its arrays."""

    graphdef: nnx.GraphDef
    trainable_names: tuple[str, ...]
    frozen_names: tuple[str, ...]
    trees: tuple[jax.tree_util.PyTreeDef, ...]  # of the trainables, the frozen, the dropout keys

    def merge(
        self, trainable: Params, frozen: Params, dropout_key: Key[Array, ""] | None = None
    ) -> WideForCausalLM:
        """The model with these parameters. Pure: usable inside jit.

        Extra names are passed over. `dropout_key` is needed where the structure was taken with
        LoRA dropout on; every map folds in its own number.
        """
        trained_tree, frozen_tree, key_tree = self.trees
        keys = []
        if key_tree.num_leaves:
            if dropout_key is None:
                raise ValueError("this structure was taken with dropout on: give a dropout_key")
            # All at once: hundreds of folds one by one are most of what there is to compile.
            folded = jax.vmap(jax.random.fold_in, (None, 0))(
                dropout_key, jnp.arange(key_tree.num_leaves)
            )
            keys = list(folded)
        return nnx.merge(
            self.graphdef,
            trained_tree.unflatten([trainable[name] for name in self.trainable_names]),
            frozen_tree.unflatten([frozen[name] for name in self.frozen_names]),
            key_tree.unflatten(keys),
        )


def take_apart(
    model: WideForCausalLM,
    *trained: type[nnx.Variable],
    keep: Callable[[str], bool] = lambda name: True,
) -> tuple[ModelParts, Params, Params]:
    """Split a model into the parameters of the `trained` types that `keep` names, and all others.

    Returns the structure, the trainable and the frozen parameters; the arrays are the model's own.

    Raises:
        ValueError: the model has no parameter of these types.
    """

    def is_trained(path, variable) -> bool:
        return isinstance(variable, trained) and keep(".".join(map(str, path)))

    graphdef, *states = nnx.split(model, is_trained, nnx.Not(DropoutKey), DropoutKey)
    (names, arrays, tree), (frozen_names, frozen_arrays, frozen_tree), (_, _, keys) = map(
        _named, states
    )
    if not names:
        kinds = ", ".join(kind.__name__ for kind in trained)
        raise ValueError(
            f"the model has no {kinds} to train: build it with a WideConfig (routers) or attach "
            "LoRA first"
        )
    parts = ModelParts(graphdef, names, frozen_names, (tree, frozen_tree, keys))
    return (
        parts,
        dict(zip(names, arrays, strict=True)),
        dict(zip(frozen_names, frozen_arrays, strict=True)),
    )


def place(params: Params, mesh: Mesh) -> Params:
    """Put parameters where `wide_jax.partition` declares them; copies only what must move."""
    return jax.device_put(params, partition.shardings_for(params, mesh))


def put_back(model: WideForCausalLM, params: Params) -> None:
    """Store parameters in a model, in place, each where the model's own array lies.

    Raises:
        KeyError: a name the model does not have.
    """
    variables = {
        ".".join(map(str, path)): (path, variable)
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }
    unknown = sorted(set(params) - set(variables))
    if unknown:
        raise KeyError(f"the model has no parameters {unknown}")
    stored = []
    for name, value in params.items():
        path, variable = variables[name]
        stored.append((path, variable.replace(_like(value, variable[...]))))
    nnx.update(model, nnx.from_flat_state(stored))


def _like(value: jax.Array, old: jax.Array) -> jax.Array:
    """`value` where `old` lies, and committed to it only if `old` is.

    Compiled programs are keyed by that too: a model that has been trained and the same model loaded
    from disk share them.
    """
    if old.committed:
        return jax.device_put(value, old.sharding)
    return jax.device_put(np.asarray(value))


def _named(state: nnx.State) -> tuple[tuple[str, ...], list, jax.tree_util.PyTreeDef]:
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    names = tuple(
        ".".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))
        for path, _ in leaves
    )
    return names, [leaf for _, leaf in leaves], tree
