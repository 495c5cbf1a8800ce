"""Sources of data: a name given as `--data` → its files, the excluded files of a folder, or a dataset of `datasets`."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from toolkit.config.run_config import EMBEDDED
from toolkit.core.atomic_io import expand_user, open_regular, outside_target
from toolkit.core.errors import DataError
from toolkit.data.embedded import embedded_files
from toolkit.data.readers import ARROW, BATCH_ROWS, CSV, JSON_SUFFIXES, TEXT, Table, Text, arrow_rows, open_file
from toolkit.models.files import first_line, hub_reachable

READ = (*TEXT, *JSON_SUFFIXES, *CSV, *ARROW)
"""Formats that are read from a folder, also compressed."""

NAMED = 5
"""Files that a message lists by name."""

_DESCRIBES = re.compile(r"dataset_infos?.*\.json|(config|dataset_dict)\.json|.*\.ya?ml", re.I)
_COMPRESSED = re.compile(r"(?<=.)\.(gz|zst|bz2|xz)$", re.I)
_NOT_DATA = re.compile(r"(readme|licen[cs]e).*", re.I)

# The words and separators of `datasets.data_files`, which splits a folder by its files' names in the same way.
_SPLIT = re.compile(
    r"(?:^|[-._ 0-9])(?:(train|training)|(validation|valid|dev|val)|(test|testing|eval|evaluation))(?=[-._ 0-9]|$)",
    re.I,
)
_SPLIT_NAMES = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of documents: files, or a dataset."""

    name: str
    """As the user wrote it."""
    files: tuple[Path, ...] = ()
    """In the order in which they are read; of a dataset, where its rows lie."""
    dataset: Any = None
    """Opens a dataset of the Hub, or one that `save_to_disk` wrote."""
    summary: str = ""
    """Of a folder: the files that are read and those that are left out."""

    @cached_property
    def places(self) -> tuple[str, ...]:
        """The names of files, or of the dataset, for messages."""
        return (self.name,) if self.dataset else tuple(map(str, self.files))

    def where(self, file: int, line: int) -> str:
        """Return a document's place for messages: its file and line (of a text: 0), or its row (below 0)."""
        rest = f", line {line}" if line > 0 else f", row {-line} (index {-line - 1})" if line else ""
        return f"{self.places[file]}{rest}"

    @contextlib.contextmanager
    def open(self, file: int, names: Sequence[str] = ()) -> Iterator[Text | Table]:
        """Open a file or the dataset. `names` of columns show that a file without a telling suffix is a table.

        Raises:
            DataError: for what cannot be read, with the library's first line.
        """
        if self.dataset:
            data = self.dataset().with_format("arrow")
            yield arrow_rows(data.column_names, lambda columns: data.select_columns(columns).iter(BATCH_ROWS))
        else:
            with open_regular(self.files[file]) as opened:
                yield open_file(self.files[file], opened, suffix_of(self.files[file]), names)


