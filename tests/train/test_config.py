"""Settings that cannot work are refused with their numbers."""

import dataclasses

import pytest

from train.config import TrainConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparsity": 1.5}, "sparsity=1.5 must be between 0 and 1"),
        ({"sparsity": float("nan")}, "sparsity=nan must be between 0 and 1"),
        ({"updates": 0}, "updates=0 must be at least 1"),
        ({"sequence_length": 1}, "sequence_length=1 must be at least 2"),
        ({"tau_end": 0.0}, "tau_end=0.0 must be positive"),
        ({"alpha": float("inf")}, "alpha=inf must be finite"),
        ({"warmup_fraction": -0.1}, "warmup_fraction=-0.1"),
        (
            {"sequences_per_update": 10, "accumulation": 4},
            "sequences_per_update=10 must be a multiple of accumulation=4",
        ),
        (
            {"sequences_per_update": 8, "accumulation": 4, "fsdp": 4},
            "a micro-batch of 2 sequences .* must be a multiple of data_parallel \\* fsdp = 4",
        ),
        ({"budget": "paper", "ffn_sparsity": 0.3}, "ffn_sparsity=0.3 needs budget='separate'"),
    ],
)
def test_wrong_settings_are_refused_with_their_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**changes)


def test_every_problem_is_reported_at_once():
    with pytest.raises(ValueError, match=r"sparsity=2.0.*updates=0"):
        TrainConfig(sparsity=2.0, updates=0)


def test_defaults_are_the_papers_stage_1():
    config = TrainConfig()
    assert config.tokens_per_update * config.updates == 655_360_000
    assert (config.learning_rate, config.alpha, config.clip_norm) == (2e-3, 20.0, 1.0)
    assert config.warmup_updates == 1_000
    assert dataclasses.is_dataclass(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.updates = 1
