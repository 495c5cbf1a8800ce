"""`RunConfig`: the model, the data, and what a run saves and watches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.config.fields import amount, choice, validate
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.config.unknown_names import by_name
from toolkit.core.errors import ToolkitError

EMBEDDED = "embedded"
"""The name of the model and of the data that are used where none are named."""

DATA_ENDINGS = (".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".jsonl.gz", ".jsonl.zst", ".csv.gz", ".txt.gz")
"""Of files that are data, and no model."""

TRAIN_ON = ("all-turns", "last-turn")
TOO_LONG = ("cut", "drop", "split", "refuse")


def check_model_name(name: str) -> None:
    """Refuse the name of a data file as a model's."""
    if name.lower().endswith(DATA_ENDINGS):
        raise ToolkitError(
            f"model {name!r} is a data file: expected a Hub id or a folder. `toolkit train --data {name}` and `toolkit preview "
            f"MODEL {name}` read it."
        )


@by_name
@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Model and data of a training, and what the run saves and watches."""

    model: str = amount(EMBEDDED, "Hub id, folder, or the embedded 5M-parameter Llama")
    """A Hub id or a folder with weights."""
    trust_remote_code: str | None = amount(
        None, "run the model's own code, of this full commit (of a folder: this sha256)"
    )
    """As `describe` takes it. A run's folder alone does not allow it: a resume needs the flag again."""
    data: str = amount(EMBEDDED, "text, JSONL, CSV, parquet, folder or dataset; with NAME:0.3 30%% of it", joined=True)
    """As `data.ingest` takes it: several by commas, each with a weight after a colon if it is not 1."""
    eval_data: str | None = amount(None, "held-out data to evaluate the loss on", joined=True)
    """Evaluated every `eval_every` steps, and at the end."""
    eval_every: int = amount(0, "steps between evaluations; 0: at the end alone", least=0)
    """In optimizer steps."""
    eval_micro_batch: int | None = amount(
        None, "rows of a rank in one forward of an evaluation; open: --micro-batch", least=1
    )
    """The forecast is of training steps: a larger one may need more memory."""
    save_best: bool = amount(False, "save the model of the lowest evaluation loss, too, in the run's best/")
    """Beside the last one in `export/`."""
    early_stop: int = amount(0, "end after so many evaluations in a row without a lower loss; 0: never", least=0)
    """The run ends as after its last step."""
    sample: str | None = amount(None, "a prompt to answer at each evaluation")
    """Answered greedily by all ranks together, in at most 64 tokens; rank 0 prints."""
    mask_prompts: bool = amount(True, "train on completions and assistant turns alone")
    """Plain text has no prompts."""
    train_on: str = choice("all-turns", TRAIN_ON, "turns of the assistant to train on")
    """Of a conversation; a message with `weight` 0 is not trained."""
    add_end_token: bool = amount(False, "train an end token after answers without one")
    """For a chat template without an end token, or with one outside `{% generation %}`."""
    too_long: str = choice("cut", TOO_LONG, "prompts and chats over seq_len; a text is continued")
    """`cut` loses the end, `split` continues in further rows. A text goes on in the next row under both."""
    chat_template: str | None = amount(None, "a Jinja file, in place of the tokenizer's own")
    """A file with a template."""
    text_column: str = amount("text", "column with the text, in JSONL and dataset rows")
    """Of JSONL and dataset rows."""
    columns: str | None = amount(None, "meaning of columns, such as prompt=question,completion=answer")
    """`NAME=COLUMN`, several by commas."""
    data_format: str = amount("auto", "of rows, such as alpaca, sharegpt or messages; auto: by their columns")
    """A name in `data.formats.FORMATS`."""
    packing: bool = amount(True, "several documents a row, if the model separates them")
    """Otherwise one document a row, padded."""
    tracker: str | None = amount(None, "tensorboard, trackio, wandb, …; several by commas")
    """Accelerate's trackers by name."""
    memory_window: bool = amount(True, "measure peaks on a CPU through the third step")
    """On CUDA measuring costs nothing and is always on."""
    allow_unquantized: bool = amount(False, "QLoRA with most weights unquantized")
    """Where large embeddings stay in the compute dtype, and under `qlora8` fused experts."""
    guard: bool = amount(True, "with tp, cp, ep or pp, compare a small copy with one process first")
    """Of a cut over ranks: two steps of a few narrow layers, on CPU ranks, before the run starts."""
    save: bool = amount(True, "save and check the trained model at the end")
    """Into the run's folder, `export/`."""
    save_every: int = amount(0, "steps between checkpoints; 0: by time alone", least=0)
    """In optimizer steps."""
    save_seconds: float = amount(1800.0, "seconds between checkpoints; 0: by steps alone", least=0)
    """Together with `save_every`: the earlier one counts. If both are 0 there are no checkpoints."""
    keep: int = amount(2, "complete checkpoints to keep", least=1)
    """The newest ones."""
    workers: int = amount(0, "loader processes of a rank; 0: none", least=0)
    """Order and values do not depend on it."""
    timeout: float = amount(600.0, "seconds without a heartbeat after which a rank has hung", least=1)
    """Also the time limit of every collective."""

    def __post_init__(self) -> None:
        validate(self)
        check_model_name(self.model)
        for name, sources in {"data": self.data, "eval_data": self.eval_data or ""}.items():
            if program := next((each for each in re.split(":|,", sources) if each.endswith(".py")), ""):
                raise ToolkitError(
                    f"{name} {program!r} is a program. `toolkit launch {program}` runs your own script. To train on its text, "
                    "copy it to a file that ends in .txt."
                )
        for name in ("eval_every", "eval_micro_batch", "save_best", "early_stop", "sample"):
            if getattr(self, name) and not self.eval_data:
                raise ToolkitError(
                    f"{name} {getattr(self, name)}: expected data to evaluate. Give --eval-data, or leave it out."
                )
        if self.sample is not None and not self.sample.strip():
            raise ToolkitError(f"sample {self.sample!r}: expected a prompt. Give it in quotes, or leave it out.")
        if self.early_stop and not self.eval_every:
            raise ToolkitError(f"early_stop {self.early_stop}: expected evaluations in the run. Give --eval-every too.")

    @property
    def checkpoints(self) -> bool:
        """Whether the run writes any, which it also does at its end and at a stop."""
        return bool(self.save_every or self.save_seconds)

    def count_checkpoints(self, steps: int, start: int = 0) -> int:
        """Return the number of checkpoints that the steps after `start` and up to `steps` write, but for those by time."""
        if not self.checkpoints:
            return 0
        return 1 + max(0, (steps - 1) // self.save_every - start // self.save_every) if self.save_every else 1


SECTIONS: Mapping[str, type[Any]] = {"run_config": RunConfig, "strategy": Strategy, "train_config": TrainConfig}
"""Key in `run.json` → the dataclass of its fields."""
