"""Ranks that train with tensor parallelism over the same global batches as one process; rank 0 writes losses and norms."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import collectives
import matrix_worker
import ranks

ROWS, SEQ_LEN, ACCUMULATION = 8, 24, 2


def loader(
    vocab: int,
    start: int,
    steps: int,
    dp_rank: int,
    dp_size: int,
    rows_are: str = "whole",
    accumulation: int = ACCUMULATION,
) -> Iterator[dict[str, Any]]:
    """This rank's micro-batches: the same rows a step on any number of ranks, each row with another number of labels.

    `rows_are` `documents`: each row holds two of them; `padded`: each ends with another number of padding; `odd`: one token less.
    """
    import torch

    for step in range(start, steps):
        rows = torch.randint(3, vocab - 6, (ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(step))
        labels = rows.clone()
        for row in range(ROWS):
            labels[row, : (row + step) * 5 % (SEQ_LEN - 4)] = -100
        columns = {"input_ids": rows, "labels": labels}
        places = torch.arange(SEQ_LEN).expand(ROWS, -1)
        if rows_are == "documents":
            first = torch.arange(ROWS)[:, None] + 7
            columns["position_ids"] = torch.where(places < first, places, places - first)
        if rows_are == "padded":
            columns["attention_mask"] = (places < SEQ_LEN - torch.arange(ROWS)[:, None]).long()
            labels[columns["attention_mask"] == 0] = -100
        shape = (accumulation, dp_size, -1, SEQ_LEN)
        for micro in range(accumulation):
            tokens = slice(SEQ_LEN - (rows_are == "odd"))
            yield {
                name: column.reshape(shape)[micro, dp_rank, :, tokens].contiguous() for name, column in columns.items()
            }


def own_loop(ours: Any, schedule: Any, vocab: int, steps: int) -> dict[str, Any]:
    """A user's own loop over a prepared loader, with the one call that every engine has; and what is refused there."""
    from torch.utils.data import DataLoader

    from toolkit import ToolkitError, forward_backward
    from toolkit import loss as loss_of

    accelerator, config, taken = ours.accelerator, ours.job.train_config, []
    rows = [
        {name: column[row] for name, column in columns.items()}
        for columns in loader(vocab, 0, steps, 0, 1, accumulation=1)
        for row in range(ROWS)
    ]
    refused = []
    sizes = ours.job.parallelism
    if sizes.dp_size < sizes.ranks:
        others = [{name: column[None] + accelerator.process_index for name, column in rows[0].items()}]
        try:
            forward_backward(accelerator, ours.model, others * config.accumulation)
        except ToolkitError as error:
            refused.append(str(error))
    if sizes.pp > 1:
        row, shorter = (
            {name: column[None, :end] for name, column in rows[0].items()} for end in (SEQ_LEN, SEQ_LEN - 1)
        )
        try:
            forward_backward(accelerator, ours.model, [row] * (config.accumulation - 1) + [shorter])
        except ToolkitError as error:
            refused.append(str(error))
    batches = iter(accelerator.prepare(DataLoader(rows, batch_size=config.micro_batch)))
    while micro_batches := list(itertools.islice(batches, config.accumulation)):
        loss = forward_backward(accelerator, ours.model, micro_batches)
        norm = accelerator.clip_grad_norm_(ours.model.parameters(), config.max_grad_norm)
        ours.optimizer.step()
        ours.optimizer.zero_grad()
        schedule.scheduler.step()
        taken.append([float(loss), float(norm)])
    row = {name: column[None].to(accelerator.device) for name, column in rows[0].items()}
    calls = {
        "pp": [
            lambda: accelerator.backward(loss),
            lambda: accelerator.save_state("."),
            lambda: accelerator.prepare(ours.model),
        ],
        "cp": [lambda: ours.model(**row), lambda: loss_of(ours.model, row)],
    }
    for call in (call for name, each in calls.items() if getattr(ours.job.parallelism, name) > 1 for call in each):
        try:
            call()
        except ToolkitError as error:
            refused.append(str(error))
    accelerator.wait_for_everyone()
    return {"steps": taken, "refused": refused}


def ragged(batches: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same batches, the last of which has a row less, as an evaluation's rows need not fill it."""
    *others, last = batches
    return [*others, {name: column[:-1] for name, column in last.items()}]


class File:
    """A file of weights, which notes the bytes of each part of a tensor that is read."""

    def __init__(self, opened: Any, read: list[int]) -> None:
        self.opened, self.read = opened, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self.opened, name)

    def get_slice(self, name: str) -> Any:
        """A tensor that is not read yet."""
        return File(self.opened.get_slice(name), self.read)

    def __getitem__(self, place: Any) -> Any:
        part = self.opened[place]
        self.read.append(part.nbytes)
        return part


