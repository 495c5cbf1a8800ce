"""The site and README: their commands exist, their numbers come from the code, and every link leads somewhere."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.parse
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import reference
import results
import schemas
from programs import ROOT, environment
from site_commands import DOCS, EXECUTED, OF_A_RUN, PARSED, commands, make_reader_folder, words_of

from toolkit.cli import main
from toolkit.cli.parser import build_parser
from toolkit.config.fields import from_dict
from toolkit.config.flags import given
from toolkit.core.glossary import glossary_terms


def test_each_command_is_executed_or_it_is_said_why_not() -> None:
    """Nothing is left out, and nothing is there that no page has."""
    parsed = [line for lines in PARSED.values() for line in lines.split("\n") if line]
    assert sorted(commands()) == sorted({*EXECUTED, *OF_A_RUN, *parsed})
    assert len(parsed) == len(set(parsed))
    assert not {*parsed} & {*EXECUTED, *OF_A_RUN}


@pytest.mark.parametrize("reason", sorted(reason for reason in PARSED if "tests/" in reason))
def test_a_reason_names_a_test(reason: str) -> None:
    """And the test's file has the words in backticks."""
    for name in re.findall(r"tests/[\w/]+\.py", reason):
        text = (ROOT / name).read_text()
        assert all(word in text for word in re.findall(r"`(\w+)`", reason)), reason


@pytest.mark.parametrize("line", commands())
def test_every_command_exists(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line)
    if words[0] == "toolkit":
        (tmp_path / "ds_config.json").write_text("{}")
        monkeypatch.chdir(tmp_path)
        flags = build_parser().parse_args(words[1:])
        for owner in reference.owners() if words[1] != "generate" else ():  # values, too
            fields = {
                name: value for name, value in given(flags, owner).items() if value != "any" and "," not in str(value)
            }
            from_dict(owner, fields)
    elif words[0] == "make":
        targets = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.M)
        assert words[1] in " ".join(targets).split(), line
    elif words[0] == "accelerate":
        config = Path(words[words.index("--config_file") + 1])
        assert config.name.startswith("node") or (ROOT / config).is_file(), line
        if "toolkit.finetune" in words:
            flags = build_parser().parse_args(["train", *words[words.index("toolkit.finetune") + 1 :]])
    else:
        assert words[0] in ("pip", "python3", "source", "git", "cd"), line
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\[(\w+)\]", line)) <= set(extras), line


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, peft: None) -> Path:
    """The folder of a reader. `peft`: adapters are traced in this process."""
    folder = tmp_path_factory.mktemp("reader")
    make_reader_folder(folder)
    return folder


@pytest.mark.parametrize("line", EXECUTED)
def test_commands_run(line: str, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reader)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words_of(line)) == 0
    assert out.getvalue() or "-o" in line


def test_schemas_are_those_of_the_classes() -> None:
    stored = {path.name.partition(".")[0]: json.loads(path.read_text()) for path in schemas.FOLDER.glob("*.json")}
    assert stored == schemas.all_schemas(), "run `make schemas`"


@pytest.mark.parametrize(
    "line",
    [
        "forecast --sharding zero3 --hardware '2x cpu'",
        "forecast --sharding ddp --hardware '8x H100-80GB' --host-memory 1GiB",
        "plan --hardware '2x cpu' --global-batch 8",
        "plan --hardware '2x T4' --global-batch 6 --tokens 1e9 --price 2",
    ],
)
def test_json_is_as_its_schema_says(line: str, tmp_path: Path) -> None:
    verb, *words = shlex.split(line)
    assert main([verb, *words, "--json", str(tmp_path / "out.json")]) == 0
    check_json(verb, tmp_path / "out.json")


def test_the_json_of_a_diagnosis_is_as_its_schema_says(tmp_path: Path) -> None:
    from toolkit.diagnosis.result import Diagnosis, Finding, list_abilities

    findings = (
        Finding(check="torch", status="ok", detail="2.13"),
        Finding(check="peft", status="missing", detail="", fix="pip"),
    )
    path = tmp_path / "out.json"
    path.write_text(Diagnosis(findings=findings, abilities=tuple(list_abilities(findings))).to_json())
    check_json("doctor", path)


def check_json(verb: str, path: Path) -> None:
    schema = json.loads((schemas.FOLDER / f"{verb}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    found = json.loads(path.read_text())
    jsonschema.Draft202012Validator(schema).validate(found)
    name = next(iter(schema["properties"]))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate({key: value for key, value in found.items() if key != name})


def test_messages_of_the_troubleshooting_page_are_the_codes() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "toolkit").rglob("*.py"))
    page = (DOCS / "guides" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page, re.M)
    fragments = [fragment for row in rows for fragment in re.findall("`(.+?)`", row)]
    assert len(fragments) > 8
    said = [fragment for fragment in fragments if fragment not in sources]
    assert said == ["It does not fit."] or not said, said
    assert "'It does not fit.'" in sources


