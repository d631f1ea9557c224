"""Speedup beside quality: the ideal comes from the masks, the measured from the clock."""

import dataclasses
import json

import jax
import jaxtyping
import numpy as np
import pytest

from eval import speed
from eval.scoring import score_windows
from eval.speed import SpeedMeter, SpeedShape, measure_speedup
from eval.windows import Window
from tests.eval.conftest import TINY, tiny_model
from wide_jax.accounting import fixed_costs
from wide_jax.config import WideConfig
from wide_jax.kernels import Kernels
from wide_jax.routing import AllOn, Argmax

SHAPE = SpeedShape(tokens=24, steps=3, repeats=2)
TEXT = np.random.default_rng(0).integers(0, TINY.vocab_size, 40)


@pytest.fixture(autouse=True)
def untyped():
    """Compiling ahead puts descriptions of arrays where arrays are declared."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def routed():
    return tiny_model(WideConfig.for_model(TINY, ffn_group_size=8, router_rank=4))


def test_ideal_of_masks_that_skip_everything_is_what_is_never_saved(routed):
    for layer in routed.model.layers:
        for router in (layer.router_attention, layer.router_ffn):
            bias = router.router.bias[...].reshape(-1, 2).at[:, 1].set(1e4)
            router.router.bias[...] = bias.reshape(-1)
    found = measure_speedup(routed, TEXT, shape=SHAPE)
    fixed = fixed_costs(TINY, routed.wide)
    # Per token and layer 4 D Hq d + 6 D F, and 4 Hq d a visible key: 12.5 on average of 1..24.
    routable = 2 * (4 * 24 * 32 + 6 * 24 * 32 + 4 * 32 * 12.5)
    # A row's last token alone meets the head, and only the pruned side pays for routers.
    head = 2 * 24 * TINY.vocab_size
    groups = routed.wide.attn_groups(TINY) + routed.wide.ffn_groups(TINY)
    routers = 2 * 2 * (2 * 24 * 4 + 4 * 2 * groups)
    left = fixed.flops - head + head / 24
    assert found.prefill.ideal == pytest.approx((left - routers + routable) / left)
    # Bytes of steps that see 25, 26, 27 keys: K and V are 2 Hk d = 32 elements a key.
    elements = 2 * (2 * 24 * 32 + 3 * 24 * 32 + 32 * 26)
    left = 4 * fixed.weights + 4 * fixed.router_weights
    assert found.decode.ideal == pytest.approx((4 * fixed.weights + 4 * elements) / left)
    for phase in (found.prefill, found.decode):
        assert phase.skipped == dict.fromkeys(phase.skipped, 1.0)
    json.dumps(found.to_json())


def test_the_timed_masks_are_those_of_the_evaluated_text(routed):
    """What is skipped of the prompt and of the steps is what scoring the same text skips."""
    found = measure_speedup(routed, TEXT, shape=SHAPE)
    totals = []
    for stop in (24, 27):
        window = Window(TEXT[:stop], TEXT[:stop], np.ones(stop, bool))
        [batch] = score_windows(routed, [window], routing=Argmax(), batch_size=1, limit=32)
        totals.append(batch.ran.usage)
    prompt, whole = totals
    pairs = 2 * routed.wide.ffn_groups(TINY)
    assert 0 < found.prefill.skipped["ffn"] < 1
    assert found.prefill.skipped["ffn"] == pytest.approx(prompt.ffn.sum() / (24 * pairs))
    steps = (whole.ffn.sum() - prompt.ffn.sum()) / (3 * pairs)
    assert found.decode.skipped["ffn"] == pytest.approx(steps)


def test_times_are_medians_of_turns_per_call_and_per_step(routed):
    """A clock that moves by known amounts, one reading before and one after every sample."""
    # Two samples of both contenders to warm up, at 20 ms each: then one call is a sample.
    warm = [0.02] * 4
    prefills = [0.030, 0.010, 0.020, 0.050, 0.040, 0.010]  # dense, wide, wide, dense, dense ...
    decodes = [0.006, 0.003, 0.0045, 0.009, 0.006, 0.006]
    readings = iter(
        [0.0 if half == 0 else spent for spent in [*warm, *prefills, *warm, *decodes]
         for half in (0, 1)]
    )  # fmt: skip
    found = measure_speedup(
        routed, TEXT, shape=SpeedShape(tokens=24, steps=3, repeats=3), clock=lambda: next(readings)
    )
    assert next(readings, None) is None
    assert found.prefill.samples_ms == {
        "dense": pytest.approx([30, 50, 40]),
        "wide": pytest.approx([10, 20, 10]),
    }
    assert (found.prefill.dense, found.prefill.dense_ms) == ("dense", pytest.approx(40))
    assert found.prefill.measured == pytest.approx(4.0)
    assert found.decode.samples_ms["wide"] == pytest.approx([1, 1.5, 2])
    assert found.decode.measured == pytest.approx(2 / 1.5)
    assert "prefill 4.00x" in found.line()
    assert "decode 1.33x" in found.line()


def test_short_calls_are_repeated_until_a_sample_is_long(routed):
    seconds = iter(range(10**6))
    readings = []

    def clock():  # 1 ms between any two readings
        readings.append(1e-3 * next(seconds))
        return readings[-1]

    found = measure_speedup(routed, TEXT, shape=SHAPE, clock=clock)
    assert found.prefill.samples_ms["wide"] == pytest.approx([1 / 20] * 2)  # 20 calls a sample
    assert found.decode.samples_ms["wide"] == pytest.approx([1 / 20 / 3] * 2)


def test_one_compile_serves_every_text_and_each_has_its_own_masks(routed, monkeypatch):
    compiled, compile_all = [], speed.compile_all

    def counting(calls, *, together):
        compiled.append(len(calls))
        return compile_all(calls, together=together)

    monkeypatch.setattr(speed, "compile_all", counting)
    meter = SpeedMeter(routed, shape=SHAPE)
    texts = (TEXT, TEXT[::-1], TEXT[:5])
    found = [meter.measure(text) for text in texts]
    assert compiled == [5]  # two ways to run, in two phases, and what the masks skip
    alone = [measure_speedup(routed, text, shape=SHAPE) for text in texts]
    for phase in ("prefill", "decode"):
        skipped = [getattr(one, phase).skipped for one in found]
        assert skipped == [getattr(one, phase).skipped for one in alone]
    assert found[0].prefill.skipped != found[1].prefill.skipped


def test_dense_is_the_faster_of_the_models_kernels_and_plain_jax(routed):
    """Kernels that are references everywhere run on a CPU: both dense ways are measured."""
    others = ("hints", "attention_decode")  # a step runs `attention_step`, and no other beside it
    ops = [field.name for field in dataclasses.fields(Kernels) if field.name not in others]
    routed.kernels = Kernels(**dict.fromkeys(ops, "reference"))
    found = measure_speedup(routed, TEXT, shape=SHAPE)
    for phase in (found.prefill, found.decode):
        medians = {name: np.median(taken) for name, taken in phase.samples_ms.items()}
        assert set(medians) == {"dense", "dense-plain", "wide"}
        assert phase.dense == min(("dense", "dense-plain"), key=medians.__getitem__)
        assert phase.measured == pytest.approx(medians[phase.dense] / medians["wide"])


def test_dense_is_timed_without_routers(routed, monkeypatch):
    """They would be arguments of its calls, which nobody who runs a dense model has."""
    kept, compiled = [], speed._compile

    def watching(*arguments):
        kept.append(compiled(*arguments))
        return kept[-1]

    monkeypatch.setattr(speed, "_compile", watching)
    measure_speedup(routed, TEXT, shape=SHAPE)
    [programs] = kept
    leaves = [jax.tree_util.tree_leaves_with_path(state) for state in programs.states]
    routers = [any("router" in jax.tree_util.keystr(path) for path, _ in one) for one in leaves]
    assert routers == [False, True]


def test_a_16_bit_models_other_dense_way_has_cudnns_attention(routed, monkeypatch):
    routed.kernels = Kernels()
    monkeypatch.setattr(speed, "element_bytes", lambda model: 2)
    own, xla, wide = speed.contenders(routed, Argmax())
    assert (own.kernels, wide.kernels) == (Kernels(), Kernels())
    assert (xla.kernels.gemm_mn, xla.kernels.attention_prefill) == ("dense", "dense")
    assert (xla.routing, wide.routing) == (AllOn(), Argmax())


def test_without_masks_nothing_is_gained(dense_model):
    shape = SpeedShape(tokens=4096, steps=2, repeats=1)
    found = measure_speedup(dense_model, TEXT, routing=AllOn(), shape=shape)
    assert found.shape.tokens == 126  # what the model can hold
    assert (found.prefill.ideal, found.decode.ideal) == (1.0, 1.0)
    with pytest.raises(ValueError, match="no token ids"):
        measure_speedup(dense_model, [], routing=AllOn())


def test_only_a_routed_model_on_a_gpu_is_worth_timing(monkeypatch):
    assert not speed.worth_timing(Argmax())
    monkeypatch.setattr(speed.jax, "default_backend", lambda: "gpu")
    assert speed.worth_timing(Argmax())
    assert not speed.worth_timing(AllOn())
