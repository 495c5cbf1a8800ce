"""The `datasets` library: datasets on the Hub, and files and folders in its formats."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.core.errors import DataError
from toolkit.models.hub import first_line, hub_reachable


def check_hub(source: str) -> None:
    """Ask once whether the Hub answers, before the libraries retry for 23 s with a warning each time.

    Raises:
        DataError: where it does not, unless `HF_HUB_OFFLINE` says that the local cache is meant.
    """
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not hub_reachable():
        raise DataError(
            f"data {source}: no such file or folder, and the Hugging Face Hub cannot be reached. Give a local file,"
            " connect to the network, or set HF_HUB_OFFLINE=1 where this dataset is in the local cache."
        )


def load_dataset(source: str, *, path: str, config: str | None = None, split: str = "train", **options: Any) -> Any:
    """Call `datasets.load_dataset`; a dataset's own code never runs.

    Raises:
        DataError: with the library's own first line.
    """
    import datasets

    with _errors(source):
        return datasets.load_dataset(path, config, split=split, **options)


def open_saved(source: str, folder: Path, split: str = "train") -> Any:
    """Open a dataset that `save_to_disk` wrote.

    Raises:
        DataError: with the library's own first line.
    """
    import datasets

    with _errors(source):
        dataset = datasets.load_from_disk(str(folder))
        return dataset[split] if isinstance(dataset, dict) else dataset


def configured_files(source: str, folder: Path) -> list[str]:
    """Return the training files under `configs` in the folder's README.md, relative to the folder, if there are any.

    Raises:
        DataError: for several configurations, for one without a split `train`, and for what the library cannot read.
    """
    try:
        header = (folder / "README.md").read_text(encoding="utf-8", errors="replace").split("\n---")[0]
    except OSError:
        return []
    if not header.startswith("---") or "\nconfigs:" not in header:
        return []
    import datasets

    folder = folder.resolve()  # as the library does
    with _errors(source):
        splits = datasets.load_dataset_builder(str(folder)).config.data_files
        files = [Path(file).relative_to(folder).as_posix() for file in splits.get("train", ())]
    if not files:
        raise DataError(
            f"data {source}: README.md configures the splits {', '.join(splits)}, expected train. Name a single file."
        )
    return files


@contextlib.contextmanager
def _errors(source: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library lets its own, the Hub's and the HTTP client's exceptions through
        raise DataError(
            f"data {source}: cannot be loaded as a dataset: {first_line(error)} ({type(error).__name__})."
            " Check the name (ID, ID:SPLIT or ID:CONFIG:SPLIT) and the network, or give a local file."
        ) from error


@contextlib.contextmanager
def progress(shown: bool) -> Iterator[None]:
    """Show the progress bars of `datasets` only where `shown`."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    disabled = are_progress_bars_disabled()
    if not shown:
        disable_progress_bars()
    try:
        yield
    finally:
        if not disabled:
            enable_progress_bars()
