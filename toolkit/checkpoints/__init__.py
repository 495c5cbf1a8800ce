"""Checkpoints: written by every rank in parallel, published whole or not at all, read under any other strategy."""

from toolkit.checkpoints.identity import Identity, identify
from toolkit.checkpoints.manifest import Manifest, complete, folder_name, problems, read_manifest
from toolkit.checkpoints.restoring import Found, check_fits, find, restore, set_aside
from toolkit.checkpoints.saving import Saver

__all__ = [
    "Found",
    "Identity",
    "Manifest",
    "Saver",
    "check_fits",
    "complete",
    "find",
    "folder_name",
    "identify",
    "problems",
    "read_manifest",
    "restore",
    "set_aside",
]
