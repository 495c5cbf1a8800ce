"""`describe` against models that are really built, against PEFT's own choice, and with all that can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from programs import environment, python
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PretrainedConfig

from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import ModelError, StrategyError
from toolkit.devices.machine import hardware
from toolkit.engines.resolution import resolve
from toolkit.engines.states import adapted
from toolkit.models import ROLES, ModelSpec, describe, embedded_config, local_weights, require_weights

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
BART: dict[str, Any] = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
}  # fmt: skip
GPT2: dict[str, Any] = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
T5: dict[str, Any] = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
MOE: dict[str, Any] = {**SMALL, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**SMALL),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True),
    "gemma3": transformers.Gemma3TextConfig(**SMALL, head_dim=8),
    "mistral": transformers.MistralConfig(**SMALL),
    "phi": transformers.PhiConfig(**SMALL),
    "olmo": transformers.OlmoConfig(**SMALL),
    "gpt_neox": transformers.GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    "gpt2": transformers.GPT2Config(**GPT2),
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": transformers.Qwen3MoeConfig(**MOE, head_dim=8),
    "t5": transformers.T5Config(**T5),
    "bart": transformers.BartConfig(**BART),
    "mbart": transformers.MBartConfig(**BART),
}


def built(config: PretrainedConfig) -> torch.nn.Module:
    auto = AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM
    model: torch.nn.Module = auto.from_config(config)
    return model


@pytest.fixture(scope="module")
def specs() -> dict[str, ModelSpec]:
    return {name: describe(config) for name, config in CONFIGS.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_built_model(name: str, specs: dict[str, ModelSpec]) -> None:
    """Names, shapes, order, and what is tied: compared with storages, which the described model does not have."""
    spec, model = specs[name], built(CONFIGS[name])
    assert [(p.name, p.shape) for p in spec.parameters] == [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    storages: dict[int, list[str]] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        storages.setdefault(parameter.untyped_storage().data_ptr(), []).append(key)
    assert spec.tied == tuple(tuple(group) for group in storages.values() if len(group) > 1)
    assert spec.elements == sum(p.numel() for p in model.parameters()) == sum(spec.elements_of(role) for role in ROLES)
    assert spec.architecture == type(model).__name__
    assert spec.kind == ("seq2seq" if name in ("t5", "bart", "mbart") else "causal")
    json.dumps(spec.to_dict())


@pytest.mark.parametrize("name", CONFIGS)
def test_linears_are_pefts_own_choice(name: str, specs: dict[str, ModelSpec]) -> None:
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        adapted = get_peft_model(built(CONFIGS[name]), LoraConfig(target_modules="all-linear"))
    assert sorted(specs[name].linears) == sorted(adapted.targeted_module_names)


@pytest.mark.parametrize(
    ("name", "blocks", "layers", "positions"),
    [
        ("llama", ("LlamaDecoderLayer",), 2, 64),
        ("gpt2", ("GPT2Block",), 2, 64),
        ("gpt_neox", ("GPTNeoXLayer",), 2, 64),
        ("mixtral", ("MixtralDecoderLayer",), 2, 64),
        ("t5", ("T5Block",), 4, None),
        ("bart", ("BartEncoderLayer", "BartDecoderLayer"), 5, 64),
        # `_no_split_modules` of mBART also names MBartAttention, which is no repeated layer.
        ("mbart", ("MBartEncoderLayer", "MBartDecoderLayer"), 5, 64),
    ],
)
def test_figures(
    name: str, blocks: tuple[str, ...], layers: int, positions: int | None, specs: dict[str, ModelSpec]
) -> None:
    spec = specs[name]
    assert (spec.blocks, spec.layers, spec.max_positions) == (blocks, layers, positions)
    assert (spec.hidden, spec.heads, spec.vocab) == (32, 4, 96)


def test_blocks_where_transformers_names_none() -> None:
    """BioGPT has no `_no_split_modules`, Blenderbot none and stacks of unequal size, CamemBERT's second is no layer."""
    config = transformers.BioGptConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    assert describe(config).blocks == ("BioGptDecoderLayer",)
    unequal = transformers.BlenderbotConfig(**{**BART, "encoder_layers": 1, "decoder_layers": 9})
    assert describe(unequal).blocks == ("BlenderbotEncoderLayer", "BlenderbotDecoderLayer")
    decoder = transformers.CamembertConfig(**SMALL, is_decoder=True)
    assert describe(decoder).blocks == ("CamembertLayer",)


