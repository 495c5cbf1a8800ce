"""Tiny models with a tokenizer, saved as checkpoints, and many cells of the matrix run in one process group."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from programs import environment, start

VOCABULARY = 256


WIDTH = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DENSE = {**WIDTH, "intermediate_size": 192, "num_key_value_heads": 2}
TEXT = {**WIDTH, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1, "n_routed_experts": 4}
ONE_GROUP = {"n_group": 1, "topk_group": 1}


def llama(folder: Path, **changes: Any) -> Path:
    return _save("LlamaForCausalLM", folder, **{**DENSE, **changes})


def packed(folder: Path) -> Path:
    """The same in 4 bits, as a published `-bnb-4bit` folder holds it."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    how = BitsAndBytesConfig(load_in_4bit=True, **options)
    source = llama(folder.with_name(f"{folder.name}-whole"))
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, quantization_config=how).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def qwen3(folder: Path, **changes: Any) -> Path:
    """Norms over the heads of queries and keys."""
    return _save("Qwen3ForCausalLM", folder, **{**DENSE, "head_dim": 32, **changes})


def mistral(folder: Path, **changes: Any) -> Path:
    """Every layer has a window."""
    return _save("MistralForCausalLM", folder, **{**DENSE, "head_dim": 16, "sliding_window": 8, **changes})


def gemma2(folder: Path, **changes: Any) -> Path:
    """Soft caps on scores and logits; every second layer has a window."""
    return _save("Gemma2ForCausalLM", folder, **{**DENSE, "head_dim": 16, "query_pre_attn_scalar": 16, **changes})


def mixtral(folder: Path, **changes: Any) -> Path:
    return _save("MixtralForCausalLM", folder, **{**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, **changes})


def qwen3_moe(folder: Path, **more: Any) -> Path:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "moe_intermediate_size": 64}
    return _save("Qwen3MoeForCausalLM", folder, **TEXT, **{**experts, **more})


def nemotron_h(folder: Path) -> Path:
    """Experts without a gate, in a module that other layers have for attention or states."""
    mixer = {"layers_block_type": ["moe", "attention", "moe"], "moe_intermediate_size": 48, "n_routed_experts": 4}
    states = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1}
    shape = {"moe_shared_expert_intermediate_size": 48, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    text = {name: value for name, value in TEXT.items() if name != "num_hidden_layers"}
    return _save("NemotronHForCausalLM", folder, **{**text, "head_dim": 16, **mixer, **states, **shape})


def qwen2_moe(folder: Path) -> Path:
    """A shared expert with a gate of one row, of which a second rank of FSDP has nothing."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    shape = {**DENSE, "shared_expert_intermediate_size": 64}
    return _save("Qwen2MoeForCausalLM", folder, **shape, **experts)


def deepseek(folder: Path) -> Path:
    """Fused experts next to a dense layer and shared experts, and a buffer in the checkpoint."""
    heads = {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    low = {"q_lora_rank": None, "kv_lora_rank": 16, "intermediate_size": 96}
    return _save("DeepseekV3ForCausalLM", folder, **WIDTH, **heads, **low, **ROUTED, **ONE_GROUP)


def gpt_oss(folder: Path) -> Path:
    """Experts that are fused in the files, too."""
    return _save("GptOssForCausalLM", folder, **TEXT, num_local_experts=4, num_experts_per_tok=2)


def llama4(folder: Path) -> Path:
    """A router that is a subclass of `Linear`; transformers has other experts for its quantized files."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}
    return _save("Llama4ForCausalLM", folder, **TEXT, **experts)


def ernie(folder: Path) -> Path:
    """A router that stays in fp32."""
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 1}
    return _save("Ernie4_5_MoeForCausalLM", folder, **TEXT, **experts)


def bloom(folder: Path) -> Path:
    """A LayerNorm behind the embedding, which FSDP's groups leave to the root."""
    return _save("BloomForCausalLM", folder, hidden_size=64, n_layer=2, n_head=4)


def gpt2(folder: Path) -> Path:
    """Weights that are packed the other way round, and the published files' names, without the base model's."""
    from safetensors.torch import load_file, save_file

    path = _save("GPT2LMHeadModel", folder, n_embd=64, n_layer=2, n_head=4, n_inner=96) / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    return folder


