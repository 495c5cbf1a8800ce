"""The embedded model: its config, and its weights from a seed. `data/embedded.py` has its text and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def embedded_config() -> dict[str, Any]:
    """Return the config of the embedded model: a Llama of 5,048,576 parameters, 19.3 MiB in fp32, nothing tied."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def embedded_checkpoint(folder: Path) -> None:
    """Write the embedded model into a new folder: config.json and model.safetensors, fp32, drawn from seed 0.

    Called before an engine is set up: under ZeRO-3 weights would be drawn otherwise.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations import is_deepspeed_zero3_enabled

    assert not is_deepspeed_zero3_enabled(), "the embedded model is made before ZeRO-3 is set up"
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig.from_dict(embedded_config()))
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
