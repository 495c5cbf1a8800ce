"""What the `datasets` library reads: the Hub's data sets, and files and folders of its own kinds."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from toolkit.errors import DataError, MissingLibrary
from toolkit.model.hub import first_line, hub_reachable


def check_hub(source: str) -> None:
    """Ask once whether the Hub answers, before the libraries retry for 23 s with a warning each time.

    Raises:
        DataError: where it does not, unless `HF_HUB_OFFLINE` says that the local cache is meant.
        MissingLibrary: without the `datasets` library.
    """
    _library(source)
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not hub_reachable():
        raise DataError(
            f"data {source}: no such file or folder, and the Hugging Face Hub cannot be reached. Give a local file,"
            " connect to the network, or set HF_HUB_OFFLINE=1 where this dataset is in the local cache."
        )


def open_dataset(source: str, *, saved: Path | None = None, split: str = "train", **load: Any) -> Any:
    """A `datasets.Dataset`: from a folder that `save_to_disk` wrote, else by `load_dataset`, which takes `load`.

    Raises:
        DataError: with the library's own first line.
        MissingLibrary: without the `datasets` library.
    """
    datasets = _library(source)
    try:
        if saved is None:
            return datasets.load_dataset(split=split, **load)
        found = datasets.load_from_disk(str(saved))
        return found[split] if isinstance(found, dict) else found
    except Exception as error:  # the library lets its own, the Hub's and the HTTP client's exceptions through
        raise DataError(
            f"data {source}: cannot be loaded as a dataset: {first_line(error)} ({type(error).__name__})."
            " Check the name (ID, ID:SPLIT or ID:CONFIG:SPLIT) and the network, or give a local file."
        ) from error


def _library(source: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise MissingLibrary(f"data {source}: reading it needs the library `datasets`: pip install datasets") from error
