"""`export()`: from a checkpoint to Hugging Face files, without the engine that wrote it and without a GPU."""

from __future__ import annotations

import dataclasses
import gc
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from toolkit.checkpoints import identify
from toolkit.checkpoints.identity import check_same
from toolkit.checkpoints.importers import Entry, Weights
from toolkit.config.fields import from_dict
from toolkit.config.run_config import EMBEDDED
from toolkit.config.strategy import Strategy
from toolkit.config.tables import PRECISIONS
from toolkit.config.train_config import TrainConfig
from toolkit.config.unknown_names import by_name
from toolkit.core.atomic_io import expand_user
from toolkit.core.errors import ModelError, RunError, ToolkitError
from toolkit.core.units import BYTES_OF, dtype_name, format_bytes
from toolkit.engines.job import Job
from toolkit.exporters.folders import Source, atomic_dir, check_target, opened_source
from toolkit.exporters.model_files import ModelFiles, common_dtype, skeleton, source_configs, write_adapter
from toolkit.exporters.results import (
    TOLERANCE,
    Checked,
    Export,
    SavedTensor,
    finish_export,
    logits_notes,
    manifest_rows,
)
from toolkit.exporters.state_dict import full_state
from toolkit.exporters.verification import (
    check_files,
    compare_whole,
    fits,
    logits,
    logits_of,
    read_base,
    relative_error,
    reopen_adapter,
    single_process_job,
)
from toolkit.models import ModelSpec, describe, require_weights
from toolkit.models.files import cached
from toolkit.models.hf_loading import SHOWS_PROGRESS, load_tokenizer, quiet_bars
from toolkit.transforms.adapters import adapt, quantized_modules
from toolkit.transforms.fused_experts import unpack_experts

if TYPE_CHECKING:
    from peft import PeftModel

DTYPES = ("fp32", "bf16", "fp16")

INT8 = 5e-2
"""`TOLERANCE` over an 8-bit base: its forward rounds activations, too (Dettmers et al. 2022)."""


@by_name
def export(
    source: str | Path,
    folder: str | Path,
    *,
    merge: bool = False,
    dtype: str | None = None,
    model: str | None = None,
    trust_remote_code: str | None = None,
) -> Export:
    """Export a checkpoint as Hugging Face files, open them again, and compare them with the checkpoint.

    A whole model becomes safetensors with config and tokenizer, an adapter PEFT's files. `folder` appears complete and checked,
    or not at all. Writing needs memory for the largest tensor. The comparison of logits needs memory for one whole model, and is
    left out with a note otherwise.

    Args:
        source: a run (its newest valid checkpoint), a checkpoint, or a folder of DeepSpeed's or Accelerate's with `model`.
        folder: a new or an empty one.
        merge: merge an adapter into its base, which then is in memory once.
        dtype: `fp32`, `bf16` or `fp16`; by default the checkpoint's own, and the base's if merged.
        model: folder or Hub id of the base model; by default the one in the checkpoint.
        trust_remote_code: as in `describe`.

    Raises:
        RunError: for a source without a checkpoint, an unusable folder, or wrong bytes in the written files.
        CheckpointError: for a damaged checkpoint, or one of another model or base.
        ModelError: for a model or tokenizer that cannot be read.
    """
    source, folder = expand_user(source), expand_user(folder)
    if dtype is not None and dtype not in DTYPES:
        raise ToolkitError(f"dtype {dtype!r} is unknown. Known: {', '.join(DTYPES)}.")
    check_target(folder, source)
    with opened_source(source) as origin, quiet_bars(shown=False):
        if merge and origin.adapter == "none":
            raise RunError(f"{origin.path} holds a whole model, and merging is for adapters. Leave --merge out.")
        spec, trained = _trained_model_spec(origin, model, trust_remote_code), origin.adapter
        make = _whole if trained == "none" else _merged if merge else _adapter
        with atomic_dir(folder) as draft:
            checked = make(origin, spec, PRECISIONS[dtype].compute if dtype else None, draft)
            rows = manifest_rows(origin.manifest) if origin.manifest else {"checkpoint": origin.weights.kind}
            result = finish_export(draft, spec, checked, trained=trained, rows=rows, folder=folder)
    step = origin.manifest.step if origin.manifest else None
    notes = (*origin.skipped, *checked.notes)
    return dataclasses.replace(result, checkpoint=str(origin.path), step=step, notes=notes)


