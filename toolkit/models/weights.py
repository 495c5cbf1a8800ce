"""A model's weights as files: safetensors only."""

from __future__ import annotations

from pathlib import Path

from toolkit.core.atomic_io import expand_user, read_json
from toolkit.core.errors import ModelError
from toolkit.models.hub import BESIDE, cached, first_line, hub_reachable, local_folder, unreachable
from toolkit.models.remote_code import check_code, check_inside
from toolkit.models.spec import ModelSpec

SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""safetensors' names of dtypes → torch's."""


def local_weights(source: str | Path) -> list[Path]:
    """Return the safetensors files of a folder, or of the cached copy of a Hub id; empty without any.

    Raises:
        ModelError: for a folder whose weights are pickles, for one that lacks a file which its index names, and for a
            file that lies elsewhere.
    """
    folder = local_folder(source)
    if folder is None:
        return []
    # In the order in which transformers looks.
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        files = [single]
    elif index.is_file():
        check_inside(index, folder)
        files = _indexed(folder, index)
    elif pickles := sorted(path.name for path in folder.glob("pytorch_model*.bin")):
        raise ModelError(
            f"model {str(source)!r} holds its weights as pickles only ({pickles[0]}), which can run code: "
            "convert them where you trust them, with `AutoModelForCausalLM.from_pretrained(old).save_pretrained(new)`, "
            "and give the new folder."
        )
    else:
        return []
    for path in files:
        check_inside(path, folder)
    return files


def require_weights(spec: ModelSpec) -> list[Path]:
    """Return a model's complete safetensors files. A Hub id's are downloaded here once, before any rank starts.

    Raises:
        ModelError: where there are none, where they are pickles, where a file is cut short, or an adapter lies beside them.
    """
    source = spec.source or spec.name
    folder = expand_user(source).is_dir()
    if not folder and spec.source is None:
        raise ModelError(
            f"model {source!r} is a config without weights: give a folder that holds model.safetensors, or a Hub id."
        )
    if not folder or spec.commit:
        _download(spec.name if spec.commit else source, spec.commit)
    files = local_weights(source)
    if not files:
        raise ModelError(
            f"model {source!r} holds no weights: expected model.safetensors, or model.safetensors.index.json and "
            "the files that it names. Copy them there, or give a folder that has them."
        )
    for path in files:
        _check_complete(path)
    if (files[0].parent / "adapter_config.json").is_file():
        raise ModelError(
            f"model {source!r} has an adapter in the folder of its weights (adapter_config.json), which transformers would "
            "load unasked, from a pickle too. Move the adapter's files into a folder of their own."
        )
    return files


def copy_code(spec: ModelSpec, folder: Path) -> None:
    """Copy the model's own code next to its saved weights; the same digest trusts it.

    Raises:
        ModelError: where it is not what was trusted any more.
    """
    if not spec.runs_code:
        return
    source = expand_user(spec.source or spec.name)
    if not spec.commit:
        check_code(spec.name, source, spec.trusted, needed=True, hub=False)
    for path in sorted(source.rglob("*.py")):
        copy = folder / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())


def copy_processor(spec: ModelSpec, folder: Path) -> None:
    """Copy the files with which the base prepares images and sound, where it has any; text training does not change them."""
    base = local_folder(spec.source or spec.name)
    for path in sorted(base.glob("*processor_config.json")) if base is not None else ():
        (folder / path.name).write_bytes(path.read_bytes())


def _download(name: str, commit: str | None) -> None:
    """Download a Hub id's weights, configs and tokenizer unless the cache has them all."""
    from huggingface_hub import errors, snapshot_download

    problem = unreachable(name, commit)
    if hub_reachable():
        try:
            snapshot_download(name, revision=commit, allow_patterns=["model*.safetensors", *BESIDE])
        except (errors.HfHubHTTPError, OSError) as error:
            raise ModelError(f"model {name!r} could not be downloaded: {first_line(error)}") from error
        problem = (
            "has no safetensors weights on the Hub, and pickles can run code: "
            "download it, convert it to safetensors where you trust it, and give that folder."
        )
    if not local_weights(cached(name, commit) or name):
        raise ModelError(f"model {name!r} {problem}")


def _indexed(folder: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index: {first_line(error)}") from None
    for name in names:
        # An index may be crafted and must not lead out of its folder.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} names {name!r}: expected the name of a safetensors file in the same folder.")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(
            f"{folder} lacks {len(missing)} of the {len(names)} weight files that its index names, "
            f"the first {missing[0]}. Copy them there."
        )
    return [folder / name for name in names]


def _check_complete(path: Path) -> None:
    """Refuse a file that is cut short or crafted. The library compares its header with its size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            return
    except SafetensorError as error:
        raise ModelError(f"{path} is not a complete safetensors file: {error}. Copy it again.") from None
