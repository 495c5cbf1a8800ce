"""Loading in one process: what the model and its tokenizer come out as, and what is refused."""

from __future__ import annotations

import functools
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ranks import reset
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import ModelError, StrategyError
from toolkit.devices.machine import hardware
from toolkit.engines.fsdp.shard_filling import fill_shards
from toolkit.engines.job import Job
from toolkit.engines.resolution import resolve
from toolkit.models import describe, embedded_config, hf_loading
from toolkit.models.hf_loading import disk_layouts, load_tokenizer
from toolkit.models.resolution import embedded_checkpoint
from toolkit.training import streamed_weights
from toolkit.training.loading import load
from toolkit.training.setup import accelerator as make
from toolkit.training.weight_reader import Reader, _moves
from toolkit.transforms.adapters import _seeded_by_name, adapt, add_adapter, save_packed_weights
from toolkit.transforms.fused_experts import packed_experts, unpack_experts

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama with a tokenizer."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    more = {"vocab_size": 64, "max_position_embeddings": 128, "tie_word_embeddings": True}
    tiny.llama(tmp_path / "model", **sizes, **more)
    tokenizer(tmp_path / "model", pad_token="<pad>")
    return tmp_path / "model"


tokenizer = functools.partial(tiny.save_tokenizer, words=50)


def loaded(folder: Path, **words: Any) -> tuple[Any, Any]:
    return load(make(Strategy(**words), TrainConfig(seq_len=16), describe(folder)))


def job(folder: Path, seed: int = 0, **words: Any) -> Job:
    return resolve(Strategy(**words), TrainConfig(seq_len=16, seed=seed), describe(folder), 1, hardware("cpu").device)


# The model


def test_an_adapters_first_values_follow_its_modules_name(tmp_path: Path) -> None:
    """A part of a model draws what the whole one draws: a rank of a pipeline holds some modules only."""

    def drawn(layers: int, targets: list[str], seed: int) -> dict[str, Any]:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers))
        with _seeded_by_name(model, seed):
            made = add_adapter(model, "causal", "lora", 4, targets)
        return {name: value for name, value in made.state_dict().items() if "lora_A" in name}

    first, second = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
    both, reverse, one = (drawn(2, [first, second], 7), drawn(3, [second, first], 7), drawn(2, [second], 7))
    assert set(both) == set(reverse)
    assert all(torch.equal(both[name], reverse[name]) for name in both)
    (name,) = one
    assert torch.equal(one[name], both[name])
    assert len({float(value.sum()) for value in both.values()}) == 2
    assert not torch.equal(drawn(2, [second], 8)[name], one[name])


@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_an_adapters_input_is_not_cast_under_autocast_and_its_bits_stay(adapter: str) -> None:
    """Autocast casts it in any case. DoRA takes norms in its dtype, and keeps PEFT's cast; other models keep it, too."""
    from peft.tuners.lora import LoraLayer

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).to(torch.bfloat16)
    model = add_adapter(base, "causal", adapter, 4, ["model.layers.0.mlp.up_proj"])
    layer = next(module for module in model.modules() if isinstance(module, LoraLayer))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter, dtype=torch.float32)
    x = torch.randn(2, 8, 32, dtype=torch.bfloat16, requires_grad=True)

    def results() -> list[Any]:
        """The output, and the gradients of the input and of the adapter."""
        with torch.autocast("cpu", torch.bfloat16):
            output = layer(x)
        weights = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
        gradients = torch.autograd.grad((output * torch.arange(64)).sum(), weights, allow_unused=True)
        return [output, *(gradient for gradient in gradients if gradient is not None)]

    assert layer._cast_input_dtype(x, torch.float32).dtype == torch.float32  # without autocast, as in PEFT
    with torch.autocast("cpu", torch.bfloat16):
        assert layer._cast_input_dtype(x, torch.float32).dtype == (torch.float32 if adapter == "dora" else x.dtype)
    ours = results()
    del layer._cast_input_dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert layer._cast_input_dtype(x, torch.float32).dtype == torch.float32
    assert len(ours) >= 4
    assert all(torch.equal(*pair) for pair in zip(ours, results(), strict=True))


