"""The K-axis part of `mask_layout`: tiles of tokens that skip about the same groups."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import MaskLayout, mask_layout
from pallas_kernels._common.testing import PATTERNS, clustered_mask, random_mask
from pallas_kernels.layout import k_axis
from pallas_kernels.layout.api import order_k_axis
from tests.kernels.contract import ON_GPU, running

KEY = jax.random.key(11)
SHAPES = [(1, 8, 8), (150, 3, 3), (300, 10, 4), (700, 9, 5), (600, 8, 8)]
if ON_GPU:
    SHAPES += [
        (400, 1, 1),
        (16384, 112, 7),
        (16384, 8, 8),
        (16384, 448, 7),
        (131072, 8, 8),
        (3000, 14, 6),
    ]


def tiles_of(order: k_axis.KOrder) -> list[list[tuple[list[int], np.ndarray, np.ndarray]]]:
    """(groups, tokens, their patterns) of every tile in use, by super-group."""
    rows, tiles = np.asarray(order.rows), np.asarray(order.tiles)
    found = []
    for own_rows, own_tiles in zip(rows, tiles, strict=True):
        used = []
        for index, (listed, counts) in enumerate(own_tiles):
            groups = [int(listed >> 4 * i & 15) for i in range(counts & 0xFF)]
            entries = own_rows[index * k_axis.TILE :][: counts >> 8]
            used.append((groups, entries & 0xFFFFFF, entries >> 24 & 0xFF))
        busy = [len(tokens) > 0 for _, tokens, _ in used]
        assert busy == sorted(busy, reverse=True)  # unused tiles come last
        found.append([tile for tile in used if len(tile[1])])
    return found


def check(order: k_axis.KOrder, mask: np.ndarray) -> int:
    """Every token is in one tile of every super-group, which has its groups; returns the work."""
    work = 0
    for i, tiles in enumerate(tiles_of(order)):
        on = mask[:, i * order.size : (i + 1) * order.size]
        patterns = (on * (1 << np.arange(on.shape[1]))).sum(axis=1)
        seen = []
        for groups, tokens, pattern in tiles:
            assert len(groups) == len(set(groups))
            assert not groups or max(groups) < on.shape[1]  # the last may have fewer
            assert len(tokens) <= k_axis.TILE
            np.testing.assert_array_equal(patterns[tokens], pattern)
            assert not (pattern & ~sum(1 << g for g in groups)).any()
            seen += list(tokens)
            work += len(groups)
        assert sorted(seen) == list(range(len(mask)))
    return work


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pattern", ["half", "all_off", "one_token_only"])
def test_every_token_is_in_one_tile_with_its_groups(implementation, shape, pattern):
    tokens, groups, size = shape
    mask = PATTERNS[pattern](KEY, tokens, groups)
    with running(implementation):
        order = order_k_axis(
            mask, mask.sum(axis=0, dtype=jnp.int32), size=size, implementation=implementation
        )
    assert order.size == size
    assert order.tiles.shape == (math.ceil(groups / size), k_axis.tile_bound(tokens), 2)
    check(order, np.asarray(mask))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_makes_the_tiles_of_the_specification(shape):
    tokens, groups, size = shape
    for pattern in ("half", "clustered", "ragged"):
        mask = PATTERNS[pattern](KEY, tokens, groups)
        specified = tiles_of(
            order_k_axis(mask, mask.sum(axis=0, dtype=jnp.int32), size=size, implementation="xla")
        )
        with running("triton"):
            made = tiles_of(
                order_k_axis(
                    mask, mask.sum(axis=0, dtype=jnp.int32), size=size, implementation="triton"
                )
            )
        for ours, theirs in zip(made, specified, strict=True):
            for (groups_a, tokens_a, _), (groups_b, tokens_b, _) in zip(ours, theirs, strict=True):
                assert groups_a == groups_b
                np.testing.assert_array_equal(tokens_a, tokens_b)


@pytest.mark.parametrize(
    ("groups", "size", "most"), [(112, 7, 0.535), (8, 8, 0.60), (56, 7, 0.535)]
)
def test_tiles_compute_little_more_than_the_tokens_need(groups, size, most):
    """Random 50 % masks of 16,384 tokens: the share of all (token tile, group) products."""
    mask = random_mask(KEY, 16384, groups, 0.5)
    order = order_k_axis(mask, mask.sum(axis=0, dtype=jnp.int32), size=size, implementation="xla")
    assert check(order, np.asarray(mask)) / (16384 / k_axis.TILE * groups) <= most


def test_an_order_by_the_routers_bottleneck_computes_more():
    """Why no caller gives a key: near tokens still differ in a few groups, and a tile adds them up.

    The key is the best there is, the walk that `clustered_mask` makes the masks from.
    """
    tokens, groups, rank = 16384, 8, 16
    mask = clustered_mask(KEY, tokens, groups, 0.5)
    order = order_k_axis(mask, mask.sum(axis=0, dtype=jnp.int32), size=8, implementation="xla")
    products = tokens / k_axis.TILE * groups
    by_mask = check(order, np.asarray(mask)) / products
    walk, _, _ = jax.random.split(KEY, 3)
    steps = np.asarray(jax.random.normal(walk, (tokens, rank))) * np.sqrt(1 - 0.9**2)
    key = np.zeros((tokens, rank))
    for t in range(tokens):
        key[t] = 0.9 * key[t - 1] + steps[t]

    def halved(rows: np.ndarray) -> list[np.ndarray]:
        if len(rows) <= k_axis.TILE:
            return [rows]
        _, directions = np.linalg.eigh(np.cov(key[rows].T))
        rows = rows[np.argsort(key[rows] @ directions[:, -1], kind="stable")]
        return [tile for half in np.split(rows, 2) for tile in halved(half)]

    needed = [np.asarray(mask)[rows].any(axis=0).sum() for rows in halved(np.arange(tokens))]
    by_key = sum(needed) / products
    assert by_mask < 0.56 < 0.9 < by_key < 1.0


def test_super_groups_follow_shapes():
    assert k_axis.super_group_size(16384, 8) == 8
    assert k_axis.super_group_size(16384, 3) == 3
    assert k_axis.super_group_size(16384, 112) == 8
    assert k_axis.super_group_size(8192, 112) == 7
    assert k_axis.super_group_size(16384, 56) == 7
    assert k_axis.super_group_size(65, 112) == 4
    assert k_axis.super_group_size(10**6, 112) == 8
    for tokens in (1, 500, 5000, 50000):
        for groups in (9, 17, 28, 136, 448):
            assert 1 <= k_axis.super_group_size(tokens, groups) <= k_axis.LARGEST


def test_the_layout_has_it_only_if_asked():
    mask = random_mask(KEY, 70, 9, 0.5)
    assert mask_layout(mask).k_order is None
    assert mask_layout(mask[:64], k_axis=True).k_order is None  # the form for few tokens needs none
    layout = mask_layout(mask, k_axis=True, expected_sparsity=0.5)
    moved = jax.jit(lambda given: jax.tree.map(lambda a: a, given))(layout)
    assert isinstance(moved, MaskLayout)
    assert moved.k_order.size == layout.k_order.size
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(moved)]
    assert paths == [".mask", ".order", ".count", ".k_order.rows", ".k_order.tiles"]


def test_refusals():
    with pytest.raises(ValueError, match=r"size=9 must be in 1\.\.8"):
        order_k_axis(jnp.ones((70, 9), bool), jnp.ones(9, jnp.int32), size=9)
    with pytest.raises(ValueError, match="ordered for up to 16777216"):
        jax.eval_shape(
            order_k_axis,
            jax.ShapeDtypeStruct((2**24 + 1, 2), jnp.bool_),
            jax.ShapeDtypeStruct((2,), jnp.int32),
        )
