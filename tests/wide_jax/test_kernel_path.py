"""Inference through `pallas_kernels` equals plain JAX: same masks, same logits, same tokens."""

import copy
import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels import MaskLayout, step_counter
from pallas_kernels._common.device import CPU, H200
from tests.kernels.contract import running
from tests.wide_jax.conftest import forward, tiny_config, tiny_model
from wide_jax import lora, pruned
from wide_jax.batch import TokenBatch
from wide_jax.cache import KVCache
from wide_jax.config import RopeConfig, WideConfig
from wide_jax.engine import automatic_kernels, plan, use_kernels
from wide_jax.generate import _decode_until, decode_step, generate, prefill
from wide_jax.kernels import Kernels, SparsityHints
from wide_jax.model import attention_inputs
from wide_jax.params import BaseParam
from wide_jax.routing import AllOn, Argmax, Forced, GumbelSoftmax, Masks

PROMPTS = [[5, 9, 11], [3, 1, 4, 1, 5, 9, 2], [7] * 13]


def pair(wide=None, **changes):
    """The same model twice: plain JAX, and kernels (their references, on a CPU)."""
    config = tiny_config(**changes)
    sizes = wide or WideConfig.for_model(config, ffn_group_size=8)
    plain = tiny_model(sizes, **changes)
    fast = copy.deepcopy(plain)
    use_kernels(fast, Kernels())
    return plain, fast


