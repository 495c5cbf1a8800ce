"""Where data are: a name given as `--data` → its files, those that a folder leaves out, or a dataset."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import expand_user, outside_target
from toolkit.core.errors import DataError
from toolkit.data.embedded import embedded_files
from toolkit.data.hub import check_hub, configured_files, load_dataset, open_saved

EMBEDDED = "embedded"
"""The source's name that means the embedded text, as None does."""

JSONL = (".jsonl", ".ndjson")
TEXT = (
    ".txt", ".text", ".md", ".rst", ".tex", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go",
    ".java", ".js", ".ts", ".rb", ".sh", ".sql", ".html", ".css", ".toml", ".yaml", ".yml",
)  # fmt: skip
"""Text in a folder. A single file with any other ending is read as text too."""

TABLES = {".arrow": "arrow", ".csv": "csv", ".json": "json", ".parquet": "parquet"}
"""Files that the `datasets` library reads, with its name for them."""

READ = (*JSONL, *TEXT, *TABLES)
"""Formats that are read from a folder."""

NAMED = 5
"""Files of a kind that a message lists by name."""

_DESCRIBES = re.compile(r"dataset_infos?.*\.json|(config|dataset_dict)\.json|.*\.ya?ml", re.I)
_DOCUMENTS = re.compile(r"(readme|licen[cs]e).*", re.I)

# The words and separators of `datasets.data_files`, which splits a folder by its files' names in the same way.
_SPLIT = re.compile(
    r"(?:^|[-._ 0-9])(?:(train|training)|(validation|valid|dev|val)|(test|testing|eval|evaluation))(?=[-._ 0-9]|$)",
    re.I,
)
_SPLIT_NAMES = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the documents are: files of text and JSONL, or rows of the `datasets` library."""

    name: str
    """As the user wrote it."""
    files: tuple[Path, ...] = ()
    """In the order in which they are read; of a dataset, where its rows lie."""
    kind: str = "files"
    """`files` (text, JSONL), `tables` (parquet, csv, …), `saved` (by `save_to_disk`) or `hub`."""
    dataset: Any = None
    """The open dataset of a Hub id."""
    summary: str = ""
    """Of a folder: which files are read and which are left out, with counts."""

    def where(self, file: int, line: int) -> str:
        """Return a document's place for messages: its file and line (of a text: 0), or its row in a dataset."""
        if self.kind != "files":
            return f"{self.name}, row {line}"
        return f"{self.files[file]}, line {line}" if line else str(self.files[file])

    def rows(self, cache: Path | None) -> Iterator[Mapping[str, Any]]:
        """Return the rows of a dataset. Tables are converted in the folder `cache`."""
        if self.kind == "saved":
            yield from open_saved(self.name, self.files[0].parent)
        elif self.kind == "hub":
            yield from self.dataset
        for suffix, kind in TABLES.items() if self.kind == "tables" else ():
            if files := [str(path) for path in self.files if path.suffix.lower() == suffix]:
                yield from load_dataset(self.name, path=kind, data_files=files, cache_dir=cache and str(cache))


def find_source(source: str | Path | None) -> Source:
    """Return the source that a `--data` value names.

    None or `embedded`; a file; a folder; a folder that `save_to_disk` wrote; or a Hub id as `ID`, `ID:SPLIT` or
    `ID:CONFIG:SPLIT` (split `train` unless named).

    Raises:
        DataError: for a path that does not exist, a folder without data or with two families of data, and a dataset
            that cannot be loaded.
    """
    if source is None or str(source) == EMBEDDED:
        return Source(files=tuple(embedded_files()), name=EMBEDDED)
    name, path = str(source), expand_user(source)
    if path.is_dir():
        for first in (path / "state.json", path / "dataset_dict.json"):
            if first.is_file():
                others = sorted(file for file in path.rglob("*") if file.is_file() and file != first)
                return Source(name=name, files=(first, *others), kind="saved")
        return _folder(name, path)
    if path.exists():
        return Source(name=name, files=(path,), kind="tables" if path.suffix.lower() in TABLES else "files")
    hub = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(:[\w.%\[\]-]+){0,2}", name)
    if not hub or Path(name).suffix.lower() in READ:
        raise DataError(
            f"data {name}: no such file or folder. Give a path that exists, or leave --data out to train on the"
            " embedded text."
        )
    identifier, *rest = name.split(":")
    split = rest[-1] if rest else "train"
    config = rest[0] if len(rest) == 2 else None
    check_hub(name)
    dataset = load_dataset(name, path=identifier, config=config, split=split)
    files = tuple(Path(entry["filename"]) for entry in dataset.cache_files)
    return Source(name=name, files=files, kind="hub", dataset=dataset)


