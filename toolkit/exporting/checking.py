"""Whether what was written is what was trained: its files tensor by tensor, then its logits beside the checkpoint's."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.adapting import quiet
from toolkit.errors import RunError
from toolkit.exporting.results import PROBE_TOKENS, shapes
from toolkit.exporting.whole import Complete
from toolkit.model import ModelSpec
from toolkit.reading import attention_word, auto_class
from toolkit.reopening import reopen_whole
from toolkit.units import BYTES_OF, dtype_name

if TYPE_CHECKING:
    import torch


def check_files(folder: Path, planned: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Every tensor that was to be written is there, in its dtype and shape, and finite; one is in memory at a time.

    Raises:
        RunError: naming the first that are not.
    """
    found = {name: (dtype, shape) for name, dtype, shape in shapes(folder)}
    wrong = [f"{name} is missing" for name in planned.keys() - found.keys()]
    wrong += [f"{name} does not belong to it" for name in found.keys() - planned.keys()]
    wrong += [
        f"{name} is {found[name]}, expected {planned[name]}"
        for name in planned.keys() & found.keys()
        if found[name] != planned[name]
    ]
    wrong += unsound(folder)
    if wrong:
        raise RunError(f"{'; '.join(wrong[:3])}{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}")


def unsound(folder: Path) -> list[str]:
    """A sentence for each tensor in a folder's safetensors files that is of size zero or not finite; one is read at a time."""
    import torch
    from safetensors import safe_open

    wrong = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  not a dictionary
                tensor = file.get_tensor(name)
                if not tensor.numel():
                    wrong.append(f"{name} is of size zero")
                elif tensor.is_floating_point() and not torch.isfinite(tensor).all():
                    wrong.append(f"{name} is not finite")
    return wrong


def check_tied(model: Any, spec: ModelSpec) -> None:
    """What shares one tensor in the model still does.

    Raises:
        RunError: naming what does not.
    """
    for group in spec.tied:
        if len({id(model.get_parameter(name)) for name in group}) > 1:
            raise RunError(f"tied weights came untied: {', '.join(group)}")


def compare_whole(spec: ModelSpec, weights: Complete, folder: Path, dtype: str) -> float | None:
    """The logits' error of a saved model against the checkpoint's own tensors in the model; None where memory lacks.

    One model is in memory at a time.

    Raises:
        RunError: for a model that does not open whole, or whose tied weights came untied.
    """
    if not fits(spec, dtype):
        return None
    found, dtypes = logits_of(spec, folder, dtype)
    gc.collect()
    reference = _assembled(spec, weights, dtype, dtypes)
    return relative_error(found, logits(reference, spec))


def logits_of(spec: ModelSpec, folder: Path, dtype: str) -> tuple[torch.Tensor, dict[str, torch.dtype]]:
    """What a saved model says on the probe, and the dtypes that transformers opens it in.

    Raises:
        RunError: for a model that does not open whole, or whose tied weights came untied.
    """
    model = reopen_whole(spec, folder, dtype=dtype, attention=attention_of(spec))
    check_tied(model, spec)
    expected = {parameter.name: parameter.shape for parameter in spec.parameters}
    opened = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if opened != expected:
        raise RunError(f"parameters are others than the model's: {sorted(opened.items() ^ expected.items())[:3]}")
    return logits(model, spec), {name: tensor.dtype for name, tensor in model.state_dict().items()}


def logits(model: Any, spec: ModelSpec) -> torch.Tensor:
    """What a model says on the probe: tokens drawn from a seed, as many as it takes, in fp32."""
    import torch

    length = min(PROBE_TOKENS, spec.max_positions or PROBE_TOKENS)
    tokens = torch.randint(spec.vocab, (1, length), generator=torch.Generator().manual_seed(0))
    probe = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if spec.kind == "seq2seq" else {})
    quiet(model)
    with torch.no_grad():
        found: torch.Tensor = model(**probe, use_cache=False).logits.float()
    return found


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖."""
    return float((found - wanted).norm() / wanted.norm())


def attention_of(spec: ModelSpec) -> str:
    """A kernel that needs no GPU."""
    return "sdpa" if "sdpa" in spec.attentions else "eager"


def fits(spec: ModelSpec, dtype: str) -> bool:
    """Whether there is host memory for the whole model in this dtype, with a fifth to spare."""
    import psutil

    gc.collect()
    return bool(psutil.virtual_memory().available > 1.2 * BYTES_OF[dtype] * spec.elements)


def _assembled(spec: ModelSpec, weights: Complete, dtype: str, dtypes: Mapping[str, torch.dtype]) -> Any:
    """A model with the checkpoint's tensors put in by name, in the dtypes that the saved one is opened in."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(spec.source, trust_remote_code=spec.runs_code)
    with init_empty_weights():
        model = auto_class(spec).from_config(
            config,
            dtype=getattr(torch, dtype),
            attn_implementation=attention_word(attention_of(spec)),
            trust_remote_code=spec.runs_code,
        )
    model.tie_weights()  # `init_empty_weights` gives every name a parameter of its own
    for name in weights.shapes:
        owner, _, leaf = name.rpartition(".")
        module, tensor = model.get_submodule(owner), weights.tensor(name).to(dtypes[name])
        if leaf in module._buffers:
            module._buffers[leaf] = tensor
        else:
            setattr(module, leaf, torch.nn.Parameter(tensor, requires_grad=False))
    model.tie_weights()
    left = [name for name, tensor in model.state_dict().items() if tensor.device.type == "meta"]
    assert not left, f"nothing was put into {left[:3]}, {dtype_name(dtype)}"
    return model
