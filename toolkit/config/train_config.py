"""`TrainConfig`: the optimizer step, and the number of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.config.flags import amount, check_choices, check_count, choice, fields_table
from toolkit.config.strategy import LATER, OPTIMIZER_WORDS
from toolkit.core.display import Result, Table
from toolkit.core.errors import StrategyError


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Result):
    """The optimizer step, and the number of steps.

    Raises:
        StrategyError: for a value out of its range.
    """

    micro_batch: int = amount(4, "sequences of a rank in one forward", "per_device_train_batch_size")
    accumulation: int = amount(1, "micro-batches before one optimizer step", "gradient_accumulation_steps")
    seq_len: int = amount(256, "tokens of a sequence")
    max_grad_norm: float = amount(1.0, "the global gradient norm is clipped to this; 0 clips nothing")
    optimizer: str = choice("adamw", OPTIMIZER_WORDS, "the optimizer, with torch's defaults", LATER["optimizer"])
    lr: float | None = amount(
        None, "peak learning rate; open: 1e-3 embedded, 2e-4 for an adapter, 2e-5 for all weights", "learning_rate"
    )
    warmup: int = amount(5, "steps in which the rate rises linearly; then it falls as a cosine, towards 0")
    steps: int = amount(100, "optimizer steps", "max_steps")
    seed: int = amount(0, "of the data's order, dropout, and an adapter's first weights")

    def __post_init__(self) -> None:
        for name in ("micro_batch", "accumulation", "seq_len", "steps"):
            check_count(name, getattr(self, name))
        for name in ("warmup", "seed"):
            check_count(name, getattr(self, name), least=0)
        if self.seq_len < 2:
            raise StrategyError(f"seq_len {self.seq_len}: expected at least 2, since each token predicts the next.")
        if not (math.isfinite(self.max_grad_norm) and self.max_grad_norm >= 0):
            raise StrategyError(f"max_grad_norm {self.max_grad_norm}: expected a number of at least 0.")
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise StrategyError(f"lr {self.lr}: expected a number above 0.")
        check_choices(self)

    def tables(self) -> list[Table]:
        return [fields_table("TrainConfig", self)]
