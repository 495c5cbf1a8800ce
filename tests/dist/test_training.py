"""The loop on two real ranks: accumulation, numbers that are not finite, loss scaling, and what is saved."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from programs import python
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.devices.machine import hardware
from toolkit.exporters import generate

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with a tokenizer, as a folder."""
    return tiny.llama(tmp_path_factory.mktemp("model"), intermediate_size=128, max_position_embeddings=64)


@pytest.fixture(scope="module")
def results(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("training")
    cells = [{"check": name, "out": []} for name in ("accumulation", "not_finite", "scaling")]
    cells += [{"check": name, "out": [str(out)]} for name in ("saved", "saved_without_a_spec")]
    (results,) = tiny.run_groups("training_worker.py", [(2, cells)], model, out)
    return {**{result["cell"]["check"]: result["gave"] for result in results}, "out": out, "model": model}


def test_ddp_reduces_once_a_step_however_many_micro_batches(results: dict[str, Any]) -> None:
    whole, split = results["accumulation"]["ddp 1"], results["accumulation"]["ddp 4"]
    assert split["reductions"] == whole["reductions"] == len(whole["losses"])


@pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3", "fsdp"])
def test_accumulation_equals_one_large_batch(results: dict[str, Any], sharding: str) -> None:
    whole, split = results["accumulation"][f"{sharding} 1"], results["accumulation"][f"{sharding} 4"]
    assert split["tokens"] == whole["tokens"]
    for name in ("losses", "norms"):
        assert split[name] == pytest.approx(whole[name], rel=1e-5), name


def test_the_learning_rate_advances_once_a_step_whatever_the_ranks(results: dict[str, Any]) -> None:
    expected = [3e-3, 5e-3, 5e-3, 3e-3]
    for run in results["accumulation"].values():
        assert run["lr"] == pytest.approx(expected)


def test_numbers_that_are_not_finite_end_the_run_with_the_weights_of_the_step_before(results: dict[str, Any]) -> None:
    """Under tp, too, where another rank of the group has finite logits."""
    assert len(results["not_finite"]) == 16
    for cell, result in results["not_finite"].items():
        assert "step 3" in result["said"], cell
        assert "Weights are those of step 2" in result["said"], cell
        assert "sample-3" in result["said"], cell
        assert result["same"], cell


def test_a_checkpoint_holds_no_later_step(model: Path, tmp_path: Path) -> None:
    """Where the numbers of a step may be read while the next one is computed, as on CUDA."""
    program = "from toolkit import finetune; from toolkit.training.rank_run import RankRun; "
    program += "RankRun.may_read_late = lambda run, step: True; finetune.main()"
    (tmp_path / "data.txt").write_text("some words to train on, " * 400)
    flags = {"model": model, "data": tmp_path / "data.txt", "run-dir": tmp_path / "run", "sharding": "none"}
    flags |= {"steps": 5, "save-every": 2, "keep": 3, "micro-batch": 1, "seq-len": 16}
    words = ["--no-save", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]
    python("-c", program, *words, code=0)
    manifests = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("run/checkpoints/*/manifest.json"))]
    assert [(manifest["step"], manifest["counters"]["steps"]) for manifest in manifests] == [(2, 2), (4, 4), (5, 5)]
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events] == [1, 2, 3, 4, 5]


def test_fp16_skips_a_step_that_overflows_and_goes_on(results: dict[str, Any]) -> None:
    able = "fp16" in hardware().device.dtypes
    for sharding, result in results["scaling"].items():
        assert ("refused" not in result) == able, sharding
        if not able:
            assert "does not compute it" in result["refused"]
            continue
        assert result["skipped"][2], sharding
        assert len(result["skipped"]) == 8, sharding
        assert all(math.isfinite(loss) for loss in result["losses"]), sharding
        assert result["losses"][-1] < result["losses"][0], sharding


