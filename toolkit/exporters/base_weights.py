"""Where an export's tensors come from: one of our checkpoints, a folder of another's, or the model that was trained from."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.checkpoints import Manifest, list_checkpoints, read_manifest, validate
from toolkit.checkpoints.identity import ADAPTER_FIELDS
from toolkit.checkpoints.layout import WEIGHT
from toolkit.checkpoints.manifest import NAME, listed, misplacement
from toolkit.checkpoints.stored_tensors import StoredTensors, opened
from toolkit.config.flags import from_dict
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import CheckpointError, ModelError, RunError, StrategyError
from toolkit.core.units import dtype_name
from toolkit.engines.shards import BUFFER
from toolkit.models import ModelSpec, require_weights
from toolkit.models.hf_loading import auto_class, disk_tensors, without_engine
from toolkit.models.weights import SAFETENSORS_DTYPES

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_REQUIRED = {
    "strategy": ("sharding", "precision", *ADAPTER_FIELDS),
    "train_config": ("micro_batch", "accumulation", "seq_len", "optimizer", "lr", "warmup", "seed"),
    "identity": ("data",),
}
"""The fields that an export needs in a manifest: for its tensors and the model card."""


class Weights(Protocol):
    """Whole tensors by canonical name, built on demand."""

    @property
    def kind(self) -> str:
        """What holds them, in a few words."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the whole tensors."""

    @property
    def dtypes(self) -> Mapping[str, str]:
        """torch's names."""

    @property
    def rounded(self) -> frozenset[str]:
        """Buffers and parameters that may be the source's own, in another dtype."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor in its own shape and dtype, in host memory."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The source of an export."""

    path: Path
    weights: Weights
    manifest: Manifest | None
    """None where it is no checkpoint of ours."""
    skipped: tuple[str, ...] = ()
    """A sentence for every newer checkpoint that could not be taken."""

    @property
    def adapter(self) -> str:
        """As `Strategy.adapter`."""
        return str(self.manifest.strategy["adapter"]) if self.manifest else "none"


class CheckpointWeights:
    """The trained weights of one of our checkpoints: masters if there are any. Of a whole model the buffers too."""

    kind = "checkpoint"

    def __init__(self, stored: StoredTensors) -> None:
        self._stored = stored
        kinds = (WEIGHT, BUFFER) if stored.manifest.strategy["adapter"] == "none" else (WEIGHT,)
        tensors = stored.manifest.tensors.items()
        self._kinds = {name: kind for name, about in tensors for kind in kinds if kind in about}
        stored_tensors = {name: stored.manifest.tensors[name][kind] for name, kind in self._kinds.items()}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(about["shape"]) for name, about in stored_tensors.items()
        }
        self.dtypes: Mapping[str, str] = {name: about["dtype"] for name, about in stored_tensors.items()}
        self.rounded = frozenset(name for name, kind in self._kinds.items() if kind == BUFFER)

    def tensor(self, name: str) -> torch.Tensor:
        """Put together from the ranks' files."""
        return self._stored.whole(name, self._kinds[name])