def _folder(name: str, path: Path) -> Source:
    """Return the data files under a folder: one family of formats, without descriptions and other splits.

    The header of a Hub dataset's README.md decides, where it names the files of the training split.

    Raises:
        DataError: for a folder without data that can be read, with data of both families, or with splits and none to
            train on.
    """
    every = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    visible = [n for n in every if not _is_hidden(n)]
    data = [n for n in visible if not _is_description(n)]
    configured = configured_files(name, path)
    # Files that describe are data only in a folder that holds nothing else.
    chosen = configured or data or [n for n in visible if _suffix(n) in TEXT]
    read = [n for n in chosen if _suffix(n) in READ]
    unread = _list_names(set(chosen) - set(read))
    if not read or (configured and unread):
        what = "README.md configures" if configured else "the folder holds no text or rows, only"
        problem = f"{what} files that cannot be read: {unread}" if unread else "the folder holds no text or rows"
        raise DataError(
            f"data {name}: {problem}. Expected {', '.join(JSONL)},"
            f" tables ({', '.join(TABLES)}), or text such as .txt, .md or .py. Unpack or convert the files, or name a"
            " single text file."
        )
    tables = [n for n in read if _suffix(n) in TABLES]
    if tables and len(tables) < len(read):
        raise DataError(
            f"data {name}: the folder holds tables ({_list_names(tables)}) and text ({_list_names(set(read) - set(tables))})."
            " Expected one of the two. Name a single file, or move one of them into a folder of its own."
        )
    picked, split = (read, "train") if configured else _training_split(name, read)
    for n in picked:
        if leads := outside_target(path / n, path):
            raise DataError(
                f"data {path / n} is a link that leaves its folder, to {leads}, and a folder from elsewhere could bring any file "
                "of yours into a model. Copy the file there in its place, or name it itself."
            )
    others = {n for n in data if _suffix(n) in READ} - set(picked)
    return Source(
        name=name,
        files=tuple(path / n for n in picked),
        kind="tables" if tables else "files",
        summary=_summary(picked, split, sorted(others), sorted(set(every) - set(picked) - others)),
    )


def _training_split(name: str, data: Sequence[str]) -> tuple[list[str], str]:
    """Return the files of the training split and its name; all files where the names contain no split.

    A file of rows names one as `datasets` finds it: `train.jsonl`, `test/part-0.parquet`. Where none names `train`, files
    that name no split are it. Names of text files count only where each of them names a split and one is `train`:
    `test_model.py` of a program is no split.
    """
    splits = {n: _split_of(n) for n in data}
    rows = [n for n in data if _suffix(n) not in TEXT]
    named = {splits[n] for n in rows or data} - {""}
    if not named or (not rows and ("" in splits.values() or "train" not in named)):
        return list(data), ""
    train = [n for n in data if splits[n] == "train"] or [n for n in data if not splits[n]]
    if train:
        return train, "train"
    if len(named) > 1:
        raise DataError(
            f"data {name}: the folder holds the splits {' and '.join(sorted(named))}, expected train. Name a single file:"
            f" {_list_names(data)}."
        )
    return list(data), named.pop()


def _split_of(name: str) -> str:
    """Return the split in the name of a file or its folders, or an empty string."""
    match = next(filter(None, map(_SPLIT.search, Path(name).parts)), None)
    return _SPLIT_NAMES[(match.lastindex or 1) - 1] if match else ""


def _suffix(name: str) -> str:
    return Path(name).suffix.lower()


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in Path(name).parts)


def _is_description(name: str) -> bool:
    """Return whether a file describes data and does not count as data where there are other files."""
    file = Path(name).name
    text = _suffix(name) in ("", *TEXT)
    return bool(_DESCRIBES.fullmatch(file)) or (text and bool(_DOCUMENTS.fullmatch(file)))


def _list_names(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED:,} more" if len(names) > NAMED else "")


def _summary(chosen: Sequence[str], split: str, other_splits: Sequence[str], left_out: Sequence[str]) -> str:
    """Return a summary such as `12 parquet files; left out: README.md, 2 .yaml files`."""
    kinds = Counter(Path(n).suffix.lower().lstrip(".") for n in chosen)
    text = ", ".join(f"{count:,} {kind} file{'s' * (count > 1)}" for kind, count in sorted(kinds.items()))
    text += f" of the split {split}" if split else ""
    groups: dict[str, list[str]] = {}
    for n in left_out:
        # A hidden folder such as .git counts as one.
        hidden = next((part for part in Path(n).parts if part.startswith(".")), None)
        groups.setdefault(hidden or Path(n).suffix.lower() or n, []).append(hidden or n)
    others = [f"{len(other_splits):,} of no or another split ({_list_names(other_splits)})"] if other_splits else []
    alike = (ns[0] if len(set(ns)) == 1 else f"{len(ns):,} {kind} files" for kind, ns in groups.items())
    words = list(chain(others, sorted(alike)))
    return text + (f"; left out: {', '.join(words)}" if words else "")
