"""What several unit tests share."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
from ranks import build, reset


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A tiny Llama on one rank."""
    from toolkit.checkpoints import identify
    from toolkit.config.train_config import TrainConfig

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    folder = tiny.llama(tmp_path_factory.mktemp("checkpoints") / "model", vocab_size=64, **shape)
    tiny.save_tokenizer(folder, words=50)
    ours, schedule, _ = build(folder, TrainConfig(steps=8, lr=1e-2), activation_checkpointing="none")
    identity = identify(ours.job.spec, ours.job.strategy, "data")
    yield {"ours": ours, "schedule": schedule, "identity": identity, "accelerator": ours.accelerator}
    reset()


@pytest.fixture(scope="session")
def peft() -> None:
    """Adapters are traced in this process then, and not in a child process each."""
    importlib.import_module("peft")


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps the last Accelerator's state."""
    yield
    reset()
