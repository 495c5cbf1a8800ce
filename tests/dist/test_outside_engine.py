"""An engine and a transform from outside the package (`tests/plugins`) are known everywhere; no file of `toolkit/` names them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT, environment, python

pytestmark = pytest.mark.dist

SIZE = (
    "--steps",
    "6",
    "--seq-len",
    "64",
    "--micro-batch",
    "4",
    "--accumulation",
    "2",
    "--activation-checkpointing",
    "none",
)
PLUGINS = [ROOT / "tests" / "plugins" / name for name in ("moments_engine.py", "recomputed_mlps.py")]

KNOWN = """
import json, sys
import toolkit as tk

spec = tk.describe()
plan = tk.plan(spec, "2x A100-80GB", global_batch=16, seq_len=128)
candidates = [one for one in (*plan.ranked, *plan.rejected) if one.strategy.sharding == "moments"]
panel = tk.explore("memory", spec, hardware="2x A100-80GB")
forecasts = {}
for word in ("ddp", "moments"):
    forecasts[word] = tk.forecast(spec, tk.Strategy(sharding=word), "2x A100-80GB", tk.TrainConfig(seq_len=128))
print(json.dumps({
    "planned": len(candidates),
    "doctor": tk.diagnose().ability("sharding", "moments").runs,
    "bytes": {word: one.parts["optimizer"] for word, one in forecasts.items()},
    "communication": {word: one.communication_bytes for word, one in forecasts.items()},
    "explored": "moments" in panel.controls["sharding"].spelled,
}))
"""


def run(*command: str, folder: Path) -> str:
    environ = environment(TOOLKIT_ENGINES=",".join(map(str, PLUGINS)))
    return python(*command, cwd=folder, env=environ, code=0).stdout


def steps_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("outside")
    words = ("-m", "toolkit.cli", "compare", "--sharding", "ddp,moments", "--processes", "2", *SIZE, "--json", "-")
    return {row["sharding"]: row for row in json.loads(run(*words, folder=folder))["results"]}


def test_it_trains_with_the_losses_of_ddp(compared: dict[str, dict[str, Any]]) -> None:
    ours, theirs = compared["moments"], compared["ddp"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert ours["grad_norms"] == pytest.approx(theirs["grad_norms"], rel=1e-5)


def test_it_holds_what_it_forecast(compared: dict[str, dict[str, Any]]) -> None:
    ours, theirs = compared["moments"], compared["ddp"]
    assert ours["measured"]["peak_bytes"] == pytest.approx(ours["forecast"]["device"]["peak_bytes"], rel=0.04)
    assert ours["measured"]["parts"]["optimizer"] < 0.6 * theirs["measured"]["parts"]["optimizer"]


def test_a_transform_changes_the_run_and_its_forecast(compared: dict[str, dict[str, Any]]) -> None:
    """This process knows no transform from outside, so its forecast keeps the MLPs' activations."""
    measured = compared["ddp"]["measured"]["peak_bytes"]
    assert compared["ddp"]["forecast"]["device"]["peak_bytes"] == pytest.approx(measured, rel=0.02)


def forget_after(folder: Path, step: int) -> None:
    """Make a finished run one that ended behind the checkpoint of a step."""
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**about, "finished": None}))


def test_its_run_goes_on_under_fsdp_and_back(tmp_path: Path, compared: dict[str, dict[str, Any]]) -> None:
    train = ("-m", "toolkit.cli", "train", "--processes", "2", *SIZE, "--no-save", "--no-memory-window")
    saves = ("--sharding", "moments", "--run-dir", "moved", "--save-every", "2", "--keep", "3")
    assert "recomputed MLPs" in run(*train, *saves, folder=tmp_path)
    moved = tmp_path / "moved"
    for flags, step in (
        (["--sharding", "fsdp"], 2),
        (["--sharding", "moments", "--steps", "5"], 4),
        (["--steps", "6"], 5),
    ):
        forget_after(moved, step)
        run("-m", "toolkit.cli", "resume", "moved", *flags, folder=tmp_path)
    # The launch environment of the last one was DDP's.
    assert json.loads((moved / "run.json").read_text())["strategy"]["sharding"] == "moments"
    assert [line["loss"] for line in steps_of(moved)] == pytest.approx(compared["ddp"]["losses"], rel=1e-5)
    assert [line["attempt"] for line in steps_of(moved)][-1] == 3


def test_plan_explorer_and_doctor_know_it(tmp_path: Path) -> None:
    known = json.loads(run("-c", KNOWN, folder=tmp_path))
    assert known["planned"]
    assert known["doctor"]
    assert known["explored"]
    assert known["bytes"]["moments"] < 0.6 * known["bytes"]["ddp"]
    assert known["communication"]["moments"] == pytest.approx(1.5 * known["communication"]["ddp"])
