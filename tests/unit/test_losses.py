"""The one loss: against transformers' own, on whole rows; padding, auxiliary losses and sequence-to-sequence models."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
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
from toolkit.engines.losses import choose_loss, cross_entropy_sum, loss_kind, loss_sum, shift_labels, with_trained
from toolkit.engines.resolution import resolve
from toolkit.transforms import chunked_loss

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several to a chunk, and one that is smaller."""
    monkeypatch.setattr(chunked_loss, "BLOCK", 3)


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


# The chunked loss ----------------------------------------------------------------------------------------------------

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
SEQ2SEQ: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "decoder_start_token_id": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "tie_word_embeddings": True},
    "gemma2": {**SIZES, **HEADS, "final_logit_softcapping": 3.0, "pad_token_id": 0},
    "granite": {**SIZES, "logits_scaling": 4.0, "pad_token_id": 0},
    "cohere": {**SIZES, "logit_scale": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "hyperclovax": {**SIZES, "logits_scaling": 0.25, "pad_token_id": 0},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8, "vocab_size": 64, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "t5": {**SEQ2SEQ, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
    "bart": {**SEQ2SEQ, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0},
}  # fmt: skip


def pair(family: str, kind: str = "cpu", **fields: Any) -> tuple[Any, Any]:
    """A model, and the same one with the chunked loss, two tokens a chunk."""
    config = AutoConfig.for_model(family, **FAMILIES[family], **fields)
    torch.manual_seed(0)
    model = (AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM).from_config(config)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dim() > 1 or name.endswith("bias"):
            tensor.data.normal_(0, 0.3)
    return model, chunk(copy.deepcopy(model))


def chunk(model: Any) -> Any:
    job = resolve(tk.Strategy(loss="chunked"), tk.TrainConfig(), None, 1, tk.hardware("1x cpu").device)
    with patch.object(chunked_loss, "CPU_CHUNK", 14):  # half of it for so few tokens
        return job.transforms[-1].apply(model, job)


def gradients(
    model: Any, batch: dict[str, Any], dtype: torch.dtype | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    kind = "seq2seq" if model.config.is_encoder_decoder else "causal"
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = loss_sum(model, batch, kind)
    (loss * 0.1).backward()
    named = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return loss.item(), named


def assert_same(whole: Any, chunked: Any, batch: dict[str, Any], limit: float = 1e-5, **options: Any) -> None:
    """The host's knowledge of the trained positions changes nothing."""
    loss, expected = gradients(whole, batch, **options)
    size = sum(each.norm() ** 2 for each in expected.values()) ** 0.5
    for form in (batch, with_trained(batch)):
        ours, got = gradients(chunked, dict(form), **options)
        assert ours == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert got.keys() == expected.keys()
        for name, gradient in expected.items():
            assert (got[name] - gradient).norm() <= limit * max(gradient.norm(), 1e-2 * size), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_chunked_loss_is_the_whole_one(family: str) -> None:
    """With caps, scales, biases and tied weights; a mask leaves all, 1% and 0% of the positions."""
    whole, chunked = pair(family)
    targets = labels()
    none, one = torch.full_like(targets, -100), torch.full_like(targets, -100)
    one[1, 3] = targets[1, 3]
    for each in (targets, targets.clamp(min=0), one, none):
        assert_same(whole, chunked, {"input_ids": targets.clamp(min=0), "labels": each})
    with torch.no_grad():
        inputs = {"input_ids": targets.clamp(min=0)}
        more = {"decoder_input_ids": inputs["input_ids"]} if whole.config.is_encoder_decoder else {}
        assert torch.equal(whole(**inputs, **more).logits, chunked(**inputs, **more).logits), "logits stay whole"
        batch = {**inputs, "labels": targets}
        torch.testing.assert_close(tk.loss(chunked, batch), tk.loss(whole, batch))
        if family != "bart":
            torch.testing.assert_close(tk.loss(chunked, batch), whole(**batch).loss)


def test_a_chunked_loss_in_half_precision_sums_in_fp32() -> None:
    whole, chunked = pair("llama")
    batch = {"input_ids": labels().clamp(min=0), "labels": labels()}
    assert_same(whole, chunked, batch, limit=2e-2, dtype=torch.bfloat16)
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 256, 64).bfloat16(), (torch.randn(4096, 64) * 0.1).bfloat16()
    targets = torch.randint(0, 4096, (1, 256))
    exact = torch.nn.functional.cross_entropy((hidden.double() @ weight.double().t())[0], targets[0]).item()
    head = chunked_loss.ChunkedHead(SimpleNamespace(out_features=4096), None, 1.0, None, 128)
    total, *_ = head.sums(hidden[0].clone(), targets[0][:, None], weight, None, None, [True, True, False])
    assert total.item() / 256 == pytest.approx(exact, abs=1e-4)


def test_chunks_take_a_small_part_of_the_memory() -> None:
    """Of head and loss on a CPU: at most 0.38 of what whole logits take, here 2,048 tokens of 32,768 words."""
    words, rows = 32_768, chunked_loss.CPU_CHUNK
    hidden, weight = torch.randn(2048, 512, requires_grad=True), torch.randn(words, 512, requires_grad=True)
    targets = torch.randint(0, words, (2048,))
    head = chunked_loss.ChunkedHead(SimpleNamespace(out_features=words), None, 1.0, None, rows)

    def whole() -> None:
        cross_entropy_sum((hidden @ weight.t())[None], targets[None]).backward()

    def chunks() -> Any:
        with torch.no_grad():
            return head.sums(hidden.clone(), targets[:, None], weight, None, None, [True, True, False])

    def peak(call: Any) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            call()
        sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        return max(itertools.accumulate(sizes))

    assert peak(chunks) <= 0.38 * peak(whole)
    chunk_bytes, copied = 4 * rows * words, 4 * hidden.numel()
    assert peak(chunks) <= 4 * weight.numel() + chunk_bytes + 2 * copied


def test_adapters_and_the_chunked_loss() -> None:
    batch = {"input_ids": labels().clamp(min=0), "labels": labels()}
    for options in ({}, {"modules_to_save": ["lm_head"], "ensure_weight_tying": True}):
        torch.manual_seed(1)
        config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False, **options)
        whole = get_peft_model(pair("llama")[0], config)
        assert_same(whole, chunk(copy.deepcopy(whole)), batch)
    adapted = get_peft_model(pair("llama")[0], LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))
    with pytest.raises(StrategyError, match=r"torch's Linear.* Choose --loss whole\."):
        chunk(adapted)


