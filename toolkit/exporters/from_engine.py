"""Export a trained model from any engine: gather, save, reopen and check it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.importers import Weights
from toolkit.core.errors import RunError, ToolkitError, is_out_of_memory
from toolkit.core.units import BYTES_OF
from toolkit.devices.machine import host_memory
from toolkit.engines.job import Job
from toolkit.engines.optimizer_step import to_device
from toolkit.engines.rank_calls import on_main
from toolkit.engines.records import Prepared
from toolkit.exporters.folders import atomic_dir
from toolkit.exporters.model_files import ModelFiles, check_export_space, skeleton, write_adapter
from toolkit.exporters.results import (
    NO_ROOM,
    OTHER_KERNELS,
    PROBE_TOKENS,
    TOLERANCE,
    Checked,
    Export,
    SavedTensor,
    finish_export,
    logits_notes,
    not_compared,
    rows_of,
)
from toolkit.exporters.state_dict import EngineWeights, full_state, is_adapter
from toolkit.exporters.verification import check_attention, check_files, check_opened, relative_error, reopen
from toolkit.models import ModelSpec
from toolkit.models.files import first_line
from toolkit.models.hf_loading import config_ties, first_names, quiet_bars
from toolkit.models.varlen import BOUNDS, document_bounds

if TYPE_CHECKING:
    import torch


def save(prepared: Prepared, tokenizer: Any, folder: Path, *, check: bool = True) -> dict[str, SavedTensor]:
    """Write the trained model (or the adapter alone) and the tokenizer in Hugging Face's format. A collective.

    Weights keep their training dtype: fp32 masters in float32. Rank 0 gathers and writes one tensor at a time. No rank holds
    more than its shards and the largest tensor. The files replace an existing `folder` once they are complete. A tied weight
    is written once where the config ties it, and under each of its names where it does not.

    Args:
        prepared: the trained model.
        tokenizer: written too, unless it is None.
        folder: where to write.
        check: read the files again, and open the folder with transformers alone. `verify` does it, too.

    Returns:
        On rank 0 the fingerprints of all tensors in the files, for `verify`; nothing on other ranks.

    Raises:
        RunError: for files with other bytes than the trained model's, and where transformers opens another model.
    """
    engine, written = EngineWeights(prepared), dict[str, SavedTensor]()
    with contextlib.closing(_write(prepared, engine.weights, tokenizer, folder, written)) as steps:
        while (names := on_main(prepared.accelerator, lambda: next(steps, None))) is not None:
            engine.gather(names)
    if check:
        on_main(prepared.accelerator, lambda: _check_folder(prepared, folder, written))
    return written


def try_save(prepared: Prepared, tokenizer: Any, folder: Path) -> None:
    """Write all files of `save` but the weights, and remove them. A fault then costs no training. A collective.

    Raises:
        RunError: for what cannot be written: a config, the tokenizer, the folder, too little room for the weights.
    """
    weights = EngineWeights(prepared).weights

    def write() -> None:
        try:
            with contextlib.closing(_write(prepared, weights, tokenizer, folder, {})) as steps:
                next(steps)
        except ToolkitError:
            raise
        except Exception as error:  # transformers, PEFT and tokenizers raise exceptions of every type
            raise RunError(
                f"the trained model could not be saved in {folder}: {type(error).__name__}: {first_line(error)}. "
                "Nothing was trained. Correct the model's configs or tokenizer, or train with --no-save."
            ) from error

    on_main(prepared.accelerator, write)


def _write(
    prepared: Prepared, weights: Weights, tokenizer: Any, folder: Path, written: dict[str, SavedTensor]
) -> Generator[list[str]]:
    """Write the files on rank 0: everything but the weights before the first yield.

    Yield the names of the next tensors, which all ranks gather before rank 0 goes on.
    """
    import torch

    module = prepared.accelerator.unwrap_model(prepared.model)
    with atomic_dir(folder, replace=True) as draft:
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        if is_adapter(module):
            check_export_space(draft, sum(math.prod(e.shape) * BYTES_OF[e.dtype] for e in weights.entries.values()))
            write_adapter(module, {name: torch.zeros(1) for name in weights.entries}, draft)
            yield list(weights.entries)
            written |= write_adapter(module, {name: weights.tensor(name) for name in weights.entries}, draft)
        else:
            with quiet_bars(shown=False):
                files = _planned_files(prepared, weights)
            files.create(draft, prepared.job.spec)
            for group in files.groups:
                yield files.trained_names(group)
                files.write(group)
            written |= files.written


SPEC_FIX = "Make the Accelerator without a spec for a model that `toolkit.load` did not read."


def _planned_files(prepared: Prepared, weights: Weights) -> ModelFiles:
    """Lay out the files of the running model, with its configs."""
    module, spec = prepared.accelerator.unwrap_model(prepared.model), prepared.job.spec
    config = copy.deepcopy(module.config)
    # Training switches the cache off; generation needs the checkpoint's own setting.
    config.use_cache = config.get_text_config().use_cache = spec.config.get("use_cache", True) if spec else True
    ties, first = config_ties(module), first_names(module)
    if any(first.get(name) != first.get(other) for name, other in ties.items()):  # the user's module is the truth
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
        ties = {}
    if spec is None:
        entries = {name: entry for name, entry in weights.entries.items() if first[name] == name or name not in ties}
        return ModelFiles(module, entries, config=config)
    model = skeleton(spec, config, module.generation_config)
    model._weight_conversions = getattr(module, "_weight_conversions", None)
    return ModelFiles(model, full_state(weights, model, spec, SPEC_FIX))


def _check_folder(prepared: Prepared, folder: Path, planned: Mapping[str, SavedTensor]) -> None:
    """Check the bytes in a folder, and that transformers alone opens the trained model's names and shapes."""
    with _naming(folder):
        check_files(folder, planned)
        for note in _opening_notes(prepared, folder):
            prepared.accelerator.print(note)


