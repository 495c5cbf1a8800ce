"""The loop on one rank: what ends it, and what it takes no notice of."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from toolkit.core.errors import DataError, NotFinite, StrategyMismatch
from toolkit.engines.losses import loss_sum
from toolkit.engines.optimizer_step import to_device
from toolkit.engines.records import Prepared
from toolkit.engines.shards import PARAMETER, Shard, whole_box
from toolkit.engines.states import optimizer_shards, set_steps
from toolkit.engines.upstream import masks_known_from
from toolkit.training.global_sums import Gather, HostCopy, StepRequest
from toolkit.training.loop import Step, train
from toolkit.training.metrics import STOP_EVERY, evaluate


def batch(trained: bool = True) -> dict[str, Any]:
    import torch

    tokens = torch.arange(16)[None]
    return {"input_ids": tokens, "labels": tokens if trained else torch.full_like(tokens, -100)}


def steps(run: dict[str, Any], batches: list[dict[str, Any]], accumulation: int = 1, **options: Any) -> list[Step]:
    return list(training(run, batches, accumulation, **options))


def training(
    run: dict[str, Any], batches: list[dict[str, Any]], accumulation: int = 1, **options: Any
) -> Iterator[Step]:
    ours: Prepared = run["ours"]
    train_config = dataclasses.replace(ours.job.train_config, accumulation=accumulation, steps=4)
    changed = dataclasses.replace(ours, job=dataclasses.replace(ours.job, train_config=train_config))
    return train(changed, batches, run["schedule"], **options)


def test_a_wish_that_comes_in_the_middle_of_a_step_ends_with_that_step(run: dict[str, Any]) -> None:
    begun: list[int] = []
    taken = steps(
        run,
        [batch()] * 4,
        on_begin=begun.append,
        request=lambda: StepRequest.STOP if begun[-1] == 2 else StepRequest.SAVE,
    )
    assert [(step.step, step.request) for step in taken] == [(1, StepRequest.SAVE), (2, StepRequest.STOP)]
    assert begun == [1, 2]


def test_a_loader_that_ends_before_the_steps_do_is_named(run: dict[str, Any]) -> None:
    with pytest.raises(
        DataError, match=r"step 2: the loader returned 1 of 2 micro-batches. 4 steps need 8. Give more data"
    ):
        steps(run, [batch()] * 3, accumulation=2)


def test_a_micro_batch_in_which_nothing_is_trained_changes_nothing(run: dict[str, Any]) -> None:
    taken = steps(run, [batch(), batch(trained=False)] * 4, accumulation=2)
    assert all(math.isfinite(step.loss) and math.isfinite(step.grad_norm) for step in taken)
    assert [step.tokens for step in taken] == [15] * 4


def states(run: dict[str, Any]) -> list[Any]:
    """Copies of weights and moments, the optimizer's steps, the schedule's state, and the rate."""
    ours, engine = run["ours"], run["ours"].job.engine
    tensors = [shard.tensor.clone() for shard in engine.shards(ours, create=True)]
    return [tensors, engine.counters(ours), run["schedule"].state_dict(), ours.optimizer.param_groups[0]["lr"]]


@pytest.fixture
def restore(run: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """Brings back the states of the test's beginning."""
    ours, (tensors, counters, schedule, rate) = run["ours"], states(run)

    def restore() -> None:
        for shard, value in zip(ours.job.engine.shards(ours), tensors, strict=True):
            shard.tensor.copy_(value)
        set_steps(ours.optimizer, counters.steps)
        run["schedule"].load_state_dict(schedule)
        ours.optimizer.param_groups[0]["lr"] = rate

    yield restore
    restore()


