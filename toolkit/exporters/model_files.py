"""A model's files, written one tensor at a time: neither the whole model nor a whole file is in memory."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.importers import Entry
from toolkit.checkpoints.rank_files import check_space
from toolkit.core.errors import RunError
from toolkit.core.units import dtype_name
from toolkit.exporters.results import SavedTensor
from toolkit.models import ModelSpec, copy_code, copy_processor
from toolkit.models.files import SAFETENSORS_DTYPES
from toolkit.models.hf_loading import auto_class, disk_layouts, disk_tensors, freeze, kept_in_fp32, without_engine

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

FILE_BYTES = 5 * 10**9
"""Largest size of a file: the Hub's recommendation."""


def source_configs(
    spec: ModelSpec, tokenizer: PreTrainedTokenizerBase
) -> tuple[PretrainedConfig, GenerationConfig | None]:
    """Return the configs in a model's source, with the tokenizer's pad token, as in training."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(spec.source, trust_remote_code=spec.runs_code)
    for part in (config, config.get_text_config()):  # what is saved is whole
        part.__dict__.pop("quantization_config", None)
    config.pad_token_id = config.get_text_config().pad_token_id = tokenizer.pad_token_id
    try:
        generation = GenerationConfig.from_pretrained(spec.source)
    except OSError:  # without one, transformers derives it from the config
        return config, None
    generation.pad_token_id = tokenizer.pad_token_id
    return config, generation


def skeleton(
    spec: ModelSpec, config: PretrainedConfig, generation_config: GenerationConfig | None = None
) -> PreTrainedModel:
    """Build the model on the meta device, with the configs of its export."""
    import torch

    with without_engine(), torch.device("meta"):
        model: PreTrainedModel = auto_class(spec).from_config(config, trust_remote_code=spec.runs_code)
    freeze(model, spec)
    if generation_config is not None:
        model.generation_config = generation_config
    return model


def common_dtype(entries: Mapping[str, Entry]) -> str:
    """Return torch's name of the dtype that most trained elements have."""
    counts: Counter[str] = Counter()
    for entry in entries.values():
        counts[entry.dtype] += math.prod(entry.shape) if entry.trained else 0
    return counts.most_common(1)[0][0]


def _saved_dtypes(model: PreTrainedModel, entries: Mapping[str, Entry], dtype: str | None) -> dict[str, torch.dtype]:
    """Return the dtype of each saved tensor: its own or the requested one, and fp32 where the model demands it."""
    import torch

    in_fp32 = kept_in_fp32(model, getattr(torch, dtype or "float32"))
    return {
        name: getattr(torch, dtype if dtype and entry.trained and not in_fp32(name) else entry.dtype)
        for name, entry in entries.items()
        if name not in (model._keys_to_ignore_on_save or ())
    }


