"""Documents joined into one row: which models keep them apart, and torch's kernel for it, on a CPU by a reference."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
import transformers
from torch.nn.attention.varlen import varlen_attn
from transformers import modeling_flash_attention_utils as flash

from toolkit.config.strategy import Strategy
from toolkit.config.tables import ATTENTIONS
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import StrategyError
from toolkit.data import supports_packing
from toolkit.devices.machine import hardware
from toolkit.engines.optimizer_step import to_device
from toolkit.engines.resolution import resolve
from toolkit.models import describe, varlen
from toolkit.models.varlen import document_bounds, register_varlen, separates_documents, small_config, varlen_attention

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT: dict[str, Any] = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}

LOST = {
    "gpt_bigcode": transformers.GPTBigCodeConfig(**GPT),
    "persimmon": transformers.PersimmonConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    "ctrl": transformers.CTRLConfig(**GPT, dff=96),
    "gptj": transformers.GPTJConfig(**GPT, rotary_dim=8),
}
"""Positions reach no flash kernel of these; the documents' bounds do, but for GPT-J."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("name", LOST)
def test_documents_are_joined_only_where_their_bounds_reach_the_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own dispatch to flash attention, over a kernel in plain torch."""

    def by_bounds(q: Any, k: Any, v: Any, cu_seqlens_q: Any, **_: Any) -> Any:
        return varlen.reference(q, k, v, cu_seqlens_q, cu_seqlens_q, scale=None, window_size=(-1, 0))

    def whole(q: Any, k: Any, v: Any, **_: Any) -> Any:
        return by_bounds(q[0], k[0], v[0], torch.tensor([0, q.shape[1]]))[None]

    spec = describe(LOST[name])
    joined = separates_documents(spec, joined=True)
    assert joined == supports_packing(spec, "flash_attention_2") == (name != "gptj")
    device = dataclasses.replace(
        hardware("A100-80GB").device, attentions=("flash_attention_2", "varlen", "sdpa", "eager")
    )
    strategy = Strategy(precision="bf16", activation_checkpointing="none")
    resolved = resolve(strategy, TrainConfig(seq_len=32), spec, 1, device).strategy.attention
    assert ATTENTIONS[resolved].joins_rows == (joined and resolved in spec.attentions)
    if not joined:
        with pytest.raises(StrategyError, match=r"'varlen' is not supported by GPTJForCausalLM"):
            resolve(dataclasses.replace(strategy, attention="varlen"), TrainConfig(seq_len=32), spec, 1, device)
        return
    kernels: Any = ((whole, by_bounds, None, None, None), (lambda **_: {}, None))
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda *_, **__: kernels)
    torch.manual_seed(0)
    kernel = "sdpa" if "sdpa" in spec.attentions else "eager"
    model = getattr(transformers, spec.architecture)._from_config(LOST[name], attn_implementation=kernel).eval()
    ids, positions = torch.randint(0, 96, (1, 16)), torch.tensor([[*range(7), *range(9)]])
    batch = {"input_ids": ids, "position_ids": positions}
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
        model.config._attn_implementation = "flash_attention_2"
        logits = model(**batch, **document_bounds(positions), use_cache=False).logits
        without = model(**batch, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert (without - expected).abs().max() > 1e-3, "positions reach the kernel now: correct the docstrings"


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(num_key_value_heads=8),
        transformers.MistralConfig(),
        transformers.Qwen3MoeConfig(),
        transformers.Gemma3TextConfig(),
        transformers.Phi3Config(),
    ],
    ids=lambda config: str(config.model_type),
)
def test_a_small_model_of_a_large_family_shows_it(config: Any) -> None:
    spec = describe(config)
    assert separates_documents(spec, joined=False)
    assert separates_documents(spec, joined=True)
    assert small_config(spec).hidden_size <= 512


def test_what_keeps_a_state_or_sees_everything_is_not_packed() -> None:
    lfm = transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])
    assert not separates_documents(describe(lfm), joined=False)
    assert not separates_documents(describe(transformers.T5Config(d_model=32, num_layers=1)), joined=False)


def test_a_gpu_takes_it_where_no_flash_package_is() -> None:
    device = dataclasses.replace(hardware("A100-80GB").device, attentions=("varlen", "sdpa", "eager"))
    spec = describe(transformers.LlamaConfig(**SMALL))

    def attention(config: Any = None, **fields: Any) -> str:
        described = describe(config) if config else spec
        return resolve(Strategy(**fields), TrainConfig(seq_len=32), described, 1, device).strategy.attention

    assert attention(precision="bf16") == "varlen"
    assert attention(precision="fp32") == "sdpa", "the kernel computes in half precision only"
    assert attention(transformers.LlamaConfig(**SMALL, attention_dropout=0.1)) == "sdpa", "it has no dropout"
    assert resolve(Strategy(), TrainConfig(seq_len=32), spec, 1, hardware("cpu").device).strategy.attention == "sdpa"


@pytest.mark.parametrize("window", [None, 5])
def test_it_gives_the_logits_and_gradients_of_sdpa(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, which is CUDA's alone, is replaced by its reference; its signature takes what it is called with."""
    calls: list[Any] = []

    def kernel(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(inspect.signature(varlen_attn).bind(*arguments, **options).arguments)
        return varlen.reference(*arguments, **options)

    monkeypatch.setattr(varlen, "_kernel", lambda _: kernel)
    register_varlen()
    config = transformers.MistralConfig(**SMALL, sliding_window=window)
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM._from_config(config, attn_implementation="sdpa")
    ids = torch.randint(0, 96, (2, 16))
    positions = torch.tensor([[*range(7), *range(9)], [*range(16)]])
    results = []
    for batch in (
        {"input_ids": ids, "position_ids": positions},
        {"input_ids": ids.view(1, -1), "position_ids": positions.view(1, -1), **document_bounds(positions.view(1, -1))},
    ):
        model.zero_grad()
        logits = model(**to_device(batch, torch.device("cpu")), use_cache=False).logits.view(2, 16, -1)
        logits.square().sum().backward()
        results.append((logits.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])))
        model.set_attn_implementation("varlen")
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    assert len(calls) == 2
    assert calls[0]["cu_seq_q"].tolist() == [0, 7, 16, 32]
    assert (calls[0]["max_q"], calls[0]["window_size"]) == (16, (4, 0) if window else (-1, 0))
    assert calls[0]["key"].shape == (32, 2, 16)
    padded = {"input_ids": ids, "attention_mask": torch.tensor([[1] * 10 + [0] * 6, [1] * 16])}
    with torch.no_grad():
        by_varlen = model(**padded).logits
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(
            by_varlen[padded["attention_mask"] == 1], model(**padded).logits[padded["attention_mask"] == 1]
        )
    assert len(calls) == 2, "padded rows are computed by sdpa"
    query = torch.zeros(1, 4, 32, 16)
    with pytest.raises(ValueError, match="varlen attention has no dropout"):
        varlen_attention(model, query, query, query, None, dropout=0.1, **document_bounds(positions.view(1, -1)))
