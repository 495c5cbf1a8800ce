"""The package as a whole: light to import, complete, documented, pinned, and the same on every machine."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import tomllib
import warnings
import zipfile
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from programs import ROOT, python

import toolkit
from toolkit.cli.parser import build_parser

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = sorted(imported.name for imported in pkgutil.walk_packages(toolkit.__path__, "toolkit."))
HEAVY = (
    "accelerate bitsandbytes datasets deepspeed filelock huggingface_hub ipywidgets matplotlib numpy pandas peft psutil "
    "pynvml safetensors tensorboard tokenizers torch tqdm transformers"
)


def in_new_process(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python("-c", script, *arguments, cwd=ROOT, env=os.environ | environment)


def test_importing_any_module_imports_nothing_heavy() -> None:
    script = """
import importlib, json, sys
heavy, imported = sys.argv[1].split(), {}
for module in sys.argv[2:]:
    importlib.import_module(module)
    imported[module] = [name for name in heavy if name in sys.modules]
    for name in imported[module]:
        del sys.modules[name]
print(json.dumps(imported))
"""
    process = in_new_process(script, HEAVY, "toolkit", *MODULES)
    assert process.returncode == 0, process.stderr
    guilty = {module for module, names in json.loads(process.stdout).items() if names}
    # Classes over torch's and over anywidget's; a trace alone imports the one, a panel the other.
    assert guilty == {"toolkit.forecasting.tracker", "toolkit.notebook.widgets"}


def test_what_is_started_with_m_is_not_imported_before() -> None:
    """Python warns of it, and runs the module twice."""
    sources = {name: importlib.util.find_spec(name) for name in MODULES}
    programs = [
        name
        for name, spec in sources.items()
        if spec and '__name__ == "__main__"' in Path(spec.origin or "").read_text()
    ]
    assert "toolkit.finetune" in programs
    programs.remove("toolkit.core.redaction")  # started by its path
    done = in_new_process("import sys, toolkit; print(*sys.modules.keys() & set(sys.argv[1:]))", *programs)
    assert done.stdout == "\n"
    help = python("-W", "error::RuntimeWarning", "-m", "toolkit.finetune", "--help", code=0)
    assert help.stderr == ""


def test_a_table_is_text_alone_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """There rich would show each thing that it renders, as an output of its own."""

    def shown(*_: object) -> None:
        raise AssertionError("rich has shown something")

    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", shown)
    assert "zero3" in str(toolkit.forecast(toolkit.describe("embedded"), toolkit.Strategy(sharding="zero3"), "2x cpu"))


@pytest.mark.parametrize("name", MODULES)
def test_no_function_hides_its_module(name: str) -> None:
    module = importlib.import_module(name)
    package, _, last = name.rpartition(".")
    assert getattr(importlib.import_module(package), last) is module
    assert not callable(getattr(module, last, None)), f"{name}.{last} has the name of its module"
    assert package != "toolkit" or last not in toolkit.__all__, f"{name} hides the public name {last}"


def constants(path: Path) -> set[str]:
    """The names in capitals that a file assigns outside of functions, those of private ones without the underscore."""
    names: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id.isupper():
            names.add(node.id.strip("_"))
        functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        nodes += [child for child in ast.iter_child_nodes(node) if not isinstance(child, functions)]
    return names


def test_a_name_of_a_constant_has_one_meaning() -> None:
    places = defaultdict(set)
    for path in (ROOT / "toolkit").rglob("*.py"):
        for name in constants(path):
            places[name].add(str(path.relative_to(ROOT)))
    several = {name: sorted(files) for name, files in places.items() if len(files) > 1}
    del several["T"]  # a type variable: it links the types of one function
    assert several == {}


def public(module: ModuleType) -> dict[str, object]:
    """What a module defines itself under a public name, with the methods and properties of its classes."""
    members: dict[str, object] = {}
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value) or inspect.isclass(value):
            members[name] = value
        if inspect.isclass(value):
            for inner in vars(value):
                member = getattr(value, inner)
                if not inner.startswith("_") and (inspect.isroutine(member) or isinstance(member, property)):
                    members[f"{name}.{inner}"] = member
    return members


@pytest.mark.parametrize("name", ["toolkit", *MODULES])
def test_everything_public_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    undocumented = [label for label, value in public(module).items() if not inspect.getdoc(value)]
    assert inspect.getdoc(module)
    assert not undocumented


def reached(extras: set[str]) -> set[str]:
    """Every distribution that the project needs with these extras, as the installed ones' metadata say."""
    wanted = [Requirement(line) for line in PROJECT["dependencies"]]
    wanted += [Requirement(line) for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    seen: set[tuple[str, str]] = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        for extra in ["", *sorted(requirement.extras)]:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            if name == PROJECT["name"]:
                wanted += map(Requirement, PROJECT["optional-dependencies"].get(extra, []))
                continue
            for line in importlib.metadata.requires(name) or []:
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    wanted.append(needed)
    return {name for name, _ in seen} - {PROJECT["name"]}


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    matches = [re.fullmatch(r"([\w.-]+)==([\w.!]+)", line) for line in lines]
    assert all(matches), f"not name==version: {[line for line, match in zip(lines, matches, strict=True) if not match]}"
    return {canonicalize_name(match[1]): match[2] for match in matches if match}


def test_constraints_are_the_packages_of_all_docs_and_test() -> None:
    cuda = re.compile(r"triton|cuda-.*|nvidia-(?!ml-py$).*")  # the CUDA build of torch brings these, with its own pins
    assert {name for name in reached({"all", "docs", "test"}) if not cuda.fullmatch(name)} == set(pins()) - {"pip"}


@pytest.mark.parametrize("name", sorted(pins()))
def test_installed_versions_are_the_pinned_ones(name: str) -> None:
    assert Version(importlib.metadata.version(name)).public == pins()[name]


def test_extras() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {"deepspeed", "qlora", "notebook", "docs", "test", "all", "flash"} <= set(extras)
    everything = {canonicalize_name(name) for name in reached({"all"})}
    assert "flash-attn" not in everything
    for extra in set(extras) - {"all", "docs", "test", "flash"}:
        assert {canonicalize_name(Requirement(line).name) for line in extras[extra]} <= everything


def test_a_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "toolkit", source / "toolkit", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "tests").mkdir()
    (source / "tests" / "__init__.py").touch()
    script = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    python("-c", script, tmp_path, cwd=source, code=0)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"accelerate_toolkit-{PROJECT['version']}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    info = f"accelerate_toolkit-{PROJECT['version']}.dist-info/"
    sources = {str(path.relative_to(source)) for path in (source / "toolkit").rglob("*") if path.is_file()}
    assert {name for name in names if not name.startswith(info)} == sources
    assert "toolkit/py.typed" in sources
    assert info + "licenses/LICENSE" in names