class ModelFiles:
    """A whole model's files. Their layout is computed first, so each tensor can be written to its place at any time.

    transformers' own conversion gives tensors their names and shapes on the disk (one expert a tensor, say). Tensors that a
    conversion joins are in memory together, and twice unless they lie row below row in one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        entries: Mapping[str, Entry],
        dtype: str | None = None,
        config: PretrainedConfig | None = None,
    ) -> None:
        """Lay out the files.

        Args:
            model: of the class that opens the files; may be on the meta device.
            entries: every tensor of the model.
            dtype: torch's name of the saved dtype, or None for the tensors' own.
            config: the saved config, by default the model's.
        """
        import torch
        from huggingface_hub import split_torch_state_dict_into_shards

        self._model, self._entries, self._config = model, entries, config or model.config
        self._dtype = dtype or common_dtype(entries)
        self._dtypes = _saved_dtypes(model, entries, dtype)
        metas = {name: torch.empty(entries[name].shape, dtype=own, device="meta") for name, own in self._dtypes.items()}
        # New tensors: for a view, the size of its whole storage would count.
        self._metas = {name: torch.empty_like(meta) for name, meta in disk_tensors(model, dict(metas)).items()}
        self._layout = split_torch_state_dict_into_shards(self._metas, max_shard_size=FILE_BYTES)
        self._places: dict[str, tuple[Path, int]] | None = None
        self.groups = _batches(_conversion_groups(model, metas, self._metas), metas)
        """Names of tensors that are written at once: at most the bytes of the largest conversion."""
        self.bytes = sum(meta.nbytes for meta in self._metas.values())
        """Bytes of the weights on the disk."""
        self.written: dict[str, SavedTensor] = {}
        """Name on the disk → tensor that `write` has written."""

    def create(self, folder: Path, spec: ModelSpec | None) -> None:
        """Write everything but the tensors into an existing folder: configs, index, the source's own files.

        Raises:
            RunError: for a full disk.
        """
        from transformers.dynamic_module_utils import custom_object_save
        from transformers.utils import GENERATION_CONFIG_NAME

        check_export_space(folder, self.bytes)
        model, config, self._folder = self._model, self._config, folder
        if self._layout.is_sharded:
            about = {"total_parameters": sum(meta.numel() for meta in self._metas.values()), **self._layout.metadata}
            index = {"metadata": about, "weight_map": self._layout.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True)
            (folder / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")
        # FSDP2 puts its own name before the class's.
        config.dtype, config.architectures = self._dtype, [type(model).__name__.removeprefix("FSDP")]
        if model.is_remote_code():
            custom_object_save(model, folder, config=config)
        config.save_pretrained(folder)
        if model.can_generate() and model.generation_config is not None:
            # As it came: `save_pretrained` refuses one that samples without `do_sample`, as many published models have.
            model.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
        if spec is not None:
            copy_code(spec, folder)
            copy_processor(spec, folder)

    def trained_names(self, group: list[str]) -> list[str]:
        """Return the names under which `write` reads a group from the trained weights."""
        return [source for name in group if (source := self._entries[name].source)]

    def write(self, group: list[str]) -> None:
        """Read, convert and write one of `groups`. The first call creates the files of zeros.

        Raises:
            RunError: for a full disk.
        """
        import torch

        if self._places is None:
            self._places = {}
            for file_name, names in self._layout.filename_to_tensors.items():
                path = self._folder / file_name
                offsets = _create_safetensors(path, {name: self._metas[name] for name in names})
                self._places |= {name: (path, offset) for name, offset in offsets.items()}
        tensors = {name: self._entries[name].read().to(self._dtypes[name]) for name in group}
        for name, tensor in self._on_disk(tensors).items():
            path, offset = self._places[name]
            data = tensor.detach().contiguous()
            self.written[name] = SavedTensor.of(data)
            with _writing(path), path.open("r+b") as file:
                file.seek(offset)
                file.write(data.reshape(-1).view(torch.uint8).numpy().data)

    def _on_disk(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors as the files hold them: views, where they lie row below row in one, such as experts; else converted."""
        import torch

        views: dict[str, torch.Tensor] = {}
        for name in tensors.keys() - self._metas.keys():
            for layout in disk_layouts(self._model, name, tuple(tensors[name].shape)):
                matches = [part in self._metas and self._metas[part].shape == shape for part, shape in layout.items()]
                if len(matches) > 1 and all(matches):  # a lone tensor of another name may be permuted
                    parts = torch.split(tensors.pop(name).reshape(-1), [*map(math.prod, layout.values())])
                    views |= {part: data.view(layout[part]) for part, data in zip(layout, parts, strict=True)}
                    break
        return views | disk_tensors(self._model, tensors)


def check_export_space(folder: Path, needed: int) -> None:
    """Refuse an export into a disk without room for its weights."""
    check_space(folder.parent, needed, "the export", "Make room, or export to another disk.")


def _create_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Create a file of zeros as `safetensors.torch.save_file` lays it out. Return the offset of each tensor.

    The library needs all tensors of a file in memory. Format: huggingface.co/docs/safetensors.
    """
    codes = {name: code for code, name in SAFETENSORS_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, starts = 0, {}
    # The widest dtype first, so that each tensor is aligned.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        starts[name], end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": codes[dtype_name(tensors[name].dtype)],
            "shape": list(tensors[name].shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with _writing(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)  # raises now on a full disk
    return {name: 8 + len(text) + start for name, start in starts.items()}


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path.name} cannot be written in {path.parent.parent}: {error.strerror}. Make room, or export to another disk."
        ) from error


def _conversion_groups(
    model: PreTrainedModel, metas: Mapping[str, torch.Tensor], disk: Mapping[str, torch.Tensor]
) -> list[list[str]]:
    """Return groups of names for separate conversions: single ones, else a layer's, else all."""
    layers: dict[str, list[str]] = {}
    for name in metas:
        layer = re.match(r"(.*?\.\d+)\.", name)
        layers.setdefault(layer[1] if layer else name, []).append(name)

    def matches(groups: list[list[str]]) -> bool:
        try:
            parts = [disk_tensors(model, {name: metas[name] for name in group}) for group in groups]
        except ValueError:  # a conversion lacks what it joins
            return False
        return {name: meta.shape for part in parts for name, meta in part.items()} == expected

    expected = {name: meta.shape for name, meta in disk.items()}
    return next(filter(matches, ([[name] for name in metas], [*layers.values()])), [list(metas)])


def _batches(groups: list[list[str]], metas: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Join groups in their order, up to the bytes of the largest."""
    sizes = [sum(metas[name].nbytes for name in group) for group in groups]
    batches: list[list[str]] = []
    room = -1
    for group, size in zip(groups, sizes, strict=True):
        if size > room:
            batches.append([])
            room = max(sizes)
        batches[-1] += group
        room -= size
    return batches


def write_adapter(model: Any, state: Mapping[str, torch.Tensor], folder: Path) -> dict[str, SavedTensor]:
    """Write `adapter_config.json` and `adapter_model.safetensors` as PEFT does. Return the tensors in the file."""
    from peft import get_peft_model_state_dict

    model.save_pretrained(folder, state_dict=dict(state))
    saved = get_peft_model_state_dict(model, state_dict=dict(state))
    return {name: SavedTensor.of(tensor) for name, tensor in saved.items()}