def test_roles(specs: dict[str, ModelSpec]) -> None:
    roles = {p.name: p.role for p in specs["mixtral"].parameters}
    layer = "model.layers.1"
    assert roles["model.embed_tokens.weight"] == "embedding"
    assert roles["lm_head.weight"] == "head"
    assert roles["model.norm.weight"] == roles[f"{layer}.input_layernorm.weight"] == "norm"
    assert roles[f"{layer}.self_attn.q_proj.weight"] == "layer"
    assert roles[f"{layer}.mlp.gate.weight"] == "router"
    assert roles[f"{layer}.mlp.experts.gate_up_proj"] == roles[f"{layer}.mlp.experts.down_proj"] == "expert"
    assert {p.role for p in specs["gpt2"].parameters} == {"embedding", "layer", "norm"}
    # A relative position bias is an embedding inside a layer: it is sharded with the layer.
    assert {p.role for p in specs["t5"].parameters if "relative_attention_bias" in p.name} == {"layer"}


def test_attention_kernels_are_what_the_class_declares(specs: dict[str, ModelSpec]) -> None:
    assert specs["llama"].attentions == ("flash_attention_3", "flash_attention_2", "varlen", "sdpa", "eager", "flex")
    assert specs["t5"].attentions == ("sdpa", "eager", "flex")
    bloom = transformers.BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=4)
    assert describe(bloom).attentions == ("eager",)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CONFIGS["mixtral"], (4, 2, "MixtralSparseMoeBlock")),
        (CONFIGS["qwen3_moe"], (4, 2, "Qwen3MoeSparseMoeBlock")),
        # A shared expert is passed by every token: it counts as a layer.
        (transformers.Qwen2MoeConfig(**MOE, shared_expert_intermediate_size=16), (4, 2, "Qwen2MoeSparseMoeBlock")),
        (transformers.SwitchTransformersConfig(**T5, num_experts=4), (4, 1, "SwitchTransformersSparseMLP")),
        (
            transformers.GraniteMoeSharedConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
            (4, 2, "GraniteMoeSharedMoE"),
        ),
        # Attention and MLP route apart, so the leaf is the layer that holds both.
        (
            transformers.JetMoeConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, kv_channels=8),
            (4, 2, "JetMoeDecoderLayer"),
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PretrainedConfig) else "",
)
def test_mixture_of_experts(config: PretrainedConfig, expected: tuple[int, int, str]) -> None:
    spec = describe(config)
    assert (spec.moe.experts, spec.moe.active, spec.moe.block) == expected
    idle = spec.elements_of("expert") * (1 - spec.moe.active / spec.moe.experts)
    assert spec.active_elements == spec.elements - idle
    assert not any("shared" in p.name for p in spec.parameters if p.role == "expert")


@pytest.mark.parametrize(
    "config",
    [
        CONFIGS["llama"],
        transformers.MixtralConfig(**SMALL, num_local_experts=1, num_experts_per_tok=1),
        transformers.Qwen3MoeConfig(**{**MOE, "num_experts": 0}),
        # Doge names 16,384 experts and routes only where `is_moe` says so.
        transformers.DogeConfig(**SMALL),
    ],
    ids=lambda config: type(config).__name__,
)
def test_a_dense_model_also_with_the_fields_of_a_mixture(config: PretrainedConfig) -> None:
    spec = describe(config)
    assert spec.moe is None
    assert spec.elements_of("expert") == spec.elements_of("router") == 0
    assert spec.active_elements == spec.elements


