"""What a running engine saves: the bytes decide whether it is what was trained, and logits only add a sentence."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from ranks import build
from transformers import AutoModelForCausalLM

from toolkit.config.run_config import RunConfig
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import CheckpointError, RunError
from toolkit.devices import machine
from toolkit.engines.records import Prepared
from toolkit.exporters import Export, from_engine, save, try_save, verify
from toolkit.exporters.verification import fits, read_base, reopen
from toolkit.models import describe
from toolkit.training.metrics import evaluate
from toolkit.training.preparation import prepared
from toolkit.training.rank_run import RankRun
from toolkit.training.setup import accelerator

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llama(tmp_path_factory.mktemp("base") / "llama")


def loaded(base: Path, **words: Any) -> tuple[Prepared, Any]:
    """A model that could be trained, and its tokenizer."""
    ours, _, tokenizer = build(base, TrainConfig(micro_batch=2, seq_len=16, lr=1e-3), **words)
    return ours, tokenizer


def batch() -> dict[str, Any]:
    rows = torch.randint(3, 250, (2, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": rows, "labels": rows}


def flags(model: Any) -> list[bool]:
    """Whether each 4-bit module would repack its weight."""
    return [m.support_avx512bf16_for_cpu for m in model.modules() if hasattr(m, "support_avx512bf16_for_cpu")]


def packed_bytes(model: Any) -> list[str]:
    weights = [p for p in model.parameters() if type(p).__name__ == "Params4bit"]
    return [hashlib.sha256(p.data.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for p in weights]


def test_four_bit_weights_stay_as_they_were_packed(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every CPU as on one with AVX512-BF16, where bitsandbytes would overwrite them in eval mode."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    ours, tokenizer = loaded(base, adapter="qlora", lora_rank=4)
    before = packed_bytes(ours.model)
    assert len(before) == len(flags(ours.model)) == 14
    assert not any(flags(ours.model))
    with torch.no_grad():
        trained_with = ours.model(**batch()).logits
        ours.model.eval()
        assert torch.equal(ours.model(**batch()).logits, trained_with)
    evaluate(ours, [batch()])
    planned = save(ours, tokenizer, tmp_path / "out")
    result = verify(ours, tmp_path / "out", planned, batch())
    assert (result.logits_error, result.notes) == (0.0, ())
    assert packed_bytes(ours.model) == before
    assert not any([*flags(reopen(ours.job, tmp_path / "out")), *flags(read_base(ours.job, on_host=True))])


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_saving_is_tried_before_the_first_step(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: str
) -> None:
    ours, tokenizer = loaded(base, adapter=adapter)
    folder = tmp_path / "out"
    save(ours, tokenizer, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    try_save(ours, tokenizer, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 1 << 40, 1000))
        with pytest.raises(CheckpointError, match="too full for the export"):
            try_save(ours, tokenizer, folder)
    (tmp_path / "file").write_text("")
    for words, place, said in (
        (object(), folder, "Nothing was trained"),
        (tokenizer, tmp_path / "file" / "out", "made"),
    ):
        with pytest.raises(RunError, match=said):
            try_save(ours, words, place)
        run: Any = RankRun.__new__(RankRun)  # the recipe: no checkpoint is read, and no attempt committed
        run.config, run.folder = RunConfig(save=True), SimpleNamespace(export=place)
        run.preflight = SimpleNamespace(tokenizer=words)
        with pytest.raises(RunError, match=said):
            run.restore(ours, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def of_ones_own(model: Any) -> Prepared:
    """A model that the toolkit did not read, prepared without its spec."""
    ours = accelerator({"sharding": "none", "precision": "fp32"})
    return prepared(ours, ours.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3)))


def test_the_users_module_decides_what_is_tied(tmp_path: Path) -> None:
    """An untied head where the config ties it. A layer with a buffer, used twice."""
    model = AutoModelForCausalLM.from_pretrained(tiny.llama(tmp_path / "tied", tie_word_embeddings=True))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() / 2)
    save(of_ones_own(model), None, tmp_path / "out")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not opened.config.tie_word_embeddings
    assert torch.equal(opened.lm_head.weight, opened.model.embed_tokens.weight / 2)

    model = AutoModelForCausalLM.from_pretrained(tiny.gemma4(tmp_path / "gemma4"))
    model.model.layers[1] = model.model.layers[0]
    planned = save(of_ones_own(model), None, tmp_path / "out")
    assert {name.replace("layers.1", "layers.0") for name in planned if "layers.1." in name} == {
        name for name in planned if "layers.0." in name
    }
    assert "lm_head.weight" not in planned, "its config ties it"


def test_a_saved_folder_that_opens_as_another_model_is_an_error(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    model.score = torch.nn.Linear(4, 4)
    said = r"differs from the trained model: unexpected keys: score\..*Do not use it"
    with pytest.raises(RunError, match=said):
        save(of_ones_own(model), None, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists(), "its bytes are the trained ones"


def checked(ours: Prepared, folder: Path, planned: Any) -> Export:
    result = verify(ours, folder, planned, batch())
    return result


def test_bytes_decide_and_logits_add_a_sentence(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, tokenizer = loaded(base)
    folder = tmp_path / "out"
    planned = save(ours, tokenizer, folder)
    assert checked(ours, folder, planned).notes == ()

    # Its forward depends on what no checkpoint holds.
    rotary = next(module for name, module in ours.model.named_modules() if name.endswith("rotary_emb"))
    rotary.inv_freq.mul_(2)
    result = checked(ours, folder, planned)
    assert result.logits_error > 1e-3
    said = f"The saved bytes are the trained ones, but logits differ by {result.logits_error:.1e} relative"
    for text in (str(result), (folder / "README.md").read_text()):
        assert said in " ".join(text.split())
        assert "Do not use it" not in text
    rotary.inv_freq.div_(2)

    # What was trained with a kernel of a GPU is compared with one that computes here.
    strategy = dataclasses.replace(ours.job.strategy, attention="flash_attention_2")
    gpu = dataclasses.replace(ours, job=dataclasses.replace(ours.job, strategy=strategy))
    (note,) = checked(gpu, folder, planned).notes
    assert note == (
        "Logits were compared on the cpu with sdpa; the model was trained on the cpu with flash_attention_2."
    )

    # A library, a kernel or memory that is missing here.
    def failing(name: str, problem: Exception) -> Export:
        def fails(*_: object, **__: object) -> None:
            raise problem

        with monkeypatch.context() as patched:
            patched.setattr(from_engine, name, fails)
            return checked(ours, folder, planned)

    for name, problem in (
        ("reopen", ImportError("no kernel here")),
        ("reopen", RuntimeError("DefaultCPUAllocator: can't allocate memory")),
        ("_error", RuntimeError("no kernel here")),
    ):
        result = failing(name, problem)
        assert result.logits_error is None
        said = f"not compared ({type(problem).__name__}: {problem}). The saved bytes are the trained ones."
        assert said in result.notes[0]

    # What transformers refuses to open, though its bytes are right.
    config = (folder / "config.json").read_text()
    for broken in (config.replace('"llama"', '"no such type"'), "{"):
        (folder / "config.json").write_text(broken)
        result = checked(ours, folder, planned)
        assert result.logits_error is None
        for text in (str(result), (folder / "README.md").read_text(), " ".join(result.notes)):
            assert "Warning: the saved folder does not open (" in " ".join(text.split())
            assert "Do not use it" not in text
        assert str(folder) not in (folder / "README.md").read_text()
    (folder / "config.json").write_text(config)
    assert "does not open (AssertionError: of ours)" in failing("reopen", AssertionError("of ours")).notes[0]

    # The control group of a container leaves less than the host has.
    with monkeypatch.context() as patched:
        patched.setattr(machine, "cgroup_memory", lambda *_: [(1 << 30, 100_000)])
        assert not fits(describe(base), "float32")
        result = checked(ours, folder, planned)
    assert result.logits_error is None
    assert "too little memory" in result.notes[0]
    assert fits(describe(base), "float32")

    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        RunError, match=r"differs from the trained model: .* has other bytes than were trained\. Do not use it"
    ):
        checked(ours, folder, planned)
    path.write_bytes(data[:-4])
    with pytest.raises(RunError, match=r"model\.safetensors cannot be read: .*Do not use it"):
        checked(ours, folder, planned)
