"""A model as jitted functions take it: one hash, one compile for equal models, few plain arrays."""

import functools
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eval import continuation, e2e_runs, engine_check, speed
from tests.wide_jax.conftest import tiny_config, tiny_model
from wide_jax import generate as generation
from wide_jax.cache import KVCache
from wide_jax.config import WideConfig
from wide_jax.generate import DecodeSettings, decode_step, first_draw, generate, prefill
from wide_jax.kernels import Kernels, SparsityHints
from wide_jax.lora import LoRASettings, attach
from wide_jax.model import WideForCausalLM
from wide_jax.params import RouterParam
from wide_jax.routing import AllOn, Argmax, Forced, Masks
from wide_jax.sampling import Sampler
from wide_jax.structure import PackedState, Structure, merge, split, unpacked


@pytest.fixture
def shapes_unchecked():
    """JAX puts values without shapes into a cache where it describes a program's arguments."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


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
        return merge(structure, state).model.norm.weight[...].sum()

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


WIDE = WideConfig.for_model(tiny_config(), ffn_group_size=8)
NAMED = ("norm_route", "route_kv", "rms_norm", "mask_layout", "rope_cache", "gemm_mn")
NAMED += ("swiglu_up", "gemm_k", "attention_prefill", "attention_step")
REFERENCES = Kernels(**dict.fromkeys(NAMED, "reference"))  # the kernel path on a CPU


def test_it_is_no_leaf_of_a_jitted_functions_arguments(wide_model):
    total = jax.jit(lambda structure, state: merge(structure, state).model.norm.weight[...].sum())
    assert float(total(*split(wide_model))) == float(total(*nnx.split(wide_model)))


def test_the_state_holds_plain_arrays_and_those_of_routers_in_one(wide_model):
    """A node of Python around each array is looked through at every call, and so is each array."""
    _, state = split(wide_model)
    found = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    assert {type(leaf) for leaf in found} == {type(jnp.zeros(()))}
    routers = jax.tree.leaves(nnx.state(wide_model, RouterParam))
    assert len(routers) == 8 * wide_model.config.num_hidden_layers
    assert len(found) == len(jax.tree.leaves(nnx.state(wide_model))) - len(routers) + 1
    assert (state.routers.size, state.routers.dtype) == (sum(x.size for x in routers), jnp.float32)
    _, again = split(wide_model)
    assert again.layout is state.layout  # jitted functions compare it with itself, at no cost


@pytest.mark.parametrize("kind", ["wide", "dense", "lora"])
def test_the_model_comes_back_whole(kind):
    model = tiny_model(None if kind == "dense" else WIDE)
    if kind == "lora":
        attach(model, LoRASettings(rank=2), rngs=nnx.Rngs(1))
    structure, state = split(model)
    assert isinstance(state, nnx.State if kind == "dense" else PackedState)
    for other in (merge(structure, state), merge(structure, unpacked(state))):
        pairs = zip(*(nnx.to_flat_state(nnx.state(m)) for m in (model, other)), strict=True)
        for (path, variable), (its_path, its_variable) in pairs:
            assert (path, type(variable)) == (its_path, type(its_variable))
            np.testing.assert_array_equal(variable[...], its_variable[...])


def prompt_and_step(structure, state, routing):
    """Logits and caches after a prompt, and after one more token."""
    cache = KVCache.empty(tiny_config(), 2, 8, jnp.float32)
    ids, lengths = jnp.arange(10).reshape(2, 5), jnp.array([5, 3])
    first, cache, _ = prefill(structure, state, ids, lengths, cache, routing, fresh=True)
    token, active = jnp.array([7, 8]), jnp.array([True, True])
    second, cache, _ = decode_step(structure, state, token, active, cache, routing)
    return first, second, cache


@pytest.mark.parametrize("kernels", [None, REFERENCES], ids=["plain", "kernels"])
def test_a_prompt_and_a_step_are_the_same_to_the_last_bit(kernels):
    model = tiny_model(WIDE)
    model.kernels = kernels
    structure, state = split(model)
    ours = prompt_and_step(structure, state, Argmax())
    wanted = prompt_and_step(structure, unpacked(state), Argmax())
    for got, same in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(got, same)


def test_what_asks_no_router_has_none_among_its_arguments(wide_model, shapes_unchecked):
    """Of a prompt, a step, and a loop of steps, as memory and time of a program count them."""
    config, layers = wide_model.config, wide_model.config.num_hidden_layers
    structure, state = split(wide_model)
    cache = KVCache.empty(config, 1, 8, jnp.float32)
    masks = Masks(
        (jnp.ones((1, 1, WIDE.attn_groups(config)), bool),) * layers,
        (jnp.ones((1, 1, WIDE.ffn_groups(config)), bool),) * layers,
    )
    one = jnp.ones(1, jnp.int32)
    programs = {
        prefill: lambda routing: (one[None], one, cache, routing),
        decode_step: lambda routing: (one, jnp.ones(1, bool), cache, routing),
        e2e_runs.run_prefill: lambda routing: (one[None], one, cache, routing),
        e2e_runs.run_decode: lambda routing: (one, cache, routing, 3),
    }

    def read(program, routing):
        compiled = program.lower(structure, state, *programs[program](routing)).compile()
        return compiled.memory_analysis().argument_size_in_bytes

    for program in programs:
        asked, dense, forced, forced_and_asked = (
            read(program, routing)
            for routing in (Argmax(), AllOn(), Forced(masks), Forced(masks, ask_routers=True))
        )
        assert asked - dense == forced_and_asked - forced == state.routers.nbytes


def reads(jaxpr, shape, in_loop=False):
    """Operations that read an array of a shape: their names, and whether a loop has them."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        looping = in_loop or name in ("while", "scan")
        if any(getattr(value.aval, "shape", None) == shape for value in equation.invars):
            yield name, looping
        for inner in jaxprs_in_params(equation.params):
            yield from reads(inner, shape, looping)


