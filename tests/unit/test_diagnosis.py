"""`diagnose` on this machine as it is, and its children with libraries that are broken in every way."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import platform
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from programs import gone, python, start, until

from toolkit import environment
from toolkit.config.strategy import ADAPTERS, OFFLOADS, SHARDINGS
from toolkit.config.strategy import ATTENTION_WORDS as ATTENTIONS
from toolkit.config.strategy import PRECISION_WORDS as PRECISIONS
from toolkit.devices.machine import hardware
from toolkit.diagnosis import Diagnosis, Finding
from toolkit.diagnosis.checks import run_apart
from toolkit.diagnosis.libraries import library
from toolkit.diagnosis.result import Outcome, list_abilities


@pytest.fixture(scope="module")
def diagnosis(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """Made in a process of its own, which asks afterwards that no library was imported where it could do harm."""
    file = tmp_path_factory.mktemp("doctor") / "diagnosis"
    script = f"""
        import pickle, sys
        from toolkit.diagnosis import diagnose
        diagnosis = diagnose()
        assert not {{"torch", "transformers", "peft", "deepspeed", "bitsandbytes", "datasets"}} & set(sys.modules)
        pickle.dump(diagnosis, open({str(file)!r}, "wb"))
    """
    python("-c", textwrap.dedent(script), code=0)
    diagnosis: Diagnosis = pickle.loads(file.read_bytes())
    return diagnosis


def test_what_is_installed_works(diagnosis: Diagnosis) -> None:
    details = {finding.check: finding.detail for finding in diagnosis.findings}
    installed = "torch transformers accelerate deepspeed bitsandbytes peft datasets ipywidgets matplotlib"
    for check in installed.split():
        assert diagnosis.status(check) == "ok", details[check]
        assert metadata.version(check) in details[check]
    for check in ("processes", "bf16", "host memory", "python"):
        assert diagnosis.status(check) == "ok", details[check]
    assert platform.python_version() in details["python"]
    assert "4 bits work" in details["bitsandbytes"]
    assert "gloo" in details["processes"]


def test_every_check_reports_once_and_says_what_to_do(diagnosis: Diagnosis) -> None:
    checks = [finding.check for finding in diagnosis.findings]
    assert len(checks) == len(set(checks)) == 22
    assert {finding.status for finding in diagnosis.findings} <= {"ok", "missing", "broken", "n/a"}
    for finding in diagnosis.findings:
        assert finding.detail
        assert finding.fix or finding.status != "missing"


def test_every_value_of_a_strategy_is_judged(diagnosis: Diagnosis) -> None:
    judged = [(one.field, one.value) for one in diagnosis.abilities]
    lists = {
        "sharding": SHARDINGS,
        "offload": OFFLOADS,
        "adapter": ADAPTERS,
        "precision": PRECISIONS,
        "attention": ATTENTIONS,
    }
    assert judged == [(field, value) for field, values in lists.items() for value in values]
    assert diagnosis.ability("sharding", "none").runs
    assert diagnosis.ability("adapter", "qlora").runs
    assert not diagnosis.ability("precision", "fp8").runs
    for kernel in ATTENTIONS[1:]:
        assert diagnosis.ability("attention", kernel).runs == (kernel in hardware().device.attentions)
    assert all(one.runs or one.reason for one in diagnosis.abilities)


def test_it_shows_itself(diagnosis: Diagnosis) -> None:
    assert "sharding" in str(diagnosis)
    assert ">This machine</caption>" in diagnosis._repr_html_()
    told = json.loads(diagnosis.to_json())
    assert told["findings"][0] == dataclasses.asdict(diagnosis.findings[0])
    assert {"field": "sharding", "value": "ddp"}.items() <= told["abilities"][1].items()


def test_a_library_that_is_not_there() -> None:
    with pytest.raises(Outcome) as error:
        library("no_such_library")
    assert error.value.args == ("missing", "not installed", "`pip install 'accelerate-toolkit'`")


# What other libraries do ----------------------------------------------------------------------------------------------


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands first on the path of the children."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    return tmp_path


def put(folder: Path, **modules: str) -> None:
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))


def test_broken_libraries_end_only_their_own_check(first: Path) -> None:
    """One raises, one crashes, one leaves the process, one writes where results go: every check has its finding."""
    put(
        first,
        datasets="raise ImportError('undefined symbol: _ZN3c10')",
        accelerate="import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        peft="import os, sys; print('no licence', file=sys.stderr); sys.stderr.flush(); os._exit(3)",
        transformers="import os; os.write(1, b'{}\\n'); print('{}', flush=True)",
    )
    findings = {finding.check: finding for finding in run_apart(["datasets", "accelerate", "peft", "transformers"])}
    assert list(findings) == ["datasets", "accelerate", "peft", "transformers"]
    assert findings["datasets"].status == "broken"
    assert findings["datasets"].detail == "ImportError: undefined symbol: _ZN3c10"
    assert findings["accelerate"].detail.startswith("killed by SIGSEGV")
    assert findings["peft"].detail == "ended its process with 3: no licence"
    assert findings["peft"].fix == "`pip install --force-reinstall peft`"
    assert findings["transformers"].status == "ok"


def test_a_library_that_hangs_is_ended_with_what_it_started(first: Path) -> None:
    put(
        first,
        accelerate=f"""
            import pathlib, subprocess, time
            started = subprocess.Popen(["sleep", "300"])
            pathlib.Path({str(first / "pid")!r}).write_text(str(started.pid))
            time.sleep(300)
        """,
        datasets="",
    )
    hung, after = run_apart(["accelerate", "datasets"], each=3)
    assert (hung.status, hung.detail) == ("broken", "did not end within 3 s")
    assert after.status == "ok"
    pid = int((first / "pid").read_text())
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 5)


def test_an_old_library_is_named_with_the_version_that_is_asked_for(
    first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(first)  # the repository's root may hold metadata of its own, which Python would find before these
    put(first, datasets="")
    info = first / "accelerate_toolkit-0.1.0.dist-info"
    info.mkdir()
    about = "Metadata-Version: 2.1\nName: accelerate-toolkit\nVersion: 0.1.0\n"
    (info / "METADATA").write_text(f"{about}Requires-Dist: datasets>=999\n")
    (finding,) = run_apart(["datasets"])
    assert finding.status == "broken"
    assert finding.detail == f"{metadata.version('datasets')}, expected >=999"
    assert finding.fix == "`pip install 'datasets>=999'`"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_examination_leaves_no_process(how: signal.Signals, first: Path) -> None:
    """Ctrl-C while libraries hang: `diagnose` ends at once, and its children; killed outright, too."""
    hang = f"""
        import os, pathlib, time
        pathlib.Path({str(first)!r}, f"pid-{{os.getpid()}}").touch()
        time.sleep(300)
    """
    put(first, torch=hang, bitsandbytes=hang)
    parent = start("-c", "from toolkit.diagnosis import diagnose; diagnose()", env=None)
    children = [psutil.Process(int(path.name.partition("-")[2])) for path in two_files(first, "pid-*")]
    parent.send_signal(how)
    assert parent.wait(timeout=20) != 0
    gone(children, 5)


def test_stopping_between_checks() -> None:
    stop = threading.Event()
    stop.set()
    assert list(run_apart(["peft"], stop=stop)) == []


def two_files(folder: Path, pattern: str) -> list[Path]:
    until(lambda: len(list(folder.glob(pattern))) == 2, 60, f"two {pattern} in {folder}")
    return list(folder.glob(pattern))


# What follows for a Strategy ------------------------------------------------------------------------------------------


def judged(diagnosis: Diagnosis, **changed: str) -> dict[tuple[str, str], tuple[bool, str]]:
    """The abilities that follow where these checks had this status."""
    names = {name.replace("_", " "): status for name, status in changed.items()}
    findings: Iterator[Finding] = (
        dataclasses.replace(finding, status=names.get(finding.check, "ok"), detail="not installed")
        for finding in diagnosis.findings
    )
    return {(one.field, one.value): (one.runs, one.reason) for one in list_abilities(tuple(findings))}


def test_without_deepspeed_no_zero(diagnosis: Diagnosis) -> None:
    whole, without = judged(diagnosis), judged(diagnosis, deepspeed="missing")
    for stage in ("zero1", "zero2", "zero3"):
        assert whole["sharding", stage][0]
        assert without["sharding", stage] == (False, "deepspeed: not installed")
    for word in ("none", "ddp", "fsdp", "fsdp_grad_op", "hsdp"):
        assert without["sharding", word] == whole["sharding", word]
    assert not without["offload", "optimizer"][0]


def test_without_bitsandbytes_no_qlora(diagnosis: Diagnosis) -> None:
    without = judged(diagnosis, bitsandbytes="missing")
    for adapter in ("qlora", "qlora8"):
        assert without["adapter", adapter] == (False, "bitsandbytes: not installed")
    assert without["adapter", "lora"] == (True, "")
    assert judged(diagnosis, peft="broken")["adapter", "lora"] == (False, "peft: not installed")


def test_without_process_groups_one_process(diagnosis: Diagnosis) -> None:
    without = judged(diagnosis, processes="broken")
    assert without["sharding", "none"][0]
    assert not any(without["sharding", word][0] for word in SHARDINGS if word != "none")
    assert not any(runs for (field, _), (runs, _) in judged(diagnosis, torch="broken").items() if field == "sharding")


# environment(), at the head of every notebook ------------------------------------------------------------------------------


def test_it_says_where_with_what_and_when() -> None:
    here = environment()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", here.date)
    assert here.versions["python"] == platform.python_version()
    assert here.versions["torch"] == metadata.version("torch")
    assert 1 <= here.cores <= (os.cpu_count() or 1)
    where, versions = here.tables()
    assert ("date", here.date) in where.rows
    assert [name for name, _ in versions.rows] == list(here.versions)
    assert here.hardware.device.name in str(here)
    without = dataclasses.replace(here, versions={"python": "3.11", "deepspeed": None})
    assert "deepspeed  not installed" in str(without)
