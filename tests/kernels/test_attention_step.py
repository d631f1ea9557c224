"""A decode step's attention: turned queries, the new entry in the cache, and what is never read."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import attention_decode, rope_cache
from pallas_kernels._attention.config import DecodeConfig, FlashConfig
from pallas_kernels._common import triton_support
from pallas_kernels._common.device import H200, Device
from pallas_kernels._common.testing import interpreted
from pallas_kernels.attention_decode import triton as decode_triton
from pallas_kernels.attention_decode.triton import NewTokens
from pallas_kernels.attention_step import attention_step
from pallas_kernels.rope_cache import Rotation
from pallas_kernels.rope_cache.reference import rotated
from tests.kernels.attention import KEY, AttentionShape, assert_right, visible
from tests.kernels.contract import ON_GPU, ROUNDED, poison_memory, running
from tests.kernels.test_attention_dispatch import assert_fits, shipped, split_usage

EPS = 1e-6
SPLIT = DecodeConfig(32, 16, 4, 2)
CONFIGS = {"triton": SPLIT}
# Rows: no new token, the first slot, inside a split, its last slot, the next one's first, the last
# slot of all, and a slot past the cache.
LENGTHS = np.array([0, 1, 13, 64, 65, 100, 101])
SMALL = AttentionShape(b=7, t=1, s=100, hq=6, hk=2, d=64, groups=2)
WRITTEN = np.isin(LENGTHS, range(1, SMALL.s + 1))

each = pytest.mark.parametrize("implementation", ["reference", "triton"])
normed_or_not = pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])


def operands(shape: AttentionShape, dtype: str, *, normed: bool = False, seed: int = 0):
    """q, k, v of the new tokens; keys and values of the cache; the rotation and the keys' norm."""
    rng = np.random.default_rng(seed)
    entry = (shape.b, shape.hk, shape.d)
    cache = (shape.b, shape.s, shape.hk, shape.d)
    sizes = ((shape.b, shape.hq, shape.d), entry, entry, cache, cache)
    arrays = [jnp.asarray(rng.standard_normal(size, np.float32), dtype) for size in sizes]
    angles = rng.uniform(-3, 3, (shape.b, 1, shape.d // 2)).astype(np.float32)
    norms = [jnp.asarray(rng.uniform(0.5, 1.5, shape.d), dtype) for _ in range(2)]
    q_norm, k_norm = norms if normed else (None, None)
    rotation = Rotation(jnp.cos(angles), jnp.sin(angles), q_norm, EPS if normed else 0.0)
    return arrays, rotation, k_norm


def step(given, mask, lengths, implementation, config=None, **options):
    """`attention_step` as a compiled function, in interpreters on a CPU."""
    arrays, rotation, k_norm = given
    static = {n: options.pop(n) for n in ("sliding_window",) if n in options}
    options = {name: jnp.asarray(value) for name, value in options.items()}

    @jax.jit
    def call(arrays, mask, lengths, rotation, k_norm, options):
        return attention_step(
            *arrays,
            mask,
            lengths,
            rotation,
            k_norm=k_norm,
            implementation=implementation,
            config=config,
            **static,
            **options,
        )

    with running(implementation):
        lengths = jnp.asarray(lengths)
        return jax.block_until_ready(call(arrays, mask, lengths, rotation, k_norm, options))


def assert_written(before, after, new, slots, dtype: str | None = None) -> None:
    """`new[b]` lies at slot `slots[b]`, -1 for none, and nothing else is touched.

    `dtype`: `new` was turned, and is rounded to it in `after`; None: it was copied.
    """
    before, after, new = (np.asarray(a, np.float32) for a in (before, after, new))
    rows = np.flatnonzero(slots >= 0)
    entries, wanted = after[rows, slots[rows]], new[rows]
    if dtype is None:
        np.testing.assert_array_equal(entries, wanted)
    else:
        # Rounded after the norm, its weight and the rotation, which keeps a pair's length.
        length = np.tile(np.hypot(*np.split(wanted, 2, axis=-1)), 2)
        allowed = (3 * ROUNDED[dtype] + 4 * ROUNDED["float32"]) * length + 1e-6
        assert (np.abs(entries - wanted) <= allowed).all()
    untouched = after.copy()
    untouched[rows, slots[rows]] = before[rows, slots[rows]]
    np.testing.assert_array_equal(untouched, before)


def check(shape, mask, implementation, dtype="bfloat16", config=None, lengths=LENGTHS, **options):
    given = operands(shape, dtype, normed=options.pop("normed", False))
    poison_memory()
    out, keys, values = step(given, mask, lengths, implementation, config, **options)
    (q, k, v, k_cache, v_cache), rotation, k_norm = given
    turn = functools.partial(rotated, cos=rotation.cos, sin=rotation.sin, eps=rotation.eps)
    exact = turn(k[:, None].astype(jnp.float32), norm=k_norm)[:, 0]
    first = np.asarray(options.get("first", np.zeros(shape.b, int)))
    slots = np.where((lengths - 1 >= first) & (lengths <= shape.s), lengths - 1, -1)
    assert_written(k_cache, keys, exact, slots, dtype)
    assert_written(v_cache, values, v, slots)
    seen = visible(shape, start=slots, lengths=slots + 1, **options)
    query = turn(q[:, None], norm=rotation.norm)
    assert_right(out[:, None], (query, keys, values), mask, seen)


def half(shape: AttentionShape) -> jax.Array:
    return jax.random.bernoulli(KEY, 0.5, (shape.b, shape.groups))


@each
@pytest.mark.parametrize(
    "ranges",
    [
        {},
        dict(first=[0, 0, 5, 63, 40, 99, 0]),
        dict(first=[0, 1, 13, 64, 65, 100, 7]),  # rows that hold nothing
        dict(sliding_window=20),
        dict(sliding_window=1),
    ],
    ids=str,
)
def test_visible_ranges(implementation, ranges):
    mask = half(SMALL).at[2:].set(True)
    check(SMALL, mask, implementation, "float32", CONFIGS.get(implementation), **ranges)


@each
@normed_or_not
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(dtype, normed, implementation):
    mask = half(SMALL).at[5].set(True)
    config = CONFIGS.get(implementation)
    check(SMALL, mask, implementation, dtype, config, normed=normed)


@pytest.mark.parametrize(
    ("hq", "hk", "d", "groups", "normed"),
    [
        (9, 3, 64, 3, False),
        (32, 8, 128, 8, False),
        (16, 8, 128, 8, True),
        (14, 2, 80, 14, True),
        (4, 1, 96, 1, False),
        (8, 2, 256, 4, True),
        (3, 3, 64, 3, False),
        (17, 1, 16, 17, False),
    ],
    ids=str,
)
def test_heads_of_models(hq, hk, d, groups, normed):
    """SmolLM2-135M, Llama-3.1-8B, Qwen3-0.6B; heads that fill no tile; one a kv head, and many."""
    shape = AttentionShape(2, 1, 70, hq, hk, d, groups)
    mask = half(shape).at[0, 0].set(True)
    lengths = np.array([33, 70])
    check(shape, mask, "triton", config=SPLIT, lengths=lengths, normed=normed)


@each
def test_a_kv_head_that_nobody_reads_gets_its_entry(implementation):
    """Another token may read it. What the head holds besides is not looked at."""
    mask = jnp.ones((SMALL.b, 2), bool).at[:, 0].set(False)
    (*new, keys, values), rotation, k_norm = operands(SMALL, "float32")
    config = CONFIGS.get(implementation)
    _, *wanted = step(((*new, keys, values), rotation, k_norm), mask, LENGTHS, "reference")
    if implementation == "triton":
        keys, values = (cache.at[:, :, 0].set(jnp.nan) for cache in (keys, values))
    given = (*new, keys, values), rotation, k_norm
    out, *caches = step(given, mask, LENGTHS, implementation, config)
    assert not np.asarray(out)[:, : SMALL.hq // 2].any()
    assert np.isfinite(np.asarray(out)).all()
    rows, slots = np.flatnonzero(WRITTEN), LENGTHS[WRITTEN] - 1
    for ours, theirs in zip(caches, wanted, strict=True):
        np.testing.assert_allclose(ours[rows, slots], theirs[rows, slots], atol=1e-6)


@each
def test_what_lay_in_unseen_slots_and_in_the_new_one_does_not_matter(implementation):
    mask = half(SMALL).at[2:].set(True)
    (*new, keys, values), rotation, k_norm = operands(SMALL, "bfloat16")
    first = np.array([0, 0, 5, 63, 40, 99, 0])
    config = CONFIGS.get(implementation)

    def run(keys, values):
        given = (*new, keys, values), rotation, k_norm
        return step(given, mask, LENGTHS, implementation, config, first=first)

    slot = np.arange(SMALL.s)[None, :]
    stale = (slot >= LENGTHS[:, None] - 1) | (slot < first[:, None])
    stale = stale[..., None, None]
    clean, *_ = run(keys, values)
    out, *caches = run(*(jnp.where(stale, jnp.nan, cache) for cache in (keys, values)))
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(clean, np.float32))
    held = np.flatnonzero(WRITTEN)
    for cache in caches:
        assert jnp.isfinite(cache[held, LENGTHS[held] - 1]).all()
        outside = np.broadcast_to(stale, cache.shape).copy()
        outside[held, LENGTHS[held] - 1] = False
        assert np.isnan(np.asarray(cache, np.float32)[outside]).all()


@pytest.mark.parametrize(
    ("dtype", "normed"), [("bfloat16", False), ("float32", False), ("float32", True)]
)
def test_it_is_the_two_operations_it_stands_for(dtype, normed):
    """Triton's: to the last bit in float32 without norms, whose sums have another order here."""
    (q, k, v, keys, values), rotation, k_norm = given = operands(SMALL, dtype, normed=normed)
    mask = half(SMALL)
    ours = step(given, mask, LENGTHS, "triton", SPLIT)
    again = step(given, mask, LENGTHS, "triton", SPLIT)
    slots = jnp.where(WRITTEN, LENGTHS - 1, SMALL.s)[:, None]
    with running("triton"):
        q, _, keys, values = rope_cache(
            *(x[:, None] for x in (q, k, v)),
            rotation.cos,
            rotation.sin,
            keys,
            values,
            slots,
            q_norm=rotation.norm,
            k_norm=k_norm,
            eps=rotation.eps,
            implementation="triton",
        )
        lengths = jnp.where(WRITTEN, LENGTHS, 0)
        out = attention_decode(
            q[:, 0], keys, values, mask, lengths, implementation="triton", config=SPLIT
        )
    exactly = dtype == "float32" and not normed and not ON_GPU
    # bfloat16: interpreters round queries to it between kernels only. A card: fused multiply-adds.
    tolerance = 0.0 if exactly else {"bfloat16": 2e-2, "float32": 2e-6}[dtype]
    for mine, repeated, other in zip(ours, again, (out, keys, values), strict=True):
        mine, repeated, other = (np.asarray(a, np.float32) for a in (mine, repeated, other))
        np.testing.assert_array_equal(mine, repeated)
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance)


def test_the_result_does_not_depend_on_the_splits():
    """float32, whatever the split that holds the new slot, or that it begins or ends."""
    given, mask = operands(SMALL, "float32"), jnp.ones((7, 2), bool)
    results = [
        step(given, mask, LENGTHS, "triton", config)
        for config in (DecodeConfig(16, 16, 4, 1), SPLIT, DecodeConfig(128, 32, 4, 2))
    ]
    for out, *caches in results[1:]:
        np.testing.assert_allclose(out, results[0][0], rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(caches, results[0][1:], strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("slot", [0, 31, 32, 63, 64, 69])
def test_the_new_slot_begins_or_ends_a_split(slot):
    shape = AttentionShape(1, 1, 70, 4, 2, 64, 2)
    lengths = np.array([slot + 1])
    check(shape, jnp.ones((1, 2), bool), "triton", "float32", SPLIT, lengths)


@pytest.mark.skipif(not ON_GPU, reason="shapes for a GPU")
@normed_or_not
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("d", [64, 80, 96, 128, 256])
def test_compiled_kernel(d, dtype, normed):
    """The config that dispatch picks, on long ragged rows."""
    shape = AttentionShape(7, 1, 5000, 8, 2, d, 4)
    lengths = np.array([0, 1, 700, 4097, 4999, 5000, 64])
    check(shape, half(shape), "triton", dtype, lengths=lengths, normed=normed)
    check(shape, half(shape), "triton", dtype, lengths=lengths, sliding_window=1000)


@pytest.mark.skipif(not ON_GPU, reason="XLA on a CPU has no cuDNN")
@normed_or_not
def test_dense(normed):
    check(SMALL, half(SMALL), "dense", normed=normed)


def test_no_mask_means_everything_on():
    given = operands(SMALL, "float32")
    wanted = step(given, jnp.ones((7, 3), bool), LENGTHS, "reference")
    for ours, theirs in zip(step(given, None, LENGTHS, None), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 if ON_GPU else 0.0)
    (q, k, v, keys, values), rotation, _ = given
    nobody = Rotation(rotation.cos[:0], rotation.sin[:0])
    out, *caches = attention_step(
        q[:0], k[:0], v[:0], keys[:0], values[:0], None, jnp.asarray(LENGTHS[:0]), nobody
    )
    assert out.shape == (0, 6, 64)
    assert {cache.shape for cache in caches} == {(0, 100, 2, 64)}


@pytest.mark.usefixtures("unchecked_types")
def test_refusals():
    (q, k, v, keys, values), rotation, k_norm = operands(SMALL, "bfloat16", normed=True)
    lengths, mask = jnp.asarray(LENGTHS), half(SMALL)

    def call(q=q, k=k, v=v, keys=keys, values=values, rotation=rotation, k_norm=k_norm, **options):
        return attention_step(
            q, k, v, keys, values, mask, lengths, rotation, k_norm=k_norm, **options
        )

    wide = {"keys": keys.astype(jnp.float32), "values": values.astype(jnp.float32)}
    with pytest.raises(ValueError, match="attention_step: k_cache is float32, but q"):
        call(**wide)
    with pytest.raises(
        ValueError, match=r"v is bfloat16\[6, 2, 64\], expected bfloat16\[7, 2, 64\]"
    ):
        call(v=v[:6])
    with pytest.raises(ValueError, match=r"k is float32\[7, 2, 64\], expected bfloat16"):
        call(k=k.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"rotation\.norm and k_norm, or none"):
        call(k_norm=None)
    with pytest.raises(ValueError, match=r"k_norm is \(32,\), expected \(64,\)"):
        call(k_norm=k_norm[:32])
    with pytest.raises(ValueError, match=r"rotation\.cos is \(7, 2, 32\), expected \(7, 1, 32\)"):
        call(rotation=Rotation(*[jnp.ones((7, 2, 32))] * 2, k_norm, EPS))
    with pytest.raises(ValueError, match="unknown implementation='mosaic'"):
        call(implementation="mosaic")
    with pytest.raises(NotImplementedError, match=r"attention_step: dense .* neither first"):
        call(implementation="dense", sliding_window=4)
    with interpreted(), pytest.raises(NotImplementedError, match="attention_step: triton has no"):
        call(implementation="triton", config=FlashConfig(32, 32, 4, 2))
    if not ON_GPU:
        with pytest.raises(NotImplementedError, match=r"attention_step: .* capability 8\.0"):
            call(implementation="triton")


@pytest.mark.skipif(ON_GPU, reason="the cache is updated in place where XLA owns it")
def test_the_callers_cache_is_not_changed():
    given = operands(SMALL, "float32")
    before = [np.array(cache) for cache in given[0][3:]]
    step(given, half(SMALL), LENGTHS, "triton", SPLIT)
    for cache, was in zip(given[0][3:], before, strict=True):
        np.testing.assert_array_equal(cache, was)


# ---- what is compiled ----


def test_the_cache_is_updated_in_place(monkeypatch):
    """The call's outputs behind its own are the cache's buffers, and no copy stands in between."""
    monkeypatch.setattr(decode_triton, "current_device", lambda: H200)
    monkeypatch.setattr(triton_support, "current_device", lambda: H200)
    bf16 = jnp.bfloat16

    def array(*shape, dtype=bf16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def call(q, k, v, keys, values, mask, lengths, angles):
        rotation = Rotation(angles, angles)
        return attention_step(
            q, k, v, keys, values, mask, lengths, rotation, implementation="triton", config=SPLIT
        )

    new, cache = array(2, 2, 64), array(2, 100, 2, 64)
    arguments = [array(2, 6, 64), new, new, cache, cache, array(2, 2, dtype=jnp.bool_)]
    arguments += [array(2, dtype=jnp.int32), array(2, 1, 32, dtype=jnp.float32)]
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        traced = jax.jit(call, donate_argnums=(3, 4)).trace(*arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@triton_kernel_call" in line]
    assert len(calls) == 2  # a step is two kernels
    result, operands = re.search(
        r"(%\d+):5 = .*@triton_kernel_call\w*\(([^)]*)\)", calls[0]
    ).groups()
    assert operands.startswith("%arg3, %arg4, ")
    aliases = re.findall(r"output_tuple_indices = \[(\d)\],\s*operand_index = (\d)", calls[0])
    assert aliases == [("3", "0"), ("4", "1")]
    assert re.search(rf"return %\d+, {result}#3, {result}#4 :", text)  # the new cache itself


def compiled_cases() -> list[tuple[Device, DecodeConfig, int, str, bool]]:
    """Every config that decode ships with; a norm, which takes more registers, is in most."""
    found = [case for case in shipped() if isinstance(case[1], DecodeConfig)]
    plain = [(*case, False) for case in found if case[2:] == (128, "bfloat16")]
    return plain + [(*case, True) for case in found]


@pytest.mark.parametrize(
    ("device", "config", "d", "dtype", "normed"),
    compiled_cases(),
    ids=lambda value: getattr(value, "capability", None) or str(value),
)
def test_shipped_configs_compile_without_spills_and_fit(device, config, d, dtype, normed):
    shape = AttentionShape(1, 1, 100, 32, 8, d, 8)
    (_, k, v, _, _), rotation, k_norm = operands(shape, dtype, normed=normed)
    found = split_usage(device, config, d, dtype, NewTokens(k, v, rotation, k_norm))
    assert_fits(found, device, config, d, dtype)