def same(got, wanted, where=...):
    """Two pytrees of arrays are equal; leaf by leaf, as their classes take nothing but arrays."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(ours)[where], np.asarray(theirs)[where])


VARIANTS = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "biases everywhere": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "window": {"sliding_window": 4},
}


@pytest.mark.parametrize("routing", [Argmax(), AllOn()], ids=["argmax", "all on"])
@pytest.mark.parametrize("name", VARIANTS)
def test_forward_pass_equals_plain_jax(name, routing):
    plain, fast = pair(**VARIANTS[name])
    ids = jax.random.randint(jax.random.key(1), (2, 24), 0, 61)
    batch = TokenBatch.from_lengths(ids, jnp.array([24, 9]))
    wanted, expected = forward(plain, batch, routing)
    logits, got = forward(fast, batch, routing)
    real = np.asarray(batch.real)
    np.testing.assert_allclose(logits[real], wanted[real], atol=1e-4)
    if isinstance(routing, AllOn):
        assert got.masks is None
        return
    same(got.masks, expected.masks, where=real)


def test_packed_rows_equal_plain_jax():
    plain, fast = pair()
    ids = jax.random.randint(jax.random.key(2), (1, 20), 0, 61)
    segments = jnp.array([[1] * 7 + [2] * 9 + [0] * 4])
    positions = jnp.array([[*range(7), *range(9), *range(4)]])
    batch = TokenBatch(ids, positions, segments)
    wanted, got = forward(plain, batch, Argmax())[0], forward(fast, batch, Argmax())[0]
    np.testing.assert_allclose(got[:, :16], wanted[:, :16], atol=1e-4)


@pytest.mark.parametrize("routing", [Argmax(), AllOn()], ids=["argmax", "all on"])
@pytest.mark.parametrize("name", ["qwen3", "window", "biases everywhere"])
def test_generation_equals_plain_jax(name, routing):
    plain, fast = pair(**VARIANTS[name])
    options = {"max_new_tokens": 8, "stop_ids": (), "routing": routing}
    wanted = generate(plain, PROMPTS, **options)
    for chunk in (None, 5):
        got = generate(fast, PROMPTS, prefill_chunk=chunk, **options)
        np.testing.assert_array_equal(got.tokens, wanted.tokens)
        np.testing.assert_allclose(got.log_probs, wanted.log_probs, atol=1e-4)
        for ours, theirs in (
            (got.prefill_usage, wanted.prefill_usage),
            (got.decode_usage, wanted.decode_usage),
        ):
            same(ours, theirs)


def test_a_rows_result_does_not_depend_on_batch_or_cache():
    _, fast = pair()
    together = generate(fast, PROMPTS, max_new_tokens=6, stop_ids=())
    for row, prompt in enumerate(PROMPTS):
        alone = generate(fast, [prompt], max_new_tokens=6, stop_ids=())
        longer = generate(fast, [prompt], max_new_tokens=50, stop_ids=())
        assert alone.tokens[0].tolist() == together.tokens[row].tolist()
        assert longer.tokens[0, :6].tolist() == alone.tokens[0].tolist()
        np.testing.assert_allclose(alone.log_probs[0], together.log_probs[row], atol=1e-5)


@pytest.mark.parametrize("maker", [WideConfig.depth_routing, WideConfig.layer_skipping])
def test_coarse_variants_run_through_the_same_kernels(maker):
    plain, fast = pair(maker(tiny_config()))
    batch = TokenBatch.from_lengths(jnp.arange(40)[None] % 61)
    wanted, got = forward(plain, batch, Argmax()), forward(fast, batch, Argmax())
    np.testing.assert_allclose(got[0], wanted[0], atol=1e-4)
    same(got[1].masks, wanted[1].masks)


def test_forced_masks_and_thresholds():
    config = tiny_config()
    wide = WideConfig.for_model(config, ffn_group_size=8)
    plain, fast = pair(wide)
    batch = TokenBatch.from_lengths(jnp.arange(12)[None])
    keys = jax.random.split(jax.random.key(3), 4)
    masks = Masks(
        tuple(jax.random.bernoulli(k, 0.5, (1, 12, 3 - 1)) for k in keys[:2]),
        tuple(jax.random.bernoulli(k, 0.5, (1, 12, 6)) for k in keys[2:]),
    )
    wanted, got = (forward(model, batch, Forced(masks))[0] for model in (plain, fast))
    np.testing.assert_allclose(got, wanted, atol=1e-4)

    # Asking the routers as well, as a benchmark does, changes nothing but the work.
    for model in (plain, fast):
        asked, found = forward(model, batch, Forced(masks, ask_routers=True))
        np.testing.assert_array_equal(asked, forward(model, batch, Forced(masks))[0])
        same(jax.tree.map(lambda m: m != 0, found.masks), masks)
        # What they say is reported: of the first layer what they always say, as nothing is
        # skipped before it; and all of it where they are given their own decisions.
        _, free = forward(model, batch, Argmax())
        np.testing.assert_array_equal(found.argmax.attention[0], free.masks.attention[0])
        assert (found.argmax.attention[0] != masks.attention[0]).any()
        _, own = forward(model, batch, Forced(free.masks, ask_routers=True))
        same(own.argmax, free.masks)
        assert forward(model, batch, Forced(masks))[1].argmax is None
    dense = tiny_model(None)
    for kernels in (None, Kernels()):
        use_kernels(dense, kernels)
        with pytest.raises(ValueError, match="Forced routing needs routers"):
            forward(dense, batch, Forced(masks, ask_routers=True))

    def active(**thresholds):
        moved = WideConfig(3, 8, attention_threshold=0.0, **thresholds)
        models = pair(moved)
        counts = [
            sum(int(mask.sum()) for mask in forward(m, batch, Argmax())[1].masks.ffn)
            for m in models
        ]
        assert counts[0] == counts[1]
        return counts[0]

    assert active(ffn_threshold=1e9) == 0
    assert active(ffn_threshold=-1e9) == 2 * 12 * 6
    assert 0 < active(ffn_threshold=0.0) < 2 * 12 * 6


def test_training_takes_the_plain_path():
    """Sampled masks need gradients, which compiled kernels do not have."""
    _, fast = pair()
    batch = TokenBatch.from_lengths(jnp.arange(6)[None])
    routing = GumbelSoftmax(jax.random.key(0), jnp.float32(1.0))
    graphdef, params, rest = nnx.split(fast, nnx.Param, ...)

    def loss(params):
        return nnx.merge(graphdef, params, rest)(batch, routing).hidden.sum()

    gradients = jax.tree.leaves(jax.grad(loss)(params))
    assert any(float(jnp.abs(g).max()) > 0 for g in gradients)


def test_auto_says_what_it_took_and_a_named_choice_is_refused_where_it_cannot_run():
    model = tiny_model(WideConfig.for_model(tiny_config(), ffn_group_size=8))
    choice = use_kernels(model)
    assert model.kernels is choice.kernels
    if jax.default_backend() == "cpu":
        assert choice.kernels is None
        assert "not a CUDA device" in choice.reason
    lora.attach(model, lora.LoRASettings(rank=2), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="LoRA is attached: merge it"):
        use_kernels(model, Kernels())
    with pytest.raises(ValueError, match=r"hint attention=1\.5 must be in"):
        SparsityHints(attention=1.5)


def test_auto_takes_plain_jax_where_kernels_cannot_run(monkeypatch):
    assert automatic_kernels(device=H200).kernels == Kernels()
    old = dataclasses.replace(H200, capability="7.5")
    assert "need compute capability 8.0" in automatic_kernels(device=old).reason
    found = automatic_kernels("its weights lie on 2 devices", device=H200)
    assert (found.kernels, found.reason) == (None, "its weights lie on 2 devices: plain JAX")
    monkeypatch.setattr("pallas_kernels._common.triton_support.available", lambda: False)
    found = automatic_kernels(device=H200)
    assert found.kernels is None
    assert "the `gpu` extra): plain JAX" in found.reason


def test_plan_names_every_op_of_a_layer():
    config, kernels = tiny_config(), Kernels(gemm_mn="reference")
    wide = WideConfig.for_model(config, ffn_group_size=8)
    step = ("attention_step", "rotation, cache, attention")
    prompt = [("rope_cache", "rotation and cache"), ("attention_prefill", "attention")]
    for tokens, attention in ((1, [step]), (64, prompt)):
        ops = plan(config, wide, kernels, batch=1, tokens=tokens, context=64)
        assert [(op.op, op.part) for op in ops] == [
            ("norm_route", "routing"),
            ("mask_layout", "layouts"),
            ("gemm_mn", "q"),
            *attention,
            ("gemm_k", "o"),
            ("swiglu_up", "gate and up"),
            ("gemm_k", "down"),
        ]
        assert ops[2].reason == "asked for"
        assert all(op.implementation for op in ops)


def test_plan_of_a_dense_model_has_no_layout_where_nothing_needs_one():
    config = tiny_config()

    def ops(tokens, **named):
        found = plan(
            config, None, Kernels(**named), batch=1, tokens=tokens, context=256, device=H200
        )
        return {op.op: op.implementation for op in found}

    assert ops(1)["mask_layout"] == "triton"
    assert ops(1)["rms_norm"] == "triton"
    assert ops(1, rms_norm="reference")["rms_norm"] == "reference"
    assert "norm_route" not in ops(1)
    assert "mask_layout" not in ops(128)
    assert "mask_layout" not in ops(1, gemm_mn="dense", swiglu_up="dense", gemm_k="dense")


def test_plan_of_a_step_of_one_token_routes_with_keys_and_values():
    config = tiny_config()
    wide = WideConfig.for_model(config, ffn_group_size=8)

    def routing(kernels, batch=1):
        ops = plan(config, wide, kernels, batch=batch, tokens=1, context=64, device=H200)
        return [(op.op, op.implementation) for op in ops if "routing" in op.part]

    assert routing(Kernels()) == [("route_kv", "triton"), ("norm_route", "triton")]
    assert routing(Kernels(), batch=2) == [("norm_route", "triton")]
    # An operation that is asked for by name runs, and not another in its place.
    assert routing(Kernels(norm_route="reference")) == [("norm_route", "reference")]
    assert routing(Kernels(gemm_mn="dense")) == [("norm_route", "triton")]
    named = Kernels(gemm_mn="dense", norm_route="reference", route_kv="reference")
    assert routing(named) == [("route_kv", "reference"), ("norm_route", "reference")]


@pytest.fixture
def route_kv_calls(monkeypatch):
    """The implementation of every `route_kv` of a forward pass that is traced."""
    found = []
    original = pruned.route_kv

    def spy(*arguments, **options):
        found.append(options["implementation"])
        return original(*arguments, **options)

    monkeypatch.setattr(pruned, "route_kv", spy)
    return found


def test_plan_of_a_decode_step_says_what_attends():
    config, options = tiny_config(), {"batch": 1, "tokens": 1, "context": 64}

    def attention(device=H200, **named):
        (found,) = (
            op
            for op in plan(config, None, Kernels(**named), **options, device=device)
            if "attention" in op.part
        )
        return found.op, found.implementation

    assert attention() == ("attention_step", "triton")
    assert attention(device=CPU) == ("attention_step", "reference")
    # As above: one that is asked for by name runs.
    assert attention(attention_decode="dense") == ("attention_decode", "dense")
    assert attention(rope_cache="triton") == ("attention_decode", "triton")
    named = dict(rope_cache="triton", attention_step="reference")  # the one for prompts
    assert attention(**named) == ("attention_step", "reference")
    with pytest.raises(ValueError, match=r"attention_step='triton' are both named"):
        Kernels(attention_decode="dense", attention_step="triton")


@pytest.fixture
def step_calls(monkeypatch):
    """What every operation of a decode step's attention was asked to run, in order."""
    found = []

    def spied(name, original):
        def spy(*arguments, **options):
            found.append((name, options["implementation"]))
            return original(*arguments, **options)

        return spy

    for name in ("attention_step", "rope_cache", "attention_decode"):
        monkeypatch.setattr(pruned, name, spied(name, getattr(pruned, name)))
    return found


