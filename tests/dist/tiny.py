"""Tiny models with a tokenizer, saved as checkpoints, and many cells of the matrix run in one process group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from programs import python

VOCABULARY = 256


def llama(folder: Path, **changes: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_key_value_heads": 2}
    return _save(LlamaForCausalLM, LlamaConfig, folder, **{**shape, "num_attention_heads": 4, **changes})


def qwen3(folder: Path, **changes: Any) -> Path:
    """Norms over the heads of queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    return _save(Qwen3ForCausalLM, Qwen3Config, folder, **{**shape, "num_attention_heads": 4, **changes})


def mixtral(folder: Path, **changes: Any) -> Path:
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return _save(MixtralForCausalLM, MixtralConfig, folder, **{**shape, **experts, "num_attention_heads": 4, **changes})


def qwen3_moe(folder: Path, **changes: Any) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    return _save(Qwen3MoeForCausalLM, Qwen3MoeConfig, folder, **{**shape, **heads, **experts, **changes})


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


def glm4_moe(folder: Path, **changes: Any) -> Path:
    """Experts chosen with a buffer's help."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 16, "n_group": 1, "topk_group": 1}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1}
    return _save(Glm4MoeForCausalLM, Glm4MoeConfig, folder, **{**shape, **heads, **experts, **changes})


def gemma4(folder: Path, **changes: Any) -> Path:
    """A buffer in each layer, which scales what the layer adds."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "num_kv_shared_layers": 0}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 16}
    return _save(
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        folder,
        **{**shape, **heads, **layers, "vocab_size_per_layer_input": VOCABULARY, **changes},
    )


def bart(folder: Path, **changes: Any) -> Path:
    """A buffer of the whole model's own, added to the logits."""
    from transformers import BartConfig, BartForConditionalGeneration

    shape = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}
    special |= {"forced_eos_token_id": 1}
    return _save(
        BartForConditionalGeneration, BartConfig, folder, **{**shape, **heads, **special, "dropout": 0.0, **changes}
    )


TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def qwen3_vl(folder: Path) -> Path:
    """A vision-language model with three rows of positions, tied embeddings, and files of a processor."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "patch_size": 14}
    tokens = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
    config = Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": rope}, vision_config=vision, tie_word_embeddings=True, **tokens
    )
    (folder / "preprocessor_config.json").parent.mkdir(parents=True, exist_ok=True)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    return _write(Qwen3VLForConditionalGeneration(config), folder)


def llava(folder: Path) -> Path:
    """A vision tower and a projector of other classes, and names of weights that differ on the disk."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **vision},
        image_token_index=250,
    )
    return _write(LlavaForConditionalGeneration(config), folder)


def _save(model: Any, config: Any, folder: Path, **shape: Any) -> Path:
    import torch

    torch.manual_seed(0)
    return _write(model(config(**{"vocab_size": VOCABULARY, **shape})), folder)


def _write(model: Any, folder: Path) -> Path:
    """The checkpoint and a tokenizer. Buffers get values that no model begins with."""
    import torch

    for name, tensor in model.state_dict().items():
        if name in dict(model.named_buffers()):
            tensor.copy_(torch.linspace(0.9, 1.1, tensor.numel()).view(tensor.shape))
    model.save_pretrained(folder)
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


def dequantized(source: Path, folder: Path, **options: Any) -> Path:
    """A checkpoint whose linear weights went through bitsandbytes and back."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant, quantize_4bit
    from transformers import BitsAndBytesConfig

    from toolkit.models import describe
    from toolkit.models.hf_loading import auto_class

    if "load_in_4bit" in options:
        options |= {"bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": torch.float32}
    auto = auto_class(describe(source))
    packed = auto.from_pretrained(source, dtype=torch.float32, quantization_config=BitsAndBytesConfig(**options))
    plain = auto.from_pretrained(source, dtype=torch.float32)
    for name, parameter in packed.named_parameters():
        if type(parameter).__name__ == "Params4bit":
            whole = dequantize_4bit(parameter.data, parameter.quant_state)
        elif type(parameter).__name__ == "Int8Params":
            whole = int8_vectorwise_dequant(parameter.data, parameter.SCB)
        else:
            continue
        assert not torch.equal(whole, plain.get_parameter(name))
        plain.get_parameter(name).data.copy_(whole)
    for name, parameter in plain.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed, state = quantize_4bit(parameter.data, blocksize=64, compress_statistics=True, quant_type="nf4")
            parameter.data.copy_(dequantize_4bit(packed, state))
    plain.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


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
    python(path, scratch, folder, code=0)
    found = [
        json.loads((scratch / f"found-{number}.json").read_text(encoding="utf-8")) for number in range(len(groups))
    ]
    errors = [(result["cell"], result["error"]) for results in found for result in results if "error" in result]
    assert not errors, errors[0]
    return found
