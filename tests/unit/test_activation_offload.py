"""`--activation-offload`: layers' inputs leave the device in a forecast for a GPU; losses are compared in `test_matrix.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch.utils.checkpoint import checkpoint

from toolkit import Strategy, TrainConfig, describe, forecast
from toolkit.core.errors import StrategyError
from toolkit.devices.machine import hardware
from toolkit.engines.resolution import resolve
from toolkit.transforms.activation_offload import Host

CPU = hardware("cpu").device
LAYERS, TOKENS, HIDDEN = 12, 4 * 128, 64


@pytest.mark.parametrize(("policy", "kept"), [("full", LAYERS), ("every:2", LAYERS / 2)])
def test_layers_inputs_are_in_the_hosts_memory_of_a_gpu_machine(policy: str, kept: float, tmp_path: Path) -> None:
    spec = describe(str(tiny.llama(tmp_path / "llama", num_hidden_layers=LAYERS)))
    there, here = (
        forecast(
            spec,
            Strategy(activation_checkpointing=policy, activation_offload=offload, precision="fp32", loss="chunked"),
            "1x A100-40GB",
            TrainConfig(seq_len=128, micro_batch=4),
        )
        for offload in (True, False)
    )
    size = kept * TOKENS * HIDDEN * 4
    assert 0.8 * size <= here.phases["forward"] - there.phases["forward"] <= size
    assert there.host_bytes - here.host_bytes == size
    assert there.job.communication()[-2:] == [
        (size, 1, "forward", "host", "layers' inputs, to the host"),
        (size, 1, "backward", "host", "layers' inputs, from the host"),
    ]


@pytest.mark.parametrize("policy", ["none", "attention", "selective"])
def test_policies_that_keep_more_are_refused(policy: str) -> None:
    with pytest.raises(StrategyError, match=r"keeps more\. Choose --activation-checkpointing full") as raised:
        resolve(Strategy(activation_checkpointing=policy, activation_offload=True), TrainConfig(), None, 1, CPU)
    assert policy in str(raised.value)


def test_compiled_blocks_are_refused() -> None:
    strategy = Strategy(activation_checkpointing="full", activation_offload=True, compile=True)
    with pytest.raises(StrategyError, match="activation_offload does not run with compile"):
        resolve(strategy, TrainConfig(), None, 1, CPU)


def test_an_input_is_given_back_once_and_masks_stay() -> None:
    host, sent = Host("cpu"), list[Any]()
    mask = torch.ones(2, 1, 5, 5)

    def layer(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        sent.append(mask.data_ptr())
        return (hidden * mask.sum()).exp()

    def run(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, hidden, mask, use_reentrant=False)  # type: ignore[no-any-return]

    hidden = torch.zeros(2, 5, 8, requires_grad=True)
    loss = host.call(lambda _, *inputs: run(*inputs), layer, hidden * 1, mask).sum()
    loss.backward(retain_graph=True)
    assert hidden.grad is not None
    assert (hidden.grad == 50).all()
    assert len(set(sent)) == 1
    with pytest.raises(StrategyError, match="one backward for each forward"):
        loss.backward()


def test_layers_without_an_input_by_position_are_refused() -> None:
    with pytest.raises(StrategyError, match="no hidden states by position"):
        Host("cpu").call(checkpoint, lambda: None)