@pytest.mark.parametrize("routing", [Argmax(), AllOn()], ids=["argmax", "all on"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "window"])
def test_a_decode_step_attends_in_one_operation(name, routing, step_calls):
    """Triton's kernels: ragged rows, one of them done; the caches' entries too."""
    plain, fast = pair(**VARIANTS[name])
    use_kernels(fast, Kernels(attention_step="triton"))
    ids = jax.random.randint(jax.random.key(9), (3, 6), 0, 61)
    found = []
    for model in (plain, fast):
        graphdef, state = nnx.split(model)
        cache = KVCache.empty(model.config, 3, 9, jnp.float32)
        lengths, active = jnp.array([6, 2, 4]), jnp.array([True, True, False])
        _, cache, _ = prefill(graphdef, state, ids, lengths, cache, routing, fresh=True)
        step_calls.clear()
        for token in (5, 7):
            with running("triton" if model is fast else None):
                tokens = jnp.full((3,), token)
                logits, cache, _ = decode_step(graphdef, state, tokens, active, cache, routing)
                jax.block_until_ready(logits)
        found.append((logits[:2], [(layer.keys, layer.values) for layer in cache.layers]))
    (wanted, kept), (got, ours) = found
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, kept)
    # Compiled once for both steps.
    assert step_calls == [("attention_step", "triton")] * fast.config.num_hidden_layers