def find_source(source: str | Path | None) -> Source:
    """Return the source that a `--data` value names.

    None or `embedded`; a file; a pattern such as `data/*.jsonl`; a folder; a folder that `save_to_disk` wrote; or a Hub id as
    `ID`, `ID:SPLIT` or `ID:CONFIG:SPLIT` (split `train` unless named).

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
                return Source(name=name, files=(first, *others), dataset=partial(_saved_dataset, name, path))
        return _folder(name, path)
    if path.exists():
        if not path.is_file():
            raise DataError(f"data {name}: is a pipe or a device, expected a file. Write its rows into one first.")
        return Source(name=name, files=(path,))
    if files := sorted(Path(file) for file in glob.glob(str(path), recursive=True) if Path(file).is_file()):
        return Source(name=name, files=tuple(files), summary=_count(list(map(str, files))))
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(:[\w.%\[\]-]+){0,2}", name) or suffix_of(name) in READ:
        raise DataError(f"data {name}: no such file or folder. Give a path that exists, or leave --data out.")
    return _hub_dataset(name)


def split_weights(source: str | Path | None) -> list[tuple[str | Path | None, float]]:
    """Return the sources in a `--data` value with their weights: `a.jsonl,b.parquet:0.3`."""
    if source is None or os.path.exists(expand_user(source)):  # a name too long for a file is none
        return [(source, 1.0)]
    parts: list[tuple[str | Path | None, float]] = []
    for part in filter(None, map(str.strip, str(source).split(","))):
        name, _, weight = part.rpartition(":")
        weighted = re.fullmatch(r"\d*\.?\d+", weight) and name and not expand_user(part).exists()
        parts.append((name, float(weight)) if weighted else (part, 1.0))
        if not parts[-1][1]:
            raise DataError(f"data {part}: a weight of 0. Expected one above 0, or leave {name} out.")
    return parts or [(source, 1.0)]


def _hub_dataset(name: str) -> Source:
    """Open a dataset of the Hub. Its own code never runs."""
    from huggingface_hub import constants

    # Asked first: without a network the libraries would retry for 23 s with a warning each time.
    if not constants.HF_HUB_OFFLINE and not hub_reachable():
        raise DataError(
            f"data {name}: no such file or folder, and the Hugging Face Hub cannot be reached. Give a local file,"
            " connect to the network, or set HF_HUB_OFFLINE=1 where this dataset is in the local cache."
        )
    import datasets

    identifier, *rest = name.split(":")
    split = rest[-1] if rest else "train"
    config = rest[0] if len(rest) == 2 else None
    with _datasets_errors(
        name, "Check the name (ID, ID:SPLIT or ID:CONFIG:SPLIT) and the network, or give a local file."
    ):
        builder = datasets.load_dataset_builder(identifier, config)
        if builder.name == "csv":  # text stays text: no numbers, no null words
            row = next(iter(builder.as_streaming_dataset(split.split("[")[0])))
            texts = datasets.Features(dict.fromkeys(row, datasets.Value("string")))
            builder = datasets.load_dataset_builder(identifier, config, features=texts, keep_default_na=False)
        builder.download_and_prepare()
        dataset = builder.as_dataset(split)
    return Source(
        name=name, files=tuple(Path(entry["filename"]) for entry in dataset.cache_files), dataset=lambda: dataset
    )


def _saved_dataset(name: str, path: Path) -> Any:
    """Open a dataset that `save_to_disk` wrote, of several splits `train`."""
    import datasets

    with _datasets_errors(name, "Expected what save_to_disk wrote."):
        dataset = datasets.load_from_disk(str(path))
    if isinstance(dataset, dict) and "train" not in dataset:
        names = ", ".join(dataset)
        raise DataError(
            f"data {name}: holds the splits {names}, expected train. Name one: {path / next(iter(dataset))}"
        )
    return dataset["train"] if isinstance(dataset, dict) else dataset


@contextlib.contextmanager
def _datasets_errors(source: str, cure: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library lets its own, the Hub's and the HTTP client's exceptions through
        why = re.split(r"\nExample", str(error))[0].replace(
            "\n", " "
        )  # «Config name is missing. Please pick one among …»
        why = why if why.startswith("Config name") else f"{first_line(error)} ({type(error).__name__})"
        raise DataError(f"data {source}: cannot be loaded as a dataset: {why.rstrip('.')}. {cure}") from error


def _folder(name: str, path: Path) -> Source:
    """Return the data files under a folder: one family of formats, without descriptions and other splits.

    The header of a Hub dataset's README.md decides, where it names the files of the training split.

    Raises:
        DataError: for a folder without data that can be read, with data of both families, or with splits and none to
            train on.
    """
    every = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    visible = [n for n in every if not any(part.startswith(".") for part in Path(n).parts)]
    data = [n for n in visible if not _is_description(n)]
    configured = _configured_files(name, path)
    # Files that describe are data only in a folder that holds nothing else.
    candidates = configured or data or [n for n in visible if suffix_of(n) in TEXT]
    readable = [n for n in candidates if suffix_of(n) in READ]
    unreadable = [n for n in candidates if n not in readable]
    if not readable or (configured and unreadable):
        what = "README.md configures" if configured else "the folder holds no text or rows, only"
        problem = (
            f"{what} files that cannot be read: {_list_names(unreadable)}"
            if unreadable
            else "the folder holds no text or rows"
        )
        formats = f"{', '.join((*JSON_SUFFIXES, *CSV, *ARROW))}, or text such as .txt, .md or .py"
        raise DataError(
            f"data {name}: {problem}. Expected {formats}. Unpack or convert the files, or name one text file."
        )
    tables = [n for n in readable if suffix_of(n) in (*CSV, *ARROW, ".json")]
    texts = [n for n in readable if suffix_of(n) in TEXT]
    if tables and texts:
        raise DataError(
            f"data {name}: the folder holds tables ({_list_names(tables)}) and text ({_list_names(texts)})."
            " Expected one of the two. Name a single file, or move one of them into a folder of its own."
        )
    training, split = (readable, "train") if configured else _training_split(name, readable)
    for n in training:
        if leads := outside_target(path / n, path):
            raise DataError(
                f"data {path / n} is a link that leaves its folder, to {leads}. Copy the file there in its place."
            )
    # Files of data come first among those that are left out; a hidden folder such as .git counts as one.
    others = [n for n in (*data, *every) if n not in training]
    excluded = dict.fromkeys(next((part for part in Path(n).parts if part.startswith(".")), n) for n in others)
    summary = _count(training, split and f" of the split {split}")
    return Source(
        name=name,
        files=tuple(path / n for n in training),
        summary=summary + (f"; left out: {_list_names(excluded)}" if excluded else ""),
    )


def _configured_files(source: str, folder: Path) -> list[str]:
    """Return the training files under `configs` in the folder's README.md, relative to the folder, if there are any.

    Raises:
        DataError: for several configurations, for one without a split `train`, and for what the library cannot read.
    """
    header = ""
    with contextlib.suppress(OSError):
        header = (folder / "README.md").read_text(encoding="utf-8", errors="replace").split("\n---")[0]
    if not header.startswith("---") or "\nconfigs:" not in header:
        return []
    import datasets

    folder = folder.resolve()  # as the library does
    with _datasets_errors(source, "Correct the header of its README.md, or name one file or folder."):
        splits = datasets.load_dataset_builder(str(folder)).config.data_files
        files = [Path(file).relative_to(folder).as_posix() for file in splits.get("train", ())]
    if not files:
        names = ", ".join(splits)
        raise DataError(f"data {source}: README.md configures the splits {names}, expected train. Name a single file.")
    return files


def _training_split(name: str, data: Sequence[str]) -> tuple[Sequence[str], str]:
    """Return the files of the training split and its name; all files where the names contain no split.

    A file of rows names one as `datasets` finds it: `train.jsonl`, `test/part-0.parquet`. Where none names `train`, files
    that name no split are it. Names of text files count only where each of them names a split and one is `train`:
    `test_model.py` of a program is no split.
    """
    splits = {n: _split_of(n) for n in data}
    texts = all(suffix_of(n) in TEXT for n in data)
    named = {split for n, split in splits.items() if split and (texts or suffix_of(n) not in TEXT)}
    if not named or (texts and ("" in splits.values() or "train" not in named)):
        return data, ""
    if train := [n for n in data if splits[n] == "train"] or [n for n in data if not splits[n]]:
        return train, "train"
    if len(named) > 1:
        words = " and ".join(sorted(named))
        raise DataError(
            f"data {name}: the folder holds the splits {words}, expected train. Name a single file: {_list_names(data)}."
        )
    return data, named.pop()


def _split_of(name: str) -> str:
    """Return the split in the name of a file or its folders, or an empty string."""
    match = next(filter(None, map(_SPLIT.search, Path(name).parts)), None)
    return _SPLIT_NAMES[(match.lastindex or 1) - 1] if match else ""


def suffix_of(path: str | Path) -> str:
    """Return a file's suffix in lower case, without one of compression."""
    return Path(_COMPRESSED.sub("", str(path))).suffix.lower()


def _is_description(name: str) -> bool:
    """Return whether a file describes data and does not count as data where there are other files."""
    file, text = Path(name).name, suffix_of(name) in ("", *TEXT)
    return bool(_DESCRIBES.fullmatch(file)) or (text and bool(_NOT_DATA.fullmatch(file)))


def _count(names: Sequence[str], what: str = "") -> str:
    return f"{len(names):,} file{'s' * (len(names) > 1)}{what} ({_list_names(names)})"


def _list_names(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED:,} more" if len(names) > NAMED else "")