def test_large_models_are_described_without_memory() -> None:
    llama = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
    small = transformers.LlamaConfig(
        **llama, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32
    )
    large = transformers.LlamaConfig(
        **llama, hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128
    )
    registered: list[str] = []

    def on_meta(_: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
        assert parameter.device.type == "meta", f"{name} takes memory"
        registered.append(name)

    hook = register_module_parameter_registration_hook(on_meta)
    try:
        for config, elements in ((small, 8_030_261_248), (large, 405_853_388_800)):
            registered.clear()
            spec = describe(config)
            assert spec.elements == elements
            assert len(registered) == len(spec.parameters), "layers were built more than once"
    finally:
        hook.remove()


def test_the_embedded_model() -> None:
    spec = describe()
    assert spec.name == "embedded"
    assert spec.source is None
    assert spec.elements == 5_048_576
    assert (spec.hidden, spec.layers, spec.vocab, spec.max_positions, spec.tied) == (256, 4, 4096, 2048, ())
    assert describe("embedded") == spec
    assert {key: spec.config[key] for key in embedded_config()} == embedded_config()


def test_the_callers_config_is_left_alone() -> None:
    config = transformers.LlamaConfig(**SMALL)
    before = config.to_dict()
    describe(config)
    assert config.to_dict() == before


def test_what_is_shown(specs: dict[str, ModelSpec]) -> None:
    shown = str(specs["mixtral"])
    assert "4 a layer, 2 active, in MixtralSparseMoeBlock" in shown
    assert "2 x MixtralDecoderLayer" in shown
    roles = {row[0]: row[1:] for row in specs["llama"].tables()[1].rows}
    assert roles["head"] == ("3,072", "14.2%", "6.0 KiB")
    assert roles["total"][1] == "100.0%"


# Where a model is found -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real checkpoint of two files with an index."""
    folder = tmp_path_factory.mktemp("saved")
    built(CONFIGS["qwen3"]).to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")  # type: ignore[operator]
    return folder


def test_a_folder_with_weights(saved: Path) -> None:
    spec = describe(saved)
    assert (spec.name, spec.source, spec.architecture) == (str(saved), str(saved), "Qwen3ForCausalLM")
    files = require_weights(spec)
    assert len(files) > 1
    assert files == local_weights(saved) == sorted(saved.glob("*.safetensors"))


def test_a_folder_and_a_file_without_weights(tmp_path: Path) -> None:
    for name in ("llama", "t5", "bart", "gpt_neox"):
        CONFIGS[name].save_pretrained(tmp_path)
        of_folder, of_file = describe(tmp_path), describe(str(tmp_path / "config.json"))
        assert of_folder.source is None
        assert of_file.source is None
        assert of_folder.parameters == of_file.parameters == describe(CONFIGS[name]).parameters
    assert local_weights(tmp_path) == []
    with pytest.raises(ModelError, match=r"holds no weights: expected model\.safetensors"):
        require_weights(of_folder)
    with pytest.raises(ModelError, match="a config without weights: give a folder"):
        require_weights(of_file)


def test_a_module() -> None:
    model = built(CONFIGS["llama"])
    spec = describe(model)
    assert (spec.name, spec.source, spec.architecture) == ("LlamaForCausalLM", None, "LlamaForCausalLM")
    model.resize_token_embeddings(128)  # type: ignore[operator]
    assert describe(model).vocab == 128
    with pytest.raises(ModelError, match="LlamaModel has no language-model head"):
        describe(model.model)
    with pytest.raises(ModelError, match="Linear: expected a transformers model"):
        describe(torch.nn.Linear(2, 2))


def test_weights_that_cannot_be_read(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    spec, first = describe(folder), local_weights(folder)[0]
    whole = first.read_bytes()
    for wrong in (whole[:-1], whole[:4], b"\xff" * 64, b""):
        first.write_bytes(wrong)
        with pytest.raises(ModelError, match="is not a complete safetensors file"):
            require_weights(spec)
    first.unlink()
    with pytest.raises(ModelError, match=f"lacks 1 of the .* the first {first.name}"):
        require_weights(spec)
    index = folder / "model.safetensors.index.json"
    index.write_text("{")
    with pytest.raises(ModelError, match="is not an index of weights"):
        require_weights(spec)


def test_pickles_are_refused(tmp_path: Path) -> None:
    CONFIGS["llama"].save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    spec = describe(tmp_path)
    with pytest.raises(ModelError, match=r"pickles only \(pytorch_model\.bin\).*convert them"):
        require_weights(spec)


# What is refused ------------------------------------------------------------------------------------------------------

REMOTE = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.Mine"}


VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip


def test_the_text_part_of_a_vision_language_model() -> None:
    """Decoder, embeddings and head; the rest is frozen, in FSDP's groups, and no target of adapters."""
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "patch_size": 14}
    spec = describe(transformers.Qwen3VLConfig(text_config={**SMALL, "head_dim": 8}, vision_config=vision))
    assert (spec.architecture, spec.kind, spec.layers) == ("Qwen3VLForConditionalGeneration", "causal", 2)
    assert spec.frozen == ("model.visual",)
    assert spec.blocks == ("Qwen3VLVisionBlock", "Qwen3VLTextDecoderLayer")
    assert {name.split(".")[1] for name in adapted(spec, "all-linear")} == {"language_model"}
    assert {name.split(".")[1] for name in spec.linears} == {"language_model", "visual"}
    size = sum(parameter.elements for parameter in spec.parameters if ".visual." in parameter.name)
    assert f"model.visual: {size / 1000:.2f}K parameters ({size / spec.elements:.0%} of all)" in str(spec)


def test_a_tower_whose_layers_transformers_does_not_list_is_in_fsdps_groups() -> None:
    config = transformers.SmolVLMConfig(text_config={"model_type": "llama", **SMALL}, vision_config=VISION)
    spec = describe(config)
    assert spec.frozen == ("model.vision_model", "model.connector")
    assert spec.blocks == ("LlamaDecoderLayer", "SmolVLMEncoderLayer")


def test_layers_that_attend_to_images_alone_are_frozen() -> None:
    text = {**SMALL, "num_hidden_layers": 3, "cross_attention_layers": [1]}
    vision = {**VISION, "num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 32}
    spec = describe(
        transformers.MllamaConfig(text_config=text, vision_config={**vision, "intermediate_layers_indices": [0]})
    )
    assert spec.frozen == ("model.vision_model", "model.multi_modal_projector", "model.language_model.layers.1")
    assert not any(".layers.1." in name for name in adapted(spec, "all-linear"))


def test_routers_of_a_class_of_their_own_are_no_linear_modules() -> None:
    """Llama 4's and PhiMoE's return a tuple, to which no adapter can add, and bitsandbytes leaves them as they are."""
    llama4 = transformers.Llama4TextConfig(**SMALL, head_dim=8, intermediate_size_mlp=48, num_local_experts=2)
    for config in (llama4, transformers.PhimoeConfig(**SMALL, num_local_experts=2)):
        spec = describe(config)
        assert sum(parameter.role == "router" for parameter in spec.parameters) >= 1
        assert spec.linears
        assert not any("router" in name for name in spec.linears)
    assert any("gate" in name for name in describe(transformers.Qwen2MoeConfig(**MOE)).linears)


def test_linear_modules_of_a_class_of_their_own_are_adapted_and_not_quantized() -> None:
    falcon = {name: value for name, value in SMALL.items() if name not in ("intermediate_size", "num_key_value_heads")}
    spec = describe(transformers.FalconConfig(**falcon))
    assert len(spec.linears) == 8
    assert spec.unquantized == spec.linears


def test_parameters_that_the_class_does_not_train() -> None:
    """ERNIE's bias of the router gets no gradient, for which DDP would wait."""
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
    spec = describe(transformers.Ernie4_5_MoeConfig(**SMALL, **experts))
    assert spec.untrained == ("model.layers.1.mlp.gate.moe_statics.e_score_correction_bias",)
    assert not spec.trains(spec.untrained[0])
    assert spec.trains("model.layers.1.mlp.gate.weight")


def test_modules_that_the_class_does_not_train_get_no_adapter() -> None:
    """BLT's patcher."""
    spec = describe(transformers.AutoConfig.for_model("blt"))
    assert any("patcher" in name for name in spec.linears)
    assert not any("patcher" in name for name in adapted(spec, "all-linear"))


def test_buffers_are_counted() -> None:
    """GPT-Neo has a mask of all positions in each layer."""
    config = transformers.GPTNeoConfig(
        vocab_size=96, hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4,
        max_position_embeddings=512,
    )  # fmt: skip
    assert describe(config).buffer_bytes == pytest.approx(2 * 512**2, rel=0.01)


def test_a_text_model_alone_is_read_as_one() -> None:
    """A Llama 4 that was saved without its vision tower."""
    both = transformers.Llama4Config(text_config={**SMALL, "num_local_experts": 2}, vision_config=VISION)
    both.architectures = ["Llama4ForCausalLM"]
    spec = describe(both)
    assert (spec.architecture, spec.frozen) == ("Llama4ForCausalLM", ())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (transformers.Blip2Config(), "does not train on text alone: each forward needs pixel_values"),
        (transformers.PaliGemmaConfig(), "does not train on text alone: its tokens attend to later ones"),
    ],
)
def test_what_does_not_train_on_text_alone(config: PretrainedConfig, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        describe(config)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "config.json is not valid JSON"),
        ("[]", "config.json is not valid JSON .expected a JSON object, found list"),
        ("{}", "names no model_type"),
        ({"model_type": "lama"}, r"model_type 'lama' is unknown .* Did you mean 'llama'\?"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalML"]}, "Did you mean 'LlamaForCausalLM'"),
        ({"model_type": "mine", "auto_map": REMOTE}, r"folder lacks configuration_mine\.py, modeling_mine\.py"),
        # A known model_type, yet the class that was trained is the repository's own.
        ({"model_type": "llama", "architectures": ["Mine"], "auto_map": REMOTE}, "needs its own code"),
        ({"model_type": "bert"}, r"\(bert\) is an encoder: expected a causal model"),
        ({"model_type": "deberta-v2", "architectures": ["DebertaV2Model"]}, "DebertaV2Model.* is an encoder"),
        ({"model_type": "t5", "architectures": ["T5EncoderModel"]}, "is an encoder"),
        ({"model_type": "vit"}, r"\(vit\) is no model that reads and writes text"),
        ({"model_type": "whisper"}, "is no model that reads and writes text"),
        ({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}, "refuses its config.json|cannot build"),
        ({"model_type": "llama", "hidden_size": "wide"}, "refuses its config.json"),
    ],
)
def test_bad_configs(config: str | dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(ModelError, match=says):
        describe(tmp_path)


def test_a_native_class_needs_no_remote_code(tmp_path: Path) -> None:
    """Many repositories keep an old `auto_map` with an architecture that transformers now has."""
    CONFIGS["llama"].save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "architectures": ["LlamaForCausalLM"], "auto_map": REMOTE})
    )
    assert describe(tmp_path).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("files", "able", "says"),
    [
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
            ["qlora"],
            "4-bit nf4",
        ),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, [], "4-bit nf4, quantized once"),
        ({"load_in_8bit": True}, [], "8-bit bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, [], "gptq"),
        ({"quant_method": "mxfp4"}, ["none", "lora", "dora"], "mxfp4"),
        ({"quant_method": "fp8"}, ["none", "lora", "dora"], "fp8"),
        (None, ["none", "lora", "dora", "qlora", "qlora8"], None),
    ],
)
def test_quantized_files_train_with_what_is_able_to(
    files: dict[str, Any] | None, able: list[str], says: str | None, tmp_path: Path
) -> None:
    folder = tmp_path / "Tiny-bnb-4bit"
    folder.mkdir()
    method = {"quant_method": "bitsandbytes"} if says and "bit" in says else {}
    config = {**embedded_config(), "quantization_config": files and {**method, **files}}
    (folder / "config.json").write_text(json.dumps(config))
    spec = describe(folder)
    assert spec.quantization == says
    shown = " ".join(str(spec).split())
    assert (f"quantized {says}, in the files" in shown) == bool(says)
    assert ("in 4 bits" in shown) == ("qlora" in able[:1])
    for adapter in ("none", "lora", "dora", "qlora", "qlora8"):
        request = Strategy(adapter=adapter), TrainConfig(), spec, 1, hardware("cpu").device
        if adapter in able:
            resolve(*request)
            continue
        with pytest.raises(
            StrategyError, match=rf"already \({says}\).* its unquantized base, {tmp_path}/Tiny\."
        ) as error:
            resolve(*request)
        assert all(f"'{word}'" in str(error.value) for word in able)


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder or file"):
        describe("./no-such-folder")
    with pytest.raises(ModelError, match="no such folder or file"):
        describe("no-such-config.json")
    with pytest.raises(ModelError, match=r"has no config\.json\. Give a folder"):
        describe(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="It is an adapter"):
        describe(tmp_path)
    with pytest.raises(ModelError, match="neither a folder nor a Hub id"):
        describe("two words")