@pytest.mark.parametrize("module", ["toolkit", "toolkit.config.strategy", "toolkit.engines.fsdp"])
def test_a_warning_of_ours_is_an_error(module: str) -> None:
    with pytest.raises(UserWarning, match="ours"):
        warnings.warn_explicit("ours", UserWarning, "a.py", 1, module=module)


@pytest.mark.parametrize("module", ["torch.toolkit", "toolkits", "transformers"])
def test_a_warning_of_others_is_none(module: str) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn_explicit("theirs", UserWarning, "a.py", 1, module=module)
    assert [str(warning.message) for warning in seen] == ["theirs"]


def test_warnings_count_in_started_processes_too() -> None:
    script = "import sys, warnings; warnings.warn_explicit('seen', UserWarning, 'a.py', 1, module=sys.argv[1])"
    ours, theirs = in_new_process(script, "toolkit.engines.fsdp"), in_new_process(script, "transformers")
    assert ours.returncode == 1
    assert "UserWarning: seen" in ours.stderr
    assert theirs.returncode == 0
    assert "UserWarning: seen" in theirs.stderr


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    home = re.compile(r"(?<![\w.])/(?:" + "home|root|" + r"Users|work)/\w")
    kinds = {".py", ".toml", ".txt", ".md", ".yaml", ".yml", ".ipynb", ".json", ""}
    folders = ("toolkit", "tests", "notebooks", "accelerate_configs", "benchmarks", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    files += (path for path in ROOT.iterdir() if path.suffix or not path.name.startswith("."))  # not what tools leave
    texts = {path: path.read_text() for path in files if path.is_file() and path.suffix in kinds}
    assert len(texts) > len(MODULES)
    assert [str(path.relative_to(ROOT)) for path, text in texts.items() if home.search(text)] == []


def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = build_parser()
    [verbs] = [action for action in parser._actions if action.dest == "verb"]
    assert isinstance(verbs.choices, dict)
    for verb in (parser, *verbs.choices.values()):
        assert not [line for line in verb.format_help().splitlines() if len(line) > 80], verb.prog


@pytest.mark.parametrize(
    "command",
    [
        "doctor",
        "describe",
        "forecast --hardware 4xH100-80GB --sharding zero3",
        "plan --global-batch 8 --hardware 4xH100-80GB",
        "precisions --hardware 4xH100-80GB",
    ],
)
def test_commands_print_at_most_80_columns(command: str) -> None:
    script = "import sys; from toolkit.cli import main; sys.exit(main(sys.argv[1:]))"
    lines = in_new_process(script, *command.split(), COLUMNS="80").stdout.splitlines()
    assert lines
    assert not [line for line in lines if len(line) > 80 and "/" not in line]  # a path stays whole
