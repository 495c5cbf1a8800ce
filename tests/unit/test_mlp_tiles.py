"""`--mlp-tiles`: the same numbers from pieces of a row, whatever the MLP; the backward's peak is a piece's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from toolkit import Strategy, TrainConfig, describe, forecast
from toolkit.core.errors import StrategyError
from toolkit.devices.machine import hardware
from toolkit.engines.resolution import resolve
from toolkit.models.hf_loading import auto_class
from toolkit.transforms.mlp_tiles import MlpTiles

CPU = hardware("cpu").device


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "phi3", "deepseek", "llama4", "t5", "qwen3_vl"])
@pytest.mark.parametrize("tiles", [2, 5])
def test_losses_and_gradients_are_those_of_whole_rows(name: str, tiles: int, tmp_path: Path) -> None:
    spec = describe(str(getattr(tiny, name)(tmp_path / name)))
    job = resolve(Strategy(mlp_tiles=tiles), TrainConfig(seq_len=16), spec, 1, CPU)
    gave: list[Any] = []
    for transform in (None, MlpTiles()):
        model: Any = auto_class(spec).from_pretrained(spec.source, dtype=torch.float32).eval()
        model = transform.apply(model, job) if transform else model
        ids = torch.randint(3, 250, (2, 16), generator=torch.Generator().manual_seed(0))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients = {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
        with torch.no_grad():
            silent = model(input_ids=ids, labels=ids, use_cache=False).loss
        gave.append((loss.item(), silent.item(), gradients))
    (whole, _, expected), (loss, silent, gradients) = gave
    assert loss == pytest.approx(whole, rel=1e-6)
    assert silent == pytest.approx(whole, rel=1e-6)
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        assert (gradient - expected[key]).abs().max() <= 1e-5 * expected[key].abs().max() + 1e-9, key


@pytest.mark.parametrize("name", ["bloom", "mixtral", "bart"])
def test_a_model_without_such_an_mlp_is_refused(name: str, tmp_path: Path) -> None:
    spec = describe(str(getattr(tiny, name)(tmp_path / name)))
    with pytest.raises(StrategyError, match="have no MLP that takes the hidden states alone"):
        forecast(spec, Strategy(mlp_tiles=2), "1x cpu", TrainConfig(seq_len=16))


def test_auto_is_a_piece_for_each_hidden_size_of_a_ranks_tokens(tmp_path: Path) -> None:
    spec = describe(str(tiny.llama(tmp_path / "llama")))

    def tiles(seq_len: int, **strategy: Any) -> str:
        wanted = Strategy(mlp_tiles="auto", **strategy)
        return resolve(wanted, TrainConfig(seq_len=seq_len), spec, wanted.least_ranks, CPU).strategy.mlp_tiles

    assert [tiles(64), tiles(65), tiles(256), tiles(256, sharding="ddp", cp=2)] == ["none", "2", "4", "2"]


def test_tiles_take_memory_off_the_peak(tmp_path: Path) -> None:
    """Eight pieces of an MLP that is three times as wide as the model."""
    spec = describe(str(tiny.llama(tmp_path / "llama", num_hidden_layers=4)))
    whole, tiled = (
        forecast(spec, Strategy(activation_checkpointing="full", mlp_tiles=tiles), "1x cpu", TrainConfig(seq_len=512))
        for tiles in ("none", 8)
    )
    assert tiled.parts["activations"] < 0.7 * whole.parts["activations"]
    assert tiled.operations is not None
    assert whole.operations is not None
    assert tiled.operations > whole.operations


@pytest.mark.parametrize("value", ["1", "0", "08", "many", "2x", True])
def test_other_words_are_refused(value: Any) -> None:
    with pytest.raises(StrategyError, match=r"mlp_tiles .* is unknown"):
        Strategy(mlp_tiles=value)


def test_compiled_blocks_are_refused() -> None:
    with pytest.raises(StrategyError, match="mlp_tiles does not run with compile"):
        resolve(Strategy(mlp_tiles="2", compile=True), TrainConfig(), None, 1, CPU)