def test_what_stands_for_logits_is_no_view() -> None:
    """Of a view FSDP2 warns in every run: its hook would be lost if somebody wrote into it."""
    _, model = pair("llama")
    given: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda *call: given.append(call[-1]))
    loss_sum(model, {"input_ids": labels().clamp(min=0), "labels": labels()}, "causal")
    assert [each._base for each in given] == [None]


def test_a_model_that_changes_its_logits_otherwise_is_refused() -> None:
    _, model = pair("llama")
    forward = model.forward

    def doubled(**inputs: Any) -> Any:
        output = forward(**inputs)
        output.logits = output.logits * 2
        return output

    model.forward = doubled
    batch = {"input_ids": labels().clamp(min=0), "labels": labels()}
    with pytest.raises(
        StrategyError, match=r"LlamaForCausalLM does to its logits after the head\. Choose --loss whole\."
    ):
        loss_sum(model, batch, "causal")


def test_auto_is_chunked_where_logits_are_large() -> None:
    """That is what train takes; all else computes whole logits."""
    large = {
        **SIZES,
        "hidden_size": 4096,
        "num_hidden_layers": 8,
        "vocab_size": 128_000,
        "max_position_embeddings": 8192,
    }
    spec = tk.describe(LlamaConfig(**large))

    def job(machine: str, seq_len: int, loss: str = "auto") -> Any:
        train_config = tk.TrainConfig(micro_batch=1, seq_len=seq_len)
        return resolve(tk.Strategy(loss=loss), train_config, spec, 1, tk.hardware(machine).device)

    cells = {("1x cpu", 16): "chunked", ("1x H100-80GB", 1024): "whole", ("1x H100-80GB", 8192): "chunked"}
    assert {cell: choose_loss(job(*cell)) for cell in cells} == cells
    assert [job("1x cpu", 16, word).strategy.loss for word in ("auto", "whole", "chunked")] == [
        "whole",
        "whole",
        "chunked",
    ]