@pytest.mark.parametrize("read_late", [False, True])
@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_no_step_follows_one_that_is_not_finite(
    run: dict[str, Any], restore: Callable[[], None], how: str, read_late: bool
) -> None:
    """Also where its numbers are read when the next step has been computed."""
    import torch

    calls, generators = 0, []

    def spoil(_: Any, __: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        generators.append(torch.get_rng_state())
        torch.rand(1)  # as dropout draws
        if calls == 3 and how == "gradient":
            output.register_hook(lambda gradient: gradient * math.inf)
        return output * math.nan if calls == 3 and how == "loss" else output

    assert len(list(itertools.islice(training(run, [batch()] * 4), 2))) == 2
    tensors, *expected = states(run)
    restore()
    handle, done = run["ours"].model.lm_head.register_forward_hook(spoil), []
    try:
        with pytest.raises(NotFinite, match=r"step 3: .*Weights are those of step 2"):
            done.extend(step.step for step in training(run, [batch()] * 4, read_late=lambda step: read_late))
    finally:
        handle.remove()
    assert (done, calls) == ([1, 2], 4 if read_late else 3)
    after, *restored = states(run)
    assert all(torch.equal(a, b) for a, b in zip(after, tensors, strict=True))
    assert restored == expected
    assert torch.equal(torch.get_rng_state(), generators[2])


def test_numbers_that_are_read_late_are_the_same(run: dict[str, Any], restore: Callable[[], None]) -> None:
    """From the third step on, when all ranks know how short steps are. A request ends the run with the step that is computed
    when it is seen.
    """
    results = []
    for late in (False, True):
        restore()
        begun: list[int] = []
        done = steps(
            run,
            [batch()] * 4,
            on_begin=begun.append,
            read_late=lambda step, late=late: late,
            request=lambda begun=begun: StepRequest.STOP if begun[-1] == 3 else StepRequest.NOTHING,
        )
        results.append((done, states(run)))
    (soon, (_, before, *_)), (late_steps, (_, counters, *_)) = results
    assert [step.step for step in soon] == [1, 2, 3]
    assert [step.step for step in late_steps] == [1, 2, 3, 4]
    assert [step.request for step in late_steps] == [0, 0, 0, StepRequest.STOP]
    same = ("loss", "grad_norm", "lr", "tokens")
    assert all(getattr(a, name) == getattr(b, name) for a, b in zip(soon, late_steps, strict=False) for name in same)
    assert counters.steps == before.steps + 1


CAUSAL = ({}, {"position_ids": list(range(16))}, {"attention_mask": [1] * 16})
"""Batches that need no mask."""


@pytest.mark.parametrize(
    "words", [*CAUSAL, {"attention_mask": [1] * 8 + [0] * 8}, {"position_ids": [*range(10), *range(6)]}]
)
def test_a_step_waits_for_no_value_on_the_device(run: dict[str, Any], words: dict[str, Any]) -> None:
    """On CUDA each of these operations would hold the host up, but for one on the host's own mask."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            waits.append(str(operator))
            return operator(*args, **(kwargs or {}))

    waits: list[str] = []
    masks: list[Any] = []
    ours, found_inf = run["ours"], torch.zeros(())
    one = batch() | {name: torch.tensor([values]) for name, values in words.items()}
    attention = ours.model.model.layers[0].self_attn
    handle = attention.register_forward_pre_hook(
        lambda _, __, named: masks.append(named["attention_mask"]), with_kwargs=True
    )
    with masks_known_from(one), Watch():
        loss_sum(ours.model, to_device(one, torch.device("cpu")), "causal").backward()
        ours.job.engine.step(ours, found_inf)
    handle.remove()
    assert len([name for name in waits if "_local_scalar_dense" in name or "nonzero" in name]) == (
        "attention_mask" in words
    )
    assert (masks[0] is None) == (words in CAUSAL)
    assert not found_inf


@pytest.mark.gpu
def test_the_numbers_of_a_step_come_while_the_device_computes_the_next() -> None:
    import torch

    gather = Gather({"loss": torch.ones((), device="cuda"), "tokens": 7}, 1, torch.device("cuda"))
    norm = HostCopy(gather.column("loss").sum() / 2)
    torch.cuda._sleep(2**32)  # clock cycles: seconds
    assert (gather.rows, norm.read()) == ([{"loss": 1.0, "tokens": 7.0}], 0.5)
    assert not torch.cuda.current_stream().query()


def test_restored_states_lie_where_fused_kernels_want_them(run: dict[str, Any]) -> None:
    """`step` beside its parameter, which has no values here; for other kernels on the host."""
    import torch

    ours: Prepared = run["ours"]
    for fused, device in ((True, "meta"), (False, "cpu")):
        parameter = torch.nn.Parameter(torch.empty(2, 3, device="meta"))
        optimizer = torch.optim.AdamW([parameter], fused=fused)
        whole = Shard("weight", PARAMETER, (2, 3), whole_box((2, 3)), 0, parameter.detach())
        made = list(optimizer_shards(ours.job, optimizer, parameter, whole, lambda tensor: tensor, create=True))
        assert [shard.kind for shard in made] == ["exp_avg", "exp_avg_sq"]
        step = optimizer.state[parameter]["step"]
        assert (step.device.type, step.dtype, step.shape) == (device, torch.float32, ())


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


def test_a_scheduler_of_another_optimizer_is_refused(run: dict[str, Any]) -> None:
    """It would set the rates of parameters that nothing trains."""
    import torch

    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    schedule = torch.optim.lr_scheduler.ConstantLR(other)
    with pytest.raises(StrategyMismatch, match=r"its scheduler has set \[0\.1"):
        next(train(run["ours"], [batch()] * 4, schedule))
