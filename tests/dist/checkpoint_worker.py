"""Ranks that train, save, restore and go on: each cell is one such life, and says its losses."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ranks

GLOBAL_BATCH, SEQ_LEN = 8, 16


def loader(vocab: int, start: int, steps: int, rank: int, count: int) -> Iterator[dict[str, Any]]:
    """This rank's rows of each step, the same eight rows a step however many ranks share them."""
    import torch

    for step in range(start, steps):
        rows = torch.randint(3, vocab - 6, (GLOBAL_BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(step))
        mine = rows.reshape(count, -1, SEQ_LEN)[rank].contiguous()
        yield {"input_ids": mine, "labels": mine}


def save(saver: Any, step: int) -> None:
    """Save, and overwrite all that was saved right afterwards: the file holds what it was."""
    import torch
    from safetensors.torch import load_file

    parts = {item.region.key: item.tensor for item in saver.layout.items()}
    before = {key: tensor.clone() for key, tensor in parts.items()}
    saver.save(step)
    for tensor in parts.values():
        tensor.fill_(77)
    saver.wait_published(step)
    (path,) = saver.folder.glob(f"step-{step:08d}/rank-{saver.rank:05d}.safetensors")
    written = load_file(path)
    assert parts.keys() == written.keys() - {key for key in written if key.startswith("generator")}
    for key, tensor in parts.items():
        assert written[key].shape == tensor.shape, key
        assert torch.equal(written[key].view(-1).view(torch.uint8), before[key].reshape(-1).view(torch.uint8)), key
        tensor.copy_(before[key])


def look(ours: Any) -> None:
    """A forward in eval mode between two steps, as anybody's own code has it. It must change nothing."""
    import torch

    ours.model.eval()
    with torch.no_grad():
        ours.model(**next(loader(ours.job.spec.vocab, 90, 91, 0, 1)), use_cache=False)
    ours.model.train()


def export_peak(cell: dict[str, Any], folder: str) -> dict[str, Any]:
    """Each rank's memory in an export of a whole model, above what it held before."""
    from accelerate.utils import gather_object

    from toolkit import measurement
    from toolkit.config.train_config import TrainConfig
    from toolkit.exporters import save, state_dict

    state_dict.SEND_CHUNK = 64 * 1024
    train_config = TrainConfig(micro_batch=1, seq_len=SEQ_LEN, lr=1e-3)
    ours, _, tokenizer = ranks.build(cell.get("folder", folder), train_config, **cell["strategy"])
    peak = measurement.peak_memory(lambda: save(ours, tokenizer, Path(cell["into"])), "cpu")
    spec = ours.job.spec
    largest = max(parameter.elements for parameter in spec.parameters)
    return {
        "peaks": gather_object([peak]),
        "largest": 4 * largest,
        "whole": 4 * spec.elements,
        "sent": state_dict.SEND_CHUNK,
    }


def run(cell: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train to step `upto`, from the checkpoint `from` or from the beginning; save after the steps `saves` into `into`."""
    import torch

    from toolkit.checkpoints import CheckpointWriter
    from toolkit.config.train_config import TrainConfig
    from toolkit.training.loop import train
    from toolkit.training.preparation import audit

    if cell.get("measures") == "export":
        return export_peak(cell, folder)
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    train_config = TrainConfig(steps=8, micro_batch=GLOBAL_BATCH // count, seq_len=SEQ_LEN, lr=5e-3, warmup=2)
    ours, schedule, _ = ranks.build(cell.get("folder", folder), train_config, **cell["strategy"])
    offloaded = cell["strategy"].get("offload", "none") != "none"
    stays = patch.object(CheckpointWriter, "stays", lambda _, item: item.region.kind != "buffer")
    with stays if offloaded else nullcontext():  # as on a GPU machine: written in place
        start, saver = ranks.restored(cell, ours, schedule)
    if saver and offloaded:
        saver.stays = lambda item: item.region.kind != "buffer"  # type: ignore[method-assign]
    if saver and start in cell["saves"]:
        save(saver, start)
    resumed = start > 0
    if resumed:
        look(ours)
    steps = []
    batches = loader(ours.job.spec.vocab, start, cell["upto"], rank, count)
    for step in train(ours, batches, schedule, start=start) if start < cell["upto"] else ():
        steps.append([step.loss, step.grad_norm, step.lr])
        if step.step == start + 1:
            audit(ours, gradients=step.gradients)
        if saver and step.step in cell["saves"]:
            save(saver, step.step)
        if resumed:
            look(ours)
        if step.step == cell["upto"]:
            break
    if saver:
        saver.wait()
    ours.accelerator.wait_for_everyone()
    return {"steps": steps, "start": start, "drawn": torch.rand(1).item()}


def as_on_every_cpu(scratch: str, folder: str) -> None:
    """bitsandbytes finds AVX512-BF16 everywhere, with which it would repack 4-bit weights in eval mode."""
    import bitsandbytes.nn.modules as modules

    modules.has_avx512bf16 = lambda: True


if __name__ == "__main__":
    ranks.main(run, *sys.argv[1:], before=as_on_every_cpu)