def test_a_step_takes_the_two_operations_where_one_is_named_or_the_cache_differs(step_calls):
    _, fast = pair()
    layers = fast.config.num_hidden_layers
    tokens = jax.random.randint(jax.random.key(7), (1, 1), 0, 61)
    batch = TokenBatch(tokens, jnp.zeros((1, 1), jnp.int32), jnp.ones_like(tokens))

    def called(kernels, dtype=jnp.float32):
        use_kernels(fast, kernels)
        step_calls.clear()
        logits, _ = forward(fast, batch, AllOn(), KVCache.empty(fast.config, 1, 7, dtype))
        found.append(logits)
        assert len(step_calls) % layers == 0
        return step_calls[: len(step_calls) // layers]

    found = []
    assert called(Kernels()) == [("attention_step", None)]
    apart = [("rope_cache", "reference"), ("attention_decode", None)]
    assert called(Kernels(rope_cache="reference")) == apart
    apart = [("rope_cache", None), ("attention_decode", "reference")]
    assert called(Kernels(attention_decode="reference")) == apart
    for logits in found[1:]:
        np.testing.assert_array_equal(logits, found[0])
    apart = [("rope_cache", None), ("attention_decode", None)]
    assert called(Kernels(), jnp.bfloat16) == apart
    with pytest.raises(ValueError, match="attention_step: k_cache is bfloat16, but q"):
        called(Kernels(attention_step="reference"), jnp.bfloat16)


def _steps(model, tokens):
    """Logits of a prefill and of one step after it, the step's masks, and the cache."""
    cache = KVCache.empty(model.config, tokens.shape[0], 11, jnp.float32)  # no other test's size
    found = []
    for ids, start in ((tokens[:, :5], 0), (tokens[:, 5:6], 5)):
        positions = jnp.broadcast_to(start + jnp.arange(ids.shape[1]), ids.shape)
        batch = TokenBatch(ids, positions, jnp.ones_like(ids))
        logits, output = forward(model, batch, Argmax(), cache)
        cache = output.cache
        found.append(logits)
    return found, output.masks, cache


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_step_of_one_token_routes_with_keys_and_values(name, route_kv_calls):
    plain, fast = pair(**VARIANTS[name])
    layers = fast.config.num_hidden_layers
    tokens = jax.random.randint(jax.random.key(5), (1, 6), 0, 61)
    wanted, expected, cache = _steps(plain, tokens)
    got, masks, ours = _steps(fast, tokens)
    assert route_kv_calls == [None] * layers  # the step's, not the prefill's
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    same(masks, expected)
    for mine, theirs in zip(ours.layers, cache.layers, strict=True):
        np.testing.assert_allclose(mine.keys, theirs.keys, atol=1e-5)
        np.testing.assert_allclose(mine.values, theirs.values, atol=1e-5)
        assert not mine.counter.any()
    route_kv_calls.clear()
    _steps(fast, jnp.concatenate([tokens, tokens]))  # two rows: the kernels of few tokens
    use_kernels(fast, Kernels(norm_route="reference"))
    _steps(fast, tokens)
    assert route_kv_calls == []
    use_kernels(fast, Kernels(norm_route="reference", route_kv="triton"))
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="route_kv: the triton implementation needs"):
            _steps(fast, tokens)


