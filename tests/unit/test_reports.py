"""A run's folder as a report: of a run that finished, goes on, was stopped or failed; and of folders that are none."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import runs
from runs import Page

import toolkit as tk
from toolkit import cli
from toolkit.config.run_config import RunConfig
from toolkit.core import atomic_io
from toolkit.core.errors import RunError
from toolkit.core.units import timestamp
from toolkit.exporters.results import Export
from toolkit.reports import reported
from toolkit.reports.sections import summarize
from toolkit.run_folder import folder
from toolkit.run_folder.heartbeat import Beat
from toolkit.training.certificates import Certificate
from toolkit.training.resumption import resume_hint

STEPS = [runs.event(step) for step in range(1, 21)]


@pytest.fixture
def finished(tmp_path: Path) -> folder.Folder:
    """Twenty steps, two evaluations, two checkpoints, all measured."""
    lines = [*STEPS[:10], {"step": 10, "attempt": 0, "eval_loss": 7.5}, *STEPS[10:]]
    lines.append({"step": 20, "attempt": 0, "eval_loss": 6.5})
    return runs.write(tmp_path / "run", lines, record=runs.about(finished=timestamp()), memory=runs.memory())


def test_a_finished_run_is_told_whole(finished: folder.Folder) -> None:
    result = tk.report(finished.path)
    text = str(result)
    assert result.status == "finished"
    for line in (
        r"status +finished",
        r"steps +20 of 20",
        r"loss +7\.900 → 6\.000",
        r"evaluation loss +6\.5000",
        r"tokens/s +2,000",
        r"peak of a rank +125\.0 MiB",
        r"forecast / measured +1\.04x",
        r"    toolkit train --processes 2 --save-every 10 --sharding zero3 --precision bf16 .*--lr 0\.001 --steps 20",
        r"0–1 +10\.0 MiB +0 B +20\.0 MiB +40\.0 MiB",
        r"trainable +bfloat16 +bfloat16",
        r"optimizer +40\.0 MiB +40\.0 MiB +1\.00x",
        r"transient +60\.0 MiB +55\.0 MiB +1\.09x",
        r"\s+gradients +12\.0 MiB +– +–",
        r"all +130\.0 MiB +125\.0 MiB +1\.04x",
        r"forward +110\.0 MiB +100\.0 MiB +1\.10x",
        r" *10 +7\.5000",
        r" *10 +70\.0 MiB +100 ms +500 ms",
        r"2 published\. The training waited 200 ms for them in all, 0\.8% of the time in steps\.",
        r" *1 +20\S+ +zero3 +2 +0",
        r"torch +2\.\S+",
    ):
        assert re.search(f"^{line}$", text, re.MULTILINE), line


def test_the_command_asks_for_the_same(finished: folder.Folder) -> None:
    words = tk.report(finished.path).command.split()
    flags = cli.build_parser().parse_args(words[1:])
    assert (flags.processes, flags.sharding, flags.steps, flags.save_every, flags.lr) == (2, "zero3", 20, 10, 1e-3)


def test_a_report_as_json(finished: folder.Folder) -> None:
    result = json.loads(tk.report(finished.path).to_json())
    assert result["loss"] == {"first": 7.9, "last": 6.0, "lowest": 6.0, "lowest_step": 20}
    assert (result["steps"], result["tokens"], result["seconds"], result["step_seconds"]) == (20, 40_000, 25.0, 1.0)
    assert result["tokens_per_second"] == 2_000
    assert result["evaluations"] == [{"step": 10, "loss": 7.5}, {"step": 20, "loss": 6.5}]
    assert result["measured"]["peak_bytes"] + 5 * 2**20 == result["forecast"]["device"]["peak_bytes"]
    assert [one["step"] for one in result["checkpoints"]] == [10, 20]


def test_a_page_stands_alone_and_can_be_read_by_ear(finished: folder.Folder) -> None:
    text = tk.report(finished.path).page()
    page = Page(text)
    tags = [tag for tag, _ in page.tags]
    assert text.startswith('<!doctype html>\n<html lang="en">')
    assert [tag for tag in tags if re.fullmatch(r"h\d", tag)] == ["h1", *["h2"] * tags.count("h2")]
    assert {"main", "header", "footer", "title"} <= set(tags)
    assert not {"script", "link", "iframe"} & set(tags)
    addresses = {value for _, marks in page.tags for name, value in marks.items() if name in ("href", "src", "action")}
    assert {address[:26] for address in addresses} == {"data:image/svg+xml;base64,"}
    assert "://" not in text
    assert "@import" not in text
    assert "url(" not in text
    assert not [name for _, marks in page.tags for name in marks if name.startswith("on")]
    assert tags.count("table") == tags.count("caption") > 10
    assert {marks.get("scope") for tag, marks in page.tags if tag == "th"} == {"col", "row"}
    ids = [marks["id"] for _, marks in page.tags if "id" in marks]
    assert ids == []
    assert [bool(marks["alt"]) for tag, marks in page.tags if tag == "img"] == [True] * 4
    assert "prefers-color-scheme: dark" in text


def test_a_notebook_shows_the_same(finished: folder.Folder) -> None:
    shown = tk.report(finished.path)._repr_html_()
    assert shown.count("<img ") == 4
    assert "toolkit train --processes 2" in shown
    assert not re.search(r"<h\d|<html", shown)
    rules = [rule for style in re.findall("<style>(.*?)</style>", shown, re.S) for rule in style.strip().splitlines()]
    assert rules
    assert all(rule.startswith(".toolkit-curve ") for rule in rules), "the notebook's own looks stay"


OWN = {"kind": "script", "name": "/opt/mine.py", "arguments": ["--words", "two of"], "sha256": ""}


def test_code_of_ones_own_is_told_by_what_it_logged(tmp_path: Path) -> None:
    """It has no audit, no forecast and no batch that the toolkit knew; its steps say what they want."""
    lines = [{"step": step, "seconds": 0.5, "loss": 1 / step, "accuracy": step / 10} for step in (1, 2)]
    lines.append({"step": 3, "seconds": 0.5, "loss": 0.25, "tokens": 100, "accuracy": None})
    attempts = [{"strategy": runs.about()["strategy"], "ranks": 2, "started": timestamp()}]
    known = {"target": OWN, "train_config": {}, "run_config": {}, "forecast": None, "attempts": attempts}
    run = runs.write(tmp_path / "run", lines, record=runs.about(**known))
    result = tk.report(run.path)
    text = str(result)
    for line in (
        r"steps +3",
        r"loss +1\.000 → 0\.250",
        r" +1 +1\.0000 +0\.1 +–",
        r" +3 +0\.2500 +not finite +200",
        r"    toolkit launch --processes 2 --sharding zero3 --precision bf16 --attention sdpa /opt/mine\.py --words 'two of'",
        r"It failed. Your own code continues from what it saved: `toolkit resume \S+` runs it again\.",
    ):
        assert re.search(f"^{line}$", text, re.MULTILINE), line
    assert result.to_dict()["tokens_per_second"] == 200
    Page(result.page())
    words = result.command.split(maxsplit=1)[1]
    flags = cli.build_parser().parse_args(shlex.split(words))
    assert (flags.target, flags.arguments) == (OWN["name"], OWN["arguments"])

    known["target"] = {"kind": "function", "name": "mine", "arguments": [], "sha256": "ab" * 32}
    again = tk.report(runs.write(tmp_path / "other", lines[:0], record=runs.about(**known)).path)
    assert again.command == (
        "tk.launch(mine, tk.Strategy(sharding='zero3', precision='bf16', attention='sdpa'), processes=2)"
    )
    assert "runs it again" in again.then
    Page(again.page())


def test_a_long_run_is_a_small_page(tmp_path: Path) -> None:
    """Every checkpoint, evaluation and step of it is in the run's files."""
    lines: list[dict[str, Any]] = []
    for step in range(1, 10_001):
        lines.append(runs.event(step, loss=8 - step / 2000 + step % 13 / 100))
        if step % 20 == 0:
            lines.append({"step": step, "attempt": 0, "eval_loss": 8 - step / 2000})
    run = runs.write(tmp_path / "run", [])
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = tk.report(run.path)
    assert len(result.page().encode()) < 100_000
    assert len(result._repr_html_().encode()) < 100_000
    assert "12 of 10,000; all are in events.jsonl." in str(result)
    assert "12 of 500; all are in events.jsonl." in str(result)


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    """Somebody else's process is in its folder; the lock of whoever reports does not count."""
    run = runs.write(tmp_path / "run", STEPS[:3])
    with folder.enter(run.path, resume=True):
        assert tk.report(run.path).status != "running"
    with runs.another(run.path), Beat(run.beat(0), 0) as beat:
        beat.note("begin", step=4)
        with beat.listening():
            result = tk.report(run.path)
            assert result.status == "running"
            assert "It is running. Rank 0 was in step 4." in str(result)
    assert tk.report(run.path).status != "running"


