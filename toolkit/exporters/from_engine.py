"""Export a trained model from any engine: gather, save, reopen and check it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.core.errors import RunError, is_out_of_memory
from toolkit.core.units import BYTES_OF
from toolkit.devices.machine import host_memory
from toolkit.engines.base import engine_of
from toolkit.engines.job import Job
from toolkit.engines.records import Prepared
from toolkit.engines.timeouts import on_main
from toolkit.exporters.adapters import planned_adapter
from toolkit.exporters.engine_weights import EngineWeights, is_adapter
from toolkit.exporters.model_card import rows_of, write_card
from toolkit.exporters.model_files import ModelFiles, skeleton
from toolkit.exporters.publication import atomic_dir, check_room
from toolkit.exporters.reload import reopen
from toolkit.exporters.results import (
    NO_ROOM,
    OTHER_KERNELS,
    PROBE_TOKENS,
    TOLERANCE,
    Export,
    SavedTensor,
    load_line,
    not_compared,
    tensor_headers,
    tolerance_note,
)
from toolkit.exporters.state_dict import FullStateDict
from toolkit.exporters.verification import check_attention, check_files, check_tied, relative_error
from toolkit.models import copy_code, copy_processor
from toolkit.models.hf_loading import quiet_bars

if TYPE_CHECKING:
    import torch


def save(prepared: Prepared, tokenizer: Any, folder: Path) -> dict[str, SavedTensor]:
    """Write the trained model (or the adapter alone) and the tokenizer in Hugging Face's format. A collective.

    Weights are saved as they were trained: fp32 masters in float32. Rank 0 gathers and writes one tensor at a time; no
    rank holds more than its shards and the largest tensor. The files appear in `folder` whole or not at all; what was
    there before is replaced by them.

    Returns:
        On rank 0 what each tensor in the files has to be, for `verify`; nothing on other ranks.
    """
    accelerator, weights = prepared.accelerator, EngineWeights(prepared)
    writing = _write_adapter if is_adapter(accelerator.unwrap_model(prepared.model)) else _write_model
    with contextlib.ExitStack() as stack:
        draft: list[Path] = []  # rank 0's

        def open_draft() -> None:
            draft.append(stack.enter_context(atomic_dir(folder, replace=True)))

        def finish() -> None:
            if tokenizer is not None:
                tokenizer.save_pretrained(draft[0])
            stack.close()

        on_main(accelerator, open_draft)
        written = writing(prepared, weights, draft)
        on_main(accelerator, finish)
    return written


def _write_adapter(prepared: Prepared, weights: EngineWeights, draft: list[Path]) -> dict[str, SavedTensor]:
    module = prepared.accelerator.unwrap_model(prepared.model)
    weights.gather(list(weights.shapes))
    written: dict[str, SavedTensor] = {}

    def write() -> None:
        state = {name: weights.tensor(name) for name in weights.shapes}
        written.update(planned_adapter(module, state))
        module.save_pretrained(draft[0], state_dict=state)

    on_main(prepared.accelerator, write)
    return written


def _write_model(prepared: Prepared, weights: EngineWeights, draft: list[Path]) -> dict[str, SavedTensor]:
    files: list[ModelFiles] = []  # rank 0's

    def begin() -> list[list[str]]:
        spec = prepared.job.spec
        with quiet_bars(True, shown=False):
            files.append(_planned_files(prepared, weights))
        check_room(draft[0], files[0].bytes)
        files[0].create(draft[0])
        if spec is not None:
            copy_code(spec, draft[0])
            copy_processor(spec, draft[0])
        return [files[0].trained_names(group) for group in files[0].groups]

    def write(number: int) -> None:
        files[0].write(files[0].groups[number])

    for number, names in enumerate(on_main(prepared.accelerator, begin)):
        weights.gather(names)
        on_main(prepared.accelerator, partial(write, number))
    return files[0].written if files else {}


LOADED = "Make the Accelerator without a spec for a model that `toolkit.load` did not read."


def _planned_files(prepared: Prepared, weights: EngineWeights) -> ModelFiles:
    """Lay out the files of the running model, with its configs."""
    module, spec = prepared.accelerator.unwrap_model(prepared.model), prepared.job.spec
    config = copy.deepcopy(module.config)
    # Training switches the cache off; generation needs the checkpoint's own setting.
    config.use_cache = config.get_text_config().use_cache = spec.config.get("use_cache", True) if spec else True
    if spec is None:
        return ModelFiles(module, weights, config=config)
    model = skeleton(spec, config, module.generation_config)
    model._weight_conversions = getattr(module, "_weight_conversions", None)
    return ModelFiles(model, FullStateDict(weights, model, spec, LOADED))


def verify(
    prepared: Prepared,
    folder: Path,
    planned: Mapping[str, SavedTensor],
    batch: Mapping[str, torch.Tensor],
    *,
    about: Mapping[str, Any] | None = None,
) -> Export | None:
    """Compare the saved files with the trained model; rank 0 gets the result, the others None. A collective.

    The bytes decide. Where they are right and the folder does not open in transformers or PEFT, the result warns and says
    why. Where only the logits of the reopened model differ, the result says by how much. What passes gets its model card.

    Args:
        prepared: the trained model.
        folder: where `save` wrote.
        planned: what `save` returned.
        batch: a batch of the training data; its first row's first tokens are the probe.
        about: more rows of the model card: data, versions.

    Raises:
        RunError: for files whose bytes are not the trained model's, and for an opened model that lacks keys, has keys too
            many, or whose tied weights came untied.
    """
    accelerator = prepared.accelerator
    if prepared.job.spec is None:
        raise RunError(
            "the model was not read by `toolkit.load`, so there is nothing to compare its export with. "
            "Make the Accelerator with a spec: `toolkit.accelerator(strategy, train_config, toolkit.describe(model))`."
        )
    probe = {name: tensor[:1, :PROBE_TOKENS] for name, tensor in batch.items()}
    prepared.model.eval()
    trained = engine_of(prepared.job.strategy).logits(prepared, probe).float().cpu()
    prepared.model.train()
    result: list[Export] = []

    def check() -> None:
        try:
            check_files(folder, planned)
            error, notes = _compare(prepared, folder, probe, trained)
        except RunError as wrong:
            raise RunError(
                f"the saved model in {folder} differs from the trained model: {wrong}. Do not use it."
            ) from wrong
        result.append(_result(prepared, folder, error, notes, about or {}))

    on_main(accelerator, check)
    return result[0] if result else None


def _compare(
    prepared: Prepared, folder: Path, probe: Mapping[str, torch.Tensor], trained: torch.Tensor
) -> tuple[float | None, tuple[str, ...]]:
    """Return the logits' error on rank 0, and notes about the comparison.

    They are computed on rank 0's device where the model fits there a second time, else on the host.

    Raises:
        RunError: for an opened model that lacks keys, has keys too many, or whose tied weights came untied.
    """
    place = _device_for_check(prepared)
    if place is None:
        return None, (NO_ROOM,)
    job = _job_on_device(prepared.job, place)
    assert job.spec is not None
    try:
        with quiet_bars(True, shown=False):
            model = reopen(job, folder)
        if job.strategy.adapter == "none":
            check_tied(model, job.spec)
    except RunError:
        raise
    except Exception as problem:  # transformers and PEFT refuse a folder with exceptions of every type
        lacks = isinstance(problem, ImportError) or is_out_of_memory(problem)
        return None, (not_compared(problem, folder, opened=lacks),)
    try:
        here = {name: tensor.to(place) for name, tensor in probe.items()}
        error = _error(job, model.to(place), here, trained)
    except Exception as problem:  # a kernel or memory that this machine lacks
        return None, (not_compared(problem, folder, opened=True),)
    limit, attention = TOLERANCE[job.compute_dtype], job.strategy.attention
    if job is prepared.job and place.type == prepared.accelerator.device.type:
        return error, tolerance_note(error, limit)
    how = f"Logits were compared on the {place.type} with {attention}; the model was trained on the "
    how += f"{prepared.accelerator.device.type} with {prepared.job.strategy.attention}."
    return error, (how, *tolerance_note(error, OTHER_KERNELS * limit))


def _device_for_check(prepared: Prepared) -> torch.device | None:
    """Return a device with memory for a second model and a fifth to spare; it is read on the host first."""
    import torch

    job = prepared.job
    device: torch.device = prepared.accelerator.device
    assert job.spec is not None
    each = 1 if job.strategy.quantized else BYTES_OF[job.weight_dtype]
    needed = 1.2 * each * job.spec.elements
    if host_memory()[1] <= needed:
        return None
    if device.type == "cuda":
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info(device)[0] > needed:
            return device
        if job.strategy.quantized:  # bitsandbytes would quantize on the device
            return None
    return torch.device("cpu")


def _job_on_device(job: Job, place: torch.device) -> Job:
    """Return the same job with an attention kernel for this device."""
    assert job.spec is not None
    if place.type == "cuda" or job.strategy.attention in ("sdpa", "eager"):
        return job
    return dataclasses.replace(job, strategy=dataclasses.replace(job.strategy, attention=check_attention(job.spec)))


def _result(
    prepared: Prepared, folder: Path, error: float | None, notes: tuple[str, ...], about: Mapping[str, Any]
) -> Export:
    """Write the model card and return the result."""
    job = prepared.job
    saved = tensor_headers(folder)
    adapter = job.strategy.adapter != "none"
    assert job.spec is not None
    strategy, train_config = dataclasses.asdict(job.strategy), dataclasses.asdict(job.train_config)
    rows = {**rows_of(strategy, train_config, parallelism=job.parallelism, steps=job.train_config.steps), **about}
    what = "adapter" if adapter else "model"
    write_card(folder, job.spec, what=what, trained=job.strategy.adapter, rows=rows, notes=notes, error=error)
    return Export(
        folder=str(folder),
        adapter=adapter,
        tensors=len(saved),
        size_bytes=sum(BYTES_OF.get(dtype, 4) * elements for _, dtype, elements in saved),
        logits_error=error,
        load=load_line(job.spec, job.spec.source, str(folder), adapter=job.strategy.adapter),
        notes=notes,
    )


def _error(job: Job, model: Any, probe: Mapping[str, Any], trained: torch.Tensor) -> float:
    import torch

    # DDP computes under autocast on fp32 weights, the other engines on weights that are cast.
    half = job.precision.mixed
    autocast = engine_of(job.strategy).autocast_dtype(job) is not None
    compute = getattr(torch, job.compute_dtype)
    if half and not autocast:
        # Parameters alone: no engine casts buffers, and rotary frequencies in half precision turn into other angles.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(compute)
    device = next(model.parameters()).device.type
    with torch.no_grad(), torch.autocast(device, compute) if autocast else nullcontext():
        logits = model(**probe, use_cache=False).logits.float().cpu()
    return relative_error(logits, trained)