def opt(folder: Path) -> Path:
    """Biases everywhere, and a class without a tensor-parallel plan."""
    shape = {"hidden_size": 64, "word_embed_proj_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return _save("OPTForCausalLM", folder, **shape, ffn_dim=96, max_position_embeddings=64, dropout=0.0)


def apertus(folder: Path) -> Path:
    """An activation with parameters, between products that ranks share."""
    return _save("ApertusForCausalLM", folder, **{**TEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})


def hrm(folder: Path) -> Path:
    """Gate and up, and four products of attention, are each one matrix in the files."""
    heads = {"num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 96}
    return _save("HrmTextForCausalLM", folder, **WIDTH, **heads, H_cycles=1, L_cycles=1, num_layers_per_stack=2)


def gpt_neox(folder: Path) -> Path:
    """A head with another name in the files."""
    return _save("GPTNeoXForCausalLM", folder, **WIDTH, intermediate_size=96)


def phi(folder: Path) -> Path:
    """A LayerNorm behind the layers, which accelerate does not find under an adapter."""
    return _save("PhiForCausalLM", folder, **WIDTH, intermediate_size=128)


def phi3(folder: Path) -> Path:
    """One product for queries, keys and values, and one for gate and up."""
    return _save("Phi3ForCausalLM", folder, **TEXT, pad_token_id=0)


def bert(folder: Path) -> Path:
    """A classifier, without dropout: each engine would draw its own masks."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _save("BertForSequenceClassification", folder, **shape, **dropout)


def t5(folder: Path) -> Path:
    """Without dropout, like `bert`."""
    shape = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    return _save("T5ForConditionalGeneration", folder, **shape, dropout_rate=0.0)


def glm4_moe(folder: Path) -> Path:
    """Experts chosen with a buffer's help."""
    return _save("Glm4MoeForCausalLM", folder, **TEXT, **ROUTED, **ONE_GROUP)


def gemma4(folder: Path) -> Path:
    """A buffer in each layer, which scales what the layer adds."""
    heads = {"global_head_dim": 16, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 16}
    return _save("Gemma4ForCausalLM", folder, **TEXT, **heads, **layers)


def bart(folder: Path) -> Path:
    """A buffer of the whole model's own, added to the logits."""
    shape = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}
    return _save(
        "BartForConditionalGeneration", folder, **shape, **heads, **special, forced_eos_token_id=1, dropout=0.0
    )


def qwen3_vl(folder: Path) -> Path:
    """A vision-language model with three rows of positions, tied embeddings, and files of a processor."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    text = {**TEXT, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "rope_parameters": rope}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "patch_size": 14}
    tokens = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
    configs = {"text_config": text, "vision_config": vision}
    _save("Qwen3VLForConditionalGeneration", folder, **configs, tie_word_embeddings=True, **tokens)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    return folder


def llava(folder: Path) -> Path:
    """A vision tower and a projector of other classes, and names of weights that differ on the disk."""
    text = {"model_type": "llama", **TEXT, "vocab_size": VOCABULARY, "max_position_embeddings": 128}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
    configs = {"text_config": text, "vision_config": vision}
    return _save("LlavaForConditionalGeneration", folder, **configs, image_token_index=250)


def _save(name: str, folder: Path, **shape: Any) -> Path:
    """The checkpoint of a class of transformers, and a tokenizer. Buffers get values that no model begins with."""
    import torch
    import transformers

    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    sizes = {} if "text_config" in shape else {"vocab_size": VOCABULARY}
    model = model_class(model_class.config_class(**{**sizes, **shape}))
    for name, tensor in model.state_dict().items():
        if name in dict(model.named_buffers()):
            tensor.copy_(torch.linspace(0.9, 1.1, tensor.numel()).view(tensor.shape))
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path, *reserved: str, words: int = 247, **special: str) -> None:
    """A tokenizer of words, by default with the special tokens of a T5; `reserved` ones have no role."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {**(special or {"pad_token": "<pad>", "eos_token": "</s>"}), "unk_token": "<unk>"}
    known = [*special.values(), *reserved, *(f"w{index}" for index in range(words))]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(known)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    tokenizer.add_tokens(list(reserved), special_tokens=True)
    tokenizer.save_pretrained(folder)


def dequantized(source: Path, folder: Path, **options: Any) -> Path:
    """A checkpoint with linear weights that went through bitsandbytes and back."""
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
    given = run_groups("matrix_worker.py", list(groups.items()), folder, scratch)
    return dict(zip(groups, given, strict=True))


LONGEST = 600
"""Seconds that a worker may take."""


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that has imported the libraries, and forks the workers of all files that this process runs."""
    # Read as torch is imported: inductor's own processes would outlive a rank's end.
    few = {**environment(), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    server = start(
        Path(__file__).with_name("ranks.py"), stdin=subprocess.PIPE, stderr=None, start_new_session=True, env=few
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    """End it, and a worker that a test no longer waits for."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


def run_worker(path: Path, scratch: Path, folder: Path) -> None:
    """Run a worker to its end, as a program of its own: exit code 0 is expected."""
    server, log = _server(), scratch / "worker.log"
    assert server.stdin is not None
    assert server.stdout is not None
    log.write_text("")
    print(
        json.dumps([str(log), os.getcwd(), environment(), *map(str, (path, scratch, folder))]),
        file=server.stdin,
        flush=True,
    )
    answer = ""
    try:
        answer = server.stdout.readline() if select.select([server.stdout], [], [], LONGEST)[0] else ""
    finally:
        if not answer:  # it has ended, or this test waits no longer: the next one has another
            _server.cache_clear()
            _end(server)
    assert answer == "CODE 0\n", (answer, log.read_text(errors="replace")[-8000:])


def run_groups(
    worker: str, groups: list[tuple[int, list[dict[str, Any]]]], folder: Path, scratch: Path
) -> list[list[dict[str, Any]]]:
    """What each cell of each group gave, in order. A group is its number of ranks and its cells; one runs after the other."""
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "cells.json").write_text(json.dumps(groups), encoding="utf-8")
    run_worker(Path(__file__).with_name(worker), scratch, folder)
    given = [
        json.loads((scratch / f"results-{number}.json").read_text(encoding="utf-8")) for number in range(len(groups))
    ]
    errors = [(result["cell"], result["error"]) for results in given for result in results if "error" in result]
    assert not errors, errors[0]
    return given


