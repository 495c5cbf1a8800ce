"""Checkpoints exported without their engine: what plain transformers and PEFT open is what was trained, or nothing is left."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from huggingface_hub import ModelCard, constants
from programs import python
from ranks import build, reset
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BitsAndBytesConfig, GenerationConfig

from toolkit import cli
from toolkit.checkpoints import CheckpointWriter, identify, read_manifest
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import CheckpointError, ModelError, RunError, ToolkitError
from toolkit.exporters import export, model_files, offline, save
from toolkit.exporters.folders import atomic_dir, opened_source
from toolkit.exporters.state_dict import full_state
from toolkit.models import describe
from toolkit.models.hf_loading import load_tokenizer
from toolkit.training.loop import train
from toolkit.transforms.adapters import keep_packing

STEPS = 2
WHOLE = ("llama", "tied", "mixtral", "deepseek", "t5", "llava")
CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in WHOLE},
    "lora": ("llama", {"adapter": "lora"}),
    "dora": ("tied", {"adapter": "dora"}),
    "qlora": ("llama", {"adapter": "qlora"}),
    "packed": ("packed", {"adapter": "qlora"}),
    "qlora8": ("llama", {"adapter": "qlora8"}),
    "lora bf16": ("tied", {"adapter": "lora", "precision": "bf16"}),
    "lora mixtral": ("mixtral", {"adapter": "lora", "lora_targets": "q_proj,v_proj"}),
    "lora t5": ("t5", {"adapter": "lora"}),
    "qlora llava": ("llava", {"adapter": "qlora"}),
}


@dataclass(frozen=True)
class Trained:
    """A run that was trained here, and what its live model held and said at its end."""

    base: Path
    run: Path
    checkpoint: Path
    state: dict[str, Any]
    logits: Any


Lives = Callable[[str], Trained]
"""A run by its name."""


def probe(kind: str) -> dict[str, Any]:
    tokens = torch.arange(3, 43)[None]
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens} if kind == "seq2seq" else {})


def said(model: Any, kind: str = "causal") -> Any:
    """Its logits. Plain bitsandbytes would compute them in bf16 on a CPU with AVX512-BF16."""
    keep_packing(model.eval())
    with torch.no_grad():
        return model(**probe(kind), use_cache=False).logits.float()


def life(base: Path, run: Path, *, ending: bool = False, **words: Any) -> Trained:
    """A few steps in this process, and a checkpoint after the last. `ending`: save the model at its end, too."""
    spec, train_config = describe(base), TrainConfig(steps=STEPS, micro_batch=2, seq_len=16, lr=2e-2, warmup=0)
    ours, schedule, tokenizer = build(base, train_config, **words)
    rows = torch.randint(3, 250, (STEPS, 2, 16), generator=torch.Generator().manual_seed(1))
    identity = identify(spec, ours.job.strategy, "synthetic")
    saver = CheckpointWriter(ours, schedule, run / "checkpoints", identity, versions={"torch": "2"})
    for step in train(ours, iter({"input_ids": row, "labels": row} for row in rows), schedule):
        saver.save(step.step)
    saver.wait()
    if ending:
        save(ours, tokenizer, run / "export")
    (run / "run.json").write_text("{}")
    module = ours.accelerator.unwrap_model(ours.model)
    reset()
    checkpoint = run / "checkpoints" / f"step-{STEPS:08d}"
    return Trained(base, run, checkpoint, module.state_dict(), said(module, spec.kind))


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    """Each run once, when it is first asked for. Tests copy what they damage."""
    root = tmp_path_factory.mktemp("lives")
    lives: dict[str, Trained] = {}

    def get(name: str) -> Trained:
        kind, words = CELLS[name]
        base = root / kind
        if not base.exists():
            changes = {"tie_word_embeddings": True} if kind == "tied" else {}
            getattr(tiny, "llama" if changes else kind)(base, **changes)
            # transformers calls it invalid, and many published models have it.
            (base / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
        if name not in lives:
            lives[name] = life(base, root / f"run {name}", **words)
        return lives[name]

    return get


def opened(folder: Path, base: Path, **words: Any) -> Any:
    """As anybody would: nothing of ours."""
    ends = {"t5": "Seq2SeqLM", "llava": "ImageTextToText"}
    auto = getattr(transformers, f"AutoModelFor{ends.get(base.name, 'CausalLM')}")
    return auto.from_pretrained(folder, **words)


def kind_of(base: Path) -> str:
    return "seq2seq" if base.name == "t5" else "causal"


def headers(folder: Path) -> dict[str, tuple[str, list[int]]]:
    parts = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                parts[name] = (part.get_dtype(), part.get_shape())
    return parts


# What comes out is what was trained


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_model_opens_in_transformers_as_it_was_trained(name: str, lives: Lives, tmp_path: Path) -> None:
    was = lives(name)
    result = export(was.run, tmp_path / "out")
    assert result.logits_error == 0.0
    assert (result.adapter, result.step, result.checkpoint) == (False, STEPS, str(was.checkpoint))
    model = opened(tmp_path / "out", was.base)
    state = model.state_dict()
    assert state.keys() == was.state.keys()
    assert [key for key in state if not torch.equal(state[key], was.state[key])] == []
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert torch.equal(said(model, kind_of(was.base)), was.logits)
    # On the disk the names are those that the model came with: one expert a tensor, tied ones once.
    assert headers(tmp_path / "out").keys() == headers(was.base).keys()
    assert (model.config.get_text_config().use_cache, model.config.architectures) == (True, [type(model).__name__])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("w1 w2")["input_ids"] == AutoTokenizer.from_pretrained(was.base)("w1 w2")["input_ids"]
    assert model.config.pad_token_id == tokenizer.pad_token_id == model.generation_config.pad_token_id
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.temperature, generation.top_p, generation.do_sample) == (0.6, 0.9, None)
    if name == "tied":
        assert model.lm_head.weight is model.model.embed_tokens.weight
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_shards_are_written_one_after_the_other_with_an_index(
    lives: Lives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    was, limit = lives("mixtral"), 150_000
    monkeypatch.setattr(model_files, "FILE_BYTES", limit)
    export(was.checkpoint, tmp_path / "out")
    files = sorted(tmp_path.glob("out/*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert set(index["weight_map"].values()) == {path.name for path in files}
    assert all(path.stat().st_size < limit + 20_000 for path in files)
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in was.state.values())
    state = opened(tmp_path / "out", was.base).state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in was.state.items())
    # The files are those of safetensors' own writer, and no more than the largest tensor is in memory.
    for path in files:
        save_file(load_file(path), tmp_path / "twin", metadata={"format": "pt"})
        assert (tmp_path / "twin").read_bytes() == path.read_bytes()
    spec = describe(was.base)
    model = model_files.skeleton(spec, *model_files.source_configs(spec, load_tokenizer(spec)))
    with opened_source(was.checkpoint) as source:
        planned = model_files.ModelFiles(model, full_state(source.weights, model, spec))
    sizes = {name: tensor.nbytes for name, tensor in was.state.items()}
    assert max(sum(sizes[name] for name in group) for group in planned.groups) == max(sizes.values())
    for name in ("gate_up_proj", "down_proj"):
        fused = was.state[f"model.layers.0.mlp.experts.{name}"]
        parts = planned._on_disk({f"model.layers.0.mlp.experts.{name}": fused})
        assert len(parts) >= len(fused)
        assert {part.untyped_storage().data_ptr() for part in parts.values()} == {fused.untyped_storage().data_ptr()}


def test_a_tokenizer_with_two_chat_templates(lives: Lives, tmp_path: Path) -> None:
    """It is saved with a subfolder. What the run had saved before it was killed is replaced."""
    base = Path(shutil.copytree(lives("llama").base, tmp_path / "base"))
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(base)
    assert (base / "additional_chat_templates" / "tool_use.jinja").is_file()
    (tmp_path / "run" / "export").mkdir(parents=True)
    (tmp_path / "run" / "export" / "model.safetensors").write_text("of an earlier end")
    was = life(base, tmp_path / "run", ending=True)
    assert sorted(path.name for path in was.run.iterdir()) == ["checkpoints", "export", "run.json"]
    export(was.run, tmp_path / "out")
    for folder in (was.run / "export", tmp_path / "out"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
        assert said(opened(folder, base)).equal(was.logits)


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", "bf16"), ("deepseek", "bf16"), ("mixtral", "fp16"), ("t5", "fp16")]
)
def test_another_dtype_rounds_what_was_trained(name: str, dtype: str, lives: Lives, tmp_path: Path) -> None:
    was = lives(name)
    result = export(was.checkpoint, tmp_path / "out", dtype=dtype)
    assert result.logits_error == 0.0
    assert "Saved in" in result.notes[0]
    rounded = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    model = opened(tmp_path / "out", was.base, dtype="auto")
    assert model.config.dtype == rounded
    state = model.state_dict()
    assert all(
        torch.equal(state[key], tensor.to(rounded).to(state[key].dtype))
        for key, tensor in was.state.items()
        if ".wo." not in key and "e_score_correction_bias" not in key
    )
    # What transformers never rounds is not rounded here.
    kept = {key for key, (stored, _) in headers(tmp_path / "out").items() if stored == "F32"}
    assert kept == {key for key in headers(was.base) if ".wo." in key or "e_score_correction_bias" in key}
    assert all(torch.equal(state[key], was.state[key]) for key in kept)


@pytest.mark.parametrize("name", ["lora", "dora", "qlora", "packed", "lora bf16", "lora mixtral", "lora t5"])
def test_an_adapter_opens_in_peft_as_it_was_trained(name: str, lives: Lives, tmp_path: Path) -> None:
    from peft import PeftModel

    was = lives(name)
    result = export(was.run, tmp_path / "out")
    assert result.adapter
    assert result.logits_error <= 1e-6
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= {
        path.name for path in tmp_path.glob("out/*")
    }
    model = PeftModel.from_pretrained(base_of(was, name), tmp_path / "out")
    state = model.state_dict()
    trained = [key for key in was.state if ".lora_" in key]
    assert trained
    assert all(torch.equal(state[key], was.state[key]) for key in trained)
    assert any(was.state[key].any() for key in trained if "lora_B" in key)
    logits = said(model, kind_of(was.base))
    assert (logits - was.logits).norm() / was.logits.norm() <= (1e-2 if "bf16" in name else 1e-6)
    if name in (
        "lora",
        "qlora",
        "packed",
    ):  # the line that is printed opens what was trained, not the adapter over other weights
        import peft
        import transformers

        printed = eval(result.load, {**vars(transformers), **vars(peft)})
        again = said(printed.float(), kind_of(was.base))
        assert (again - was.logits).norm() / was.logits.norm() <= 1e-5
        assert ("load_in_4bit=True" in (tmp_path / "out" / "README.md").read_text()) == (name == "qlora")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["use_dora"]) == (str(was.base), name == "dora")


def base_of(was: Trained, name: str) -> Any:
    if name != "qlora":
        return opened(was.base, was.base, dtype=torch.bfloat16 if "bf16" in name else torch.float32)
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=torch.float32,
    )
    return opened(was.base, was.base, dtype=torch.float32, quantization_config=how)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("lora", 1e-6),
        ("dora", 1e-6),
        ("qlora", 1e-6),
        ("packed", 1e-6),
        ("lora mixtral", 1e-6),
        ("lora t5", 1e-6),
        ("lora bf16", 1e-2),
        ("qlora8", 2e-2),
        ("qlora llava", 1e-6),
    ],
)
def test_a_merged_model_says_what_was_trained(name: str, limit: float, lives: Lives, tmp_path: Path) -> None:
    was = lives(name)
    result = export(was.run, tmp_path / "out", merge=True)
    assert not result.adapter
    assert result.logits_error <= limit
    assert ("dequantized" in str(result)) == name.startswith(("qlora", "packed"))
    model = opened(tmp_path / "out", was.base, dtype="auto")
    assert not hasattr(model.config, "quantization_config")
    if name == "packed":  # the file's own 4 bits, which are those of packing the whole weights
        assert torch.equal(was.logits, lives("qlora").logits)
    whole = lives("qlora").base if name == "packed" else was.base
    assert headers(tmp_path / "out").keys() == headers(whole).keys()
    if name == "qlora llava":  # what text does not pass has not gone through 4 bits
        source = opened(was.base, was.base).state_dict()
        frozen = [key for key in source if "vision_tower" in key or "projector" in key]
        assert frozen
        assert all(torch.equal(model.state_dict()[key], source[key]) for key in frozen)
    kind = kind_of(was.base)
    logits, before = said(model, kind), said(opened(was.base, was.base, dtype=torch.float32), kind)
    error = float((logits - was.logits).norm() / was.logits.norm())
    moved = float((before - was.logits).norm() / was.logits.norm())
    assert error <= limit
    assert moved > 4 * limit, "training has to show, or merging nothing would pass too"


def test_an_adapter_is_merged_before_it_is_trained_further(lives: Lives, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    was, folder = lives("lora"), tmp_path / "adapter"
    export(was.run, folder)
    with pytest.raises(ModelError, match=rf"is an adapter over '{was.base}'.*toolkit export RUN --merge") as error:
        describe(folder)
    assert "not on this machine" not in str(error.value)
    AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload().save_pretrained(tmp_path / "theirs")
    load_tokenizer(describe(was.base)).save_pretrained(tmp_path / "theirs")
    export(was.run, tmp_path / "ours", merge=True)
    for merged in ("theirs", "ours"):
        ours, _, _ = build(tmp_path / merged, TrainConfig(seq_len=16, lr=1e-3), adapter="lora")
        first = said(ours.accelerator.unwrap_model(ours.model))
        assert (first - was.logits).norm() / was.logits.norm() <= 1e-6
        reset()

    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/gone/base"}))
    with pytest.raises(ModelError, match="'/gone/base' is not on this machine: give its present place"):
        describe(folder)


def test_merged_in_another_dtype(lives: Lives, tmp_path: Path) -> None:
    result = export(lives("lora").run, tmp_path / "out", merge=True, dtype="bf16")
    assert {stored for stored, _ in headers(tmp_path / "out").values()} == {"BF16"}
    assert 0 < result.logits_error < 2e-2


def test_the_model_card_says_what_it_was_trained_with(lives: Lives, tmp_path: Path) -> None:
    was = lives("lora")
    export(was.checkpoint, tmp_path / "adapter")
    export(was.checkpoint, tmp_path / "merged", merge=True)
    for name, library in (("adapter", "peft"), ("merged", "transformers")):
        card = ModelCard.load(tmp_path / name / "README.md")
        assert card.data.library_name == library
        assert card.data.tags[0] == "accelerate-toolkit"
        for word in ("adapter lora", f"steps         {STEPS}", "fingerprint synthetic", "torch 2", ".from_pretrained("):
            assert " ".join(word.split()) in " ".join(card.text.split())
        assert str(was.base.parent) not in card.content


def test_the_newest_sound_checkpoint_is_taken_and_nothing_is_touched(lives: Lives, tmp_path: Path) -> None:
    run = Path(shutil.copytree(lives("llama").run, tmp_path / "run"))
    flip(run / "checkpoints" / f"step-{STEPS:08d}" / "rank-00000.safetensors")
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    result = export(run, tmp_path / "out")
    assert result.step == STEPS - 1
    assert f"step-{STEPS:08d}: rank-00000.safetensors is damaged" in result.notes[0]
    assert result.notes[0] in " ".join(str(result).split())  # a terminal wraps it
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)


def test_a_folder_of_anothers_needs_its_model(lives: Lives, tmp_path: Path) -> None:
    """As `accelerator.save_model` writes it: names of the module, tied weights once, no config."""
    was = lives("tied")
    state = {name: tensor for name, tensor in was.state.items() if name != "lm_head.weight"}
    (tmp_path / "theirs").mkdir()
    save_file(state, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match=r"does not name its model.*--model"):
        export(tmp_path / "theirs", tmp_path / "out")
    lives("mixtral")
    with pytest.raises(RunError, match=r"does not hold the weights of .*mixtral.*--model"):
        export(tmp_path / "theirs", tmp_path / "out", model=str(was.base.parent / "mixtral"))
    result = export(tmp_path / "theirs", tmp_path / "out", model=str(was.base))
    assert (result.logits_error, result.step) == (0.0, None)
    model = opened(tmp_path / "out", was.base)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in was.state.items())


@pytest.mark.parametrize("changed", [True, False])
def test_a_buffer_is_exported_as_training_left_it(changed: bool, lives: Lives, tmp_path: Path) -> None:
    """Rounded alone it leaves as it came. A script's own buffer, which the model does not know, is left out."""
    was = lives("deepseek")
    checkpoint = Path(shutil.copytree(was.checkpoint, tmp_path / was.checkpoint.name))
    (path,) = checkpoint.glob("*.safetensors")
    manifest, tensors = read_manifest(checkpoint), load_file(path)
    (key,) = (key for key in tensors if key.startswith("buffer:"))
    name = key.split(":")[1]
    tensors[key] = (tensors[key] + 1 if changed else tensors[key]).bfloat16()
    tensors["buffer:own::0"] = torch.tensor(3)
    save_file(tensors, path)
    about = {**manifest.tensors, name: {"buffer": {**manifest.tensors[name]["buffer"], "dtype": "bfloat16"}}}
    about["own"] = {"buffer": {"shape": [], "dtype": "int64"}}
    files = {path.name: {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}}
    crafted = dataclasses.replace(manifest, files=files, tensors=about)
    (checkpoint / "manifest.json").write_bytes(crafted.encode())
    export(checkpoint, tmp_path / "out")
    saved, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", was.base))
    assert saved.keys() == before.keys()
    assert torch.equal(saved[name], tensors[key] if changed else before[name])