@pytest.fixture
def rotations(monkeypatch):
    """What every `rope_cache` that is traced turns, and every `attention_prefill`."""
    found = []
    originals = pruned.rope_cache, pruned.attention_prefill

    def rope(q, *arguments, **options):
        found.append("step" if q is not None else "keys")
        return originals[0](q, *arguments, **options)

    def attention(*arguments, rotation, **options):
        found.append("as they are" if rotation is None else "queries")
        return originals[1](*arguments, rotation=rotation, **options)

    monkeypatch.setattr(pruned, "rope_cache", rope)
    monkeypatch.setattr(pruned, "attention_prefill", attention)
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_attention_rotates_the_queries_of_a_prompt(name, rotations):
    """Into an empty cache and against a cached prefix, in ragged rows; Triton's kernels run."""
    plain, fast = pair(**VARIANTS[name])
    use_kernels(fast, Kernels(rope_cache="triton", attention_prefill="triton"))
    ids = jax.random.randint(jax.random.key(8), (2, 13), 0, 61)
    found = []
    for model in (plain, fast):
        cache = KVCache.empty(model.config, 2, 14, jnp.float32)
        chunks = (ids[:, :7], jnp.array([7, 5]), True), (ids[:, 7:], jnp.array([6, 2]), False)
        for chunk, lengths, fresh in chunks:
            with running("triton" if model is fast else None):
                logits, cache, _ = jax.block_until_ready(
                    prefill(*nnx.split(model), chunk, lengths, cache, Argmax(), fresh=fresh)
                )
            found.append((logits, [np.asarray(layer.keys) for layer in cache.layers]))
    for (wanted, keys), (got, ours) in zip(found[:2], found[2:], strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
        np.testing.assert_allclose(ours, keys, atol=1e-5)
    assert rotations == ["keys", "queries"] * fast.config.num_hidden_layers * 2


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="an interpreter's")
def test_the_kernel_for_hopper_rotates_the_queries_of_a_prompt():
    sizes = dict(num_hidden_layers=1, head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    plain, fast = pair(qk_norm=True, **sizes)
    use_kernels(fast, Kernels(rope_cache="triton", attention_prefill="mosaic"))
    found = []
    for model in (plain, fast):
        graphdef, base, rest = nnx.split(model, BaseParam, ...)
        state = nnx.merge_state(jax.tree.map(lambda a: a.astype(jnp.bfloat16), base), rest)
        cache = KVCache.empty(model.config, 2, 16, jnp.bfloat16)
        prompt = jnp.arange(18).reshape(2, 9), jnp.array([9, 4])
        with running("mosaic" if model is fast else None):
            logits, *_ = prefill(graphdef, state, *prompt, cache, AllOn(), fresh=True)
            found.append(np.asarray(logits, np.float32))
    wanted, got = found
    assert np.linalg.norm(got - wanted) <= 1e-2 * np.linalg.norm(wanted)


def test_a_step_of_given_masks_pays_for_routing_with_keys_and_values(route_kv_calls):
    """As `wide bench e2e` times it; and the kernel itself, in its interpreter."""
    _, fast = pair()
    layers = fast.config.num_hidden_layers
    tokens = jax.random.randint(jax.random.key(6), (1, 1), 0, 61)
    batch = TokenBatch(tokens, jnp.zeros((1, 1), jnp.int32), jnp.ones_like(tokens))
    cache = KVCache.empty(fast.config, 1, 7, jnp.float32)
    wide = fast.wide
    masks = Masks(
        tuple(jnp.arange(wide.attn_groups(fast.config))[None, None] == i for i in range(layers)),
        tuple(jnp.arange(wide.ffn_groups(fast.config))[None, None] != i for i in range(layers)),
    )
    _, wanted = forward(fast, batch, Forced(masks), cache)
    assert route_kv_calls == []
    use_kernels(fast, Kernels(route_kv="triton"))
    with running("triton"):
        _, got = forward(fast, batch, Forced(masks, ask_routers=True), cache)
    assert route_kv_calls == ["triton"] * layers
    np.testing.assert_allclose(got.hidden, wanted.hidden, atol=1e-5)
    same(got.masks, wanted.masks)
    for mine, theirs in zip(got.cache.layers, wanted.cache.layers, strict=True):
        np.testing.assert_allclose(mine.keys, theirs.keys, atol=1e-6)
        assert not mine.counter.any()


def test_plan_of_what_runs_in_plain_jax():
    config, options = tiny_config(), {"batch": 1, "context": 128, "device": H200}
    prefill_ops = plan(config, None, Kernels(), tokens=128, **options)
    products = [op for op in prefill_ops if op.op in ("gemm_mn", "gemm_k", "swiglu_up")]
    assert {op.implementation for op in products} == {"plain JAX"}
    step = plan(config, None, Kernels(), tokens=1, **options)
    assert "plain JAX" not in {op.implementation for op in step}
    biased = tiny_config(mlp_bias=True)
    wide = WideConfig.for_model(biased, ffn_group_size=8)
    for op in plan(biased, wide, Kernels(), tokens=128, **options):
        assert (op.implementation == "plain JAX") == (op.op == "swiglu_up")


def test_a_kernel_asked_for_by_name_raises_where_the_ffn_has_biases():
    _, fast = pair(mlp_bias=True)
    use_kernels(fast, Kernels(swiglu_up="triton"))
    with pytest.raises(NotImplementedError, match="leave swiglu_up at None"):
        forward(fast, TokenBatch.from_lengths(jnp.arange(6)[None]), Argmax())


def test_finished_rows_do_not_touch_the_others():
    plain, fast = pair(sliding_window=4)
    alone = generate(plain, PROMPTS, max_new_tokens=8, stop_ids=())
    stop = int(alone.tokens[1, 2])
    assert stop not in alone.tokens[[0, 2], :3]
    for routing in (Argmax(), AllOn()):
        options = {"max_new_tokens": 8, "stop_ids": (stop,), "routing": routing}
        wanted, got = generate(plain, PROMPTS, **options), generate(fast, PROMPTS, **options)
        np.testing.assert_array_equal(got.tokens, wanted.tokens)
        np.testing.assert_array_equal(got.lengths, wanted.lengths)
        if isinstance(routing, Argmax):
            assert got.lengths[1] <= 3
            same(got.decode_usage, wanted.decode_usage)


def test_one_router_and_dynamic_rope_generate_as_plain_jax():
    config = tiny_config()
    rope = RopeConfig(rope_type="dynamic", factor=4.0, original_max_position_embeddings=16)
    plain, fast = pair(WideConfig.layer_skipping(config), rope=rope)
    wanted, got = (generate(m, PROMPTS, max_new_tokens=12, stop_ids=()) for m in (plain, fast))
    np.testing.assert_array_equal(got.tokens, wanted.tokens)
    np.testing.assert_allclose(got.log_probs, wanted.log_probs, atol=1e-4)


def test_one_router_that_is_asked_beside_given_masks_leaves_both_as_they_are():
    """Its word holds for the FFN where it is followed only."""
    config = tiny_config()
    wide = WideConfig.layer_skipping(config)
    batch = TokenBatch.from_lengths(jnp.arange(12)[None])
    keys = jax.random.split(jax.random.key(4), 4)
    masks = Masks(
        tuple(jax.random.bernoulli(k, 0.5, (1, 12, 1)) for k in keys[:2]),
        tuple(jax.random.bernoulli(k, 0.5, (1, 12, 1)) for k in keys[2:]),
    )
    for model in pair(wide):
        wanted, _ = forward(model, batch, Forced(masks))
        asked, output = forward(model, batch, Forced(masks, ask_routers=True))
        np.testing.assert_array_equal(asked, wanted)
        same(output.masks, masks)
        _, free = forward(model, batch, Argmax())
        np.testing.assert_array_equal(output.argmax.attention[0], free.masks.attention[0])
        for attention, ffn in zip(output.argmax.attention, output.argmax.ffn, strict=True):
            np.testing.assert_array_equal(ffn, attention)  # its own router is never asked


def test_one_compiled_prefill_a_length_bucket_and_one_step():
    _, fast = pair()
    for compiled in (prefill, _decode_until):
        compiled.clear_cache()  # other tests run models of these very shapes
    for length in (3, 9, 16, 17):  # two buckets: 16 and 32
        generate(fast, [[7] * length], max_new_tokens=3, stop_ids=())
    assert prefill._cache_size() == 2
    assert _decode_until._cache_size() == 2  # a longer cache is another step
    generate(fast, [[5] * 11], max_new_tokens=16, stop_ids=())  # new tokens have buckets too
    assert prefill._cache_size() == 2


def test_a_dense_step_of_plain_products_builds_no_layout():
    """What dense is compared with must not pay for masks that it has no use for."""
    model = tiny_model()
    layer = model.model.layers[0]
    batch = TokenBatch.from_lengths(jnp.array([[3]]))
    shared = attention_inputs(model.config, batch, None)

    def layout(kernels):
        return pruned.decision(
            layer.input_layernorm,
            None,
            jnp.ones((1, 1, model.config.hidden_size)),
            shared,
            AllOn(),
            kernels,
            layer=0,
            module="attention",
            groups=2,
            counter=step_counter(),
        ).layout

    assert layout(Kernels(gemm_mn="dense", swiglu_up="dense", gemm_k="dense")) is None
    assert layout(Kernels()) is not None


@pytest.fixture
def sublayer_calls(monkeypatch):
    """In order: every routing, every layout made, and every op with the number of its layout.

    A layout is seen where it is made, so one that an op made for itself is there too.
    """
    found, layouts = [], []
    make = MaskLayout.__init__

    def made(self, *arguments, **options):
        make(self, *arguments, **options)
        found.append(("layout", len(layouts)))
        layouts.append(self)

    def number(given):
        """Which layout is among the arguments, whole or as its mask."""
        for index, layout in enumerate(layouts):
            if any(argument is layout or argument is layout.mask for argument in given):
                return index
        return None

    def spied(name, original):
        def spy(*arguments, **options):
            found.append((name, number((*arguments, *options.values()))))
            return original(*arguments, **options)

        return spy

    monkeypatch.setattr(MaskLayout, "__init__", made)
    routings, products = ("norm_route_step", "route_kv"), ("project_qkv", "gemm_mn", "gemm_k")
    attentions = ("attention_prefill", "attention_step", "attention_decode")
    for name in (*routings, *products, "swiglu_up", *attentions):
        monkeypatch.setattr(pruned, name, spied(name, getattr(pruned, name)))
    return found


def trace(model, rows, tokens):
    """Trace a prompt of `tokens` tokens a row, or for one token a decode step; nothing is run."""
    graphdef, state = nnx.split(model)
    cache = KVCache.empty(model.config, rows, 64, jnp.float32)
    if tokens == 1:
        phase, inputs = decode_step, (jnp.ones(rows, jnp.int32), jnp.ones(rows, bool))
        options = {}
    else:
        phase, inputs = prefill, (jnp.ones((rows, tokens), jnp.int32), jnp.full(rows, tokens - 1))
        options = {"fresh": True}
    # Not the jitted function itself: JAX keeps what other tests traced of these very shapes.
    run = functools.partial(inspect.unwrap(phase), graphdef, **options)
    jax.make_jaxpr(run)(state, *inputs, cache, Argmax())


TRITON = Kernels(
    **{field.name: "triton" for field in dataclasses.fields(Kernels) if field.name != "hints"}
    | {"attention_decode": None}  # `attention_step` runs in its place
)


def sublayer(number, *ops, routing="norm_route_step"):
    """The calls of a sublayer: one decision, one layout, and this layout in all of its ops."""
    return [(routing, None), *((op, number) for op in ("layout", *ops))]


@pytest.mark.parametrize("kernels", [Kernels(), TRITON], ids=["tables", "triton"])
@pytest.mark.parametrize(
    ("rows", "tokens", "routing", "attention"),
    [
        (2, 40, "norm_route_step", ("project_qkv", "attention_prefill")),
        (1, 9, "norm_route_step", ("project_qkv", "attention_prefill")),
        (2, 1, "norm_route_step", ("project_qkv", "attention_step")),
        (1, 1, "route_kv", ("gemm_mn", "attention_step")),
    ],
    ids=["prompt", "prompt of few tokens", "step of two rows", "step of one row"],
)
def test_a_sublayer_has_one_decision_and_one_layout(
    rows, tokens, routing, attention, kernels, sublayer_calls
):
    _, fast = pair()
    use_kernels(fast, kernels)
    with running("triton" if kernels == TRITON else None):
        trace(fast, rows, tokens)
    expected, sublayers = [], 2 * fast.config.num_hidden_layers
    for first in range(0, sublayers, 2):
        expected += sublayer(first, *attention, "gemm_k", routing=routing)
        expected += sublayer(first + 1, "swiglu_up", "gemm_k")
    head = [("layout", sublayers), ("gemm_mn", sublayers)]  # few rows: by a layout of all on
    assert sublayer_calls == expected + head


@pytest.mark.parametrize(("tokens", "attention"), [(9, "attention_prefill"), (1, "attention_step")])
def test_one_router_has_one_decision_and_one_layout_a_layer(tokens, attention, sublayer_calls):
    _, fast = pair(WideConfig.layer_skipping(tiny_config()))
    trace(fast, 2, tokens)
    expected, layers = [], fast.config.num_hidden_layers
    for layer in range(layers):
        expected += sublayer(layer, "project_qkv", attention, "gemm_k")
        expected += [("swiglu_up", layer), ("gemm_k", layer)]
    assert sublayer_calls == [*expected, ("layout", layers), ("gemm_mn", layers)]