@pytest.mark.parametrize("cell", ["ddp", "zero1", "zero3", "fsdp", "fsdp_grad_op"])
def test_a_whole_model_loads_in_plain_transformers(results: dict[str, Any], cell: str) -> None:
    folder = results["out"] / cell
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(parameter.numel() for parameter in model.parameters())
    assert model.config.use_cache
    assert len(AutoTokenizer.from_pretrained(folder)) == len(AutoTokenizer.from_pretrained(results["model"])) == 250
    assert results["saved"][cell]["logits_error"] <= 1e-5
    reference = AutoModelForCausalLM.from_pretrained(results["out"] / "ddp")
    probe = torch.arange(3, 35)[None]
    with torch.no_grad():
        mine, theirs = model(probe).logits, reference(probe).logits
    # Adam's first steps follow the sign of a gradient. Where that is rounding, single weights differ, and the logits do not.
    assert (mine - theirs).norm() <= 1e-3 * theirs.norm()


@pytest.mark.parametrize("sharding", ["fsdp", "zero3"])
def test_a_users_own_model_is_saved(results: dict[str, Any], sharding: str) -> None:
    base, own = (
        load_file(folder / "model.safetensors") for folder in (results["model"], results["out"] / f"own-{sharding}")
    )
    assert base.keys() == own.keys()
    assert all(base[name].equal(own[name]) for name in base)
    config = json.loads((results["out"] / f"own-{sharding}" / "config.json").read_text())
    assert (config["architectures"], config["use_cache"]) == (["LlamaForCausalLM"], True)


def test_an_adapter_of_peft_s_own_is_saved_and_a_bad_place_refused_on_every_rank(results: dict[str, Any]) -> None:
    files = {path.name for path in (results["out"] / "own-ddp").iterdir()}
    assert files >= {"adapter_config.json", "adapter_model.safetensors"}
    for result in results["saved_without_a_spec"].values():
        assert result["refused"] == 2 * [len(result["said"])]
        assert "cannot be made" in result["said"]


@pytest.mark.parametrize("cell", ["zero3 lora", "fsdp lora", "zero3 qlora", "fsdp qlora"])
def test_an_adapter_loads_in_plain_peft(results: dict[str, Any], cell: str) -> None:
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(results["model"])
    before = {name: parameter.clone() for name, parameter in base.named_parameters()}
    model = PeftModel.from_pretrained(base, results["out"] / cell.replace(" ", "-"))
    adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert len(adapters) == 2 * 7 * 2
    assert all(p.numel() and p.abs().sum() > 0 for p in adapters.values())
    assert len(before) == 21
    assert results["saved"][cell]["logits_error"] <= 1e-5


def test_engines_agree_on_the_evaluation_loss(results: dict[str, Any]) -> None:
    for cell in ("zero1", "zero3", "fsdp", "fsdp_grad_op"):
        evaluated = results["saved"][cell]["evaluated"]
        assert evaluated == pytest.approx(results["saved"]["ddp"]["evaluated"], rel=1e-5), cell


@pytest.mark.parametrize(("precision", "close"), [("fp32", 1e-5), ("bf16", 1e-3)])
def test_offload_changes_no_loss(results: dict[str, Any], precision: str, close: float) -> None:
    reference = results["saved"][f"ddp none {precision}"]["losses"]
    for cell in ("zero1 optimizer", "zero2 optimizer", "zero3 optimizer", "zero3 cpu"):
        result = results["saved"][f"{cell} {precision}"]
        assert result["losses"] == pytest.approx(reference, rel=close), cell
        # The same kernels on the same values; rotary frequencies that are cast too would show here.
        assert result["logits_error"] <= 1e-6, cell


@pytest.mark.parametrize("cell", ["ddp", "zero1", "zero3", "fsdp", "zero3 lora", "fsdp lora"])
def test_a_sample_of_all_ranks_is_the_answer_of_the_saved_model(results: dict[str, Any], cell: str) -> None:
    text = generate(
        results["out"] / cell.replace(" ", "-"), "w7 w8", stream=False
    )  # of 62 tokens: the model has 64 places
    assert text.startswith("w")
    assert results["saved"][cell]["sample"] == f"step 3: sample: {text}"
