"""`run_rank()`: the process of a rank: command line, run folder, log, heartbeat, and the report of an error."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit.config.fields import from_dict
from toolkit.config.flags import Parser, add_flags, given
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import NotFinite, OutOfMemory, StrategyError, ToolkitError, is_out_of_memory
from toolkit.core.process_lifecycle import import_libraries, skip_last_collection
from toolkit.core.rank_output import tee_output
from toolkit.run_folder.folder import Folder, enter
from toolkit.run_folder.heartbeat import Beat
from toolkit.run_folder.run_json import read_run_json
from toolkit.run_folder.run_lock import run_token, supervised
from toolkit.training.oom import out_of_memory
from toolkit.training.rank_run import RankRun
from toolkit.training.resumption import merge_config
from toolkit.training.setup import agree, agree_train_config, launched

ERROR_DELAY = 3.0
"""Seconds that ranks other than the first of a node wait before they print an error: most errors are every rank's."""


def run_rank(train_rank: Callable[[RankRun], int], arguments: Sequence[str] | None = None) -> int:
    """Run a recipe as one rank of the launched processes.

    Args:
        train_rank: the recipe; returns the exit code.
        arguments: of the command line; None for this process's own.

    Returns:
        The exit code: 2 after a user's mistake.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        flags = build_parser().parse_args(arguments)
        if flags.resume and not flags.run_dir:
            raise StrategyError("--resume needs the folder of the run. Give it with --run-dir.")
        if not supervised():
            # a mistake here is reported before a folder is made
            resolve_flags(flags, Path(flags.run_dir) if flags.resume else None)
        # Without a supervisor and a name the ranks derive one from what only they share.
        path = flags.run_dir or f"runs/launched-{hashlib.sha256(run_token().encode()).hexdigest()[:8]}"
        folder = enter(path, resume=flags.resume)
    except ToolkitError as error:
        return _print_error(rank, error)
    with folder:
        tee_output(folder.log(rank), rank=rank, supervised=supervised(), token=folder.token)
        with folder.room_for_error(rank):
            return _run_recorded(train_rank, flags, folder, rank, own_process=arguments is None)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of a rank: every field of RunConfig, Strategy and TrainConfig is a flag."""
    parser = Parser(prog="toolkit.finetune", description="Train a model on ranks that were launched.")
    parser.add_argument("--run-dir", metavar="DIR", help="the run's folder (default: runs/…)")
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in --run-dir from its newest checkpoint"
    )
    add_flags(parser, RunConfig, Strategy, TrainConfig)
    return parser


def resolve_flags(flags: argparse.Namespace, path: Path | None = None) -> tuple[RunConfig, TrainConfig, Strategy]:
    """Merge the flags, the launch environment and, for a resumed run, its folder.

    Raises:
        StrategyError: for an invalid value, and for flags that contradict the launch environment.
    """
    run_config, train_config, strategy = (given(flags, owner) for owner in (RunConfig, TrainConfig, Strategy))
    if path is None:
        step = agree_train_config(train_config, os.environ)
        return from_dict(RunConfig, run_config), step, agree(strategy, os.environ)
    recorded, ranks = read_run_json(path), int(os.environ.get("WORLD_SIZE", "1"))
    # The environment alone does not tell `none` with tp, or an engine from outside, from DDP. The recorded run does.
    before = {**recorded["strategy"], **strategy}
    bound = launched(os.environ, before)
    merged_run, merged_train, fields = merge_config(recorded, run_config, train_config, {**bound, **strategy}, ranks)
    # The launcher may bind other values than before: that is how a run resumes under another strategy.
    requested = {name: value for name, value in fields.items() if name in strategy or name not in bound}
    return merged_run, merged_train, agree(requested, os.environ, bound)


def _run_recorded(
    train_rank: Callable[[RankRun], int], flags: argparse.Namespace, folder: Folder, rank: int, *, own_process: bool
) -> int:
    """Run the recipe, and record the error that ends it for the supervisor. Return the exit code."""
    beat = Beat(folder.beat(rank), rank)
    try:
        with beat:  # its last entry tells where an exception was raised
            resolved = resolve_flags(flags, folder.path if flags.resume else None)
            if own_process:
                skip_last_collection()
                import_libraries("transformers.modeling_utils")  # and with it torch
            return train_rank(RankRun(folder, beat, *resolved, resume=flags.resume))
    except ToolkitError as error:
        return _report_error(folder, rank, error, resumed=flags.resume)
    except BaseException as error:
        if not is_out_of_memory(error):
            folder.record_error(rank, error)
            raise
        return _report_error(folder, rank, out_of_memory(error, folder, beat.last), resumed=flags.resume)


def _report_error(folder: Folder, rank: int, error: ToolkitError, *, resumed: bool) -> int:
    """Report an error to the supervisor, or to the user without one. A new run that has not begun leaves no folder."""
    if supervised():
        folder.record_error(rank, error)
        return error.exit_code
    if not resumed and not isinstance(error, OutOfMemory | NotFinite):
        folder.discard(shared=True)
    return _print_error(rank, error)


def _print_error(rank: int, error: ToolkitError) -> int:
    """Print an error once a node: after the first rank's error the launcher ends the others."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(ERROR_DELAY)
    print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
    return error.exit_code
