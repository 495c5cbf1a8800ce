"""The commands of the site that belong to a run: it is trained, stopped, resumed, watched, reported, exported and asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import start, until
from site_commands import OF_A_RUN, make_reader_folder, words_of

from toolkit.cli import main
from toolkit.launcher import attach

pytestmark = pytest.mark.dist


def test_commands_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_reader_folder(tmp_path, words=400_000)
    monkeypatch.chdir(tmp_path)
    train, *others = OF_A_RUN
    process = start("-m", "toolkit", *words_of(train), cwd=tmp_path)
    until(lambda: list(tmp_path.glob("runs/*/events.jsonl")), what="a step", alive=process)
    run = next(tmp_path.glob("runs/*"))
    for line in others:
        done = main(words_of(line, run.name))
        shown = capsys.readouterr()
        assert done == 0, (line, shown.err)
        assert shown.out or "-o" in line, line
        if " stop " in line:
            process.communicate(timeout=60)
            assert attach(run).status == "stopped"
    assert attach(run).status == "finished"
    assert (run / "report.html").is_file()
    assert (tmp_path / "my-model-trained" / "config.json").is_file()
