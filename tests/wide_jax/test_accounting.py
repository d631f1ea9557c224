"""What masks save: figures worked out by hand, and properties that hold for every mask."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wide_jax.accounting import (
    Accounting,
    account,
    fixed_costs,
    fractions,
    ideal_decode_speedup,
    ideal_prefill_speedup,
    step_usage,
    usage,
)
from wide_jax.config import ModelConfig, WideConfig
from wide_jax.routing import Masks

# D 8, Hq 4, Hk 2, d 4 (not D / Hq), F 12, V 10: one layer unless a test says otherwise.
CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=10,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
)
WIDE = WideConfig(attn_group_size=2, ffn_group_size=4, router_rank=3)


def masks_of(attention, ffn) -> Masks:
    """One layer from nested lists `[B][T][groups]`."""
    return Masks((jnp.array(attention, bool),), (jnp.array(ffn, bool),))


def random_case(seed, *, config=CONFIG, wide=WIDE, batch=3, tokens=7):
    """Random masks, lengths and visible keys."""
    rng = np.random.default_rng(seed)
    groups = (wide.attn_groups(config), wide.ffn_groups(config))
    attention, ffn = (
        tuple(
            jnp.asarray(rng.random((batch, tokens, count)) < 0.6)
            for _ in range(config.num_hidden_layers)
        )
        for count in groups
    )
    real = jnp.arange(tokens)[None] < jnp.asarray(rng.integers(1, tokens + 1, batch))[:, None]
    keys = jnp.broadcast_to(jnp.arange(1, tokens + 1), (batch, tokens))
    return Masks(attention, ffn), real, keys


def figures(sums, config=CONFIG, wide=WIDE, **sizes) -> Accounting:
    return account(sums, config, wide, **({"weight_bytes": 2, "kv_bytes": 2} | sizes))


def test_two_tokens_by_hand():
    # Token 0 (n = 1) skips attention group 1 and FFN groups 0, 2; token 1 (n = 2) skips both
    # attention groups and FFN group 1. A group is 2 heads x 4 = 8 rows, or 4 channels.
    masks = masks_of([[[1, 0], [0, 0]]], [[[0, 1, 0], [1, 0, 1]]])
    sums = usage(masks, jnp.ones((1, 2), bool), jnp.array([[1, 2]]), CONFIG)
    found = figures(sums, weight_bytes=2, kv_bytes=1)
    assert found.attention == pytest.approx(3 / 4)
    assert found.ffn == pytest.approx(3 / 6)
    assert found.paper == pytest.approx((3 / 4 + 3 / 6) / 2)
    # Weights: 2 D g d = 2*8*8 = 128 an attention group, 3 D G = 3*8*4 = 96 an FFN group.
    saved_weights, routable_weights = 3 * 128 + 3 * 96, 2 * (2 * 128 + 3 * 96)
    assert found.parameters == pytest.approx(saved_weights / routable_weights)
    # FLOPs: 4 D g d = 256 and 4 g d n = 32 n an attention group, 6 D G = 192 an FFN group.
    # Group 1 of token 0 (n 1) and both of token 1 (n 2): 3*256 + 32*(1 + 2*2).
    saved_flops = 3 * 256 + 32 * 5 + 3 * 192
    routable_flops = 2 * (2 * 256 + 3 * 192) + 32 * (2 * 1 + 2 * 2)
    assert found.flops == pytest.approx(saved_flops / routable_flops)
    # Bytes: weights x 2; K and V of a skipped head 2 n d = 8 n: head 1 at n 1, both at n 2.
    saved_bytes = 2 * saved_weights + 8 * (1 * 1 + 2 * 2)
    routable_bytes = 2 * routable_weights + 8 * (2 * 1 + 2 * 2)
    assert found.bytes == pytest.approx(saved_bytes / routable_bytes)
    # Never saved, per token: K and V 4 D Hk d = 256 FLOPs, head 2 D V = 160, routers
    # 2 * (8*3 + 3*4 + 8*3 + 3*6) = 156, three norms of 8 elements at 4 FLOPs = 96.
    assert found.flops_total == pytest.approx(saved_flops / (routable_flops + 2 * 668))
    # Elements: K and V 128, head 80, embedding row 8, norms 24; routers 78 + biases 3+4+3+6.
    assert fixed_costs(CONFIG, WIDE).weights == 240
    assert fixed_costs(CONFIG, WIDE).router_weights == 94
    assert found.parameters_total == pytest.approx(saved_weights / (routable_weights + 2 * 334))
    assert found.bytes_total == pytest.approx(
        saved_bytes / (routable_bytes + 2 * (240 * 2 + 94 * 4))
    )
    assert found.attention_layers == pytest.approx((3 / 4,))
    assert found.ffn_layers == pytest.approx((1 / 2,))
    assert (found.tokens, found.mean_keys) == (2, 1.5)


def test_a_router_that_is_never_asked_costs_nothing():
    both = WideConfig(attn_group_size=4, ffn_group_size=12, router_rank=3)
    one = dataclasses.replace(both, one_router=True)
    saved = 8 * 3 + 3 * 2
    assert fixed_costs(CONFIG, both).flops - fixed_costs(CONFIG, one).flops == 2 * saved
    assert fixed_costs(CONFIG, one).router_weights == saved + 3 + 2


def test_the_paper_mean_is_not_the_parameter_weighted_one():
    # Llama-3.1-8B's published run: 66.2 % of attention, 28.5 % of FFN groups = 47.4 % by the
    # paper's mean, but 34.5 % of the routed parameters.
    config = dataclasses.replace(
        CONFIG,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    wide = WideConfig(attn_group_size=4, ffn_group_size=14)
    attention = np.ones((1, 1000, 8), bool)
    ffn = np.ones((1, 1000, 1024), bool)
    attention.reshape(-1)[: round(0.662 * attention.size)] = False
    ffn.reshape(-1)[: round(0.285 * ffn.size)] = False
    sums = usage(
        Masks((jnp.asarray(attention),), (jnp.asarray(ffn),)),
        jnp.ones((1, 1000), bool),
        jnp.ones((1, 1000)),
        config,
    )
    found = figures(sums, config, wide)
    assert found.paper == pytest.approx(0.4735, abs=1e-3)
    assert found.parameters == pytest.approx(0.345, abs=1e-3)


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("attn_group_size", [1, 2, 4])
def test_all_on_saves_nothing_and_all_off_everything(value, attn_group_size):
    wide = WideConfig(attn_group_size=attn_group_size, ffn_group_size=6)
    shapes = (wide.attn_groups(CONFIG), wide.ffn_groups(CONFIG))
    masks = Masks(*((jnp.full((2, 5, groups), value),) for groups in shapes))
    keys = jnp.broadcast_to(jnp.arange(1, 6), (2, 5))
    found = figures(usage(masks, jnp.ones((2, 5), bool), keys, CONFIG), wide=wide)
    expected = 0.0 if value else 1.0
    assert found.summary() == dict.fromkeys(found.summary(), expected)
    for total in (found.parameters_total, found.flops_total, found.bytes_total):
        assert total == 0.0 if value else 0.0 < total < 1.0


@pytest.mark.parametrize("seed", range(5))
def test_padding_changes_nothing_whatever_it_holds(seed):
    masks, real, keys = random_case(seed)
    plain = usage(masks, real, keys, CONFIG)
    for filler in (0.0, 1.0, jnp.nan):
        filled = jax.tree.map(
            lambda mask, filler=filler: jnp.where(real[..., None], mask.astype(float), filler),
            masks,
        )
        longer = jax.tree.map(
            lambda mask, filler=filler: jnp.pad(
                mask, ((0, 1), (0, 3), (0, 0)), constant_values=filler
            ),
            filled,
        )
        padded = usage(
            longer,
            jnp.pad(real, ((0, 1), (0, 3))),
            jnp.pad(keys, ((0, 1), (0, 3)), constant_values=99),
            CONFIG,
        )
        assert figures(padded) == figures(plain)


@pytest.mark.parametrize("seed", range(3))
def test_sums_of_parts_are_the_sum_of_the_whole(seed):
    masks, real, keys = random_case(seed, batch=4)
    whole = usage(masks, real, keys, CONFIG).to_host()
    rows = [
        usage(jax.tree.map(lambda m, i=i: m[i : i + 1], masks), real[i : i + 1], keys[:1], CONFIG)
        for i in range(4)
    ]
    total = rows[0].to_host()
    for row in rows[1:]:
        total = total + row.to_host()
    assert figures(total) == figures(whole)
    assert total.tokens.dtype == np.float64


@pytest.mark.parametrize(
    ("heads", "kv_heads", "group", "running", "saved_kv_heads"),
    [
        (8, 2, 4, [1], [0]),  # one group a KV head
        (8, 2, 8, [], [0, 1]),  # one group reads both heads
        (8, 2, 8, [0], []),
        (8, 2, 2, [0], [1]),  # two groups a KV head: one running group keeps it
        (8, 2, 2, [3], [0]),
        (8, 2, 1, [0, 7], []),
        (8, 4, 4, [1], [0, 1]),  # a group that reads two heads
        (12, 2, 4, [1], []),  # heads 4..7 straddle both KV heads
        (12, 2, 4, [0], [1]),
        (12, 2, 4, [2], [0]),
        (6, 3, 3, [0], [2]),  # group 0 reads heads 0 and 1
    ],
)
def test_a_kv_head_is_saved_only_when_every_group_that_reads_it_is_skipped(
    heads, kv_heads, group, running, saved_kv_heads
):
    config = dataclasses.replace(CONFIG, num_attention_heads=heads, num_key_value_heads=kv_heads)
    attention = np.zeros((1, 1, heads // group), bool)
    attention[0, 0, running] = True
    masks = masks_of(attention, [[[True]]])
    sums = usage(masks, jnp.ones((1, 1), bool), jnp.array([[10]]), config)
    assert float(sums.kv_keys[0]) == 10 * len(saved_kv_heads)


def test_a_sliding_window_bounds_the_visible_keys_of_its_layers():
    config = dataclasses.replace(
        CONFIG, num_hidden_layers=2, sliding_window=4, sliding_window_layers=(True, False)
    )
    masks, real, _ = random_case(0, config=config)
    real = jnp.ones_like(real)
    keys = jnp.broadcast_to(jnp.arange(1, 8), real.shape)
    sums = usage(masks, real, keys, config)
    assert sums.keys.tolist() == [3 * (1 + 2 + 3 + 4 * 4), 3 * 28]


def test_straight_through_masks_carry_the_gradient_of_the_linear_budget():
    masks, real, keys = random_case(3)
    floats = jax.tree.map(lambda m: m.astype(jnp.float32), masks)

    def rate(masks: Masks):
        sums = usage(masks, real, keys, CONFIG)
        return fractions(sums, CONFIG, weight_bytes=2, kv_bytes=2)

    for name in ("attention", "ffn", "parameters", "flops"):
        gradient = jax.jit(jax.grad(lambda m, name=name: getattr(rate(m), name)))(floats)
        # These are linear in the masks: value(on) - value = -gradient . (skipped)
        through = sum(
            float((g * (1 - m)).sum())
            for g, m in zip(jax.tree.leaves(gradient), jax.tree.leaves(floats), strict=True)
        )
        assert float(getattr(rate(floats), name)) == pytest.approx(-through, rel=1e-5)
        for g in jax.tree.leaves(gradient):
            assert bool((jnp.where(real[..., None], 0.0, g) == 0).all())


def test_byte_gradient_is_what_flipping_one_group_changes():
    # One KV head read by two groups: flipping one saves its K and V only if the other is off too.
    config = dataclasses.replace(CONFIG, num_key_value_heads=1)
    real, keys = jnp.ones((1, 1), bool), jnp.array([[50.0]])

    def rate(attention):
        masks = Masks((attention,), (jnp.ones((1, 1, 3)),))
        sums = usage(masks, real, keys, config)
        return fractions(sums, config, weight_bytes=2, kv_bytes=2).bytes

    for state in ([1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]):
        mask = jnp.array([[state]])
        gradient = jax.grad(rate)(mask)
        for group in range(2):
            on, off = mask.at[0, 0, group].set(1.0), mask.at[0, 0, group].set(0.0)
            assert float(gradient[0, 0, group]) == pytest.approx(
                float(rate(on) - rate(off)), abs=1e-6
            )


def test_no_tokens_give_zeros_and_finite_gradients():
    masks, real, keys = random_case(0)
    nothing = jnp.zeros_like(real)
    assert figures(usage(masks, nothing, keys, CONFIG)).summary()["flops"] == 0.0
    floats = jax.tree.map(lambda m: m.astype(jnp.float32), masks)
    gradient = jax.grad(
        lambda m: (
            fractions(usage(m, nothing, keys, CONFIG), CONFIG, weight_bytes=2, kv_bytes=2).flops
        )
    )(floats)
    assert all(bool((g == 0).all()) for g in jax.tree.leaves(gradient))


def test_large_models_do_not_overflow():
    # 70B sizes: routable elements of one layer alone pass 2**31.
    config = dataclasses.replace(
        CONFIG,
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=3,
    )
    wide = WideConfig.for_model(config)
    masks, real, _ = random_case(0, config=config, wide=wide, batch=2, tokens=64)
    keys = jnp.full(real.shape, 131072)
    sums = usage(masks, real, keys, config)
    part = jax.jit(lambda u: fractions(u, config, weight_bytes=2, kv_bytes=2))(sums)
    exact = figures(sums, config, wide)
    for name, value in exact.summary().items():
        assert float(getattr(part, name)) == pytest.approx(value, rel=1e-5)


def test_a_batched_decode_step_saves_a_weight_group_only_when_no_row_needs_it():
    # Two rows, three steps; row 1 has ended before step 2. Attention groups 2, FFN groups 3.
    attention = [[[1, 0], [0, 0], [0, 1]], [[0, 0], [1, 0], [1, 1]]]
    ffn = [[[1, 1, 0], [0, 0, 0], [1, 0, 0]], [[1, 0, 0], [0, 0, 0], [1, 1, 1]]]
    real = jnp.array([[1, 1, 1], [1, 1, 0]], bool)
    masks = masks_of(attention, ffn)
    steps = step_usage(masks, real)
    assert float(steps.steps) == 3
    assert steps.attention_idle.tolist() == [1 + 1 + 1]  # group 1, group 1, group 0
    assert steps.ffn_idle.tolist() == [1 + 3 + 2]
    sums = usage(masks, real, jnp.full((2, 3), 7), CONFIG)
    found = figures(sums, weight_bytes=2, kv_bytes=2)
    assert found.bytes_batched is None
    found = account(sums, CONFIG, WIDE, weight_bytes=2, kv_bytes=2, steps=steps)
    # Weights 128 and 96 elements a group; KV 8 elements x n 7 a head: 7 heads of 10 are skipped.
    saved = 3 * 128 + 6 * 96 + 8 * 7 * 7
    routable = 3 * (2 * 128 + 3 * 96) + 8 * 7 * 10
    assert found.bytes_batched == pytest.approx(saved / routable)
    assert found.bytes_batched < found.bytes


def test_wrong_groups_are_refused_with_their_numbers():
    masks, real, keys = random_case(0)
    with pytest.raises(ValueError, match=r"1 attention and 1 FFN layers .*num_hidden_layers=2"):
        usage(masks, real, keys, dataclasses.replace(CONFIG, num_hidden_layers=2))
    with pytest.raises(ValueError, match="2 groups do not divide num_attention_heads=3"):
        usage(
            masks,
            real,
            keys,
            dataclasses.replace(CONFIG, num_attention_heads=3, num_key_value_heads=1),
        )
    other = WideConfig(attn_group_size=1, ffn_group_size=4)
    with pytest.raises(ValueError, match=r"\(2, 3\) .*the WideConfig \(4, 3\)"):
        figures(usage(masks, real, keys, CONFIG), wide=other)


def test_line_and_json_name_every_measure():
    masks, real, keys = random_case(1)
    found = figures(usage(masks, real, keys, CONFIG))
    for name in ("attention", "FFN", "paper mean", "parameters", "FLOPs", "decode bytes"):
        assert name in found.line()
    assert f"{found.flops:.1%} ({found.flops_total:.1%} of all)" in found.line()
    assert json.loads(json.dumps(found.to_json())) == found.to_json()
    assert Accounting.dense(CONFIG, 5, 3.0).summary() == dict.fromkeys(found.summary(), 0.0)


def test_ideal_prefill_counts_the_head_once_a_row():
    """Two rows of three tokens, all skipped, then nothing: D 8, d 4, Hq 4, Hk 2, F 12, V 10."""
    keys = jnp.broadcast_to(jnp.arange(1, 4), (2, 3))
    real = jnp.ones((2, 3), bool)
    # Per token: q and o 2 * 2 * 8 * 16, gate, up and down 3 * 2 * 8 * 12, k and v 2 * 2 * 8 * 8;
    # attention 4 * 16 a visible key, 2 rows of 1 + 2 + 3.
    products, kv, keys_flops = 6 * (512 + 576), 6 * 256, 4 * 16 * 12
    norms = fixed_costs(CONFIG, WIDE).flops - 2 * (8 * 8 * 2 + 8 * 10 + 8 * 3 * 2 + 3 * (4 + 6))
    head, routers = 2 * 2 * 8 * 10, 6 * 2 * (8 * 3 * 2 + 3 * (4 + 6))
    dense = products + kv + keys_flops + 6 * norms + head
    off = masks_of([[[0, 0]] * 3] * 2, [[[0] * 3] * 3] * 2)
    found = ideal_prefill_speedup(usage(off, real, keys, CONFIG), CONFIG, WIDE, rows=2)
    assert found == pytest.approx(dense / (kv + 6 * norms + head + routers))
    on = masks_of([[[1, 1]] * 3] * 2, [[[1] * 3] * 3] * 2)
    found = ideal_prefill_speedup(usage(on, real, keys, CONFIG), CONFIG, WIDE, rows=2)
    assert found == pytest.approx(dense / (dense + routers))


def test_ideal_decode_reads_a_weight_once_for_the_batch():
    """A group that one row of two needs is read; a KV head only by the rows that need it."""
    masks = masks_of([[[1, 0]], [[0, 0]]], [[[0, 0, 1]], [[0, 1, 1]]])
    real, keys = jnp.ones((2, 1), bool), jnp.array([[5], [9]])
    sums, steps = usage(masks, real, keys, CONFIG), step_usage(masks, real)
    fixed = fixed_costs(CONFIG, WIDE)
    routable = 2 * 2 * 8 * 8 + 3 * 3 * 8 * 4  # q and o of two groups; gate, up, down of three
    cached = 2 * 4 * 2 * (5 + 9)  # K and V of two heads of 4
    dense = 2 * (routable + fixed.weights) + 2 * cached
    saved = 2 * (2 * 8 * 8 + 3 * 8 * 4) + 2 * (2 * 4) * (5 + 2 * 9)
    found = ideal_decode_speedup(sums, steps, CONFIG, WIDE, weight_bytes=2, kv_bytes=2)
    assert found == pytest.approx(dense / (dense + 4 * fixed.router_weights - saved))
