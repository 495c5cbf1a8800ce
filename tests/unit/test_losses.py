"""The one loss: against transformers' own, on whole rows; padding, auxiliary losses and sequence-to-sequence models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import toolkit as tk
from toolkit.core.errors import StrategyError
from toolkit.engines.losses import cross_entropy_sum, loss_kind, loss_sum, shift_labels
from toolkit.engines.resolution import resolve

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def labels(rows: int = 3, length: int = 17, vocabulary: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(0, vocabulary, (rows, length), generator=generator)
    values[0, :5] = -100
    values[2] = -100
    return values


def causal(**fields: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **fields))


@pytest.mark.parametrize("experts", [False, True])
def test_it_is_transformers_mean_times_the_tokens(experts: bool) -> None:
    """Also of the balance of experts, which is added once for each token."""
    torch.manual_seed(0)
    routed = {
        "num_local_experts": 4,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.1,
        "num_key_value_heads": 2,
    }
    model = MixtralForCausalLM(MixtralConfig(**SIZES, **routed)) if experts else causal()
    targets = labels()
    ids = targets.clamp(min=0)
    shifted = shift_labels(targets, "causal")
    count = int((shifted != -100).sum())
    ours = loss_sum(model, {"input_ids": ids, "labels": shifted}, "causal")
    theirs = model(input_ids=ids, labels=targets).loss * count
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)
    assert (float(ours) > 1.001 * float(cross_entropy_sum(model(input_ids=ids).logits, shifted))) == experts
    ours.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    theirs.backward()
    for one, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-6)


def test_labels_move_once_on_the_whole_row() -> None:
    targets = labels()
    shifted = shift_labels(targets, "causal")
    assert torch.equal(shifted[:, :-1], targets[:, 1:])
    assert (shifted[:, -1] == -100).all()
    assert shift_labels(targets, "seq2seq") is targets
    # Halves of a shifted row are the row: the label of the first half's last token is the second half's first.
    assert int(shifted[1, 7]) == int(targets[1, 8])


def test_a_batch_without_a_trained_label_is_zero_with_a_zero_gradient() -> None:
    logits = torch.randn(2, 5, 8, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.full((2, 5), -100))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not logits.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_in_fp32(dtype: torch.dtype) -> None:
    logits, targets = torch.randn(2, 300, 8, dtype=dtype), torch.randint(0, 8, (2, 300))
    loss = cross_entropy_sum(logits, targets)
    assert loss.dtype == torch.float32
    exact = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="sum")
    assert float(loss) == pytest.approx(float(exact), rel=1e-5)


def test_a_model_that_was_not_described_keeps_the_loss_of_its_own_task() -> None:
    job = resolve(tk.Strategy(), tk.TrainConfig(seq_len=17), None, 1, tk.hardware("cpu").device)
    torch.manual_seed(0)
    masked = BertForMaskedLM(BertConfig(**SIZES)).eval()
    targets = labels()
    ids, kind = targets.clamp(min=0), loss_kind(job, masked)
    ours = loss_sum(masked, {"input_ids": ids, "labels": shift_labels(targets, kind)}, kind)
    theirs = masked(input_ids=ids, labels=targets).loss * int((targets != -100).sum())
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)

    untrained = torch.full_like(targets, -100)
    assert float(loss_sum(masked, {"input_ids": ids, "labels": untrained}, kind)) == 0.0
    assert loss_kind(job, causal()) == "causal"
    assert loss_kind(job, GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64))) == "causal"


def test_a_loss_that_is_not_there_or_has_another_term_is_refused() -> None:
    class Silent(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, use_cache: bool) -> Any:
            return type("Output", (), {"loss": None})()

    targets = labels()
    batch = {"input_ids": targets.clamp(min=0), "labels": targets}
    with pytest.raises(StrategyError, match="Silent returned no loss"):
        loss_sum(Silent(), batch, "own")
    model = causal()
    model.config.z_loss_coefficient = 0.1
    with pytest.raises(StrategyError, match=r"z_loss_coefficient 0\.1"):
        loss_sum(model, batch, "causal")