def _trained_model_spec(source: Source, model: str | None, trust: str | None) -> ModelSpec:
    """Return the spec of the base model, which has to match the checkpoint's."""
    identity = source.manifest.identity if source.manifest else {}
    own = str(source.path) if (source.path / "config.json").is_file() else None
    name = model or identity.get("source") or identity.get("model") or own
    if name is None:
        raise RunError(
            f"{source.path} ({source.weights.kind}) does not name its model. Add --model with the folder or Hub id of the "
            "base model, for its config and tokenizer."
        )
    here = name if model or name == EMBEDDED or os.path.exists(expand_user(name)) else _cached_folder(source, name)
    try:
        spec = dataclasses.replace(describe(here, trust_remote_code=trust), name=name)
    except ModelError as error:
        if model or Path(name).exists():
            raise
        raise ModelError(f"{error} Or name the model's present place with --model.") from error
    if spec.source is None:  # the checkpoint has all weights, so config and tokenizer are enough
        if name == EMBEDDED:
            raise ModelError("model 'embedded' has no folder yet: `toolkit.data.embedded_model()` makes and names it.")
        path = expand_user(here)
        spec = dataclasses.replace(spec, source=str(path if path.is_dir() else path.parent))
    if identity.get("model") == EMBEDDED:
        spec = dataclasses.replace(spec, name=EMBEDDED)
    if source.manifest:
        if source.adapter != "none" or spec.frozen or spec.untrained:
            require_weights(spec)
        strategy = from_dict(Strategy, source.manifest.strategy)
        check_same(identify(spec, strategy, identity["data"]), identity, source.path)
    return spec


def _cached_folder(source: Source, name: str) -> str:
    """Return the cached folder of a manifest's Hub model. A crafted manifest must not start a download.

    Raises:
        ModelError: for a model that is not in the cache.
    """
    path = cached(name)
    if path is None:
        is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
        fetch = f" A name in a checkpoint starts no download: --model {shlex.quote(name)} fetches it from the Hub."
        raise ModelError(
            f"{source.path} was trained from model {name!r}, which is not on this machine. Add --model with its present "
            f"folder.{'' if is_path else fetch}"
        )
    return str(path)


def _whole(source: Source, spec: ModelSpec, dtype: str | None, draft: Path) -> Checked:
    entries, tensors = _write(spec, source.weights, dtype, draft)
    own = common_dtype(entries)
    dtype, notes = dtype or own, []
    if dtype not in TOLERANCE:
        raise RunError(f"{source.path} holds weights in {dtype}: expected {', '.join(TOLERANCE)}. Choose a --dtype.")
    if dtype != own:
        notes.append(f"Saved in {dtype}; the checkpoint holds {own}. Logits were compared in {dtype}.")
    error = compare_whole(spec, entries, draft, dtype)
    return Checked(what="model", error=error, tensors=tensors, notes=(*notes, *logits_notes(error, TOLERANCE[dtype])))


def _merged(source: Source, spec: ModelSpec, dtype: str | None, draft: Path) -> Checked:
    job = job_of(source, spec)
    dtype = dtype or job.compute_dtype
    by_width = sorted((dtype, job.compute_dtype), key=lambda name: (BYTES_OF[name], name != "bfloat16"))
    if not fits(spec, by_width[1]):
        raise RunError(
            f"merging needs memory for {spec.name} in {by_width[1]}, {format_bytes(1.2 * BYTES_OF[by_width[1]] * spec.elements)}, "
            "and there is less. Export the adapter without --merge, or merge on a larger machine."
        )
    model = with_adapter(read_base(job, on_host=True), job, source, None)
    expected = logits(model, spec)
    _, tensors = _write(spec, merged(model, job, source, dtype), dtype, draft)
    del model
    error = relative_error(logits_of(spec, draft, dtype)[0], expected)
    limit = INT8 if source.adapter == "qlora8" else TOLERANCE[by_width[0]]
    if not error <= limit:  # merged weights are new, so only logits can check them
        raise RunError(
            f"the export of {source.path} was removed: its logits differ from the trained model's by {error:.1e} relative, "
            f"expected at most {limit:.0e}."
        )
    notes = [f"The {source.adapter} adapter is merged into its base by PEFT, in {dtype}."]
    if bits := {"qlora": "4-bit (nf4)", "qlora8": "8-bit"}.get(source.adapter):
        notes.append(
            f"The base is the adapter's {bits} base, dequantized: its weights differ from those of the original model."
        )
    return Checked(what="merged model", error=error, tensors=tensors, notes=tuple(notes))


