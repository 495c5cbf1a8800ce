"""Checkpoints: every rank writes its part in parallel; any strategy reads them."""

from toolkit.checkpoints.checkpoint_writer import CheckpointWriter
from toolkit.checkpoints.identity import Identity, identify
from toolkit.checkpoints.manifest import Manifest, folder_name, list_checkpoints, read_manifest, validate
from toolkit.checkpoints.restoration import ResumePoint, check_fits, find_resume_point, quarantine, restore

__all__ = [
    "CheckpointWriter",
    "Identity",
    "Manifest",
    "ResumePoint",
    "check_fits",
    "find_resume_point",
    "folder_name",
    "identify",
    "list_checkpoints",
    "quarantine",
    "read_manifest",
    "restore",
    "validate",
]
