"""The child of the guard: it trains a small model in one process and cut over forked CPU ranks, and prints how far they differ."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing import connection
from typing import Any

from toolkit.config.fields import from_dict
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.process_lifecycle import die_with_parent, import_libraries, skip_last_collection
from toolkit.core.units import ceil_div
from toolkit.engines.shards import overlaps, parts
from toolkit.models import describe
from toolkit.models.files import first_line
from toolkit.training.loading import load
from toolkit.training.loop import train
from toolkit.training.optimizers import make_schedule
from toolkit.training.preflight import random_model
from toolkit.training.preparation import prepare, prepared
from toolkit.training.setup import accelerator as make
from toolkit.training.setup import seed_everything

GUARD_STEPS, GUARD_ROWS, SEQ_LEN = 2, 4, 32
"""Steps; rows of a micro-batch over all ranks, at least, and their tokens. A step has two micro-batches for each stage's rank."""

ENV_NAMES = ("ACCELERATE_", "FSDP_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
"""What variables of another launcher begin with."""

ALONE: dict[str, Any] = {"tp": 1, "tp_sequence": False, "cp": 1, "ep": 1, "pp": 1, "pp_stages_per_rank": None}
"""Fields of the run in one process."""

SAID = "guard: "
"""What a rank's message begins with."""

GRADIENT = 1e-4
"""Largest difference of a gradient, relative to its largest element."""

ROUNDING = 5e-7
"""What a gradient is uncertain by, relative to the weight that it was added to and read from again: 4 units in the last place."""

NOISE = 6e-8
"""What it is uncertain by, relative to the model's largest: half a unit in the last place. Some are zero but for rounding errors
(the bias of keys without rotary positions)."""


def _rows(vocab: int, micros: int, rows: int, dp_rank: int, dp_size: int, joined: bool) -> Iterator[dict[str, Any]]:
    """Yield a rank's micro-batches; each row has another number of labels, and two documents where they are `joined`."""
    import torch

    for step in range(GUARD_STEPS):
        ids = torch.randint(3, vocab, (micros * rows, SEQ_LEN), generator=torch.Generator().manual_seed(step))
        labels = ids.clone()
        for row in range(len(ids)):
            labels[row, : 3 * (row + step) % (SEQ_LEN - 4)] = -100
        columns = {"input_ids": ids, "labels": labels}
        if joined:
            places, first = torch.arange(SEQ_LEN).expand_as(ids), 7 + torch.arange(len(ids))[:, None] % 16
            columns["position_ids"] = torch.where(places < first, places, places - first)
        for micro in range(micros):
            yield {
                name: column.reshape(micros, dp_size, -1, SEQ_LEN)[micro, dp_rank].contiguous()
                for name, column in columns.items()
            }


Work = tuple[int, int, bool, Mapping[str, str]]
"""Micro-batches of a step, their rows over all ranks, whether a row holds two documents, and the tensor-parallel plan."""


def _train(folder: str, strategy: Strategy, work: Work, ranks: int, rank: int) -> dict[str, Any]:
    """Take the steps as one rank; return losses, norms, and the first step's changes of the weights as parts of tensors."""
    import torch

    micros, rows, joined, plan = work
    spec = replace(describe(folder), tp_plan=plan)  # unchecked: a small copy may lack what a rule names
    dp_size = ranks // (strategy.tp * strategy.cp * strategy.pp)
    config = TrainConfig(
        steps=GUARD_STEPS, micro_batch=rows // dp_size, accumulation=micros, seq_len=SEQ_LEN, warmup=0, lr=1.0
    )
    accelerator = make(strategy, config, spec)
    accelerator.print = lambda *_: None
    seed_everything(accelerator)
    model, _ = load(accelerator)
    # Its step is the clipped gradient: AdamW's is the same for any multiple of it.
    trained = [each for each in model.parameters() if each.requires_grad and not each.is_meta]
    optimizer: Any = torch.optim.SGD(trained, lr=1.0)
    model, optimizer, schedule = prepare(accelerator, model, optimizer, make_schedule(optimizer, config))
    ours = prepared(accelerator, (model, optimizer))

    def weights() -> dict[tuple[str, Any], Any]:
        held = [shard for shard in ours.job.engine.shards(ours) if shard.kind in ("parameter", "master")]
        kind = "master" if any(shard.kind == "master" for shard in held) else "parameter"
        boxes = [(shard.name, part) for shard in held if shard.kind == kind for part in parts(shard)]
        return {(name, box): tensor.detach().clone() for name, (box, tensor) in boxes}

    steps: list[tuple[float, float]] = []
    before, changes = weights(), dict[Any, Any]()
    dp_rank = ours.job.coordinates(rank).dp_rank
    for step in train(ours, _rows(spec.vocab, micros, rows, dp_rank, dp_size, joined), schedule):
        steps.append((step.loss, step.grad_norm))
        if not changes:
            changes = {key: (tensor - before[key], tensor.abs().max()) for key, tensor in weights().items()}
    return {"steps": steps, "changes": changes}


def _rank(folder: str, strategy: Strategy, work: Work, ranks: int, rank: int, port: int) -> None:
    """Train, and write the result into the folder. The process ends here."""
    import torch

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    if ranks > 1:
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    code = 1
    try:
        torch.save(_train(folder, strategy, work, ranks, rank), f"{folder}/{ranks}-{rank}.pt")
        code = 0
    except Exception as error:
        os.write(2, f"{SAID}{first_line(error)}\n".encode())  # in one piece: the ranks share the stream
    os._exit(code)  # libraries that were imported before the fork would wait for the parent's threads


def _compare(folder: str, ranks: int, names: list[str]) -> dict[str, Any]:
    """Return the differences of the ranks' results from those of one process. A weight that no rank holds whole differs, too."""
    import torch

    alone = torch.load(f"{folder}/1-0.pt", weights_only=False)
    cut = [torch.load(f"{folder}/{ranks}-{rank}.pt", weights_only=False) for rank in range(ranks)]
    pairs = list(zip(alone["steps"], cut[0]["steps"], strict=True))
    whole = {name: (box, change, largest) for (name, box), (change, largest) in alone["changes"].items()}
    missing = {name: torch.ones_like(change, dtype=torch.bool) for name, (_, change, _) in whole.items()}
    other, noise = set(), NOISE * max(change.abs().max() for _, change, _ in whole.values())
    for name, box, part in ((*key, change) for result in cut for key, (change, _) in result["changes"].items()):
        own_box, change, largest = whole[name]
        limit = GRADIENT * change.abs().max() + ROUNDING * largest + noise
        if any((theirs - mine).abs().max() > limit for theirs, mine in overlaps([(own_box, change)], [(box, part)])):
            other.add(name)
        for left, _ in overlaps([(own_box, missing[name])], [(box, part)]):
            left.fill_(False)
    other |= {name for name, left in missing.items() if left.any()}
    relative = [[abs(one - two) / abs(one) for one, two in zip(*pair, strict=True)] for pair in pairs]
    return {
        "loss_difference": max(loss for loss, _ in relative),
        "norm_difference": relative[0][1],  # after a step of rate 1 it is less exact
        "gradient": next((name for name in names if name in other), min(other, default=None)),
    }


def _draw_both_halves() -> None:
    """Let PEFT draw an adapter's B, too. It is zero otherwise, and then no gradient of A is known in the first step."""
    import torch
    from peft.tuners.lora import LoraLayer

    reset = LoraLayer.reset_lora_parameters

    def drawn(layer: Any, name: str, *arguments: Any) -> None:
        reset(layer, name, *arguments)
        if name in layer.lora_B:
            torch.nn.init.normal_(layer.lora_B[name].weight, std=0.02)

    LoraLayer.reset_lora_parameters = drawn


def _run(request: Mapping[str, Any]) -> dict[str, Any]:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    strategy, ranks, values = from_dict(Strategy, request["strategy"]), request["ranks"], dict(request["config"])
    libraries = ["transformers.modeling_utils", "accelerate"]
    libraries += ["deepspeed"] if strategy.sharding.startswith("zero") else []
    import_libraries(*libraries)
    if strategy.adapter != "none":
        _draw_both_halves()
    dp_size = ranks // (strategy.tp * strategy.cp * strategy.pp)
    work = (2 * strategy.pp, dp_size * ceil_div(GUARD_ROWS, dp_size), strategy.cp > 1, request["tp_plan"])
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        random_model(folder, AutoConfig.for_model(values.pop("model_type"), **values))
        started = []
        for count, way in (
            (1, replace(strategy, sharding="none", dp_replicate=1, **ALONE)),
            (ranks, strategy),
        ):
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            started += [
                (fork.Process(target=_rank, args=(folder, way, work, count, rank, store.port)), store)
                for rank in range(count)
            ]
        for process, _ in started:
            process.start()
        waited: dict[Any, Any] = {process.sentinel: process for process, _ in started}
        while waited:
            for sentinel in connection.wait(list(waited)):
                process = waited.pop(sentinel)
                process.join()
                if process.exitcode:
                    for other in waited.values():
                        other.kill()
                    raise SystemExit(1)
        names = [parameter.name for parameter in describe(folder).parameters]
        return _compare(folder, ranks, names)


def main(parent: int) -> None:
    """Read a request from standard input, and print the differences as JSON. All ranks end with the process `parent`."""
    die_with_parent(parent)
    skip_last_collection()
    for name in [name for name in os.environ if name.startswith(ENV_NAMES)]:
        del os.environ[name]
    with contextlib.redirect_stdout(sys.stderr):
        answer = _run(json.load(sys.stdin))
    print(json.dumps(answer))