def test_a_hub_id_offline(saved: Path, tmp_path: Path) -> None:
    """Cached, cached without weights, and not at all; in a process of its own, where the Hub's settings are read."""
    for name, files in (("tiny", list(saved.iterdir())), ("bare", [saved / "config.json"])):
        snapshot = tmp_path / f"models--somebody--{name}" / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        refs = snapshot.parents[1] / "refs"
        refs.mkdir()
        (refs / "main").write_text("0" * 40)
        for path in files:
            (snapshot / path.name).write_bytes(path.read_bytes())
    script = """
import sys
import toolkit.models
assert not {"torch", "transformers", "huggingface_hub", "numpy"} & set(sys.modules)
from toolkit.engines.states import adapted
from toolkit.core.errors import ModelError
from toolkit.models import describe, require_weights
for name in ("tiny", "bare", "absent"):
    try:
        spec = describe(f"somebody/{name}")
        assert describe(f"somebody/{name}") == spec
        print(spec.source, spec.architecture, end=" ")
        print(len(require_weights(spec)))
    except ModelError as error:
        print("refused:", error)
assert not {"deepspeed", "bitsandbytes", "peft"} & set(sys.modules)
"""
    again = """
import sys
from toolkit.models import describe
print(describe("somebody/tiny").source)
assert not {"torch", "transformers"} & set(sys.modules)
"""
    environ = environment(HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path))
    cached, bare, absent = python("-c", script, env=environ, code=0).stdout.splitlines()
    assert python("-c", again, env=environ, code=0).stdout.strip() == "somebody/tiny"
    assert cached == f"somebody/tiny Qwen3ForCausalLM {len(local_weights(saved))}"
    assert bare.startswith("somebody/bare Qwen3ForCausalLM refused: model 'somebody/bare' is not in the local cache")
    assert absent.startswith(
        "refused: model 'somebody/absent' is not in the local cache and the Hugging Face Hub cannot"
    )
    assert "`hf download somebody/absent --local-dir FOLDER`" in absent
    assert "For a forecast `hf download somebody/absent config.json --local-dir FOLDER` is enough." in absent
