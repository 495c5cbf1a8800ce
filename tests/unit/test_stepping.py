"""The loop on one rank: what ends it, and what it takes no notice of."""

import dataclasses
import math
from typing import Any

import pytest

from toolkit.core.errors import DataError
from toolkit.engines.records import Prepared
from toolkit.training.evaluation import STOP_EVERY, evaluate
from toolkit.training.loop import Step, StepRequest, train


def batch(trained: bool = True) -> dict[str, Any]:
    import torch

    tokens = torch.arange(16)[None]
    return {"input_ids": tokens, "labels": tokens if trained else torch.full_like(tokens, -100)}


def steps(run: dict[str, Any], batches: list[dict[str, Any]], accumulation: int = 1, **options: Any) -> list[Step]:
    ours: Prepared = run["ours"]
    train_config = dataclasses.replace(ours.job.train_config, accumulation=accumulation, steps=4)
    asked = dataclasses.replace(ours, job=dataclasses.replace(ours.job, train_config=train_config))
    return list(train(asked, batches, run["schedule"], **options))


def test_a_wish_that_comes_in_the_middle_of_a_step_ends_with_that_step(run: dict[str, Any]) -> None:
    begun: list[int] = []
    found = steps(
        run,
        [batch()] * 4,
        on_begin=begun.append,
        request=lambda: StepRequest.STOP if begun[-1] == 2 else StepRequest.SAVE,
    )
    assert [(step.step, step.request) for step in found] == [(1, StepRequest.SAVE), (2, StepRequest.STOP)]
    assert begun == [1, 2]


def test_a_loader_that_ends_before_the_steps_do_is_named(run: dict[str, Any]) -> None:
    with pytest.raises(
        DataError, match=r"step 2: the loader returned 1 of 2 micro-batches. 4 steps need 8. Give more data"
    ):
        steps(run, [batch()] * 3, accumulation=2)


def test_a_micro_batch_in_which_nothing_is_trained_changes_nothing(run: dict[str, Any]) -> None:
    found = steps(run, [batch(), batch(trained=False)] * 4, accumulation=2)
    assert all(math.isfinite(step.loss) and math.isfinite(step.grad_norm) for step in found)
    assert [step.tokens for step in found] == [15] * 4


def test_an_evaluation_ends_at_its_next_look_at_the_stop_signal(run: dict[str, Any]) -> None:
    signals = iter([False, True])
    batches = iter([batch()] * (STOP_EVERY + 3))
    assert evaluate(run["ours"], batches, lambda: next(signals)) is None
    assert len(list(batches)) == 2
    assert run["ours"].model.training
    whole = evaluate(run["ours"], [batch()] * 2)
    assert whole is not None
    assert whole > 0


def test_a_step_in_which_nothing_is_trained_is_refused(run: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"step 1: none of its labels is trained\. Samples: here"):
        steps(run, [batch(trained=False)] * 4, samples=lambda step: "here")
