"""What is known to be wrong before a process starts, and what can be shipped."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toolkit as tk
from toolkit.cli.parser import build_parser
from toolkit.core.errors import RunError
from toolkit.forecasting import prediction
from toolkit.launcher import api, script_run
from toolkit.launcher.targets import dump_function, load_function, write_function
from toolkit.run_folder.status import Tail, page, read_progress
from toolkit.training.setup import choose_ranks


def nothing() -> None:
    """A function to launch."""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"strategy": "zero4"}, "sharding 'zero4' is unknown. Did you mean"),
        ({"stepps": 3}, "launch has no argument 'stepps'. Did you mean 'steps'?"),
        ({"target": "toolkit.fine_tune"}, "Python finds no such module. Did you mean 'toolkit.finetune'?"),
        ({"target": "missing.py"}, "no such script"),
        ({"target": "json.tool", "steps": 3}, "steps: only the recipe"),
        ({"target": 42}, "target 42: expected a module's name"),
        ({"args": (1,)}, "args: the recipe takes its fields by name"),
        (
            {"strategy": tk.Strategy(sharding="fsdp", precision="fp16"), "processes": 2},
            "cannot train in precision 'fp16'",
        ),
        ({"processes": 0}, "processes 0: expected at least 1"),
        ({"target": nothing, "processes": "two"}, "processes 'two': expected a number"),
        ({"steps": "many"}, "steps 'many': expected int"),
        ({"restarts": -1}, "restarts -1"),
        (
            {"target": lambda steps: None},
            "cannot be called so: missing a required argument: 'steps'. Give its arguments:",
        ),
        ({"target": nothing, "strategy": "ddp", "kwargs": {"lock": 1}}, "got an unexpected keyword argument 'lock'"),
        ({"target": print, "args": (threading.Lock(),)}, "its argument 1 is a lock"),
    ],
)
def test_a_refused_launch_leaves_nothing(
    words: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tk.ToolkitError, match=re.escape(said)):
        tk.launch(**words)
    assert not Path("runs").exists()


class Launched(Exception):
    """Raised in place of the first process."""


@pytest.mark.parametrize(("words", "ranks"), [("none", 1), ("zero3", 2), ("hsdp --dp-replicate 2", 4)])
def test_shell_and_python_have_one_default_of_processes(
    words: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And both print it, before a process starts."""
    script = tmp_path / "mine.py"
    script.touch()
    sharding, *fields = words.split()
    strategy = tk.Strategy(sharding=sharding, dp_replicate=2 if fields else 1)

    def refuse(*_: Any, **__: Any) -> None:
        raise Launched

    monkeypatch.setattr(script_run, "supervise", refuse)
    monkeypatch.setattr(api, "_start", refuse)
    flags = build_parser().parse_args(
        ["launch", "--sharding", *words.split(), "--run-dir", str(tmp_path / "a"), str(script)]
    )
    for started in (lambda: flags.call(flags), lambda: tk.launch(str(script), strategy, run_dir=tmp_path / "b")):
        with pytest.raises(Launched):
            started()
        assert capsys.readouterr().err.startswith(f"processes: {ranks}, the default on ")
    assert prediction.resolve_request(None, strategy, "cpu")[0].ranks == ranks


def test_every_gpu_is_used_unless_another_number_is_given() -> None:
    machine = tk.hardware("8x H100-80GB")
    several = [tk.Strategy(sharding="none"), tk.Strategy(sharding="zero3")]
    assert choose_ranks(several, machine, None) == 8
    assert choose_ranks(several[:1], machine, None) == 1
    assert choose_ranks(several, machine, 4) == 4
    assert choose_ranks(several[1:], tk.hardware("1x T4"), None) == 1
    with pytest.raises(RunError, match="this machine has 8 cuda"):
        choose_ranks(several, machine, 9)


def holder() -> Callable[[], object]:
    lock = threading.Lock()

    def function() -> object:
        return lock

    return function


def test_what_cannot_be_shipped_is_named() -> None:
    with pytest.raises(RunError, match=r"its variable 'lock' is a lock .*Make it inside of the function"):
        dump_function(holder(), (), {})


def test_a_shipped_function_comes_back_and_no_other(tmp_path: Path) -> None:
    factor = 3

    def triple(number: int, *, more: int) -> int:
        return factor * number + more

    target, data = dump_function(triple, (2,), {"more": 1})
    write_function(tmp_path / "function.pkl", data)
    function, args, kwargs = load_function(tmp_path / "function.pkl", target.sha256)
    assert function(*args, **kwargs) == 7
    assert (tmp_path / "function.pkl").stat().st_mode & 0o777 == 0o600
    with pytest.raises(RunError, match="is not the one that was launched"):
        load_function(tmp_path / "function.pkl", "0" * 64)
    with pytest.raises(RunError, match="cannot be read"):
        load_function(tmp_path / "other.pkl", target.sha256)


def test_a_folder_without_a_run_is_not_attached(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        tk.attach(tmp_path)
    assert "No runs in" in str(tk.runs(tmp_path))


def line(step: int) -> str:
    return f'{{"step": {step}, "loss": {10 / step}, "tokens": 100, "seconds": 0.5, "bytes": [{{"rss": 1048576}}]}}\n'


def test_events_are_read_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path, "loss")
    assert tail.look() == []
    path.write_text(line(1) + line(2)[:20])  # torn
    assert [one["step"] for one in tail.look()] == [1]
    path.write_text(line(1) + line(2) + line(3))
    assert [one["step"] for one in tail.look()] == [1, 2, 3]
    (tmp_path / "new").write_text(line(1))  # as a resumed run writes it
    (tmp_path / "new").replace(path)
    assert [one["step"] for one in tail.look()] == [1]


def test_ten_thousand_steps_are_a_small_page(tmp_path: Path) -> None:
    forecast = {"device": {"peak_bytes": 2 << 20, "limit_bytes": 4 << 20}}
    about = {"strategy": {}, "run_config": {}, "ranks": 1, "train_config": {"steps": 10_000}, "forecast": forecast}
    (tmp_path / "run.json").write_text(json.dumps(about))
    (tmp_path / "events.jsonl").write_text("".join(line(step) for step in range(1, 10_001)))
    progress = read_progress(tmp_path)
    figures = (progress.step, progress.steps, progress.tokens_per_second, progress.left_seconds)
    assert figures == (10_000, 10_000, 200.0, 0.0)
    shown = page("runs/x", "running", progress, Tail(tmp_path / "events.jsonl", "loss").look(), "")
    assert len(shown) < 100_000
    assert "<script" not in shown
    assert "4.0 MiB" in shown
    assert 'role="status"' in shown