def _adapter(source: Source, spec: ModelSpec, dtype: str | None, draft: Path) -> Checked:
    import torch

    job, tokenizer = job_of(source, spec), load_tokenizer(spec)
    comparable = fits(spec, job.compute_dtype)
    base = read_base(job, on_host=True) if comparable else skeleton(spec, *source_configs(spec, tokenizer))
    model = with_adapter(base, job, source, dtype)
    expected = logits(model, spec) if comparable else None
    entries = source.weights.entries
    state = {name: entry.read().to(getattr(torch, dtype or entry.dtype)) for name, entry in entries.items()}
    tensors = write_adapter(model, state, draft)
    tokenizer.save_pretrained(draft)
    check_files(draft, tensors)
    error = None
    if expected is not None:
        error = relative_error(logits(reopen_adapter(model.unload(), draft), spec), expected)
    notes = logits_notes(error, TOLERANCE[job.compute_dtype])
    return Checked(what="adapter", error=error, tensors=tensors, notes=notes)


def _write(
    spec: ModelSpec, weights: Weights, dtype: str | None, draft: Path
) -> tuple[dict[str, Entry], dict[str, SavedTensor]]:
    """Write a whole model's files and check each. Return the model's tensors, and those in the files."""
    from tqdm import tqdm

    tokenizer = load_tokenizer(spec)
    model = skeleton(spec, *source_configs(spec, tokenizer))
    entries = full_state(weights, model, spec)
    files = ModelFiles(model, entries, dtype)
    files.create(draft, spec)
    tokenizer.save_pretrained(draft)
    for group in tqdm(files.groups, desc="writing", disable=spec.elements < SHOWS_PROGRESS):
        files.write(group)
    check_files(draft, files.written)
    return entries, files.written


def job_of(source: Source, spec: ModelSpec) -> Job:
    """Return the checkpoint's job as one process on this host, without its engine and attention kernel."""
    assert source.manifest is not None
    was = source.manifest.strategy
    fields = {name: was[name] for name in ("adapter", "precision", "lora_rank", "lora_targets")}
    strategy = Strategy(**fields, lora_alpha=was.get("lora_alpha"))
    return single_process_job(spec, strategy, from_dict(TrainConfig, source.manifest.train_config))


def with_adapter(base: Any, job: Job, source: Source, dtype: str | None) -> PeftModel:
    """Put the checkpoint's adapter on the base. It computes in fp32, as adapters that PEFT loads.

    Args:
        base: from `read_base`, or a skeleton.
        job: of the adapter.
        source: the checkpoint.
        dtype: torch's name of a dtype to round the adapter to first, or None.

    Raises:
        RunError: for a checkpoint of another adapter.
    """
    import torch

    model = adapt(job, base)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    weights = source.weights
    if {name: tuple(p.shape) for name, p in trainable.items()} != weights.shapes:
        raise RunError(f"{source.path} holds another adapter than {job.strategy.adapter} on this model puts there.")
    for name, parameter in trainable.items():
        if parameter.device.type != "meta":
            tensor = weights.tensor(name)
            parameter.data = (tensor.to(getattr(torch, dtype)) if dtype else tensor).float()
    return cast("PeftModel", model.eval())


def merged(model: PeftModel, job: Job, source: Source, dtype: str) -> Weights:
    """Return the base's weights with the adapter merged by PEFT. Takes the model apart.

    Args:
        model: from `with_adapter`. A quantized base is dequantized first, since the adapter was trained over it.
        job: of the adapter.
        source: the checkpoint.
        dtype: torch's name of the saved dtype. With fp32, the merge computes in fp32.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    base = model.unload()
    assert job.spec is not None
    # transformers quantizes the transpose of such a module's weight.
    turned = {
        f"{name}.weight"
        for name in quantized_modules(base)
        if issubclass(getattr(base.get_submodule(name), "source_cls", object), Conv1D)
    }
    if job.strategy.quantized:
        unpack_experts(base)
        base = base.dequantize(getattr(torch, job.compute_dtype))
    if dtype == "float32":
        base = base.float()
    gc.collect()
    whole = with_adapter(base, job, source, None).merge_and_unload(safe_merge=True)
    # Frozen parts come from the model's source, since the base may hold them in 4 bits.
    trained = {name: p.detach() for name, p in whole.named_parameters() if job.spec.trains(name)}
    tensors = {name: tensor.T if name in turned else tensor for name, tensor in trained.items()}
    entries = {name: Entry(tuple(t.shape), dtype_name(t.dtype), t.cpu, source=name) for name, t in tensors.items()}
    return Weights("merged model", entries)
