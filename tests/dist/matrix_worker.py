"""One process group, many cells: each loads, prepares and trains a few steps, and says what came of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ranks


def run(cell: dict[str, Any], folder: str) -> dict[str, Any]:
    """The steps of one cell, or the sentence that refuses it."""
    import torch

    import toolkit as tk
    from toolkit.config.strategy import Strategy
    from toolkit.config.train_config import TrainConfig
    from toolkit.core.errors import ToolkitError
    from toolkit.engines.upstream import patched
    from toolkit.models import describe
    from toolkit.training.loading import load
    from toolkit.training.preparation import prepare, prepared
    from toolkit.training.setup import accelerator as make
    from toolkit.training.setup import job as job_of
    from toolkit.training.streamed_weights import StreamedWeights

    options = {name: cell.pop(name) for name in ("steps", "allow_unquantized", "folder", "export") if name in cell}
    steps, folder = options.get("steps", 2), options.get("folder", folder)
    spec = describe(folder)
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    said: list[str] = []
    try:
        train_config = TrainConfig(steps=steps, micro_batch=8 // count, seq_len=16)
        accelerator = make(Strategy(**cell), train_config, spec)
        accelerator.print = lambda *lines: said.extend(map(str, lines))
        model, tokenizer = load(accelerator, allow_unquantized=options.get("allow_unquantized", False))
    except ToolkitError as error:
        return {"refused": str(error), "kind": type(error).__name__}
    job = job_of(accelerator)
    loaded = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}
    bytes_read = accelerator.gather(torch.tensor([held_bytes(model)], device=accelerator.device)).tolist()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    streamed, read = [], StreamedWeights.read

    def counted(weights: Any, *of_what: Any) -> Any:
        streamed.append((tensor := read(weights, *of_what)).nbytes)
        return tensor

    with patched(StreamedWeights, read=counted):
        ours = prepared(accelerator, prepare(accelerator, model, optimizer))
    bytes_streamed = accelerator.gather(torch.tensor([sum(streamed)], device=accelerator.device)).tolist()
    engine = job.engine
    exact = same_as(folder, engine.shards(ours), spec) if job.strategy.adapter == "none" else None
    # The same eight rows, however many ranks share them.
    batch = torch.randint(3, spec.vocab - 6, (8, 16), generator=torch.Generator().manual_seed(7))[rank::count]
    batch = batch.contiguous().to(accelerator.device)
    losses, norms, skipped = [], [], 0
    for _ in range(steps):
        loss = tk.loss(ours.model, {"input_ids": batch, "labels": batch})
        engine.backward(ours, loss, True)
        update = engine.step(ours)
        norms.append(update.norm)
        skipped += update.skipped
        losses.append(float(accelerator.gather(loss.detach().float().reshape(1)).mean()))
    held, expected = engine.measure_state(ours), engine.expected_state(job)
    exported = export(ours, tokenizer, folder, batch, Path(options["export"])) if "export" in options else None
    return {
        "exported": exported,
        "engine": type(ours.model).__name__,
        "losses": losses,
        "norms": norms,
        "skipped": skipped,
        "said": said,
        "loaded": sorted(loaded),
        "bytes_read": bytes_read,
        "bytes_streamed": bytes_streamed,
        "training": all(module.training for module in ours.model.modules()),
        "exact": exact,
        "pad": tokenizer.pad_token_id,
        "measured": {**held.to_dict(), "dtypes": dict(held.dtypes)},
        "expected": {**expected.to_dict(), "dtypes": dict(expected.dtypes)},
    }


def export(prepared: Any, tokenizer: Any, source: str, batch: Any, out: Path) -> dict[str, Any] | None:
    """What a checkpoint contains, and which tensors of the export are the source's, byte by byte."""
    from toolkit.checkpoints.layout import lay_out
    from toolkit.engines.states import SNAPSHOT_CHUNK
    from toolkit.exporters.from_engine import save, verify

    layout = lay_out(prepared, SNAPSHOT_CHUNK)
    planned = save(prepared, tokenizer, out)
    result = verify(prepared, out, planned, {"input_ids": batch})
    if result is None:
        return None
    from safetensors.torch import load_file

    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (source, out))
    assert before.keys() == after.keys(), sorted(before.keys() ^ after.keys())
    same = [name for name in before if before[name].numpy().tobytes() == after[name].numpy().tobytes()]
    return {
        "unchanged": same,
        "names": sorted(before),
        "checkpoint": sorted(layout.tensors),
        "error": result.logits_error,
        "files": sorted(path.name for path in out.iterdir()),
    }


def held_bytes(model: Any) -> int:
    """Bytes of the parameters that a rank holds after loading: its shards under ZeRO-3, else their storages."""
    tensors = [getattr(parameter, "ds_tensor", parameter) for parameter in model.parameters()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def same_as(folder: str, shards: Any, spec: Any) -> bool:
    """Whether this rank's masters, or its parameters where they are their own, are the checkpoint's values bit by bit.

    What is frozen is held in the compute dtype.
    """
    import torch

    from toolkit.engines.shards import overlaps, parts, whole_box

    whole = reference(folder)
    held = [shard for shard in shards if shard.kind in ("master", "parameter")]
    kind = "master" if any(shard.kind == "master" for shard in held) else "parameter"

    def same(shard: Any) -> bool:
        tensor = whole[shard.name]
        wanted = tensor if spec.trains(shard.name) else tensor.to(shard.tensor.dtype)
        pairs = list(overlaps([(whole_box(tensor.shape), wanted)], parts(shard)))
        assert sum(mine.numel() for _, mine in pairs) == shard.tensor.numel(), shard.name
        return all(torch.equal(theirs, mine.cpu()) for theirs, mine in pairs)

    return all(same(shard) for shard in held if shard.kind == kind)


_references: dict[str, dict[str, Any]] = {}


def reference(folder: str) -> dict[str, Any]:
    """The checkpoint in fp32 as plain transformers reads it. Called first before any engine is set up."""
    if folder not in _references:
        import torch

        from toolkit.models import describe
        from toolkit.models.hf_loading import auto_class

        model = auto_class(describe(folder)).from_pretrained(folder, dtype=torch.float32)
        _references[folder] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return _references[folder]


def prepare_parent(scratch: str, folder: str) -> None:
    """Read every model's reference before any engine is set up."""
    for _, cells in json.loads((Path(scratch) / "cells.json").read_text(encoding="utf-8")):
        for cell in cells:
            reference(cell.get("folder", folder))


if __name__ == "__main__":
    ranks.main(run, *sys.argv[1:], before=prepare_parent)
