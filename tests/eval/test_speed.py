"""Speedup beside quality: the ideal comes from the masks, the measured from the clock."""

import json

import pytest

from eval.speed import SpeedShape, measure_speedup
from tests.eval.conftest import TINY, tiny_model
from wide_jax.accounting import fixed_costs
from wide_jax.config import WideConfig
from wide_jax.routing import AllOn, Argmax

SHAPE = SpeedShape(batch=2, tokens=24, steps=3, repeats=2)


def test_ideal_of_masks_that_skip_everything_is_what_is_never_saved():
    wide = WideConfig.for_model(TINY, ffn_group_size=8, router_rank=4)
    model = tiny_model(wide)
    for layer in model.model.layers:
        for router in (layer.router_attention, layer.router_ffn):
            bias = router.router.bias[...].reshape(-1, 2).at[:, 1].set(1e4)
            router.router.bias[...] = bias.reshape(-1)
    found = measure_speedup(model, routing=Argmax(), shape=SHAPE)
    fixed = fixed_costs(TINY, wide)
    # Per token and layer 4 D Hq d + 6 D F, and 4 Hq d a visible key: 12.5 on average of 1..24.
    routable = 2 * (4 * 24 * 32 + 6 * 24 * 32 + 4 * 32 * 12.5)
    # A row's last token alone meets the head, and only the pruned side pays for routers.
    head = 2 * 24 * TINY.vocab_size
    groups = wide.attn_groups(TINY) + wide.ffn_groups(TINY)
    routers = 2 * 2 * (2 * 24 * 4 + 4 * 2 * groups)
    left = fixed.flops - head + head / 24
    assert found["prefill"]["ideal"] == pytest.approx((left - routers + routable) / left)
    # Bytes of steps that see 25, 26, 27 keys: K and V are 2 Hk d = 32 elements a key.
    elements = 2 * (2 * 24 * 32 + 3 * 24 * 32 + 32 * 26)
    ideal = (fixed.bytes(4) + 4 * elements) / fixed.bytes(4)
    assert found["decode"]["ideal"] == pytest.approx(ideal)
    for phase in ("prefill", "decode"):
        part = found[phase]
        assert part["measured"] == part["dense_ms"] / part["wide_ms"]
        assert [len(part["samples_ms"][name]) for name in ("dense", "wide")] == [2, 2]
    assert found["shape"]["tokens"] == 24
    json.dumps(found)


def test_without_masks_nothing_is_gained(dense_model):
    found = measure_speedup(
        dense_model, routing=AllOn(), shape=SpeedShape(tokens=4096, steps=2, repeats=1)
    )
    assert found["shape"]["tokens"] == 126  # what the model can hold
    assert (found["prefill"]["ideal"], found["decode"]["ideal"]) == (1.0, 1.0)
