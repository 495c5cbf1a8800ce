"""Checkpoints: written by every rank in parallel, published whole or not at all, read under any other strategy."""

from toolkit.checkpoints.checkpoint_writer import Saver
from toolkit.checkpoints.identity import Identity, identify
from toolkit.checkpoints.manifest import Manifest, complete, folder_name, problems, read_manifest
from toolkit.checkpoints.restoration import Found, check_fits, find, restore, set_aside

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
