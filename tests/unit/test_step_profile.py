"""`profile_steps`: what a few steps in this process take, against their forecast; and what it leaves behind, which is nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from accelerate.state import AcceleratorState

from toolkit import Strategy, StrategyError, TrainConfig, profile_steps
from toolkit.core.phases import phase
from toolkit.core.units import MiB
from toolkit.measurement import peak_memory
from toolkit.training.step_profile import StepProfile, StepProfiles

LOOP = TrainConfig(steps=4, seq_len=64, micro_batch=2)
PARAMETERS = 5_048_576  # of the embedded model


@pytest.fixture(scope="module")
def trials() -> dict[str, StepProfile]:
    return {word: profile_steps(Strategy(precision=word), LOOP) for word in ("fp32", "bf16_pure")}


def test_a_trial_measures_what_was_forecast(trials: dict[str, StepProfile]) -> None:
    for trial, each in ((trials["fp32"], 4), (trials["bf16_pure"], 2)):
        assert [step.step for step in trial.steps] == [1, 2, 3, 4]
        assert trial.parts["parameters"] == each * PARAMETERS
        assert trial.parts["optimizer"] == 2 * each * PARAMETERS
        assert sum(trial.parts.values()) == trial.peak_bytes
        assert trial.peak_bytes == max(trial.phases.values())
        assert trial.ratio == pytest.approx(1, abs=0.05)
        assert "save" not in trial.phases
    assert any("KV cache off" in note for note in trials["fp32"].notes)
    assert trials["fp32"].losses[0] == pytest.approx(8.4, abs=0.2)


def test_time_is_that_of_the_steps_behind_the_window(trials: dict[str, StepProfile]) -> None:
    trial = trials["fp32"]
    assert trial.seconds == trial.steps[3].seconds
    within = dataclasses.replace(trial, steps=trial.steps[:3])
    assert within.seconds == sorted(step.seconds for step in within.steps)[1]


def test_trials_stand_beside_each_other(trials: dict[str, StepProfile]) -> None:
    both = StepProfiles(title="two", trials=trials)
    first = trials["fp32"]
    if first.forecast.timing is None:
        assert [both.forecast_seconds(name) for name in trials] == [None, None]
    (table,) = both.tables()
    assert [row[0] for row in table.rows] == ["fp32", "bf16_pure"]
    assert both._repr_html_().count("<img ") == 1
    assert "x 1.0" not in str(first)
    assert "measured" in str(both)


def test_accelerates_state_is_as_it_was(trials: dict[str, StepProfile]) -> None:
    assert trials
    before = dict(AcceleratorState._shared_state)
    AcceleratorState._shared_state["_mark"] = 1
    try:
        profile_steps(Strategy(), dataclasses.replace(LOOP, steps=1))
        assert AcceleratorState._shared_state == {**before, "_mark": 1}
    finally:
        AcceleratorState._shared_state.pop("_mark")


def test_a_sharding_that_needs_processes_is_refused() -> None:
    with pytest.raises(StrategyError, match="sharding 'zero3' needs several processes"):
        profile_steps(Strategy(sharding="zero3"))


def test_the_highest_of_a_piece_of_work() -> None:
    held = torch.ones(MiB, dtype=torch.uint8)

    def work() -> torch.Tensor:
        brief = torch.ones(6 * MiB, dtype=torch.uint8)
        del brief
        with phase("step"):
            brief = torch.ones(9 * MiB, dtype=torch.uint8)
            del brief
        return torch.ones(2 * MiB, dtype=torch.uint8)

    assert peak_memory(work, "cpu") == 9 * MiB
    assert held.numel() == MiB
