"""What several unit tests share."""

from collections.abc import Iterator
from typing import Any

import pytest
from ranks import reset


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A tiny Llama on one rank, two steps trained, with a CheckpointWriter."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from toolkit.checkpoints import identify
    from toolkit.config.strategy import Strategy
    from toolkit.config.train_config import TrainConfig
    from toolkit.models import describe
    from toolkit.training.loop import make_optimizer, make_schedule
    from toolkit.training.preparation import prepare, prepared
    from toolkit.training.setup import accelerator as make

    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    module = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **shape))
    module.save_pretrained(folder / "model")
    train_config = TrainConfig(steps=8, lr=1e-2)
    accelerator = make(Strategy(), train_config, describe(str(folder / "model")))
    optimizer = make_optimizer(module, train_config)
    model, optimizer, schedule = prepare(accelerator, module, optimizer, make_schedule(optimizer, train_config))
    ours = prepared(accelerator, (model, optimizer))
    identity = identify(ours.job.spec, ours.job.strategy, "data")
    yield {"ours": ours, "schedule": schedule, "identity": identity, "accelerator": accelerator}
    reset()


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps the last Accelerator's state."""
    yield
    reset()
