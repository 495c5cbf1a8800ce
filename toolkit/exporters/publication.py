"""An export appears complete or not at all: it is written into a draft, flushed, then renamed."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from toolkit.core.atomic_io import sync_folder
from toolkit.core.errors import RunError


def check_target(folder: Path, source: Path) -> None:
    """Refuse a folder with files in it, or among the checkpoints. Writes nothing.

    Raises:
        RunError: with what is there.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file: expected a new or an empty folder. Choose another with -o.")
    if folder.is_dir() and (entry := next(folder.iterdir(), None)):
        raise RunError(
            f"{folder} is not empty (it has {entry.name}): expected a new or an empty folder. "
            "Choose another with -o, or remove it."
        )
    resolved = source.resolve()
    if (resolved / "run.json").exists():
        resolved = resolved / "checkpoints"
    elif resolved.parent.name == "checkpoints":
        resolved = resolved.parent
    if folder.resolve().is_relative_to(resolved):
        raise RunError(f"{folder} lies among the checkpoints in {resolved}. Choose another place with -o.")


@contextlib.contextmanager
def atomic_dir(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a draft folder that becomes `folder` on success and is removed on an error.

    Args:
        folder: a new or an empty one; its parents are made.
        replace: take the place of what is there, once the draft is whole. Killed between the two names, the next call
            finds what was there as `.NAME.old`, and gives it its name back.

    Raises:
        RunError: where it cannot be made, or something has come into its place.
    """
    final = folder.absolute()
    old = final.with_name(f".{final.name}.old")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        if replace:  # in a run's folder: what lies there is the run's
            _restore_old(old, final)
            for unfinished in final.parent.glob(f".{final.name}.*.partial"):
                shutil.rmtree(unfinished, ignore_errors=True)
        draft = final.with_name(f".{final.name}.{secrets.token_hex(8)}.partial")
        draft.mkdir()
    except OSError as error:
        raise RunError(f"{folder} cannot be made: {error.strerror}. Choose another place.") from error
    try:
        yield draft
        _flush(draft)
        try:
            if replace and final.exists():
                final.rename(old)
            draft.rename(final)
        except OSError as error:
            raise RunError(f"{folder} cannot be put in place: {error.strerror}. Choose another place.") from error
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        if replace:
            _restore_old(old, final)
        raise
    sync_folder(final.parent)
    if replace:
        shutil.rmtree(old, ignore_errors=True)


def _restore_old(old: Path, final: Path) -> None:
    """Rename the old folder back, or remove it if its place is taken."""
    if old.exists() and not final.exists():
        old.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Flush a folder and everything in it to the disk."""
    for path in (*folder.rglob("*"), folder):
        if path.is_file() or path.is_dir():
            sync_folder(path)  # it flushes a file as well
