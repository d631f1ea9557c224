"""`rope_cache`: rotation in float64, cache entries where they belong and nowhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common.cubin import TYPE_NAMES, compile_usage
from pallas_kernels._common.device import KNOWN_DEVICES
from pallas_kernels.rope_cache import rope_cache
from pallas_kernels.rope_cache.triton import NUM_WARPS, launch_constants, rope_kernel
from tests.kernels.contract import ON_GPU, ROUNDED, running

EPS = 1e-6
SHAPES = [  # B, T, S, Hq, Hk, d
    (2, 3, 8, 4, 1, 64),
    (1, 5, 5, 9, 3, 16),
    (3, 1, 7, 14, 2, 80),
]
if ON_GPU:
    SHAPES += [(1, 4096, 4128, 32, 8, 128), (16, 1, 16384, 40, 8, 128)]


def operands(shape, dtype, seed=0):
    b, t, s, hq, hk, d = shape
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal((b, t, h, d)) for h in (hq, hk, hk)]
    angles = rng.uniform(-3, 3, (b, t, d // 2))
    arrays += [np.cos(angles), np.sin(angles)]
    arrays += [rng.standard_normal((b, s, hk, d)) for _ in range(2)]
    kinds = [dtype] * 3 + ["float32"] * 2 + [dtype] * 2
    # Every row's tokens go to distinct slots; one is padding where there is room to tell.
    slots = np.stack([rng.permutation(s)[:t] for _ in range(b)]).astype(np.int32)
    slots[0, -1] = s
    return [jnp.asarray(a, kind) for a, kind in zip(arrays, kinds, strict=True)], jnp.asarray(slots)


def exact(arrays, norms):
    q, k, _, cos, sin = (np.asarray(a, np.float64) for a in arrays[:5])
    out = []
    for x, norm in ((q, norms[0]), (k, norms[1])):
        if norm is not None:
            x = np.asarray(norm, np.float64) * x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
        first, second = np.split(x, 2, axis=-1)
        c, s = cos[:, :, None], sin[:, :, None]
        out.append(np.concatenate([first * c - second * s, second * c + first * s], axis=-1))
    return out


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotation_and_cache(shape, dtype, normed, implementation):
    arrays, slots = operands(shape, dtype)
    norms = (None, None)
    if normed:
        norms = tuple(jnp.linspace(0.5, 1.5, shape[-1]).astype(dtype) for _ in range(2))
    with running(implementation):
        q, k, keys, values = rope_cache(
            *arrays, slots, q_norm=norms[0], k_norm=norms[1], eps=EPS, implementation=implementation
        )
    roundings = 3 if normed else 1  # after the norm, its weight and the rotation
    for got, wanted in zip((q, k), exact(arrays, norms), strict=True):
        assert got.dtype == arrays[0].dtype
        # Rotation keeps a pair's length, and with it what was rounded away before.
        length = np.tile(np.hypot(*np.split(wanted, 2, axis=-1)), 2)
        allowed = (roundings * ROUNDED[dtype] + 4 * ROUNDED["float32"]) * length + 1e-6
        assert (np.abs(np.asarray(got, np.float64) - wanted) <= allowed).all()
    # The cache holds exactly what attention is given, at the slots, and is untouched elsewhere.
    for new, before, after in ((k, arrays[5], keys), (arrays[2], arrays[6], values)):
        wanted = np.array(before)
        for b, t in np.ndindex(slots.shape):
            if slots[b, t] < shape[2]:
                wanted[b, slots[b, t]] = np.asarray(new)[b, t]
        np.testing.assert_array_equal(np.asarray(after), wanted)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_without_queries_keys_and_cache_are_the_same(normed, implementation):
    """Where attention turns the queries itself."""
    (q, *arrays), slots = operands(SHAPES[2], "float32")
    norm = jnp.linspace(0.5, 1.5, SHAPES[2][-1]) if normed else None
    options = dict(k_norm=norm, eps=EPS, implementation=implementation)
    with running(implementation):
        _, *wanted = rope_cache(q, *arrays, slots, q_norm=norm, **options)
        none, *got = rope_cache(None, *arrays, slots, **options)
    assert none is None
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.usefixtures("unchecked_types")
def test_misfits_are_refused_with_numbers():
    arrays, slots = operands(SHAPES[0], "float32")
    with pytest.raises(ValueError, match=r"keys is \(2, 8, 1, 32\), expected \(2, 8, 1, 64\)"):
        rope_cache(*arrays[:5], arrays[5][..., :32], arrays[6], slots)
    with pytest.raises(ValueError, match="q_norm and k_norm, or none"):
        rope_cache(*arrays, slots, q_norm=jnp.ones(64))
    with pytest.raises(ValueError, match="q_norm is given without q"):
        rope_cache(None, *arrays[1:], slots, q_norm=jnp.ones(64), k_norm=jnp.ones(64))
    with pytest.raises(ValueError, match=r"q is \(2, 2, 4, 64\), expected \(2, 3, 4, 64\)"):
        rope_cache(arrays[0][:, 1:], *arrays[1:], slots)
    with pytest.raises(ValueError, match="q bfloat16, k float32, v float32: expected one of"):
        rope_cache(arrays[0].astype("bfloat16"), *arrays[1:], slots)


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda d: d.capability)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("hq", [0, 32], ids=["without queries", "with queries"])
def test_kernel_compiles_without_spills(device, hq, normed):
    kind = TYPE_NAMES["bfloat16"]
    names = ("keys", "values", "q", "k", "v", "q_norm", "k_norm", "q_out", "k_out")
    signature = dict.fromkeys(names, kind) | {"cos": "*fp32", "sin": "*fp32", "slots": "*i32"}
    constants = launch_constants(4096, 8192, hq, 8, 128, normed, EPS)
    found = compile_usage(
        rope_kernel, signature, constants, device.capability, NUM_WARPS, num_stages=1
    )
    assert found.spills == 0
    assert not found.instructions & {"red.", "atom."}


@pytest.mark.skipif(ON_GPU, reason="the cache is updated in place where XLA owns it")
def test_the_callers_cache_is_not_changed():
    arrays, slots = operands(SHAPES[0], "float32")
    before = np.array(arrays[5])
    with running("triton"):
        jax.block_until_ready(rope_cache(*arrays, slots, implementation="triton"))
    np.testing.assert_array_equal(before, arrays[5])
