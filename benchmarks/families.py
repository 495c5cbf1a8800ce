"""Small models of many families, in two shapes each, and the grid of what can be trained of them."""

from __future__ import annotations

import itertools
import random
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import ToolkitError
from toolkit.devices.machine import hardware
from toolkit.engines.resolution import resolve
from toolkit.models import ModelSpec

VOCABULARY = 8192

STEPS = 3
"""Of a run: what the memory window sees."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {"num_key_value_heads": 4}),
    "Qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True}),
    "Gemma3": ("Gemma3TextConfig", {"num_key_value_heads": 2, "head_dim": 64, "sliding_window": 128}),
    "Mistral": ("MistralConfig", {"num_key_value_heads": 4, "sliding_window": 128}),
    "Phi": ("PhiConfig", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}),
    "GPT-2": ("GPT2Config", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "GPT-NeoX": ("GPTNeoXConfig", {}),
    "OLMo": ("OlmoConfig", {}),
    "Mixtral": ("MixtralConfig", {"num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "T5": ("T5Config", {"dropout_rate": 0.0, "decoder_start_token_id": 0}),
}
"""Class of the config, and what it needs beside the shape; no dropout, which the toolkit would not need but T5 has."""

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}

RECENT: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2-MoE": (
        "Qwen2MoeConfig",
        {"num_key_value_heads": 4, "num_experts": 8, "shared_expert_intermediate_size": 512, **EXPERTS},
    ),
    "Gemma4": (
        "Gemma4TextConfig",
        {
            **{"num_key_value_heads": 2, "head_dim": 64, "global_head_dim": 64, "sliding_window": 128},
            **{"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 64},
        },
    ),
    "Qwen3-Next": (
        "Qwen3NextConfig",
        {
            **{"num_key_value_heads": 2, "head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
            **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_experts": 8},
            **{"shared_expert_intermediate_size": 256, **EXPERTS},
        },
    ),
    "GPT-OSS": (
        "GptOssConfig",
        {"num_key_value_heads": 2, "head_dim": 64, "sliding_window": 128, "num_local_experts": 4}
        | {"num_experts_per_tok": 2, **TOKENS},
    ),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {
            **{"num_key_value_heads": None, "q_lora_rank": 128, "kv_lora_rank": 64, "n_group": 1, "topk_group": 1},
            **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 48, "v_head_dim": 64},
            **{"n_routed_experts": 8, "first_k_dense_replace": 1, **EXPERTS},
        },
    ),
    "GLM-4": ("Glm4Config", {"num_key_value_heads": 2, "head_dim": 64}),
    "SmolLM3": ("SmolLM3Config", {"num_key_value_heads": 4, **TOKENS}),
}
"""Families of 2024 to 2026, which no mending of a forecast has looked at before."""

RECENT |= {
    "Qwen2-MoE-32": (RECENT["Qwen2-MoE"][0], {**RECENT["Qwen2-MoE"][1], "num_experts": 32}),
    "Gemma4-PLE": (RECENT["Gemma4"][0], {**RECENT["Gemma4"][1], "hidden_size_per_layer_input": 512}),
}
"""Two in which one tensor outweighs the others: fused experts, and the table of per-layer embeddings."""

SHAPES = {
    "wide": {"hidden": 512, "ffn": 1536, "layers": 4, "heads": 8, "seq_len": 256},
    "deep": {"hidden": 384, "ffn": 1024, "layers": 8, "heads": 6, "seq_len": 384},
}

SIZES = {
    **SHAPES,
    "mesh": {"hidden": 768, "ffn": 1536, "layers": 8, "heads": 16, "seq_len": 64},
    "parity": {"hidden": 128, "ffn": 256, "layers": 4, "heads": 8, "seq_len": 64},
}
"""Layers and heads of the last two can be divided over ranks: up to 8, and up to 4."""

AXES: dict[str, tuple[Any, ...]] = {
    "sharding": ("none", "ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp_grad_op", "hsdp"),
    "adapter": ("none", "lora", "qlora", "qlora8"),
    "activation_checkpointing": ("full", "none"),
    "attention": ("sdpa", "eager"),
    "precision": ("fp32", "bf16", "bf16_pure"),
    "family": (*FAMILIES, *RECENT),
    "shape": tuple(SHAPES),
    "ranks": (1, 2, 4),
    "documents": ("one", "several"),
    "accumulation": (1, 2),
}
"""`documents` in a row: several need an attention mask."""


@dataclass(frozen=True)
class Case:
    """One point of the grid."""

    sharding: str
    adapter: str
    activation_checkpointing: str
    attention: str
    precision: str
    family: str
    shape: str
    ranks: int
    documents: str
    accumulation: int

    def strategy(self) -> Strategy:
        """What is asked for."""
        named = ("sharding", "adapter", "activation_checkpointing", "attention", "precision")
        dp_replicate = 2 if self.sharding == "hsdp" else 1
        return Strategy(**{name: getattr(self, name) for name in named}, dp_replicate=dp_replicate)

    def train_config(self, micro_batch: int) -> TrainConfig:
        """With a batch of its own."""
        seq_len = int(SHAPES[self.shape]["seq_len"])
        return TrainConfig(steps=STEPS, accumulation=self.accumulation, micro_batch=micro_batch, seq_len=seq_len)


def config_of(family: str, shape: str) -> Any:
    """The transformers config."""
    import transformers

    word, more = (FAMILIES | RECENT)[family]
    size = SIZES[shape]
    if family == "GPT-2":
        names = {"n_embd": "hidden", "n_inner": "ffn", "n_layer": "layers", "n_head": "heads"}
    elif family == "T5":
        names = {"d_model": "hidden", "d_ff": "ffn", "num_layers": "layers", "num_heads": "heads"}
        more = {**more, "d_kv": size["hidden"] // size["heads"]}
    else:
        names = {"hidden_size": "hidden", "intermediate_size": "ffn", "num_hidden_layers": "layers"}
        names |= {"num_attention_heads": "heads"}
    if more.get("num_key_value_heads") == 4:
        more = {**more, "num_key_value_heads": size["heads"] // 2}
    asked = {name: size[ours] for name, ours in names.items()}
    return getattr(transformers, word)(vocab_size=VOCABULARY, pad_token_id=0, **asked, **more)


def checkpoint(folder: Path, family: str, shape: str) -> Path:
    """A model of random weights with the embedded model's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from toolkit.data.embedded import embedded_model

    if not (folder / "tokenizer.json").exists():
        torch.manual_seed(0)
        auto = AutoModelForSeq2SeqLM if family == "T5" else AutoModelForCausalLM
        auto.from_config(config_of(family, shape)).save_pretrained(folder)
        for file in embedded_model().glob("token*"):
            shutil.copy(file, folder)
    return folder