def run_recipe(count: int, words: Sequence[object], scratch: Path) -> None:
    """Run the recipe over forked ranks with these flags: what `toolkit train` starts, without the processes around the ranks."""
    run_groups("recipe_worker.py", [(count, [{"words": [*map(str, words)]}])], scratch, scratch)


def run_meshes(
    groups: list[tuple[int, list[dict[str, Any]]]], folder: Path, scratch: Path
) -> dict[tuple[int, str], dict[str, Any]]:
    """What each cell of `mesh_worker.py` gave, by its number of ranks and its name."""
    given = run_groups("mesh_worker.py", groups, folder, scratch)
    return {
        (count, result["cell"]["name"]): result
        for (count, _), results in zip(groups, given, strict=True)
        for result in results
    }


def assert_same(result: list[list[float]], expected: list[list[float]]) -> None:
    """Steps have the losses, gradient norms and tokens of one process."""
    for ours, theirs in zip(result, expected, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
        assert ours[1] == pytest.approx(theirs[1], rel=5e-5)
        assert ours[2] == theirs[2]


def stored_tensors(checkpoint: Path) -> dict[tuple[str, str], Any]:
    """Every whole tensor of a valid checkpoint, by name and kind."""
    from toolkit.checkpoints import read_manifest, validate
    from toolkit.checkpoints.stored_tensors import opened

    assert validate(checkpoint) == []
    manifest = read_manifest(checkpoint)
    with opened(checkpoint, manifest) as stored:
        return {(name, kind): stored.whole(name, kind) for name, about in manifest.tensors.items() for kind in about}


def differing(one: Path, other: Path) -> list[tuple[str, str]]:
    """The tensors of two checkpoints that have other bits: parameters, masters, moments and buffers."""
    import torch

    mine, theirs = stored_tensors(one), stored_tensors(other)
    assert mine.keys() == theirs.keys()
    return [key for key, tensor in mine.items() if not torch.equal(tensor, theirs[key])]


def assert_alike(
    result: dict[str, Any], reference: dict[str, Any], *, bytes_too: bool = False, where: str = ""
) -> None:
    """Two cells trained alike in fp32; with `bytes_too` the first held what was expected, too."""
    assert result["losses"] == pytest.approx(reference["losses"], rel=1e-5), where
    assert result["norms"] == pytest.approx(reference["norms"], rel=1e-4), where
    for part in ("trainable", "frozen", "master", "optimizer") if bytes_too else ():
        assert result["measured"][part] == pytest.approx(result["expected"][part], rel=0.02), (where, part)
