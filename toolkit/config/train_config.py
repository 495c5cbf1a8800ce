"""`TrainConfig`: the optimizer step, and the number of steps."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Collection
from dataclasses import dataclass

from toolkit.config.fields import amount, choice, fields_table, validate
from toolkit.config.strategy import LATER, OPTIMIZER_WORDS
from toolkit.config.unknown_names import by_name
from toolkit.core.display import Result, Table
from toolkit.core.errors import StrategyError
from toolkit.core.units import ceil_div

DEFAULT_STEPS = 100
"""Steps over the embedded text, and of a loop of your own without `steps`."""

SCHEDULERS = ("cosine", "linear", "constant")


@by_name
@dataclass(frozen=True, kw_only=True)
class TrainConfig(Result):
    """The optimizer step, and the number of steps.

    Raises:
        StrategyError: for a value out of its range.
    """

    micro_batch: int = amount(4, "sequences of a rank in one forward", "per_device_train_batch_size", least=1)
    accumulation: int = amount(1, "micro-batches before one optimizer step", "gradient_accumulation_steps", least=1)
    seq_len: int = amount(256, "tokens of a sequence; each token predicts the next", least=2)
    max_grad_norm: float = amount(1.0, "the global gradient norm is clipped to this; 0 clips nothing", least=0)
    optimizer: str = choice("adamw", OPTIMIZER_WORDS, "the optimizer", LATER["optimizer"])
    lr: float | None = amount(
        None,
        "peak learning rate; open: 1e-3 embedded, 2e-4 for an adapter, 2e-5 for all weights",
        "learning_rate",
        above=0,
    )
    weight_decay: float = amount(0.01, "share of a weight removed in each step, times the rate", least=0)
    beta1: float = amount(0.9, "decay of the first moment", least=0, below=1)
    beta2: float = amount(0.999, "decay of the second moment", least=0, below=1)
    eps: float = amount(1e-8, "added to the root of the second moment", above=0)
    scheduler: str = choice("cosine", SCHEDULERS, "decay of the rate after the warm-up, over the remaining steps")
    warmup: float = amount(
        5, "steps of the rate's rise to its peak; below 1 a share of the steps, such as 0.03", least=0
    )
    warmup_type: str = choice(
        "linear", ("linear", "log"), "shape of the rise; log: the default of DeepSpeed's schedulers"
    )
    min_lr: float = amount(0.0, "rate at the start of the warm-up and at the end of the schedule", least=0)
    loss_scale: float = amount(65536.0, "fp16: the first scale of the loss, a power of 2; it adapts", least=1)
    loss_scale_window: int = amount(2000, "fp16: steps without an overflow before the scale doubles", least=1)
    steps: int | None = amount(
        None,
        "optimizer steps; open: --epochs, else one epoch of your data, 100 steps of the embedded text",
        "max_steps",
        least=1,
    )
    epochs: float | None = amount(
        None, "passes over the data, in place of --steps; the last step is a full one", above=0
    )
    seed: int = amount(0, "seed of the data's order, dropout, and an adapter's first weights", least=0)

    def __post_init__(self) -> None:
        validate(self)
        if self.lr is not None and self.min_lr > self.lr:
            raise StrategyError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}. Choose a lower min_lr.")
        if not math.log2(self.loss_scale).is_integer():
            raise StrategyError(f"loss_scale {self.loss_scale:g}: expected a power of 2, such as 65536.")
        if self.steps and self.epochs:
            raise StrategyError(f"steps {self.steps} and epochs {self.epochs:g}: give one of them.")
        if self.warmup >= 1:
            if not float(self.warmup).is_integer():
                raise StrategyError(f"warmup {self.warmup:g}: expected whole steps, or a share below 1.")
            object.__setattr__(self, "warmup", int(self.warmup))

    @property
    def total_steps(self) -> int:
        """The optimizer steps; `DEFAULT_STEPS` where neither steps nor data are known."""
        return self.steps or DEFAULT_STEPS

    @property
    def warmup_steps(self) -> int:
        """The steps of the warm-up."""
        return int(self.warmup) if self.warmup >= 1 else math.ceil(self.warmup * self.total_steps)

    def with_steps(self, rows: int, dp_size: int, *, embedded: bool = False) -> TrainConfig:
        """Return the same with the steps that the epochs of these rows are; one epoch by default.

        Args:
            rows: of the data.
            dp_size: the data-parallel ranks.
            embedded: use `DEFAULT_STEPS` if no epochs are given.
        """
        if self.steps or (embedded and not self.epochs):
            return dataclasses.replace(self, steps=self.total_steps)
        batches = (self.epochs or 1) * rows / (self.micro_batch * self.accumulation * dp_size)
        return dataclasses.replace(self, steps=max(1, math.ceil(batches - 1e-9)), epochs=None)

    def rate_factor(self, done: int) -> float:
        """Return the learning rate after `done` steps as a share of `lr`, which is resolved."""
        assert self.lr is not None, "a resolved TrainConfig has a learning rate"
        if done < self.warmup_steps:
            risen = done + 1
            height = (
                risen / self.warmup_steps
                if self.warmup_type == "linear"
                else math.log(risen) / math.log(max(2, self.warmup_steps))
            )
        else:
            left = max(0.0, 1 - (done - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
            height = {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 - math.cos(math.pi * left))}[self.scheduler]
        least = self.min_lr / self.lr
        return least + (1 - least) * height

    def tables(self) -> list[Table]:
        return [fields_table("TrainConfig", self)]


PIPELINE_ROWS = ("micro_batch", "accumulation")
"""The fields of which a pipeline has defaults of its own."""


def pipeline_rows(pp: int, given: Collection[str] = (), *, say: bool = False) -> dict[str, int]:
    """Return `PIPELINE_ROWS` of a pipeline's step for which neither of them is given; else nothing.

    These are the default rows of a step, one by one, at least one for each stage: all stages have work.
    """
    if pp == 1 or not set(PIPELINE_ROWS).isdisjoint(given):
        return {}
    rows = ceil_div(max(TrainConfig().micro_batch, pp), pp) * pp
    if say:
        print(f"pp {pp}: --micro-batch 1 --accumulation {rows}, so that all stages have work", file=sys.stderr)
    return {"micro_batch": 1, "accumulation": rows}
