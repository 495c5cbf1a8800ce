"""Checkpoints: every rank writes its part in parallel; any strategy reads them."""

from toolkit.checkpoints.checkpoint_writer import CheckpointWriter as CheckpointWriter
from toolkit.checkpoints.identity import Identity as Identity
from toolkit.checkpoints.identity import identify as identify
from toolkit.checkpoints.manifest import Manifest as Manifest
from toolkit.checkpoints.manifest import folder_name as folder_name
from toolkit.checkpoints.manifest import list_checkpoints as list_checkpoints
from toolkit.checkpoints.manifest import newest_step as newest_step
from toolkit.checkpoints.manifest import read_manifest as read_manifest
from toolkit.checkpoints.manifest import validate as validate
from toolkit.checkpoints.restoration import ResumePoint as ResumePoint
from toolkit.checkpoints.restoration import check_fits as check_fits
from toolkit.checkpoints.restoration import find_resume_point as find_resume_point
from toolkit.checkpoints.restoration import quarantine as quarantine
from toolkit.checkpoints.restoration import restore as restore