def _opening_notes(prepared: Prepared, folder: Path) -> tuple[str, ...]:
    """Return a warning if transformers does not open the folder."""
    try:
        check_opened(prepared.accelerator.unwrap_model(prepared.model), folder)
    except RunError:
        raise
    except Exception as problem:  # transformers raises exceptions of every type
        return (not_compared(problem, folder, opened=False),)
    return ()


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    try:
        yield
    except RunError as wrong:
        raise RunError(
            f"the saved model in {folder} differs from the trained model: {wrong}. Do not use it."
        ) from wrong


def verify(
    prepared: Prepared,
    folder: Path,
    planned: Mapping[str, SavedTensor],
    batch: Mapping[str, torch.Tensor],
    *,
    about: Mapping[str, Any] | None = None,
) -> Export | None:
    """Compare the saved files with the trained model; rank 0 gets the result, the others None. A collective.

    Wrong bytes are an error. With right bytes, the result has a warning if the folder does not open in transformers or PEFT,
    and a note if the logits of the reopened model differ. The files get their model card.

    Args:
        prepared: the trained model.
        folder: where `save` wrote.
        planned: what `save` returned.
        batch: a batch of the training data; its first row's first tokens are the probe.
        about: more rows of the model card: data, versions.

    Raises:
        RunError: for files with other bytes than the trained model's, and for a reopened model with missing or unknown keys,
            or with tied weights that came untied.
    """
    accelerator = prepared.accelerator
    if prepared.job.spec is None:
        raise RunError(
            "the model was not read by `toolkit.load`, so its export cannot be compared. "
            "Make the Accelerator with a spec: `toolkit.accelerator(strategy, train_config, toolkit.describe(model))`."
        )
    tokens = min(PROBE_TOKENS, batch["input_ids"].shape[1])
    tokens -= tokens % prepared.job.parallelism.tp  # `--tp-sequence` divides them
    probe: dict[str, Any] = {name: tensor[:1, :tokens] for name, tensor in batch.items() if name not in BOUNDS}
    if BOUNDS[0] in batch:
        probe |= document_bounds(probe["position_ids"])
    prepared.model.eval()
    trained = prepared.job.engine.logits(prepared, probe).float().cpu()
    prepared.model.train()
    result: list[Export] = []

    def check() -> None:
        job, adapter = prepared.job, prepared.job.strategy.adapter
        assert job.spec is not None
        with _naming(folder):
            check_files(folder, planned)
            error, notes = _compare(prepared, folder, probe, trained)
        checked = Checked(what="model" if adapter == "none" else "adapter", tensors=planned, error=error, notes=notes)
        settings = dataclasses.asdict(job.strategy), dataclasses.asdict(job.train_config)
        rows = {**rows_of(*settings, job.parallelism, job.train_config.total_steps), **(about or {})}
        result.append(finish_export(folder, job.spec, checked, trained=adapter, rows=rows, folder=folder))

    on_main(accelerator, check)
    return result[0] if result else None


