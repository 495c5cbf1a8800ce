"""What a user can get wrong, through the shell: one sentence with the fix, exit code 2, and nothing left behind."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import operator
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
import tiny
from programs import environment, start, text_table, until

from toolkit import cli
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import RunError, StrategyError
from toolkit.core.redaction import MARK
from toolkit.core.stopping import StopSignal
from toolkit.core.units import timestamp
from toolkit.devices.machine import hardware
from toolkit.engines.registry import PLUGINS, import_plugins
from toolkit.run_folder.run_json import read_run_json
from toolkit.training.preflight import run_preflight
from toolkit.training.resumption import check_not_repeated

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and folders with one thing wrong each."""
    root = tmp_path_factory.mktemp("things")

    for name, changes in {
        "weightless": {},
        "unknown": {"model_type": "lama", "architectures": ["LamaForCausalLM"]},
    }.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    tiny.llama(root / "overfull", vocab_size=64, max_position_embeddings=512)
    tiny.opt(root / "opt")
    tiny.mixtral(root / "mixtral")
    for name, text in {
        "malformed": '{"text": "one"}\n{"text": "two"\n',
        "misnamed": '{"body": "one"}\n',
        "chat": '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n' * 9,
        "short": '{"text": "one"}\n',
    }.items():
        (root / f"{name}.jsonl").write_text(text)
    (root / "old").mkdir()
    (root / "old" / "run.json").write_text("{}")
    (root / "full").mkdir()
    (root / "full" / "letter.txt").write_text("dear reader")
    (root / "file").write_text("a file")
    return root


REFUSED = text_table("refused_commands.txt")