def test_a_model_is_ready_for_training(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, words = loaded(folder)
    assert model.training
    assert all(module.training for module in model.modules())
    assert model.config.use_cache is False
    assert model.config.pad_token_id == words.pad_token_id == model.generation_config.pad_token_id
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert capsys.readouterr().out.splitlines() == [
        "loading: every rank reads the whole model, which it keeps",
        "attention: sdpa; activation checkpointing: full; loss: whole; KV cache off",
    ]


def test_the_named_attention_and_checkpointing_are_used(folder: Path) -> None:
    model, _ = loaded(folder, attention="eager")
    assert model.config._attn_implementation == "eager"
    layers = model.model.layers
    assert all(layer.gradient_checkpointing for layer in layers)
    assert layers[0]._gradient_checkpointing_func.keywords == {"use_reentrant": False}
    reset()
    model, _ = loaded(folder, activation_checkpointing="none", attention="sdpa")
    assert model.config._attn_implementation == "sdpa"
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)


def test_an_accelerator_without_a_model_loads_none() -> None:
    with pytest.raises(StrategyError, match="made without a model"):
        load(make(Strategy()))


@pytest.mark.parametrize("damage", ["missing", "other shape"])
def test_weights_that_do_not_fit_are_never_drawn_at_random(folder: Path, damage: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    if damage == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:8].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"1 of its weights are missing.*{name}"):
        loaded(folder)


# Adapters


def adapter_values(folder: Path, seed: int = 0, **words: Any) -> dict[str, Any]:
    request = job(folder, seed, **words)
    model = adapt(request, AutoModelForCausalLM.from_pretrained(folder))
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_an_adapter_depends_on_the_seed_alone_and_leaves_the_generator_alone(folder: Path) -> None:
    torch.manual_seed(3)
    first = adapter_values(folder, adapter="lora")
    following = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), following)
    again, other = adapter_values(folder, adapter="lora"), adapter_values(folder, 1, adapter="lora")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_an_adapter_begins_on_values_of_the_compute_dtype(folder: Path) -> None:
    for values in (adapter_values(folder, adapter=kind, precision="bf16") for kind in ("lora", "dora")):
        assert all(tensor.dtype == torch.float32 for tensor in values.values())
        assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in values.values())


def test_all_linear_layers_but_the_head_are_adapted(folder: Path) -> None:
    names = {
        name.split(".lora_")[0].removeprefix("base_model.model.") for name in adapter_values(folder, adapter="lora")
    }
    assert names == set(describe(folder).linears)
    assert len(names) == 14
    some = adapter_values(folder, adapter="lora", lora_targets="q_proj,mlp.up_proj", lora_rank=4)
    assert len(some) == 8
    assert {min(tensor.shape) for tensor in some.values()} == {4}


def test_modules_that_peft_does_not_adapt(tmp_path: Path) -> None:
    """A Mamba's output is computed by a kernel that never calls the module."""
    config = MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=64)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(
        StrategyError, match=r"PEFT takes not all of .*out_proj.*Choose --lora-targets among the others"
    ):
        adapter_values(tmp_path, adapter="lora")
    assert len(adapter_values(tmp_path, adapter="lora", lora_targets="in_proj,x_proj")) == 8


def test_rank_alpha_and_task_of_an_adapter(folder: Path) -> None:
    model, _ = loaded(folder, adapter="dora", lora_rank=8)
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout, config.use_dora) == (8, 16, 0.0, True)
    assert config.task_type == "CAUSAL_LM"
    assert not config.modules_to_save


# The tokenizer


@pytest.mark.parametrize(
    ("reserved", "special", "expected"),
    [
        ((), {"pad_token": "<pad>", "eos_token": "</s>"}, "<pad>"),
        (("<|right_pad|>", "<|reserved_special_token_0|>"), {"eos_token": "</s>"}, "<|right_pad|>"),
        (("<|other|>", "<|reserved_special_token_0|>"), {"eos_token": "</s>"}, "<|reserved_special_token_0|>"),
        (("<|other|>",), {"eos_token": "</s>"}, "</s>"),
    ],
)
def test_the_pad_token(folder: Path, reserved: tuple[str, ...], special: dict[str, str], expected: str) -> None:
    tokenizer(folder, *reserved, **special)
    assert load_tokenizer(describe(folder)).pad_token == expected


def test_the_configs_pad_token_comes_before_a_reserved_one(folder: Path) -> None:
    tokenizer(folder, "<|reserved|>", eos_token="</s>")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": 5}))
    assert load_tokenizer(describe(folder)).pad_token_id == 5


@pytest.mark.parametrize(
    ("special", "message"),
    [
        ({"bos_token": "<s>"}, "no pad token, none in reserve"),
        ({"words": 70, "pad_token": "<pad>"}, "goes to token 71, its embedding only to 63"),
        (None, "tokenizer cannot be read"),
    ],
)
def test_a_tokenizer_that_does_not_fit(folder: Path, special: dict[str, Any] | None, message: str) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    if special is not None:
        tokenizer(folder, **special)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(describe(folder))