def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    run = runs.write(tmp_path / "run", STEPS[:3])
    then = resume_hint(run)
    run.record_end("stopped", f"stopped by SIGTERM. {then}")
    result = tk.report(run.path)
    assert result.status == "stopped"
    assert f"\n\nStopped by SIGTERM. {then}\n\n" in str(result)
    assert "A finished run has the memory of each rank in memory.json" in str(result)
    assert "parameters" in result.page()  # the forecast, from run.json


def test_a_run_that_failed_says_the_ranks_last_words(tmp_path: Path) -> None:
    words = "rank 1 ended with RuntimeError: it broke. Its last lines (logs/rank-1.log):\n    Traceback <b>\n    RuntimeError"
    run = runs.write(tmp_path / "run", STEPS[:3])
    run.record_end("failed", words)
    result = tk.report(run.path)
    assert result.status == "failed"
    assert f"`toolkit resume {run.path}` starts again from step 0." in str(result)
    assert "    rank 1 ended with RuntimeError: it broke." in str(result)
    assert words in "".join(Page(result.page()).words)


def test_a_run_without_a_supervisor(tmp_path: Path) -> None:
    """What its ranks left says how it ended."""
    run = runs.write(tmp_path / "run", STEPS[:3])
    assert "left no word" in tk.report(run.path).words
    with Beat(run.beat(0), 0):
        pass
    assert tk.report(run.path).status == "stopped"
    run.record_error(1, ValueError("too large"))
    result = tk.report(run.path)
    assert (result.status, result.words) == ("failed", "Rank 1 ended with ValueError: too large")


