"""A machine that lacks packages, and a checkout in which other commands have left their folders."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT

SCRIPT = ROOT / ".ci" / "system-packages"
TOOLS = ("make", "g++", "chromium", "git", "unshare", "mount")
PACKAGES = ["python3", "python3-venv", "make", "g++", "python3-dev", "chromium", "git", "util-linux", "mount"]


def test_style_is_the_same_whatever_folders_are_at_the_root(tmp_path: Path) -> None:
    """`make demo` leaves `runs/`, a tracker `wandb/`: here is a folder for every module that a file imports."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    imported = set()
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    assert {"runs", "torch"} <= imported
    for name in imported:
        (tmp_path / name).mkdir(exist_ok=True)
    ruff = [Path(sys.executable).with_name("ruff"), "check", "."]
    checked = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


class Machine:
    """The script in a checkout of its own, on a PATH that holds only what a test puts there."""

    def __init__(self, folder: Path, user: int) -> None:
        self.bin, self.script = folder / "bin", folder / "checkout" / ".ci" / SCRIPT.name
        self.bin.mkdir()
        self.script.parent.mkdir(parents=True)
        shutil.copy(SCRIPT, self.script)
        for name in ("bash", "dirname", "ln"):
            (self.bin / name).symlink_to(str(shutil.which(name)))
        self.command("id", f"echo {user}")

    def command(self, name: str, *lines: str) -> None:
        """Put a command of this name on the PATH."""
        path = self.bin / name
        path.write_text("\n".join(("#!/bin/bash", *lines)))
        path.chmod(0o755)

    def check(self, *targets: str, python: str = "python3") -> subprocess.CompletedProcess[str]:
        """Run the script. Ten seconds are the promise."""
        environ = {"PATH": str(self.bin), "PYTHON": python}
        return subprocess.run(
            [self.script, *targets], env=environ, capture_output=True, text=True, timeout=10, check=False
        )


def test_everything_missing_is_in_one_message(tmp_path: Path) -> None:
    machine = Machine(tmp_path, user=1000)
    machine.command("apt-get", "echo apt-get was called; exit 1")
    done = machine.check("test")
    assert (done.returncode, done.stdout) == (1, "")
    first, *listed, last = done.stderr.splitlines()
    assert first == "Missing for make test:"
    assert len(listed) == len(PACKAGES)
    install = f"sudo apt-get install --no-install-recommends {' '.join(PACKAGES)}"
    assert last == f"On Debian or Ubuntu: sudo apt-get update && {install}"


def test_a_target_asks_only_for_what_it_needs(tmp_path: Path) -> None:
    machine = Machine(tmp_path, user=1000)
    for name in ("make", "g++"):
        machine.command(name)
    assert machine.check("demo", python=sys.executable).returncode == 0
    assert "chromium" in machine.check("test", python=sys.executable).stderr
    for name in TOOLS:
        machine.command(name)
    assert machine.check("demo", "test", python=sys.executable).returncode == 0


def test_root_installs_what_is_missing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, user=0)
    made = f"for name in {' '.join(TOOLS)}; do ln -s {shutil.which('true')} {machine.bin}/$name; done"
    python = f"ln -s {sys.executable} {machine.bin}/python3"
    machine.command("apt-get", 'echo "$DEBIAN_FRONTEND: $*"', f'if [[ "$*" == *install* ]]; then {made}; {python}; fi')
    done = machine.check("test")
    assert done.returncode == 0, done.stderr
    first, update, install = done.stdout.splitlines()
    assert first == f"Missing for make test: installing {' '.join(PACKAGES)} with apt-get."
    assert update.startswith("noninteractive: ")
    assert update.endswith(" update")
    assert install.endswith(f" install --yes --no-install-recommends {' '.join(PACKAGES)}")
    again = machine.check("test")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_what_apt_cannot_install_is_in_the_same_message(tmp_path: Path) -> None:
    """Without a network apt-get ends with 100."""
    machine = Machine(tmp_path, user=0)
    machine.command("apt-get", "exit 100")
    done = machine.check("test")
    assert done.returncode == 1
    assert done.stderr.startswith("Missing for make test:\n")
    assert done.stderr.endswith(f": apt-get update && apt-get install --no-install-recommends {' '.join(PACKAGES)}\n")


@pytest.mark.parametrize("user", [0, 1000])
def test_an_old_python_is_named_with_what_else_is_missing(tmp_path: Path, user: int) -> None:
    """No package makes it newer, so nothing is installed."""
    machine = Machine(tmp_path, user=user)
    machine.command("apt-get", "echo apt-get was called")
    machine.command("python3", '[ "$1" = --version ] && echo Python 3.9.2', '[[ "$2" != *version_info* ]]')
    done = machine.check("demo")
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        "Python 3.11 or newer (python3 is Python 3.9.2; name another one: make demo PYTHON=python3.11)" in done.stderr
    )
    assert "g++" in done.stderr


@pytest.mark.parametrize("target", ["demo", "test", "check", "notebooks", "screenshots"])
def test_every_target_begins_with_the_check(target: str) -> None:
    """Before `.venv` is made, and also where it is current."""
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    planned = ["make", "--dry-run", "PYTHON=python3", target]
    done = subprocess.run(planned, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == f"PYTHON='python3' .ci/system-packages {target}"