def run(cell: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train to step `upto` of `planned`, from the checkpoint `from` if any; save after `saves`; export to `export`."""
    from accelerate.utils import gather_object
    from safetensors import safe_open
    from transformers import modeling_utils

    from toolkit.config.strategy import Strategy
    from toolkit.config.train_config import TrainConfig
    from toolkit.engines.pipeline import stages
    from toolkit.engines.upstream import patched
    from toolkit.exporters import save, verify
    from toolkit.models import describe
    from toolkit.training.loop import train
    from toolkit.training.metrics import evaluate
    from toolkit.training.preparation import audit
    from toolkit.training.replicas import wrong_parts

    spec, strategy = describe(cell["folder"]), Strategy(**cell["strategy"])
    rank, dp_size = (
        int(os.environ.get("RANK", "0")),
        int(os.environ.get("WORLD_SIZE", "1")) // (strategy.tp * strategy.cp * strategy.pp),
    )
    accumulation = cell.get("accumulation", ACCUMULATION)
    micro = ROWS // accumulation // dp_size
    planned = max(cell.get("planned", 4), cell["upto"])
    train_config = TrainConfig(
        steps=planned, micro_batch=micro, accumulation=accumulation, seq_len=SEQ_LEN, lr=2e-3, warmup=1
    )
    read: list[int] = []  # where transformers reads parts
    files = {"safe_open": lambda *where, **how: File(safe_open(*where, **how), read)}
    with patched(modeling_utils, **(files if strategy.tp * strategy.ep > 1 else {})):
        ours, schedule, tokenizer = ranks.build(cell["folder"], train_config, cell.get("plan"), **cell["strategy"])
    exact = strategy.adapter == "none" and matrix_worker.same_as(cell["folder"], ours.job.engine.shards(ours), spec)
    rows_are = cell.get("rows", "whole")
    start, saver = ranks.restored(cell, ours, schedule)
    dp_rank, steps = ours.job.coordinates(rank).dp_rank, []
    loads: list[Any] = []
    if cell.get("own"):
        return own_loop(ours, schedule, spec.vocab, cell["upto"])
    batches = loader(spec.vocab, start, cell["upto"], dp_rank, dp_size, rows_are, accumulation)
    if saver and start in cell.get("saves", ()):  # what was read, as this strategy writes it
        saver.save(start)
    called, logits = collectives.Collectives(ours.job.ranks), collectives.Logits(spec.vocab)
    copied: list[list[str]] = []  # by each forward of a stage, to the device
    to_device, forwards, audits = stages.to_device, [], []

    def copy(columns: dict[str, Any], device: Any) -> Any:
        copied.append(sorted(columns))
        return to_device(columns, device)

    watched = called if cell.get("counts") else logits if cell.get("logits") else contextlib.nullcontext()
    with watched, patched(stages, to_device=copy):
        for step in train(ours, batches, schedule, start=start):
            steps.append([step.loss, step.grad_norm, step.tokens])
            loads.append(step.experts)
            forwards.append(len(copied))
            if step.step in (start + 1, cell["upto"]):  # at the end, too, replicas are equal
                audits.append(str(audit(ours, gradients=step.gradients)))
            if saver and step.step in cell.get("saves", ()):
                saver.save(step.step)
            if step.step == cell["upto"]:
                break
    hooks = (hook for module in ours.model.modules() for hook in module._forward_pre_hooks.values())
    assert not any("ExpertLoad" in getattr(hook, "__qualname__", "") for hook in hooks), "the loop has ended"
    if saver:
        saver.wait()
    evaluated = evaluate(ours, loader(spec.vocab, 7, 8, dp_rank, dp_size, rows_are))
    counted = gather_object([ours.job.engine.counters(ours).steps])
    measured = {"steps": steps, "evaluated": evaluated, "exact": exact, "experts": loads, "counted": counted}
    measured["forwards"], measured["copied"] = gather_object([forwards]), gather_object([copied[:1]])
    measured["audits"] = audits
    if dp_size == 1:
        measured["ragged"] = evaluate(ours, ragged(loader(spec.vocab, 7, 8, 0, 1, rows_are)))
    measured["calls"], measured["sent"] = called.number, called.bytes
    measured["logits"] = gather_object([logits.rows])
    measured["read"] = gather_object([sum(read)])
    measured["transfers"] = [(each.what, each.size * each.times) for each in ours.job.communication()]
    layers = (module for module in ours.model.modules() if type(module).__name__.removeprefix("FSDP") in spec.blocks)
    measured["recomputed"] = [getattr(layer, "gradient_checkpointing", None) for layer in layers]
    if "spoil" in cell:  # as a gradient would that one rank reduces otherwise
        named = ours.model.named_parameters()
        next(parameter for name, parameter in named if name.endswith(cell["spoil"])).data.add_(rank)
        measured["differing"] = wrong_parts(ours)
    if "export" in cell:
        exported = save(ours, tokenizer, Path(cell["export"]))
        result = verify(ours, Path(cell["export"]), exported, next(loader(spec.vocab, 0, 1, 0, 1)))
        measured["logits_error"] = result.logits_error if result else None
    ours.accelerator.wait_for_everyone()
    return measured


if __name__ == "__main__":
    ranks.main(run, *sys.argv[1:], before=matrix_worker.prepare_parent)
