"""The number of steps: given, from epochs, or one epoch; the warm-up as steps and as a share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import StrategyError, ToolkitError
from toolkit.devices.machine import hardware
from toolkit.training.preflight import run_preflight
from toolkit.training.rank_run import RankRun


@pytest.mark.parametrize(
    ("fields", "rows", "dp_size", "steps"),
    [
        ({"micro_batch": 4}, 40, 1, 10),
        ({"micro_batch": 4}, 41, 1, 11),
        ({"micro_batch": 4, "accumulation": 2}, 40, 5, 1),
        ({"micro_batch": 4, "epochs": 3}, 40, 2, 15),
        ({"micro_batch": 4, "epochs": 0.1}, 30, 1, 1),
        ({"micro_batch": 1, "epochs": 0.1}, 30, 1, 3),
        ({"micro_batch": 4, "steps": 7}, 40, 1, 7),
    ],
)
def test_steps_are_the_epochs_of_the_rows(fields: dict[str, float], rows: int, dp_size: int, steps: int) -> None:
    config = TrainConfig(**fields).with_steps(rows, dp_size)  # type: ignore[arg-type]
    assert (config.steps, config.epochs, config.total_steps) == (steps, None, steps)


def test_the_embedded_text_takes_100_steps() -> None:
    assert TrainConfig().with_steps(10_000, 1, embedded=True).steps == TrainConfig().total_steps == 100
    assert TrainConfig(epochs=2, micro_batch=1).with_steps(30, 1, embedded=True).steps == 60


def test_a_file_takes_one_epoch(tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_text("some words of a text to train on\n" * 400)
    request = Strategy(), TrainConfig(seq_len=32, micro_batch=2), 1, hardware("1x cpu").device
    result = run_preflight(RunConfig(data=str(data)), *request)
    assert result.job.train_config.steps == -(-result.rows.count // 2)
    assert result.notes[-1].startswith("epochs: 1.0")
    # The template that is trained is saved with the model, and a prompt that it refuses is known before.
    (tmp_path / "chat.jinja").write_text("{{ raise_exception('no') if 'bad' in messages[0].content else 'w' }}")
    config = {"data": str(data), "eval_data": str(data), "chat_template": str(tmp_path / "chat.jinja")}
    result = run_preflight(RunConfig(**config, sample="good"), *request)
    assert "raise_exception" in result.tokenizer.chat_template
    assert "sample: printed after the last step alone; --eval-every N prints one every N steps" in result.notes
    with pytest.raises(ToolkitError, match="the chat template refuses the prompt: no"):
        run_preflight(RunConfig(**config, sample="bad"), *request)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"steps": 3, "epochs": 1}, "steps 3 and epochs 1: give one of them"),
        ({"epochs": 0}, "epochs 0: expected float above 0"),
        ({"warmup": 1.5}, "warmup 1.5: expected whole steps, or a share below 1"),
        ({"warmup": -0.1}, "warmup -0.1: expected float of at least 0"),
    ],
)
def test_what_is_refused(fields: dict[str, float], said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        TrainConfig(**fields)  # type: ignore[arg-type]


def test_a_share_below_one_is_a_share_of_the_steps() -> None:
    share, steps = TrainConfig(warmup=0.03, steps=200, lr=1.0), TrainConfig(warmup=6, steps=200, lr=1.0)
    assert share.warmup_steps == 6
    assert [share.rate_factor(done) for done in range(200)] == [steps.rate_factor(done) for done in range(200)]
    assert TrainConfig(warmup=5.0).warmup == TrainConfig().warmup_steps == 5


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"early_stop": 2}, "early_stop 2: expected data to evaluate. Give --eval-data"),
        ({"save_best": True}, "save_best True: expected data to evaluate. Give --eval-data"),
        ({"eval_micro_batch": 2}, "eval_micro_batch 2: expected data to evaluate. Give --eval-data"),
        ({"sample": "w1"}, "sample w1: expected data to evaluate. Give --eval-data"),
        ({"sample": " ", "eval_data": "embedded"}, "sample ' ': expected a prompt"),
        ({"early_stop": 2, "eval_data": "embedded"}, "expected evaluations in the run. Give --eval-every"),
    ],
)
def test_an_evaluation_needs_data(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolkitError, match=said):
        RunConfig(**fields)


@pytest.mark.parametrize(
    ("losses", "patience", "ends"),
    [
        ([], 1, False),
        ([3.0], 1, False),
        ([3.0, 2.0, 2.5], 1, True),
        ([3.0, 2.0, 2.5], 2, False),
        ([3.0, 2.0, 2.5, 2.1], 2, True),
        ([3.0, 2.0, 2.5, 1.9], 1, False),
        ([3.0, 3.0], 1, True),
        ([1.0, 2.0, 3.0], 0, False),
    ],
)
def test_a_run_ends_early_after_evaluations_without_a_lower_loss(
    losses: list[float], patience: int, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.training.rank_run.on_any_rank", bool)
    (tmp_path / "events.jsonl").write_text("".join(f'{{"step": 1, "eval_loss": {loss}}}\n' for loss in losses))
    run = RankRun.__new__(RankRun)
    config = {"early_stop": patience, "eval_every": 1, "eval_data": "embedded"} if patience else {}
    run.config = RunConfig(**config)
    run.preflight = SimpleNamespace(eval_rows=True)  # type: ignore[assignment]
    run.accelerator = SimpleNamespace(is_main_process=True, print=lambda text: None)  # type: ignore[assignment]
    run.folder = SimpleNamespace(events=tmp_path / "events.jsonl")  # type: ignore[assignment]
    assert run.ends_early() is ends
