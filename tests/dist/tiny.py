"""Tiny models with a tokenizer, saved as checkpoints, and many cells of the matrix run in one process group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 256


def llama(folder: Path, **changes: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_key_value_heads": 2}
    return _save(LlamaForCausalLM, LlamaConfig, folder, **{**shape, "num_attention_heads": 4, **changes})


def mixtral(folder: Path, **changes: Any) -> Path:
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return _save(MixtralForCausalLM, MixtralConfig, folder, **{**shape, **experts, "num_attention_heads": 4, **changes})


def deepseek(folder: Path, **changes: Any) -> Path:
    """Fused experts beside a dense layer and shared experts, and a buffer in the checkpoint."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    low = {"q_lora_rank": None, "kv_lora_rank": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1}
    groups = {"n_group": 1, "topk_group": 1}
    return _save(
        DeepseekV3ForCausalLM, DeepseekV3Config, folder, **{**shape, **heads, **low, **experts, **groups, **changes}
    )


def bloom(folder: Path, **changes: Any) -> Path:
    """A LayerNorm behind the embedding, which FSDP's groups leave to the root."""
    from transformers import BloomConfig, BloomForCausalLM

    return _save(BloomForCausalLM, BloomConfig, folder, **{"hidden_size": 64, "n_layer": 2, "n_head": 4, **changes})


def phi(folder: Path, **changes: Any) -> Path:
    """A LayerNorm behind the layers, which accelerate does not find under an adapter."""
    from transformers import PhiConfig, PhiForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return _save(PhiForCausalLM, PhiConfig, folder, **{**shape, **changes})


def bert(folder: Path, **changes: Any) -> Path:
    """A classifier, without dropout: each engine would draw its own masks."""
    from transformers import BertConfig, BertForSequenceClassification

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _save(BertForSequenceClassification, BertConfig, folder, **{**shape, **dropout, **changes})


def t5(folder: Path, **changes: Any) -> Path:
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    # Dropout would make each engine draw its own masks.
    return _save(T5ForConditionalGeneration, T5Config, folder, **{**shape, "dropout_rate": 0.0, **changes})


def _save(model: Any, config: Any, folder: Path, **shape: Any) -> Path:
    import torch

    torch.manual_seed(0)
    model(config(vocab_size=VOCABULARY, **shape)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path, *, extra: tuple[str, ...] = (), **special: str) -> None:
    """A word-level tokenizer of 250 words; by default with the special tokens that a T5 has."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    special = special or {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*dict.fromkeys([*special.values(), "<unk>"]), *extra]
    words += [f"w{index}" for index in range(250 - len(words))]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    if extra:
        tokenizer.add_special_tokens({"additional_special_tokens": list(extra)})
    tokenizer.save_pretrained(folder)


def run_cells(groups: dict[int, list[dict[str, Any]]], folder: Path, scratch: Path) -> dict[int, list[dict[str, Any]]]:
    """Number of ranks → cells of the matrix, to what each gave, in order."""
    found = run_groups("matrix_worker.py", list(groups.items()), folder, scratch)
    return dict(zip(groups, found, strict=True))


def run_groups(
    worker: str, groups: list[tuple[int, list[dict[str, Any]]]], folder: Path, scratch: Path
) -> list[list[dict[str, Any]]]:
    """What each cell of each group gave, in order. A group is its number of ranks and its cells; one runs after the other."""
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "cells.json").write_text(json.dumps(groups), encoding="utf-8")
    path = Path(__file__).with_name(worker)
    done = subprocess.run(
        [sys.executable, path, scratch, folder],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        # Up to four ranks, of which each would need a GPU of its own.
        env={**os.environ, "PYTHONPATH": str(path.parents[2]), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found = [
        json.loads((scratch / f"found-{number}.json").read_text(encoding="utf-8")) for number in range(len(groups))
    ]
    errors = [(result["cell"], result["error"]) for results in found for result in results if "error" in result]
    assert not errors, errors[0]
    return found