class InMemory:
    """Tensors that are in memory already."""

    kind = "memory"
    rounded: frozenset[str] = frozenset()

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes: Mapping[str, str] = {name: dtype_name(tensor.dtype) for name, tensor in tensors.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor itself."""
        return self._tensors[name].cpu()


class BaseWeights:
    """The base model's buffers and untrained weights, which no checkpoint holds."""

    def __init__(self, spec: ModelSpec, model: PreTrainedModel) -> None:
        """Take the spec, and a skeleton that knows how the files call its tensors."""
        self.spec, self._model = spec, model
        self._state: dict[str, torch.Tensor] | None = None

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return a tensor's shape and torch's name of its dtype.

        Raises:
            ModelError: where the source has no weights, or lacks this one.
        """
        place = self._place(name)
        if place is None:
            whole = self._whole(name)
            return tuple(whole.shape), dtype_name(whole.dtype)
        stored = self._files[place].get_slice(place)
        return tuple(stored.get_shape()), SAFETENSORS_DTYPES[stored.get_dtype()]

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor from its file; where the file holds it in another form, transformers reads the whole model once.

        Raises:
            ModelError: where the source has no weights, or lacks this one.
        """
        place = self._place(name)
        return self._whole(name) if place is None else self._files[place].get_tensor(place)

    @functools.cached_property
    def _files(self) -> Mapping[str, Any]:
        from safetensors import safe_open

        files: list[Any] = [safe_open(path, framework="pt") for path in require_weights(self.spec)]
        return {name: file for file in files for name in file.keys()}  # noqa: SIM118  not a dictionary

    def _place(self, name: str) -> str | None:
        """Return the tensor's name in the files, if these hold it as it is."""
        import torch

        if name in self._files:
            return name
        meta: Any = dict(self._model.named_parameters()).get(name)
        if meta is None:
            return None
        try:
            (place, stored), *more = disk_tensors(self._model, {name: torch.empty_like(meta, device="meta")}).items()
        except ValueError:
            return None
        return place if not more and place in self._files and stored.shape == meta.shape else None

    def _whole(self, name: str) -> torch.Tensor:
        if self._state is None:
            with without_engine():
                read = auto_class(self.spec).from_pretrained
                model = read(self.spec.source, trust_remote_code=self.spec.runs_code, use_safetensors=True)
            self._state = model.state_dict()
        if name not in self._state:
            raise ModelError(f"model {self.spec.name!r} has no tensor {name}. Give the model that was trained from.")
        return self._state[name]


@contextlib.contextmanager
def opened_source(path: Path) -> Iterator[Source]:
    """Open a run's newest sound checkpoint, one checkpoint, or a folder of DeepSpeed's or Accelerate's.

    Raises:
        RunError: for a folder without any; for a checkpoint whose hashes do not hold (`CheckpointError`).
    """
    if not path.is_dir():
        raise RunError(f"{path}: no such folder. Name a run's folder, or a checkpoint in it.")
    skipped: tuple[str, ...] = ()
    if (path / NAME).exists() or path.name.startswith("step-"):
        wrong = validate(path)
        if wrong:
            raise CheckpointError(f"{path} is damaged: {'; '.join(wrong[:3])}. {_other_checkpoints(path)}")
    elif (path / "run.json").exists() or list_checkpoints(path / "checkpoints"):
        path, skipped = _newest_checkpoint(path)
    else:
        yield _foreign(path)
        return
    manifest = read_manifest(path)
    _check_manifest(path, manifest)
    with opened(path, manifest) as stored:
        yield Source(path=path, weights=CheckpointWeights(stored), manifest=manifest, skipped=skipped)


def _check_manifest(path: Path, manifest: Manifest) -> None:
    """Refuse a manifest with a valid sha256 that lacks fields for an export."""
    wrong = [
        f"{part} has no {name}"
        for part, names in _REQUIRED.items()
        for name in names
        if name not in getattr(manifest, part)
    ]
    try:
        from_dict(Strategy, manifest.strategy)
        from_dict(TrainConfig, manifest.train_config)
    except StrategyError as error:
        wrong.append(str(error).removesuffix("."))
    identity = manifest.identity
    for name, value, kind in (
        ("loop lr", manifest.train_config.get("lr", 0.0), int | float),
        ("identity data", identity.get("data", ""), str),
        ("identity model", identity.get("model"), str | None),
        ("identity source", identity.get("source"), str | None),
        ("identity base", identity.get("base"), dict | None),
    ):
        if not isinstance(value, kind):
            wrong.append(f"{name} is {json.dumps(value)[:40]}")
    wrong += [f"{name} has no weight" for name, about in manifest.tensors.items() if not {WEIGHT, BUFFER} & set(about)]
    if wrong:
        raise CheckpointError(
            f"{path / NAME} cannot be exported from: {'; '.join(wrong[:3])}. {_other_checkpoints(path)}"
        )


def _other_checkpoints(damaged: Path) -> str:
    others = [path for path in list_checkpoints(damaged.parent) if path != damaged]
    return f"Take another: {others[0]}." if others else "The folder holds no other."


def _newest_checkpoint(run: Path) -> tuple[Path, tuple[str, ...]]:
    skipped: list[str] = []
    for path in listed(run / "checkpoints"):
        wrong = misplacement(path) or validate(path)
        if not wrong:
            return path, tuple(skipped)
        skipped.append(f"skipped {path}: {'; '.join(wrong[:3])}")
    fix = (
        f"The run's own export is in {run / 'export'}."
        if (run / "export").is_dir()
        else f"Resume it: `toolkit resume {run} --save-every N`, which writes one every N steps and at the end."
    )
    raise RunError(f"{run} has no checkpoint that can be exported{''.join(f'; {line}' for line in skipped)}. {fix}")


def _foreign(path: Path) -> Source:
    from toolkit.checkpoints.importers import open_foreign

    weights = open_foreign(path)
    if weights is None:
        raise RunError(
            f"{path} holds nothing that can be exported: no run of ours (run.json), no checkpoint of ours ({NAME}), "
            "and no folder of DeepSpeed's or Accelerate's. Give one of these."
        )
    if any(".lora_" in name for name in weights.shapes):
        raise RunError(
            f"{path} ({weights.kind}) holds an adapter in a folder that does not say which one: rank, alpha and base are "
            "missing. Adapters are exported from this toolkit's own checkpoints."
        )
    return Source(path=path, weights=weights, manifest=None)