@pytest.mark.parametrize(("line", "expected"), [(line, words) for line, *words in REFUSED])
def test_one_sentence_and_nothing_left(
    line: str,
    expected: list[str],
    things: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(things.rglob("*"))
    code = cli.main([word.format(things=things) for word in shlex.split(line)])
    out, err = capfd.readouterr()
    assert code == 2, (out, err)
    assert out == ""
    said = err.strip()
    assert said.startswith("toolkit: ")
    assert "\n" not in said
    for words in expected:
        assert words.format(things=things) in said, said
    assert list(tmp_path.iterdir()) == []
    assert sorted(things.rglob("*")) == before


@pytest.mark.parametrize(
    ("library", "flags", "fix"),
    [
        ("deepspeed", "--sharding zero3 --processes 2", "[deepspeed]"),
        ("bitsandbytes", "--adapter qlora", "[qlora]"),
        ("peft", "--adapter lora", "pip install peft"),
        ("peft", "--adapter dora", "pip install peft"),
    ],
)
def test_missing_library(
    library: str, flags: str, fix: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Its import and its search fail, as on a machine without it."""
    search = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == library else search(name, *rest)
    )
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *flags.split()]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert f"needs {library}, which is not installed" in err
    assert fix in err
    assert "\n" not in err.strip()
    assert list(tmp_path.iterdir()) == []


def shell(*words: str, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    return start("-m", "toolkit.cli", *words, cwd=cwd, **options)


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = shell("config", "--sharding", "ddp", cwd=tmp_path, stdout=writing)
    os.close(writing)
    _, err = ended.communicate(timeout=60)
    assert (ended.returncode, err) == (141, "")  # as git and grep


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_stopped_while_it_reads_data(number: str, code: int, tmp_path: Path) -> None:
    """A file of many short lines takes seconds; its draft shows that it is being read."""
    work, cache = tmp_path / "work", tmp_path / "cache"
    work.mkdir()
    (tmp_path / "data.txt").write_bytes(b"a\n" * 30_000_000)
    environ = environment(XDG_CACHE_HOME=str(cache))
    started = shell("train", "--data", str(tmp_path / "data.txt"), cwd=work, env=environ)
    until(lambda: list(cache.glob("*/documents/.*/documents.arrow")), what="reading", alive=started)
    started.send_signal(getattr(signal, number))
    out, err = started.communicate(timeout=60)
    assert started.returncode == code, err
    assert (out, err.strip()) == ("", f"toolkit: stopped by {number}")
    assert list(work.iterdir()) == list(cache.glob("*/documents/*")) == []


def test_json_alone_on_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["describe", "--json", "-"]) == 0
    assert json.loads(capfd.readouterr().out)["architecture"] == "LlamaForCausalLM"
    assert cli.main(["config", "--sharding", "zero3", "--json", "-"]) == 0
    assert json.loads(capfd.readouterr().out)["distributed_type"] == "DEEPSPEED"


def test_json_overwrites_its_own_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "r.json"
    for sharding in ("zero2", "zero3"):
        assert cli.main(["config", "--sharding", sharding, "--json", str(target)]) == 0
        assert json.loads(target.read_text())["deepspeed_config"]["zero_stage"] == int(sharding[-1])
    target.write_text(target.read_text() + "\n")
    changed = target.read_bytes()
    assert cli.main(["config", "--sharding", "zero2", "--json", str(target)]) == 2
    assert "r.json: it exists, and has content of others" in capsys.readouterr().err
    (tmp_path / "link.json").symlink_to(target)
    assert cli.main(["config", "--sharding", "zero2", "--json", str(tmp_path / "link.json")]) == 2
    assert target.read_bytes() == changed


def test_a_finished_run_refuses_what_would_change_nothing_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.write(tmp_path / "run", [], record=runs.about(RunConfig(data=MARK), finished=timestamp()))
    words = "--model b --data c --lr 0.5 --sharding fsdp --attention sdpa --precision auto --processes 4 --timeout 9"
    assert cli.main(["resume", str(run.path), *words.split()]) == 2
    changes = "--model b (it was embedded) and --lr 0.5 (it was 0.001) and --sharding fsdp (it was zero3)"
    assert f" {changes} and --processes 4 (it was 2) would change nothing of it" in capsys.readouterr().err


def test_signals_that_come_together_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` signals a process and its group."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert (stop.number, stop.again) == (signal.SIGTERM, False)
        now += 1
        signal.raise_signal(signal.SIGTERM)
        assert not stop.again
        signal.raise_signal(signal.SIGINT)
        assert stop.again


def test_fields_without_effect_are_refused() -> None:
    strategy, device = Strategy(adapter="none", lora_rank=8), hardware("1x cpu").device
    with pytest.raises(StrategyError, match="lora_rank 8: without effect, since adapter is none"):
        run_preflight(RunConfig(), strategy, TrainConfig(), 1, device)


def test_a_finished_run_is_not_trained_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a checkpoint it could only begin at step 0, and replace what it saved."""
    run = runs.write(tmp_path / "run", [runs.event(20)], record=runs.about(finished=timestamp()), memory=runs.memory())
    run.export.mkdir()
    assert cli.main(["resume", str(run.path)]) == 0
    assert "For more steps" not in capsys.readouterr().err
    assert cli.main(["resume", str(run.path), "--steps", "22", "--save-every", "1"]) == 2
    said = capsys.readouterr().err
    assert "had finished, and has no checkpoint from which it could continue" in said
    assert f"toolkit train --model {run.export}" in said
    assert json.loads(run.run_json.read_text())["finished"]
    with pytest.raises(RunError, match="has no checkpoint from which it could continue"):
        check_not_repeated(run.path, read_run_json(run.path), 0)  # as a rank does that finds its checkpoints damaged
    check_not_repeated(run.path, read_run_json(run.path), 4)
    assert cli.main(["export", str(run.path), "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert f"The run's own export is in {run.export}." in said
    assert "Resume it" not in said


@pytest.mark.parametrize("junk", [0, -1, -0.0, "4", True, [], 1e308, 5e-324])
def test_no_figure_below_nothing_calibrates(junk: Any, tmp_path: Path) -> None:
    """Each figure that a forecast is divided or multiplied by is refused by its name."""
    run = runs.write(tmp_path / "run", [runs.event(1), runs.event(2)], memory=runs.memory())
    memory, steps = json.loads((run.path / "memory.json").read_text()), (run.path / "events.jsonl").read_text()
    forecast = runs.expected()
    assert forecast.calibrate(run.path).peak_bytes > 0
    names = ["measured.peak_bytes", "forecast.device.peak_bytes", "forecast.operations", "forecast.step_seconds"]
    names += [f"measured.per_rank.{name}" for name in ("peak_bytes", "reserved_bytes", "device_bytes")]
    for name in names:
        *path, last = name.split(".")
        changed = copy.deepcopy(memory)
        place = functools.reduce(operator.getitem, path, changed)
        for record in place if isinstance(place, list) else [place]:
            record[last] = junk
        (run.path / "memory.json").write_text(json.dumps(changed))
        with pytest.raises(
            RunError, match=rf"Cannot calibrate with .*: {name} is .*, expected a positive number\. Name"
        ):
            forecast.calibrate(run.path)
    (run.path / "memory.json").write_text(json.dumps(memory))
    (run.path / "events.jsonl").write_text(re.sub('"seconds": [^,}]+', f'"seconds": {json.dumps(junk)}', steps))
    with pytest.raises(RunError, match=r"seconds of step 1 is .*, expected a positive|line 1: seconds is .*, expected"):
        forecast.calibrate(run.path)


PLUGIN_FILES = {
    "json": ("", "json/__init__.py is the module 'json', so rename the file"),
    "colorsys": ("", "colorsys.py is the module 'colorsys', so rename the file"),
    "broken": ("def (", r"invalid syntax \(broken.py, line 1\) \(SyntaxError\)"),
    "failing": ("1 / 0", r"division by zero \(ZeroDivisionError\)"),
    "pipe": (os.mkfifo, "it is not a regular file"),
    "folder": (os.mkdir, "it is not a regular file"),
    "endless": (lambda path: os.symlink("/dev/zero", path), "it is not a regular file"),
    "missing": (None, "No such file"),
}


@pytest.mark.parametrize("name", PLUGIN_FILES)
def test_a_file_that_is_no_plugin_is_refused_by_the_variable(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, why = PLUGIN_FILES[name]
    path = tmp_path / f"{name}.py"
    if isinstance(content, str):
        path.write_text(content)
    elif content:
        content(path)
    monkeypatch.setenv(PLUGINS, str(path))
    for _ in range(2):  # what failed is not half there the next time
        with pytest.raises(
            ImportError, match=f"^TOOLKIT_ENGINES names .*{name}.py', which cannot be imported: .*{why}"
        ):
            import_plugins()


def test_a_folder_or_a_module_that_fails_is_no_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "plain_folder").mkdir()
    (tmp_path / "failing_module.py").write_text("nothing")
    words = {"plain_folder": "it is a folder without an __init__.py", "failing_module": "name 'nothing' is not defined"}
    for name, why in {**words, str(tmp_path): "No module named", ".relative": "relative import"}.items():
        monkeypatch.setenv(PLUGINS, name)
        with pytest.raises(ImportError, match=f"^TOOLKIT_ENGINES names '{name}', which cannot be imported: .*{why}"):
            import_plugins()
    (tmp_path / "plain_plugin.py").write_text("")
    monkeypatch.setenv(PLUGINS, str(tmp_path / "plain_plugin.py"))
    import_plugins()
    import_plugins()
    assert sys.modules.pop("plain_plugin").__file__ == str(tmp_path / "plain_plugin.py")