# The embedded model


def test_the_embedded_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    for name in ("one", "two"):
        embedded_checkpoint(tmp_path / name)
    assert torch.equal(torch.rand(1), expected)
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    spec = describe(tmp_path / "one")
    assert spec.source is not None
    assert spec.elements == describe().elements
    assert embedded_config().items() <= spec.config.items()


def reader(path: Path, **words: Any) -> Reader:
    accelerator = make(Strategy(**{"adapter": "qlora", **words}), TrainConfig(seq_len=16), describe(path))
    return Reader(accelerator.job, accelerator)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_that_are_packed_in_pieces_have_the_bits_of_a_whole_read(
    tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a piece is no whole number of rows of the tensor, and where the rest is smaller than a piece."""
    monkeypatch.setattr(streamed_weights, "PACKED_AT_ONCE", 64 * 96)
    reads = reader(tiny.llama(tmp_path / "model", hidden_size=96, intermediate_size=200), precision=precision)
    deferred, whole = reads.defer(), reads.read()
    packed = [name for name, module in whole.named_modules() if type(module).__name__ == "Linear4bit"]
    assert len(packed) == 14
    for name in packed:
        module, expected = deferred.get_submodule(name), whole.get_submodule(name)
        data = deferred.streamed_weights.read(f"{name}.weight", module, torch.float32)
        assert torch.equal(data.view(torch.uint8), expected.weight.data.view(torch.uint8))
        state, other = module.quant_state, expected.weight.quant_state
        for part in ("absmax", "offset", "code"):
            assert torch.equal(getattr(state, part), getattr(other, part))
        for part in ("absmax", "code"):
            assert torch.equal(getattr(state.state2, part), getattr(other.state2, part))
        assert (state.shape, state.dtype, state.blocksize) == (other.shape, other.dtype, other.blocksize)


EXPERTS = {"gpt_oss": 4, "deepseek": 2, "mixtral": 4, "ernie": 2, "llama4": 4}
"""Weights of fused experts that are packed."""


@pytest.mark.parametrize("kind", [*EXPERTS, "gpt2", "gpt_neox", "t5", "llava", "gemma4"])
@pytest.mark.parametrize("adapter", ["qlora", "none"])
def test_streamed_weights_have_the_bits_of_a_whole_read(
    kind: str, adapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files hold experts one by one in two or three tensors, or weights under other names, or the other way round."""
    from bitsandbytes.functional import dequantize_4bit

    monkeypatch.setattr(streamed_weights, "PACKED_AT_ONCE", 64 * 64)
    reads = reader(getattr(tiny, kind)(tmp_path / "model"), precision="bf16", adapter=adapter)
    streamed, whole = reads.defer(), reads.read()
    assert all(parameter.untyped_storage().nbytes() <= 4 for parameter in streamed.parameters())
    assert str(streamed._weight_conversions) == str(whole._weight_conversions)  # how the model is saved
    streamed.streamed_weights.fill(streamed)
    if adapter == "qlora":
        assert packed_experts(streamed) == packed_experts(whole)
        assert len(packed_experts(streamed)) == EXPERTS.get(kind, 0)
        for model in (streamed, whole):
            unpack_experts(model)
    for (name, ours), theirs in zip(streamed.named_parameters(), whole.parameters(), strict=True):
        assert (ours.dtype, ours.requires_grad) == (theirs.dtype, theirs.requires_grad), name
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name
        if hasattr(theirs, "quant_state"):
            assert torch.equal(*(dequantize_4bit(weight, weight.quant_state) for weight in (ours, theirs))), name
    for (name, ours), theirs in zip(streamed.named_buffers(), whole.buffers(), strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_fp8_files_are_dequantized_as_they_are_read(
    folder: Path, adapter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And saved as a model of this class that was never quantized."""
    whole, stored, config = (
        load_file(folder / "model.safetensors"),
        {},
        json.loads((folder / "config.json").read_text()),
    )
    for name, tensor in whole.items():
        if "proj" in name:
            rows, columns = tensor.shape
            blocks = tensor.view(rows // 16, 16, columns // 16, 16)
            scales = blocks.abs().amax((1, 3)) / 448
            stored[name] = (blocks / scales[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
            exact = stored[name].float().view(blocks.shape) * scales[:, None, :, None]
            whole[name] = exact.reshape(rows, columns)
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": fp8}))
    model, _ = loaded(folder, adapter=adapter)
    model = model.unload() if adapter == "lora" else model
    assert all(torch.allclose(model.get_parameter(name), tensor, rtol=1e-6) for name, tensor in whole.items())
    assert hf_loading.disk_tensors(model, dict(model.named_parameters())).keys() == whole.keys()
    assert not hasattr(model.config, "quantization_config")
    assert "dequantized: the files hold fp8" in capsys.readouterr().out


def test_trained_weights_have_one_dtype_where_their_class_keeps_fp32(tmp_path: Path) -> None:
    """ERNIE keeps routers in fp32. Engines train one dtype; the bias that nothing trains stays."""
    reads = reader(tiny.ernie(tmp_path / "model"), precision="bf16_pure", adapter="none")
    for model in (reads.read(), reads.defer()):
        kinds = {(parameter.requires_grad, parameter.dtype) for parameter in model.parameters()}
        assert kinds == {(True, torch.bfloat16), (False, torch.float32)}


@pytest.mark.parametrize("adapter", ["none", "qlora"])
def test_what_bf16_pure_rounds_is_a_line(
    folder: Path, tmp_path: Path, adapter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "model.safetensors"
    tensors = {name: t if "norm" in name else t.bfloat16() for name, t in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    load(
        make(Strategy(precision="bf16_pure", adapter=adapter), TrainConfig(seq_len=16), describe(folder)),
        allow_unquantized=True,
    )
    assert (
        "bf16_pure: 5 weights that the files or LlamaForCausalLM keep in fp32 are in bf16: "
        "input_layernorm.weight, norm.weight, post_attention_layernorm.weight"
    ) in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_frozen_weights_are_in_fp16_where_their_class_keeps_fp32(tmp_path: Path, adapter: str) -> None:
    """T5 keeps `wo` in fp32, which every engine would cast: the audit expects the compute dtype."""
    path = tiny.t5(tmp_path / "model")
    strategy = Strategy(adapter=adapter, precision="fp16")
    job = resolve(strategy, TrainConfig(seq_len=16), describe(path), 1, hardware("T4").device)
    reads = Reader(job, reader(path, adapter=adapter).accelerator)
    for model in (reads.read(), reads.defer()):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}


def test_the_last_rank_pads_each_shard_before_it_reads_the_next_weight() -> None:
    """FSDP copies a shard with fewer rows into a padded one: at the end, all of them would be there twice."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Weights:
        def read(self, name: str, module: Any, dtype: torch.dtype, rows: slice) -> torch.Tensor:
            missing.append(sum(parameter.is_meta for parameter in model.parameters()))
            return torch.arange(10.0).view(5, 2)[rows].clone()

        def close(self) -> None:
            pass

    missing: list[int] = []
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    try:
        with torch.device("meta"):
            model: Any = torch.nn.Sequential(*(torch.nn.Linear(2, 5, bias=False) for _ in range(3)))
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (3,)))
        fill_shards(Weights(), {f"{layer}.weight": f"{layer}.weight" for layer in range(3)}, model, {})
    finally:
        dist.destroy_process_group()
    assert missing == [3, 2, 1]
    for parameter in model.parameters():
        assert torch.equal(parameter.to_local(), torch.tensor([[8.0, 9.0]]))
        assert parameter.to_local().untyped_storage().nbytes() == 2 * 2 * 4


def test_rows_of_a_weight_that_lies_in_several_tensors_are_read_alone(tmp_path: Path) -> None:
    """Experts one by one in the files: a shard begins and ends at an expert or within one's tensors, or is empty."""
    weights = reader(tiny.mixtral(tmp_path / "model"), adapter="none").defer().streamed_weights
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = weights.tensor(name)
    assert len(weights._entry(name).tensors) == 2 * len(whole) == 8
    for first in range(5):
        for end in range(first, 5):
            rows = weights.tensor(name, slice(first, end))
            assert torch.equal(rows, whole[first:end])
            assert rows.untyped_storage().nbytes() == rows.nbytes
    for module, dtype in (("embed_tokens", torch.bfloat16), ("norm", torch.float32)):
        part = weights.read(f"model.{module}.weight", None, dtype, slice(3, 5))
        assert torch.equal(part, weights.tensor(f"model.{module}.weight")[3:5].to(dtype))
        assert part.untyped_storage().nbytes() == part.nbytes  # no view of the file, which would be held


def test_what_a_script_takes_off_the_model_can_still_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `prepare` has closed the files, and after an attempt that failed: never zeros."""
    model = reader(tiny.mixtral(tmp_path / "model"), adapter="none").defer()
    weights, name = model.streamed_weights, "model.layers.1.mlp.experts.gate_up_proj"
    values, taken = weights.tensor(name), model.get_parameter(name)
    weights.defer()
    weights.close()
    with monkeypatch.context() as broken:
        broken.setattr(streamed_weights.StreamedWeights, "tensor", _gone)
        with pytest.raises(OSError, match="gone"):
            taken.sum()
    assert torch.equal(taken, values)


def _gone(*_: Any) -> None:
    raise OSError("gone")


def test_a_conversion_may_refuse_numbered_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        torch.zeros(1).view(2, 2)

    monkeypatch.setattr(hf_loading, "disk_tensors", refuse)
    model = LlamaForCausalLM(LlamaConfig(**tiny.DENSE, vocab_size=8))
    assert [*disk_layouts(model, "model.norm.weight", (64,))] == [{"model.norm.weight": (64,)}, {"norm.weight": (64,)}]


def test_a_checkpoint_in_another_form_is_read_whole(tmp_path: Path) -> None:
    """An expert in another dtype than the others of its layer cannot be joined with them as it is."""
    path = tiny.mixtral(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if "experts.1." in name)
    tensors[name] = tensors[name].half()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    reads = reader(path, adapter="lora")
    assert reads.defer() is None
    assert not reads.streamed


@pytest.mark.parametrize("difference", [0.0, 1.0])
def test_files_hold_one_value_for_tied_weights(folder: Path, difference: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].double() + difference
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if not difference:
        assert loaded(folder)[0].lm_head.weight.dtype == torch.float32
        return
    with pytest.raises(
        ModelError, match=r"ties model.embed_tokens.weight and lm_head.weight, but .*tie_word_embeddings"
    ):
        loaded(folder)


def test_a_checkpointed_graph_keeps_no_packed_weight(tmp_path: Path) -> None:
    """A gathered weight that stayed until the backward would undo ZeRO-3's sharding."""
    from bitsandbytes.autograd import _functions
    from bitsandbytes.functional import quantize_4bit

    save_packed_weights()
    x = torch.randn(4, 64, requires_grad=True)
    data, state = quantize_4bit(torch.randn(64, 64), quant_type="nf4", compress_statistics=True)
    exact = torch.autograd.grad(_functions.MatMul4Bit.apply(x, data, None, None, state).sum(), x)[0]
    gathered = [data.clone()]
    held = StorageWeakRef(gathered[0].untyped_storage())

    def product(inputs: torch.Tensor) -> torch.Tensor:
        weight = gathered[0] if gathered else data
        result: torch.Tensor = _functions.MatMul4Bit.apply(inputs, weight, None, None, state)
        return result

    result = checkpoint(product, x, use_reentrant=False)
    gathered.clear()  # let go behind the forward; the recomputation gathers again
    gc.collect()
    assert held.expired()
    assert torch.equal(torch.autograd.grad(result.sum(), x)[0], exact)


def test_an_adapter_has_the_alpha_and_dropout_that_are_given() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))
    made = add_adapter(base, "causal", "lora", 4, ["model.layers.0.mlp.up_proj"], alpha=6, dropout=0.1)
    config: Any = made.peft_config["default"]
    assert (config.lora_alpha, config.lora_dropout) == (6, 0.1)
    module: Any = made.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    assert (module.scaling["default"], module.lora_dropout["default"].p) == (1.5, 0.1)


def test_which_conversions_move_rows_between_ranks() -> None:
    """Where a rank converts its slice, and not the whole tensor, as transformers 5.23 reads."""
    from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, PermuteForRope, Transpose

    rows = {0}
    moved = [Chunk(0), Chunk(1), Concatenate(0), Concatenate(-2), Transpose(0, 1), Transpose(-2, -1), PermuteForRope()]
    assert all(_moves(step, rows, set(), 2) for step in moved)
    kept = [Concatenate(1), Concatenate(-1), MergeModulelist(0)]
    assert not any(_moves(step, rows, set(), 2) for step in kept)
    # Gate and up of experts, of each of which a rank reads its part.
    assert _moves(Concatenate(1), {1}, set(), 3)
    assert not _moves(Concatenate(1), {1}, {1}, 3)
    assert _moves(Transpose(1, 2), {1}, {1}, 3)
    assert not _moves(Transpose(1, 2), rows, set(), 3)  # of experts, which ranks share by their number
    assert not any(_moves(step, set(), set(), 2) for step in moved)