def test_an_older_attempts_words_and_memory_do_not_count(tmp_path: Path) -> None:
    """Of a run that goes on in another way."""
    run = runs.write(tmp_path / "run", STEPS, memory=runs.memory())
    run.record_end("failed", "an old failure")
    later = runs.about()
    later["attempts"].append({**later["attempts"][0], "started": "2099-01-01T00:00:00+0000"})
    atomic_io.write_json(run.run_json, later)
    result = tk.report(run.path)
    assert "an old failure" not in str(result)
    assert result.measured is None


@pytest.mark.parametrize("reason", ["the memory window was switched off (--no-memory-window)", None])
def test_a_run_that_measured_nothing_or_was_not_forecast(tmp_path: Path, reason: str | None) -> None:
    about = runs.about(finished=timestamp(), forecast=None)
    run = runs.write(tmp_path / "run", STEPS, record=about, memory=runs.memory(reason=reason, forecast=False))
    text = str(tk.report(run.path))
    if reason:
        assert f"There is neither: no trace; {reason}." in text
    else:
        assert "No forecast: no trace." in text
        assert re.search(r"^transient +55\.0 MiB$", text, re.MULTILINE)
    assert "Dtype ledger" in text
    Page(tk.report(run.path).page())


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    run = runs.write(tmp_path / "run", [])
    run.published.unlink()
    text = str(tk.report(run.path))
    assert "No step was done." in text
    assert "None was published." in text
    assert json.loads(tk.report(run.path).to_json())["tokens_per_second"] is None
    Page(tk.report(run.path).page())


