"""Several process groups in turn, each of forked ranks that run many cells: the libraries are imported once for all."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

from toolkit.core.errors import ToolkitError
from toolkit.core.process_lifecycle import import_libraries

Run = Callable[[dict[str, Any], str], dict[str, Any]]
"""Takes a cell and the folder of a model; what comes back is written as JSON by rank 0."""

LIBRARIES = ("accelerate", "bitsandbytes", "deepspeed", "peft", "transformers.integrations.deepspeed")
"""What the ranks import, in the process that forks them."""

LAUNCHED = (
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING",
    "ACCELERATE_MIXED_PRECISION",
)


def reset() -> None:
    """Forget the last cell's Accelerator, so that the next one is made as in a new process."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in LAUNCHED:
        os.environ.pop(name, None)


def build(folder: Any, train_config: Any, plan: Any = None, **words: Any) -> tuple[Any, Any, Any]:
    """A model that is loaded and prepared as the recipe does, its schedule and its tokenizer; `plan` is a user's own."""
    from toolkit.config.strategy import Strategy
    from toolkit.models import describe
    from toolkit.training.loading import load
    from toolkit.training.optimizers import make_optimizer, make_schedule
    from toolkit.training.preparation import prepare, prepared
    from toolkit.training.setup import accelerator as make
    from toolkit.training.setup import seed_everything

    accelerator = make(Strategy(**words), train_config, describe(folder, tp_plan=plan))
    seed_everything(accelerator)
    accelerator.print = lambda *lines: None  # type: ignore[method-assign]
    model, tokenizer = load(accelerator, allow_unquantized=True)
    optimizer = make_optimizer(model, train_config)
    model, optimizer, schedule = prepare(accelerator, model, optimizer, make_schedule(optimizer, train_config))
    assert not getattr(model, "broadcast_buffers", False), "DDP sends no constant in every forward"
    return prepared(accelerator, (model, optimizer)), schedule, tokenizer


def resume_point(path: Path) -> Any:
    """A checkpoint to go on from."""
    from toolkit.checkpoints import ResumePoint, read_manifest

    return ResumePoint(path=path, manifest=read_manifest(path), skipped=())


def restored(cell: dict[str, Any], ours: Any, schedule: Any) -> tuple[int, Any]:
    """Restore the checkpoint `from`, where a cell has one. Its step, and a writer into `into`, where a cell has that."""
    from toolkit.checkpoints import CheckpointWriter, identify, restore

    identity, start, saver = identify(ours.job.spec, ours.job.strategy, "synthetic"), 0, None
    if "from" in cell:
        point = resume_point(Path(cell["from"]))
        restore(ours, schedule, point, identity)
        start = point.step
    if "into" in cell:
        saver = CheckpointWriter(ours, schedule, Path(cell["into"]), identity, versions={}, keep=99)
    return start, saver


def work(run: Run, rank: int, ranks: int, port: int, cells: list[dict[str, Any]], folder: str, out: Path) -> None:
    """One rank: every cell in turn; rank 0 writes what each gave."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    if ranks > 1:
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    results = []
    for cell in cells:
        reset()
        begin = time.perf_counter()
        try:
            got = run(dict(cell), folder)
        except Exception as error:  # the test shows it, and the other cells run on
            traceback.print_exc()
            got = {"error": traceback.format_exc()}
            got |= {"refused": str(error)} if isinstance(error, ToolkitError) else {}
        results.append({"cell": cell, "seconds": time.perf_counter() - begin, **got})
    if rank == 0:
        out.write_text(json.dumps(results), encoding="utf-8")
    # Not through the interpreter's end, where libraries that were imported before the fork wait for the parent's threads.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main(
    run: Run, scratch: str, folder: str, before: Callable[[str, str], None] = lambda scratch, folder: None
) -> None:
    """Fork the ranks of each group of cells from this process, which has imported everything once."""
    from torch.distributed import TCPStore

    import_libraries(*LIBRARIES)
    from transformers.utils import logging

    logging.disable_progress_bar()
    before(scratch, folder)
    # DeepSpeed collects garbage for every engine, which takes a second over all that was imported.
    gc.collect()
    gc.freeze()
    groups = json.loads((Path(scratch) / "cells.json").read_text(encoding="utf-8"))
    fork = multiprocessing.get_context("fork")
    for number, (ranks, cells) in enumerate(groups):
        # As a launcher does: the store outlives a process group, so that ranks can make another one.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        out = Path(scratch) / f"results-{number}.json"
        started = [
            fork.Process(target=work, args=(run, rank, ranks, store.port, cells, folder, out)) for rank in range(ranks)
        ]
        for process in started:
            process.start()
        failed: list[int | None] = []
        waited = {process.sentinel: process for process in started}
        while waited and not failed:
            ended = [waited.pop(sentinel) for sentinel in connection.wait(list(waited))]
            for process in ended:
                process.join()
            failed = [process.exitcode for process in ended if process.exitcode]
        for process in waited.values():  # in a collective, for one that has failed
            process.kill()
        if failed:
            sys.exit(f"one of {ranks} ranks ended with exit code {failed[0]}; its output is above")


def serve() -> None:
    """Import once; then fork, for every line of standard input, a process that runs a worker as a program."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    import_libraries(*LIBRARIES)
    for line in sys.stdin:
        log, folder, environ, *words = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for stream, path, how in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY)):
                    os.dup2(os.open(path, how), stream)
                os.dup2(1, 2)
                os.environ.clear()
                os.environ.update(environ)
                os.chdir(folder)
                random.seed()
                sys.argv = words
                runpy.run_path(words[0], run_name="__main__")
                code = 0
            except SystemExit as error:
                print(error, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print("CODE", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    serve()
