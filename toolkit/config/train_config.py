"""`TrainConfig`: the optimizer step, and the number of steps."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.flags import amount, choice, fields_table, validate
from toolkit.config.strategy import LATER, OPTIMIZER_WORDS
from toolkit.core.display import Result, Table


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
    optimizer: str = choice("adamw", OPTIMIZER_WORDS, "the optimizer, with torch's defaults", LATER["optimizer"])
    lr: float | None = amount(
        None,
        "peak learning rate; open: 1e-3 embedded, 2e-4 for an adapter, 2e-5 for all weights",
        "learning_rate",
        above=0,
    )
    warmup: int = amount(5, "steps in which the rate rises linearly; then it falls as a cosine, towards 0", least=0)
    steps: int = amount(100, "optimizer steps", "max_steps", least=1)
    seed: int = amount(0, "of the data's order, dropout, and an adapter's first weights", least=0)

    def __post_init__(self) -> None:
        validate(self)

    def tables(self) -> list[Table]:
        return [fields_table("TrainConfig", self)]
