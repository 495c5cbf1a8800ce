"""What is released: wheel and sdist from their files, types for those who import it, metadata, and files of the repository."""

from __future__ import annotations

import email
import importlib.machinery
import importlib.util
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from programs import ROOT

from toolkit.core import VERSION

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def program(name: str) -> ModuleType:
    """A Python file of `.ci`, without running it."""
    module_name = name.replace("-", "_")
    loader = importlib.machinery.SourceFileLoader(module_name, str(ROOT / ".ci" / name))
    spec = importlib.util.spec_from_loader(module_name, loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def builder() -> ModuleType:
    return program("build-dist")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, and the wheel that the sdist gives."""
    _, wheel, from_sdist = builder().build(tmp_path_factory.mktemp("dist"))
    return wheel, from_sdist


def contents(wheel: Path) -> dict[str, bytes]:
    archive = zipfile.ZipFile(wheel)
    return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def test_wheel_and_sdist_hold_the_same(built: tuple[Path, Path]) -> None:
    assert contents(built[0]) == contents(built[1])
    assert "toolkit/core/glossary.txt" in contents(built[0])


def test_metadata(built: tuple[Path, Path]) -> None:
    info = f"accelerate_toolkit-{VERSION}.dist-info"
    about = email.message_from_bytes(contents(built[0])[f"{info}/METADATA"])
    assert about["License-Expression"] == "Apache-2.0"  # PEP 639
    assert about.get_all("License-File") == ["LICENSE"]
    assert not [line for line in about.get_all("Classifier") if line.startswith("License")]
    assert set(about.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert about["Version"] == PROJECT["version"] == VERSION == str(cited["version"])
    assert cited["license"] == about["License-Expression"]


def test_the_wheel_installs_from_its_file_and_has_types(built: tuple[Path, Path], tmp_path: Path) -> None:
    make = builder()
    interpreter = make.install(built[0], tmp_path / "environment")
    assert make.run(interpreter.with_name("toolkit"), "--version", cwd=tmp_path) == f"toolkit {VERSION}\n"
    where = make.run(interpreter, "-c", "import toolkit; print(toolkit.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path)
    consumer = tmp_path / "consumer.py"
    consumer.write_text(
        "from toolkit.config.strategy import Strategy\n\n"
        'strategy = Strategy(sharding="zero3")\n'
        "reveal_type(strategy.sharding)\n"
        "wrong: int = strategy.engine\n"
    )
    bare = make.install(built[0], tmp_path / "bare", libraries=False)  # torch's own types take a minute
    options = ("--strict", "--python-executable", bare, "--no-incremental")
    with pytest.raises(RuntimeError) as found:
        make.run(sys.executable, "-m", "mypy", *options, consumer, cwd=tmp_path)
    first, second, *_ = str(found.value).splitlines()
    assert first.endswith('Revealed type is "str"'), found.value
    assert 'has type "str", variable has type "int"' in second, found.value


def test_make_lower_bounds_installs_each_declared_bound() -> None:
    """None has an upper bound: no test shows a break."""
    lines = [*PROJECT["dependencies"], *(line for lines in PROJECT["optional-dependencies"].values() for line in lines)]
    assert [line for line in lines if "<" in line or "==" in line] == []
    lowest = program("lower-bounds").lowest()
    assert {line.replace("==", ">=") for line in lowest} <= set(lines)
    left_out = {"torch", "accelerate-toolkit"}
    assert {line.partition("==")[0] for line in lowest} >= {
        line.partition(">")[0] for line in PROJECT["dependencies"]
    } - left_out


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_of_the_makefile(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    lines = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    makefile = (ROOT / "Makefile").read_text()
    assert lines
    for line in lines:
        make, target, *_ = line.split()
        assert make == "make"
        assert f"\n{target}:" in makefile, line


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_issue_templates_have_what_github_needs(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.stem != "config":
        assert {"name", "description", "body"} <= form.keys()
        assert all({"type", "id", "attributes"} <= part.keys() for part in form["body"])
