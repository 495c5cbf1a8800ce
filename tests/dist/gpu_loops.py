"""Two NCCL ranks on one GPU: `test_loops` in each sharding, tp, cp and compile: `python tests/dist/gpu_loops.py FOLDER`.

NCCL refuses two ranks on a device of one host, so each rank names another host. All shardings run at once. The times mean nothing.
Without a GPU the ranks take gloo, which tries the program itself.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT), str(ROOT / "tests/dist")]
SHARDINGS = ("none", "ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp_grad_op")
PARTS = (
    "changed",
    "unused",
    "scripts",
    "own",
    "tied",
    "trainer",
    "modules",
    "orders",
    "saving",
    "mismatch",
    "refusals",
)
"""Functions of the worker that may fail alone."""

DOCUMENTS = {"rows": "documents", "upto": 4}
GATHER = {"cp_attention": "gather"}
MESHES: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "alone": (
        1,
        {
            "whole loss": {"loss": "whole"},
            "compile": {"compile": True},
            "selective": {"activation_checkpointing": "selective"},
            "attention": {"activation_checkpointing": "attention"},
            "every:2": {"activation_checkpointing": "every:2"},
        },
    ),
    "mesh": (
        2,
        {
            "tp": {"tp": 2},
            "cp in ddp": {"sharding": "ddp", "cp": 2},
            "cp in zero3": {"sharding": "zero3", "cp": 2},
            "cp in zero2, gather": {"sharding": "zero2", "cp": 2, **GATHER},
            "cp in fsdp, gather": {"sharding": "fsdp", "cp": 2, **GATHER},
            "compile in ddp": {"sharding": "ddp", "compile": True},
            "compile in fsdp": {"sharding": "fsdp", "compile": True},
            "compile in zero2": {"sharding": "zero2", "compile": True},
        },
    ),
}
"""Ranks, and strategies of one training. Their losses and norms are compared with those of one process."""

ONE_CARD = dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1")
LIBRARIES = ("accelerate", "bitsandbytes", "deepspeed", "peft", "transformers.integrations.deepspeed")
FIGURES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "function": lambda got: got["function"]["losses"],
    "script": lambda got: got["script"]["losses"],
    "changed": lambda got: got["changed"],
    "own": lambda got: got["own"]["figures"],
    "modules": lambda got: got["modules"]["losses"],
    "trainer": lambda got: got["trainer"]["losses"],
    "full": lambda got: got["saving"]["none"]["losses"],
    "lora": lambda got: got["saving"]["lora"]["losses"],
    "tokens": lambda got: got["scripts"]["tokens"],
}
"""What is compared with ddp's."""


def run_rank(scratch: str, folder: str, sharding: str) -> None:
    """Run all loops of a sharding as one rank; rank 0 writes what they gave."""
    import loops_worker
    import ranks
    import torch

    for name in LIBRARIES:
        importlib.import_module(name)
    if torch.cuda.is_available():
        loops_worker.plain = lambda *_: lambda *_: []  # it computes on the CPU
    for name in PARTS:
        setattr(loops_worker, name, guarded(getattr(loops_worker, name)))
    ranks.reset()
    began = time.perf_counter()
    if sharding in MESHES:
        result = {name: guarded(mesh_cell)(strategy, folder) for name, strategy in cells_of(sharding).items()}
    else:
        result = guarded(loops_worker.run)({"sharding": sharding}, folder)
    if os.environ.get("RANK", "0") == "0":
        seconds = time.perf_counter() - began
        Path(scratch, f"{sharding}.json").write_text(json.dumps({**result, "seconds": seconds}, default=str))
    sys.stdout.flush()
    os._exit(0)


def cells_of(sharding: str) -> dict[str, dict[str, Any]]:
    """Return the strategies of a mesh, after the one that all are compared with."""
    count, cells = MESHES[sharding]
    return {"reference": {"sharding": "none" if count == 1 else "ddp"}, **cells}