def possible(
    specs: Mapping[tuple[str, str], ModelSpec], adapters: Collection[str] = ("none", "lora", "qlora")
) -> tuple[list[Case], Counter[str]]:
    """Every case of these models and adapters that some engine can run, and the refusals of the others, with how many."""
    from toolkit.transforms.adapters import check_quantized

    device, cases, refused = hardware().device, [], Counter[str]()
    for values in itertools.product(*AXES.values()):
        case = Case(*values)
        if (case.family, case.shape) not in specs or case.adapter not in adapters:
            continue
        spec = specs[case.family, case.shape]
        if case.documents == "several" and case.family == "T5":
            refused["T5 takes a document a row"] += 1
            continue
        try:
            resolve(case.strategy(), case.train_config(1), spec, case.ranks, device)
            if case.strategy().quantized:
                check_quantized(spec, case.adapter, False)
        except ToolkitError as error:
            refused[str(error).replace(spec.name, f"{case.family}, {case.shape}")] += 1
            continue
        cases.append(case)
    return cases, refused


def spread(cases: Sequence[Case], count: int, seed: int) -> Iterator[Case]:
    """`count` of them, so that every value, and every pair of sharding and adapter, comes as evenly as can be.

    Four ranks share two cores, and a run of theirs takes four times as long: they come a quarter as often.
    """
    drawn: Counter[Any] = Counter()
    draw = random.Random(seed)
    left = list(cases)
    for _ in range(min(count, len(left))):
        # A sample of what is left, and of it what has come least so far.
        chosen = min(
            draw.sample(left, min(400, len(left))), key=lambda case: sum(drawn[one] ** 2 for one in _marks(case))
        )
        for one in _marks(chosen):
            drawn[one] += 4 if one == ("ranks", 4) else 1
        left.remove(chosen)
        yield chosen


def _marks(case: Case) -> list[Any]:
    values = list(asdict(case).items())
    return [*values, (case.sharding, case.adapter)]