def test_a_loss_that_was_not_finite(tmp_path: Path) -> None:
    """JSON says null of it; the curve has a gap."""
    lines = [*STEPS[:3], {**runs.event(4), "loss": float("nan"), "skipped": True}, *STEPS[4:6]]
    result = tk.report(runs.write(tmp_path / "run", lines).path)
    assert re.search(r"^ +4 +not finite ", str(result), re.MULTILINE)
    assert "In 1 step(s) fp16 overflowed, and they were skipped." in str(result)
    assert json.loads(result.to_json())["skipped"] == 1
    Page(result.page())


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("run.json", None, r"holds no run: .*run\.json does not exist"),
        ("run.json", "{}", r"run\.json lacks ranks, run_config, strategy, train_config"),
        ("run.json", "{", r"run\.json cannot be read"),
        ("events.jsonl", "{}\nno\n{}\n", r"events\.jsonl, line 2: it is not JSON"),
        ("memory.json", "{", r"memory\.json cannot be read: .* Repair or remove it"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: str | None, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.write(tmp_path / "run", STEPS[:3])
    if content is None:
        (run.path / name).unlink()
    else:
        (run.path / name).write_text(content)
    with pytest.raises(RunError, match=sentence):
        tk.report(run.path)
    assert cli.main(["report", str(run.path)]) == 2
    assert re.search(sentence, capsys.readouterr().err)
    assert not run.report.exists()


def test_no_secret_comes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it stands in the files themselves, which another's toolkit may have written."""
    secret = "hunter2 <or> 'more'"
    token = "hf_" + "a1B2" * 8
    about = runs.about(RunConfig(model=f"https://user:{token}@place/model", data=f"{secret}/data.jsonl"))
    run = runs.write(tmp_path / "run", STEPS[:3], record=about)
    run.run_json.write_text(json.dumps(about))
    run.end.write_text(json.dumps({"how": "failed", "attempt": 1, "message": f"Bearer {token} {secret}"}))
    monkeypatch.setenv("MY_PASSWORD", secret)
    report = tk.report(run.path)
    report.write()
    for text in (str(report), report._repr_html_(), report.to_json(), run.report.read_text()):
        assert "[redacted]" in text
        assert token not in text
        assert "hunter2" not in text
    assert "A secret in the command is replaced by [redacted]: give it again." in str(report)


def test_fields_of_another_version_are_told_too(tmp_path: Path) -> None:
    about = runs.about()
    about["run_config"]["flavour"] = "sweet"
    text = str(tk.report(runs.write(tmp_path / "run", STEPS, record=about).path))
    assert "--flavour sweet" in text
    assert "This version cannot resume it: RunConfig has no field 'flavour'." in text
    assert re.search(r"^flavour +sweet$", text, re.MULTILINE)


def test_the_guards_certificate_is_told(tmp_path: Path) -> None:
    """As `run.json` has it; without one, no word."""
    certificate = Certificate(
        model="m", strategy={"tp": 2}, ranks=4, layers=2, hidden=64, loss_difference=2.3e-7, norm_difference=4.1e-6,
        gradient=None, seconds=9.0,
    )  # fmt: skip
    sentence = "A small copy over 4 ranks computed as one process did before the run: losses 2e-07 and gradient norms 4e-06 apart."
    for name, guard in (("with", certificate.to_dict()), ("without", None)):
        run = runs.write(tmp_path / name, STEPS, record=runs.about(guard=guard), memory=runs.memory())
        report = tk.report(run.path)
        report.write()
        told = [sentence in " ".join(text.split()) for text in (str(report), run.report.read_text())]
        assert told == [guard is not None] * 2


def test_the_verb_writes_the_page(finished: folder.Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(finished.path), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["status"] == "finished"
    assert err == f"report: {finished.report}\n"
    assert finished.report.read_text().startswith("<!doctype html>")
    assert cli.main(["report", str(finished.path), "-o", str(tmp_path / "page.html")]) == 0
    assert "== Forecast and measured ==" in capsys.readouterr().out
    assert "Dtype ledger" in (tmp_path / "page.html").read_text()
    assert cli.main(["report", str(finished.path), "-o", str(tmp_path / "nowhere" / "page.html")]) == 2
    assert "cannot be written: No such file or directory. Choose another place with -o." in capsys.readouterr().err


def test_a_report_changes_nothing_of_how_a_run_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Written after success and failure, if the run had begun. An obstacle is one line, and no failure."""
    with reported(tmp_path / "none"):
        pass
    run = runs.write(tmp_path / "run", STEPS[:3])
    with pytest.raises(KeyboardInterrupt), reported(run.path):
        raise KeyboardInterrupt
    assert run.report.exists()
    assert capsys.readouterr().err == ""
    run.report.unlink()
    with reported(run.path):
        pass
    assert capsys.readouterr().err == f"report: {run.report}\n"
    run.report.unlink()
    run.report.mkdir()
    with reported(run.path):
        pass
    assert f"toolkit: no report of {run.path}: " in capsys.readouterr().err


def test_the_end_of_a_training_is_told_in_a_few_lines(tmp_path: Path) -> None:
    load_line = "AutoModelForCausalLM.from_pretrained('out/export')"
    about = Export(folder="out/export", adapter=False, tensors=3, size_bytes=9, logits_error=0.0, load=load_line)
    export = about.to_dict()
    data = {"fingerprint": "f" * 64, "trained_tokens": 1, "count": 80}
    evaluations = [{"step": step, "attempt": 0, "eval_loss": loss} for step, loss in ((1, 3.0), (20, 3.5))]
    events = [runs.event(step, loss=4.0 - step / 20) for step in range(1, 21)] + evaluations
    run = runs.write(
        tmp_path / "run",
        events,
        record=runs.about(finished=timestamp(), export=export, data=data) | {"planned_steps": 40},
        memory=runs.memory(),
    )
    figures, saved, load, generate = summarize(tk.report(run.path)).splitlines()
    for words in (
        "loss 3.9500 → 3.0000, evaluation loss 3.5000, lowest 3.0000, ",
        " tokens/s, ended early, of 40 steps, 20 steps in ",
        " s, 2.00 epochs, peak of a rank ",
        "MiB, forecast 130.0 MiB",
    ):
        assert words in figures
    assert (saved, load) == ("saved in out/export", f"load it with: {export['load']}")
    assert generate == f'try it: toolkit generate {run.path} "a prompt"'
    (run.path / "best").mkdir()
    assert summarize(tk.report(run.path)).endswith(f"the model of the lowest evaluation loss: {run.path / 'best'}")
