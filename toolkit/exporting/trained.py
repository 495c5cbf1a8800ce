"""What was trained, from the engine that holds it: gathered under every one of them, saved, reopened and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.adapting import quiet
from toolkit.engines.job import Piece, Prepared, engine_of
from toolkit.errors import RunError
from toolkit.exporting.card import rows_of, write_card
from toolkit.exporting.checking import check_tied, relative_error, unsound
from toolkit.exporting.publishing import drafted
from toolkit.exporting.results import PROBE_TOKENS, TOLERANCE, Export, headers, load_line
from toolkit.exporting.sources import Origin
from toolkit.loading import quiet_bars
from toolkit.model import copy_code, copy_processor
from toolkit.reopening import reopen
from toolkit.units import BYTES_OF, DTYPE_OF

if TYPE_CHECKING:
    import torch


def save(prepared: Prepared, tokenizer: Any, folder: Path) -> None:
    """Write the trained model (or the adapter alone) and the tokenizer in Hugging Face's format; every rank calls it.

    Weights are saved as they were trained: fp32 masters in float32. Rank 0 gathers one tensor at a time, into host
    memory; the other ranks hold no more than before. The files appear in `folder` whole or not at all; what was there
    before is replaced by them.
    """
    module = prepared.accelerator.unwrap_model(prepared.model)
    adapter = prepared.job.strategy.adapter != "none"
    spec = prepared.job.spec
    wanted = {name for name, p in module.named_parameters() if p.requires_grad or not (adapter or spec)}
    state = {name: tensor for name, tensor in gathered(prepared, wanted) if tensor is not None}
    if not adapter:
        known = set(module.state_dict())
        state |= {name: buffer.cpu() for name, buffer in module.named_buffers() if name in known}
    if prepared.accelerator.is_main_process:
        if spec is not None and not adapter:
            origin = Origin(spec)  # what is frozen leaves as it came, also where it was cast to be computed with
            state |= {p.name: origin.tensor(p.name) for p in spec.parameters if p.name not in wanted}
        with quiet_bars(True, shown=False):
            _write(prepared, module, tokenizer, state, folder)
    prepared.accelerator.wait_for_everyone()


def _write(prepared: Prepared, module: Any, tokenizer: Any, state: dict[str, Any], folder: Path) -> None:
    spec = prepared.job.spec
    if prepared.job.strategy.adapter == "none":
        # Training switches the cache off; whoever loads the result to generate wants what the checkpoint said.
        cached = spec.config.get("use_cache", True) if spec else True
        module.config.use_cache = module.config.get_text_config().use_cache = cached
        module.config.dtype = next(iter(state.values())).dtype
    with drafted(folder, replace=True) as draft:
        module.save_pretrained(draft, state_dict=state)
        if prepared.job.strategy.adapter == "none":
            module.config.use_cache = module.config.get_text_config().use_cache = False
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        if spec and prepared.job.strategy.adapter == "none":
            copy_code(spec, draft)
            copy_processor(spec, draft)


def gathered(prepared: Prepared, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Whole tensors by name, on rank 0's host memory; None on other ranks, which send what they hold. A collective.

    Masters where an engine keeps them, else parameters. One tensor is in flight at a time.
    """
    from accelerate.utils import gather_object

    mine: dict[str, dict[str, list[Piece]]] = {}
    for piece in engine_of(prepared.job.strategy).pieces(prepared):
        if piece.name in wanted:
            mine.setdefault(piece.name, {}).setdefault(piece.kind, []).append(piece)
    ranges = {
        name: {kind: [(p.start, p.tensor.numel()) for p in pieces] for kind, pieces in kinds.items()}
        for name, kinds in mine.items()
    }
    shapes = {name: next(iter(kinds.values()))[0].shape for name, kinds in mine.items()}
    every: list[tuple[Any, Any]] = gather_object([(ranges, shapes)])
    known = {name: shape for _, found in every for name, shape in found.items()}
    module = prepared.accelerator.unwrap_model(prepared.model)
    for name in (name for name, _ in module.named_parameters() if name in wanted):
        masters = any("master" in held.get(name, {}) for held, _ in every)
        kind = "master" if masters else "parameter"
        plan = [held.get(name, {}).get(kind, []) for held, _ in every]
        yield name, _assemble(prepared, mine.get(name, {}).get(kind, []), plan, known[name])


def _assemble(prepared: Prepared, mine: list[Piece], plan: list[list[tuple[int, int]]], shape: tuple[int, ...]) -> Any:
    """Put one tensor together on rank 0 from every rank's ranges; equal ranges (replicas) are taken once."""
    import torch
    import torch.distributed as dist

    accelerator = prepared.accelerator
    rank, device = accelerator.process_index, accelerator.device
    dtype = getattr(torch, prepared.job.weight_dtype) if not mine else mine[0].tensor.dtype
    whole = torch.empty(shape, dtype=dtype).view(-1) if rank == 0 else None
    covered: set[int] = set()
    for owner, ranges in enumerate(plan):
        for index, (start, length) in enumerate(ranges):
            if start in covered or not length:
                continue
            covered.add(start)
            if rank == owner and rank != 0:
                dist.send(mine[index].tensor.contiguous().to(device), 0)
            elif rank == 0:
                assert whole is not None
                part = mine[index].tensor if owner == 0 else torch.empty(length, dtype=dtype, device=device)
                if owner != 0:
                    dist.recv(part, owner)
                whole[start : start + length].copy_(part)
    return whole.view(shape) if whole is not None else None