def _compare(
    prepared: Prepared, folder: Path, probe: Mapping[str, torch.Tensor], trained: torch.Tensor
) -> tuple[float | None, tuple[str, ...]]:
    """Return the logits' error on rank 0, and notes about the comparison.

    Logits are computed on rank 0's device if the model fits there a second time, else on the host.

    Raises:
        RunError: for a reopened model with missing or unknown keys, or with tied weights that came untied.
    """
    job, spec, trained_on = prepared.job, prepared.job.spec, prepared.accelerator.device.type
    assert spec is not None
    place = _device_for_check(job, spec, prepared.accelerator.device)
    if place is None:
        return None, (*_opening_notes(prepared, folder), NO_ROOM)
    if place.type == "cpu" and job.strategy.attention not in ("sdpa", "eager"):
        job = dataclasses.replace(job, strategy=dataclasses.replace(job.strategy, attention=check_attention(spec)))
    is_open = False
    try:
        with quiet_bars(shown=False):
            model = reopen(job, folder)
        is_open = True
        here = to_device(probe, place)
        error = _error(job, model.to(place), here, trained)
    except RunError:
        raise
    except Exception as problem:  # transformers, PEFT and kernels raise exceptions of every type
        lacks = is_open or isinstance(problem, ImportError) or is_out_of_memory(problem)
        return None, (not_compared(problem, folder, opened=lacks),)
    limit, attention = TOLERANCE[job.compute_dtype], job.strategy.attention
    if job is prepared.job and place.type == trained_on:
        return error, logits_notes(error, limit)
    how = (
        f"Logits were compared on the {place.type} with {attention}; the model was trained on the {trained_on} with "
        f"{prepared.job.strategy.attention}."
    )
    return error, (how, *logits_notes(error, OTHER_KERNELS * limit))


def _device_for_check(job: Job, spec: ModelSpec, device: torch.device) -> torch.device | None:
    """Return a device with memory for a second model and a fifth to spare. The host reads the model first."""
    import torch

    needed = 1.2 * (1 if job.strategy.quantized else BYTES_OF[job.weight_dtype]) * spec.elements
    if host_memory()[1] <= needed:
        return None
    if device.type == "cuda":
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info(device)[0] > needed:
            return device
        if job.strategy.quantized:  # bitsandbytes would quantize on the device
            return None
    return torch.device("cpu")


def _error(job: Job, model: Any, probe: Mapping[str, Any], trained: torch.Tensor) -> float:
    import torch

    # DDP computes under autocast on fp32 weights, the other engines on weights that are cast.
    half = job.precision.mixed
    autocast = job.engine.autocast_dtype(job) is not None
    compute = getattr(torch, job.compute_dtype)
    if half and not autocast:
        # Parameters only: no engine casts buffers, and rotary frequencies in half precision give other angles.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(compute)
    device = next(model.parameters()).device.type
    with torch.no_grad(), torch.autocast(device, compute) if autocast else nullcontext():
        logits = model(**probe, use_cache=False).logits.float().cpu()
    return relative_error(logits, trained)
