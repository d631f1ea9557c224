"""A model as jitted functions take it: one hash, one compile for equal models, plain arrays."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from wide_jax.kernels import Kernels, SparsityHints
from wide_jax.structure import Structure, split


def test_it_hashes_once(wide_model, monkeypatch):
    structure, _ = split(wide_model)
    first = hash(structure)
    monkeypatch.setattr(nnx.GraphDef, "__hash__", None)
    assert hash(structure) == first


def test_equal_models_share_a_compile_and_others_do_not(wide_model):
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def total(structure, state):
        traced.append(structure)
        return nnx.merge(structure, state).model.norm.weight[...].sum()

    structure, state = split(wide_model)
    again, _ = split(wide_model)
    assert again is structure
    assert Structure(nnx.split(wide_model)[0]) == structure
    assert float(total(structure, state)) == float(total(again, state))
    assert len(traced) == 1
    wide_model.kernels = Kernels(SparsityHints(0.25, 0.5))
    try:
        other, _ = split(wide_model)
    finally:
        wide_model.kernels = None
    assert other != structure
    total(other, state)
    assert len(traced) == 2


def test_it_is_no_leaf_of_a_jitted_functions_arguments(wide_model):
    total = jax.jit(
        lambda structure, state: nnx.merge(structure, state).model.norm.weight[...].sum()
    )
    assert float(total(*split(wide_model))) == float(total(*nnx.split(wide_model)))


def test_the_state_holds_plain_arrays_and_the_model_comes_back_whole(wide_model):
    """A node of Python around each array is looked through at every call."""
    structure, state = split(wide_model)
    found = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    assert {type(leaf) for leaf in found} == {type(jnp.zeros(()))}
    kinds, again = (
        {path: type(variable) for path, variable in nnx.to_flat_state(nnx.state(model))}
        for model in (wide_model, nnx.merge(structure, state))
    )
    assert len(set(kinds.values())) > 1  # what is trained and what is not
    assert again == kinds