# What is refused leaves nothing behind


def refused(problem: type[Exception], match: str, source: Path, out: Path, **words: Any) -> None:
    before = sorted(path.name for path in out.parent.iterdir())
    with pytest.raises(problem, match=match):
        export(source, out, **words)
    assert sorted(path.name for path in out.parent.iterdir()) == before


def test_folders_without_anything(lives: Lives, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(RunError, r"no such folder", tmp_path / "nowhere", out)
    (tmp_path / "empty").mkdir()
    refused(RunError, r"holds nothing to export.*run\.json.*manifest\.json", tmp_path / "empty", out)
    (tmp_path / "step-00000009").mkdir()
    refused(CheckpointError, r"step-00000009 is damaged.*manifest\.json is missing", tmp_path / "step-00000009", out)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    refused(RunError, r"no checkpoint that can be exported.*toolkit resume .*--save-every", tmp_path / "run", out)


def test_damaged_checkpoints(lives: Lives, tmp_path: Path) -> None:
    was, out = lives("llama"), tmp_path / "out"
    run = Path(shutil.copytree(was.run, tmp_path / "run"))
    for checkpoint in (run / "checkpoints").iterdir():
        flip(checkpoint / "rank-00000.safetensors")
    newest, older = (run / "checkpoints" / f"step-{step:08d}" for step in (STEPS, STEPS - 1))
    match = rf"{newest.name} is damaged: rank-00000\.safetensors is damaged.*Take another: .*{older.name}"
    refused(CheckpointError, match, newest, out)
    refused(RunError, rf"skipped .*{newest.name}: .*damaged.*skipped .*{older.name}", run, out)


def test_places_that_are_taken(lives: Lives, tmp_path: Path) -> None:
    was = lives("llama")
    run = Path(shutil.copytree(was.run, tmp_path / "run"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear reader")
    refused(RunError, r"full is not empty \(it has letter\.txt\).*-o", run, tmp_path / "full")
    refused(RunError, r"is a file.*-o", run, tmp_path / "full" / "letter.txt")
    refused(RunError, r"lies among the checkpoints.*-o", run, run / "checkpoints" / "out")
    refused(
        RunError,
        r"lies among the checkpoints.*-o",
        run / "checkpoints" / was.checkpoint.name,
        run / "checkpoints" / "step-00000009",
    )
    assert (tmp_path / "full" / "letter.txt").read_text() == "dear reader"
    (tmp_path / "void").mkdir()
    assert export(run, tmp_path / "void").logits_error == 0.0


def test_what_cannot_be_done(lives: Lives, tmp_path: Path) -> None:
    was = lives("llama")
    refused(RunError, r"holds a whole model.*--merge", was.run, tmp_path / "out", merge=True)
    refused(ToolkitError, r"dtype 'bf15' is unknown.*fp32, bf16, fp16", was.run, tmp_path / "out", dtype="bf15")
    lives("tied")
    match = r"was written of another model"
    refused(CheckpointError, match, was.run, tmp_path / "out", model=str(was.base.parent / "tied"))


@pytest.mark.parametrize("merge", [False, True])
def test_a_base_that_changed(merge: bool, lives: Lives, tmp_path: Path) -> None:
    was = lives("lora")
    base = Path(shutil.copytree(was.base, tmp_path / "base"))
    moved = export(was.run, tmp_path / "out", merge=merge, model=str(base))
    assert moved.logits_error is not None
    shutil.rmtree(tmp_path / "out")
    flip(base / "model.safetensors")
    refused(CheckpointError, r"trained over another base", was.run, tmp_path / "out", merge=merge, model=str(base))


def test_a_model_that_is_gone(lives: Lives, tmp_path: Path) -> None:
    base = Path(shutil.copytree(lives("llama").base, tmp_path / "base"))
    was = life(base, tmp_path / "run")
    (base / "model.safetensors").unlink()
    assert export(was.run, tmp_path / "config-only").logits_error == 0.0, "a config and a tokenizer are enough"
    shutil.rmtree(base)
    refused(ModelError, r"--model", was.run, tmp_path / "out")


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (lambda tensors: tensors["model.norm.weight"].mul_(1.01), r"model\.norm\.weight has other bytes"),
        (lambda tensors: tensors["model.norm.weight"].fill_(float("nan")), r"model\.norm\.weight is not finite"),
        (lambda tensors: tensors.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (lambda tensors: tensors.update(other=tensors["model.norm.weight"].clone()), "other does not belong to it"),
        (lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"][:0]}), "is of size zero"),
        (lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"][:5].clone()}), "expected"),
    ],
)
def test_what_is_written_wrong_is_removed(
    fault: Callable[[dict[str, Any]], object],
    match: str,
    lives: Lives,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = offline.check_files

    def damaged(folder: Path, planned: Any) -> None:
        tensors = load_file(folder / "model.safetensors")
        fault(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        check(folder, planned)

    monkeypatch.setattr(offline, "check_files", damaged)
    refused(RunError, match, lives("llama").run, tmp_path / "out")


MANIFESTS: list[tuple[dict[str, Any], str]] = [
    ({"strategy": {}}, "strategy has no sharding; strategy has no precision"),
    ({"strategy": {"adapter": "glue"}}, "adapter 'glue' is unknown"),
    ({"strategy": {"glue": 1}}, "Strategy has no field 'glue'"),
    ({"train_config": {}}, "train_config has no micro_batch"),
    ({"train_config": {"lr": "fast"}}, "lr 'fast': expected float"),
    ({"train_config": {"lr": None}}, "lr is None"),
    ({"identity": {}}, "identity has no data"),
    ({"identity": {"data": 1, "source": ["x"]}}, "data is 1, expected str"),
    ({"identity": {"base": "x"}}, "base is x, expected dict"),
    ({"tensors": {"model.norm.weight": {"exp_avg": {"shape": [64], "dtype": "float32"}}}}, "norm.weight has no weight"),
]


def test_manifests_that_somebody_made(lives: Lives, tmp_path: Path) -> None:
    """Each is whole by its own sha256, which anybody can compute; without what an export needs."""
    was = lives("llama")
    checkpoint = Path(shutil.copytree(was.checkpoint, tmp_path / "step-00000002"))
    manifest = read_manifest(was.checkpoint)
    for changes, match in MANIFESTS:
        values: dict[str, Any] = {
            name: {**getattr(manifest, name), **value} if isinstance(value, dict) and value else value
            for name, value in changes.items()
        }
        (checkpoint / "manifest.json").write_bytes(dataclasses.replace(manifest, **values).encode())
        assert read_manifest(checkpoint) != manifest
        refused(CheckpointError, rf"manifest\.json cannot be exported from: .*{match}", checkpoint, tmp_path / "out")
    tensors = {
        name: {**about, "weight": {**about["weight"], "dtype": "int8"}} for name, about in manifest.tensors.items()
    }
    (checkpoint / "manifest.json").write_bytes(dataclasses.replace(manifest, tensors=tensors).encode())
    for dtype in (None, "fp32"):
        match = r"is damaged: .*holds float32, and the manifest names int8"
        refused(CheckpointError, match, checkpoint, tmp_path / "out", dtype=dtype)


def test_what_is_there_is_replaced_by_what_is_whole(tmp_path: Path) -> None:
    final, mine = tmp_path / "export", tmp_path / ".export.mine.partial"
    mine.mkdir()
    for text in ("first", "second"):
        with atomic_dir(final, replace=True) as draft:
            (draft / "deep" / "er").mkdir(parents=True)
            (draft / "deep" / "er" / "file").write_text(text)
        assert (final / "deep" / "er" / "file").read_text() == text
    with pytest.raises(ZeroDivisionError), atomic_dir(final, replace=True):
        raise ZeroDivisionError
    with pytest.raises(RunError, match=r"export cannot be put in place: .*not empty"), atomic_dir(final) as draft:
        (draft / "file").write_text("third")
    assert (final / "deep" / "er" / "file").read_text() == "second"
    mine.rmdir()
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


KILLED = """
import os, sys
from pathlib import Path
from toolkit.exporters.folders import atomic_dir
left = [int(sys.argv[2])]
def hook(event, arguments):
    if event == "os.rename":
        left[0] -= 1
        if not left[0]:
            os._exit(9)
sys.addaudithook(hook)
with atomic_dir(Path(sys.argv[1]), replace=True) as draft:
    (draft / "file").write_text("new")
"""


@pytest.mark.parametrize("rename", [1, 2])
def test_a_kill_between_two_names_loses_nothing(rename: int, tmp_path: Path) -> None:
    final = tmp_path / "export"
    final.mkdir()
    (final / "file").write_text("old")
    python("-c", KILLED, final, rename, code=9)
    assert final.exists() == (rename == 1)
    with pytest.raises(ZeroDivisionError), atomic_dir(final, replace=True):
        raise ZeroDivisionError
    assert (final / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_full_disk_is_said_before_anything_is_written(
    lives: Lives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    was, usage = lives("llama"), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    refused(RunError, r"too full.*525,568 bytes\) are needed.*1,000 bytes\) are free", was.run, tmp_path / "out")


def test_the_shell_says_the_same(lives: Lives, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    was = lives("lora")
    out = str(tmp_path / "out")
    assert cli.main(["export", str(was.run), "-o", out, "--merge", "--dtype", "fp32", "--json", "-"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert (printed["folder"], printed["adapter"], printed["step"]) == (out, False, read_manifest(was.checkpoint).step)
    assert printed["load"] == f"AutoModelForCausalLM.from_pretrained({out!r})"
    assert cli.main(["export", str(was.run), "-o", out]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "is not empty" in lines[0]


def test_a_manifest_downloads_no_model(lives: Lives, tmp_path: Path) -> None:
    """A checkpoint may be a stranger's: what it names on the Hub is taken from the cache, or named by the user."""
    trained = lives("llama")
    run = shutil.copytree(trained.run, tmp_path / "run")
    checkpoint = run / "checkpoints" / trained.checkpoint.name
    manifest = read_manifest(checkpoint)
    named = {**manifest.identity, "model": "someone/model", "source": "someone/model"}
    (checkpoint / "manifest.json").write_bytes(dataclasses.replace(manifest, identity=named).encode())
    refused(
        ModelError,
        r"A name in a checkpoint starts no download: --model someone/model",
        run,
        tmp_path / "out",
    )
    cache = Path(constants.HF_HUB_CACHE) / "models--someone--model"
    try:
        shutil.copytree(trained.base, cache / "snapshots" / ("0" * 40))
        (cache / "refs").mkdir()
        (cache / "refs/main").write_text("0" * 40)
        assert export(run, tmp_path / "out").logits_error == 0
        assert "base_model: someone/model" in (tmp_path / "out/README.md").read_text()
    finally:
        shutil.rmtree(cache)