def mesh_cell(strategy: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train a strategy on rows of two documents, made where the model is."""
    import mesh_worker
    import ranks
    import torch

    made = mesh_worker.loader
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def moved(*words: Any) -> Iterator[dict[str, Any]]:
        for batch in made(*words):
            yield {name: column.to(device) for name, column in batch.items()}

    mesh_worker.loader = moved
    ranks.reset()
    try:
        return mesh_worker.run({"folder": folder, "strategy": {"loss": "chunked", **strategy}, **DOCUMENTS}, folder)
    finally:
        mesh_worker.loader = made


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, with a trace as its result where it raises."""

    def call(*words: Any, **more: Any) -> Any:
        try:
            return function(*words, **more)
        except Exception:  # the other parts run on
            return {"trace": traceback.format_exc()}

    return call


def start(scratch: Path, sharding: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start the ranks of a sharding."""
    import tiny

    place, count = scratch / sharding, MESHES[sharding][0] if sharding in MESHES else 1 if sharding == "none" else 2
    tiny.bert(place / "bert")
    tiny.llama(place / "tied", tie_word_embeddings=True)
    folder = tiny.llama(place / "llama")
    for rank in range(count):
        env = os.environ | ONE_CARD | {"NCCL_HOSTID": f"h{rank}", "NCCL_SOCKET_IFNAME": "lo", "USE_HUB_KERNELS": "0"}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])}
        if count > 1:
            env |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        words = [sys.executable, __file__, str(scratch), "rank", str(folder), sharding]
        with (scratch / f"{sharding}-{rank}.log").open("wb") as log:
            yield subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)


def traces(results: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield what failed, and where."""
    items = results.items() if isinstance(results, dict) else enumerate(results) if isinstance(results, list) else ()
    for key, value in items:
        if key == "trace":
            yield where, str(value)
        yield from traces(value, f"{where}/{key}")


def distance(one: Any, other: Any) -> float:
    """Return the largest relative difference of numbers in the same places; infinite where the lists differ."""
    if isinstance(one, list) and isinstance(other, list):
        return max(map(distance, one, other), default=0.0) if len(one) == len(other) else math.inf
    return abs(one - other) / max(1e-9, abs(one), abs(other))


def main(scratch: Path, limit: float) -> None:
    """Run all shardings within `limit` seconds; print what failed, and how far the figures are from ddp's."""
    from torch.distributed import TCPStore

    sys.path[:0] = PATHS
    scratch.mkdir(parents=True, exist_ok=True)
    everything = (*SHARDINGS, *MESHES)
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in everything]
    started = [
        process
        for sharding, store in zip(everything, stores, strict=True)
        for process in start(scratch, sharding, store.port)
    ]
    end = time.monotonic() + limit
    for process in started:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    results = {one: json.loads(path.read_text()) for one in everything if (path := scratch / f"{one}.json").exists()}
    for sharding in everything:
        if sharding not in results:
            print(f"{sharding}: no result\n{(scratch / f'{sharding}-0.log').read_text()[-1500:]}")
            continue
        print(f"{sharding}: {results[sharding]['seconds']:.0f} s")
        for where, trace in traces(results[sharding], sharding):
            print(f"{where}: {trace[-900:]}")
        if sharding in MESHES:
            for name, cell in results[sharding].items():
                if isinstance(cell, dict) and "steps" in cell:
                    print(
                        f"  {name}: {distance(cell['steps'], results['alone']['reference']['steps']):.1e} from one process"
                    )
            continue
        for name, read in FIGURES.items():
            try:
                print(f"  {name}: {distance(read(results[sharding]), read(results['ddp'])):.1e} from ddp")
            except (KeyError, TypeError) as error:
                print(f"  {name}: no figure, {error!r}")


if __name__ == "__main__":
    if sys.argv[2:3] == ["rank"]:
        run_rank(sys.argv[1], *sys.argv[3:])
    else:
        main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 90.0)
