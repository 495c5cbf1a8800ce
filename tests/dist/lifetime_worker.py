"""A rank that does what its test says (`TASK --run-dir FOLDER`), and its supervisor (`supervise FOLDER RANKS TASK`)."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from toolkit.core import process_lifecycle, rank_output
from toolkit.run_folder import folder, run_lock


def note(path: Path, word: str) -> None:
    """Tell the test where this process is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(word)
    draft.replace(path)


def fork_child(path: Path) -> None:
    """A child as a DataLoader's: forked by the main thread, and busy for longer than the test."""
    child = os.fork()
    if child == 0:
        time.sleep(120)
        os._exit(0)
    note(path, str(child))


def work(task: str, path: Path, rank: int) -> None:
    """What comes after the rank has entered its run."""
    print(f"rank {rank} begins")
    print(f"rank {rank} says so on stderr", file=sys.stderr)
    if task in ("sleep", "watched"):
        fork_child(path.with_name(f"child-{rank}"))
        note(path.with_name(f"rank-{rank}"), str(os.getpid()))
        time.sleep(120)
    if task == "killed":
        import torch.distributed

        torch.distributed.init_process_group("gloo")
        if rank == 1:
            print("the last words of rank 1")
            os.kill(os.getpid(), 9)
        torch.distributed.all_reduce(torch.zeros(1))
    if task == "waits":
        from datetime import timedelta

        from accelerate import PartialState

        from toolkit.engines.rank_calls import on_main

        state = PartialState(cpu=True, timeout=timedelta(seconds=2))
        said = on_main(state, lambda: time.sleep(4) or "longer than a collective may take")
        note(path.with_name(f"waited-{rank}"), said)
        note(path.with_name(f"rank-{rank}"), str(os.getpid()))
        on_main(state, lambda: os.kill(os.getpid(), 9))
    if task == "refuses":
        from toolkit.core.errors import DataError

        raise DataError("rows.jsonl, line 3: no column 'text'.")
    if task == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        note(path.with_name(f"rank-{rank}"), str(os.getpid()))
        time.sleep(120)
    if task == "interrupted":
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        note(path.with_name(f"rank-{rank}"), str(os.getpid()))
        try:
            time.sleep(120)
        except KeyboardInterrupt:
            time.sleep(1)  # a second signal would end it here
            print(f"rank {rank} stops in peace")
            sys.exit(130)


def main() -> None:
    """A rank, as `toolkit.finetune` is one."""
    task, path = sys.argv[1], Path(sys.argv[3])
    rank = int(os.environ.get("RANK", "0"))
    if task == "late":  # the launcher ends before the rank has asked to die with it
        parent = os.getppid()
        note(path.with_name(f"rank-{rank}"), str(os.getpid()))
        while os.getppid() == parent:
            time.sleep(0.01)
    process_lifecycle.die_with_parent()
    if task == "import":
        note(path.with_name(f"rank-{rank}"), str(os.getpid()))
        import peft  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401

        note(path.with_name(f"imported-{rank}"), "")
        time.sleep(120)
    if task == "late":
        note(path.with_name(f"outlived-{rank}"), "")
        time.sleep(120)
    run = folder.enter(path)
    rank_output.tee_output(run.log(rank), rank=rank, supervised=run_lock.supervised(), token=run.token)
    try:
        work(task, path, rank)
    except Exception as error:
        run.record_error(rank, error)
        raise


def supervisor() -> None:
    """As the shell's command is one."""
    from programs import launch_config

    from toolkit import launcher
    from toolkit.core.errors import ToolkitError

    path, ranks, task = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    try:
        with folder.enter(path, token=run_lock.new_token()) as run:
            module = "no_such_module" if task == "typo" else "lifetime_worker"
            launcher.supervise(run, module, [task, "--run-dir", str(path)], launch_config(ranks))
    except launcher.Stopped as stopped:
        sys.exit(stopped.exit_code)
    except ToolkitError as error:
        note(path.with_name("ended"), str(time.time()))
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))


if __name__ == "__main__":
    supervisor() if sys.argv[1] == "supervise" else main()