def test_reference_is_complete() -> None:
    import toolkit

    pages = reference.pages()
    for verb in reference.verbs():
        assert f"\n## {verb}\n" in pages["reference/commands.md"]
    for name in toolkit.__all__:
        assert f"\n::: toolkit.{name}\n" in pages["reference/python.md"]
    for text in ("`--micro-batch INT`", "`--adapter none|lora|dora|qlora|qlora8`".replace("|", "\\|")):
        assert text in pages["reference/commands.md"]
    assert "OutOfMemory" in pages["reference/errors.md"]
    assert all(f"**{term}**" in pages["reference/glossary.md"] for term in glossary_terms())


def test_the_glossary_is_short_and_plain() -> None:
    terms = glossary_terms()
    assert {"rank", "master", "workspace", "buffer", "micro-batch", "MFU", "reserved"} <= terms.keys()
    for term, meaning in terms.items():
        sentences = re.split(r"(?<=[.:])\s", meaning)
        assert meaning.endswith("."), term
        assert max(len(sentence.split()) for sentence in sentences) < 25, term


def test_results_have_versions_and_known_keys() -> None:
    for name in ("matrix", "families", "choose"):
        for key, result in results.stored(name).items():
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"]), key
            assert set(result["versions"]) == set(results.LIBRARIES), key
    matrix, cells = results.stored("matrix"), results.cells()
    assert set(matrix) <= set(cells)
    for key, result in matrix.items():
        assert ("losses" in result) + ("refused" in result) == 1, (key, result)
        if "losses" in result and not results.model_of(cells[key]):  # two steps of the same rows
            assert result["losses"][-1] < result["losses"][0], key


def test_the_meshes_of_the_matrix_have_the_same_losses() -> None:
    """However a model is divided. Two steps of other rows."""
    cells, losses = results.cells(), {}
    for key, result in results.stored("matrix").items():
        if "losses" in result and (model := results.model_of(cells[key])):
            losses.setdefault((model, cells[key].get("adapter", "none")), []).append(result["losses"])
    assert len(losses) == 4
    for same in losses.values():
        assert all(each == pytest.approx(same[0], rel=1e-5) for each in same), same


def test_refusals_of_the_matrix_are_todays() -> None:
    """Those that no process was started for; not of fp16, which some processors compute."""
    stored = {
        key: one["refused"] for key, one in results.stored("matrix").items() if "refused" in one and "ranks" not in one
    }
    assert stored
    assert {key: results.refusal(results.cells()[key]) for key in stored} == stored


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        about = dict(attrs)
        self.names |= {str(about[key]) for key in ("id", "name") if about.get(key)}
        for key in ("href", "src"):
            if about.get(key):
                self.targets.append(str(about[key]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly."""
    folder = tmp_path_factory.mktemp("site")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        line, cwd=ROOT, env=environment(NO_MKDOCS_2_WARNING="1"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def links(site: Path) -> dict[Path, _Links]:
    found = {}
    for path in site.rglob("*.html"):
        found[path] = _Links()
        found[path].feed(path.read_text())
    return found


def local(path: Path, links: _Links) -> Iterator[tuple[Path, str]]:
    for target in links.targets:
        parts = urllib.parse.urlsplit(target)
        if not parts.scheme and not parts.netloc:
            place = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            yield (place / "index.html" if place.is_dir() else place), urllib.parse.unquote(parts.fragment)


def test_every_link_leads_somewhere(site: Path, links: dict[Path, _Links]) -> None:
    assert len(links) > 30
    for path, found in links.items():
        if path.name == "404.html":
            continue  # its links are from the root of a server
        for place, fragment in local(path, found):
            assert place.is_file(), (path.name, place)
            if fragment and place.suffix == ".html" and not fragment.startswith("__"):
                assert fragment in links[place].names, (path.name, place.name, fragment)


def test_every_page_is_reached_from_the_first(site: Path, links: dict[Path, _Links]) -> None:
    reached, left = set(), [site / "index.html"]
    while left:
        path = left.pop()
        if path in links and path not in reached:
            reached.add(path)
            left += [place for place, _ in local(path, links[path])]
    assert {path.name for path in links.keys() - reached} <= {"404.html"}


def test_nothing_comes_from_the_network(site: Path) -> None:
    """Neither fonts nor scripts nor pictures; links that a reader follows may lead outside."""
    for path in site.rglob("*.html"):
        loaded = re.findall(
            r"""<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""", path.read_text()
        )
        assert loaded == [], path
    assert (site / "search" / "search_index.js").is_file()