def verify(
    prepared: Prepared, folder: Path, batch: Mapping[str, torch.Tensor], *, about: Mapping[str, Any] | None = None
) -> Export | None:
    """Reopen what was saved and compare it with the trained model; rank 0 gets the result, the others None. A collective.

    What passed gets its model card.

    Args:
        prepared: the trained model.
        folder: where `save` wrote.
        batch: a batch of the training data; its first row's first tokens are the probe.
        about: more rows of the model card: data, versions.

    Raises:
        RunError: for a tensor of size zero, missing or unexpected keys, and logits that are not the trained model's.
    """
    import torch

    accelerator = prepared.accelerator
    probe = {name: tensor[:1, :PROBE_TOKENS].to(accelerator.device) for name, tensor in batch.items()}
    quiet(prepared.model)
    with torch.no_grad():
        trained = prepared.model(**probe, use_cache=False).logits.float().cpu()
    prepared.model.train()
    error: float | None = None
    problem = ""
    if accelerator.is_main_process:
        try:
            error = _compare(prepared, folder, probe, trained)
        except Exception as found:  # the other ranks wait for the verdict
            problem = f"{type(found).__name__}: {found}"
    return _verdict(prepared, folder, problem, error, about or {})


def _compare(
    prepared: Prepared, folder: Path, probe: Mapping[str, torch.Tensor], trained: torch.Tensor
) -> float | None:
    """The logits' error on rank 0: on its device where the model fits there again, else on the host, else not at all."""
    job = prepared.job
    if wrong := unsound(folder):
        raise RunError("; ".join(wrong[:3]))
    place = _place(prepared)
    if place is None:
        return None
    with quiet_bars(True, shown=False):
        model = reopen(job, folder)
    assert job.spec is not None
    if job.strategy.adapter == "none":
        check_tied(model, job.spec)
    model = model.to(place)
    here = {name: tensor.to(place) for name, tensor in probe.items()}
    return _error(model, here, trained, job.strategy.precision, sharding=job.strategy.sharding)


def _place(prepared: Prepared) -> torch.device | None:
    """Where there is memory for the whole model a second time, with a fifth to spare."""
    import psutil
    import torch

    job = prepared.job
    device: torch.device = prepared.accelerator.device
    assert job.spec is not None
    each = 1 if job.strategy.quantized else BYTES_OF[job.weight_dtype]
    needed = 1.2 * each * job.spec.elements
    if device.type == "cuda":
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info(device)[0] > needed:
            return device
        if job.strategy.quantized:  # bitsandbytes would quantize on the device
            return None
    return torch.device("cpu") if psutil.virtual_memory().available > needed else None


def _verdict(
    prepared: Prepared, folder: Path, problem: str, error: float | None, about: Mapping[str, Any]
) -> Export | None:
    from accelerate.utils import broadcast_object_list

    job = prepared.job
    limit = TOLERANCE[job.compute_dtype]
    if error is not None and not error <= limit:
        problem = f"logits differ from the trained model's by {error:.1e} relative, more than {limit:.0e}"
    said = [problem]
    if job.ranks > 1:
        broadcast_object_list(said)
    if said[0]:
        raise RunError(f"the saved model in {folder} is not what was trained: {said[0]}. Do not use it.")
    if not prepared.accelerator.is_main_process:
        return None
    saved = headers(folder)
    adapter = job.strategy.adapter != "none"
    assert job.spec is not None
    strategy, loop = dataclasses.asdict(job.strategy), dataclasses.asdict(job.loop)
    rows = {**rows_of(strategy, loop, ranks=job.ranks, steps=job.loop.steps), **about}
    what = "adapter" if adapter else "model"
    write_card(folder, job.spec, what=what, trained=job.strategy.adapter, rows=rows, notes=(), error=error)
    size = sum(BYTES_OF.get(dtype, 4) * elements for _, dtype, elements in saved)
    return Export(
        folder=str(folder),
        adapter=adapter,
        tensors=len(saved),
        size_bytes=size,
        logits_error=error,
        load=load_line(job.spec, job.spec.source, str(folder), adapter=job.strategy.adapter),
    )


def _error(model: Any, probe: Mapping[str, Any], trained: torch.Tensor, precision: str, *, sharding: str) -> float:
    import torch

    # DDP computes under autocast on fp32 weights, the other engines on weights that are cast.
    half = precision in ("bf16", "fp16")
    autocast = half and sharding in ("none", "ddp")
    compute = getattr(torch, DTYPE_OF[precision])
    if half and not autocast:
        # Parameters alone: no engine casts buffers, and rotary frequencies in half precision turn into other angles.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(compute)
    device = next(model.parameters()).device.type
    with torch.no_grad(), torch.autocast(device, compute) if autocast else nullcontext():
        found = model(**probe, use_cache=False).logits.float().cpu()
    return relative_error(found, trained)