TOKEN, KEYS = jnp.array([3]), jax.vmap(jax.random.key)(jnp.array([0]))
SETTINGS = DecodeSettings(Sampler(), 4, (), 0)


def generating(structure, state, cache):
    logits, cache, used = prefill(structure, state, TOKEN[None], TOKEN * 0 + 1, cache, Argmax())
    heat = jnp.zeros(1)
    begun = first_draw(logits, cache, KEYS, heat, SETTINGS, seen=None, no_usage=used)
    return generation._decode_until(
        structure, state, begun, Argmax(), KEYS, heat, SETTINGS, jnp.int32(4)
    )


def continuing(structure, state, cache):
    logits, done = jnp.zeros((1, tiny_config().vocab_size)), jnp.zeros(1, bool)
    rest = (KEYS, jnp.int32(4), Argmax())
    return continuation._draw_chunk(
        structure, state, logits, cache, done, *rest, sampler=Sampler(), stop_ids=()
    )


@pytest.mark.parametrize(
    "run",
    [
        generating,
        continuing,
        lambda *model: e2e_runs.run_decode(*model[:2], TOKEN, model[2], Argmax(), 3),
        lambda *model: speed._run_steps(*model[:2], TOKEN[None], model[2], Argmax()),
        lambda *model: speed._ask(
            *model[:2], TOKEN[None], TOKEN * 0 + 1, TOKEN[None], model[2], Argmax()
        ),
        lambda *model: engine_check._steps(*model[:2], TOKEN[None], model[2]),
    ],
    ids=["generate", "continuation", "e2e", "speed", "speed's masks", "engine check"],
)
def test_routers_are_taken_apart_before_a_loop_of_steps(run, wide_model, shapes_unchecked):
    """XLA takes apart at every step what is taken apart inside."""
    structure, state = split(wide_model)
    cache = KVCache.empty(wide_model.config, 1, 8, jnp.float32)
    jaxpr = jax.make_jaxpr(lambda state, cache: run(structure, state, cache))(state, cache).jaxpr
    assert {"while", "scan"} & set(re.findall(r"\b\w+\b", str(jaxpr)))
    found = list(reads(jaxpr, state.routers.shape))
    assert ("slice", False) in found
    assert not [name for name, in_loop in found if in_loop]


def test_routers_on_several_devices_stay_apart(wide_model):
    structure, _ = split(wide_model)
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("data",), devices=devices)
    spread = jax.device_put(nnx.split(wide_model)[1], NamedSharding(mesh, P()))
    model = nnx.merge(structure, spread)
    _, found = split(model)
    assert isinstance(found, nnx.State)
    assert all(leaf.devices() == set(devices) for leaf in jax.tree.leaves(found))
    options = {"max_new_tokens": 3, "stop_ids": ()}
    wanted, got = (generate(m, [[5, 9, 11]], **options) for m in (wide_model, model))
    np.testing.assert_array_equal(got.tokens, wanted.tokens)
    # On one device, whichever it is, they are packed there.
    moved = jax.device_put(nnx.split(wide_model)[1], devices[1])
    assert split(nnx.merge(structure, moved))[1].routers.devices() == {devices[1]}


def test_shapes_alone_lower_the_same_program(wide_model, shapes_unchecked):
    abstract = nnx.eval_shape(lambda: WideForCausalLM(tiny_config(), WIDE, rngs=nnx.Rngs(0)))
    cache = KVCache.empty(wide_model.config, 1, 8, jnp.float32)
    ids, lengths = jnp.ones((1, 4), jnp.int32), jnp.array([4])
    texts = []
    for model in (abstract, wide_model):
        structure, state = split(model)
        texts.append(prefill.lower(structure, state, ids, lengths, cache, Argmax()).as_text())
    assert isinstance(split(abstract)[1].routers, jax.ShapeDtypeStruct)
    assert texts[0] == texts[1]
