"""A model's files: config, tokenizer and safetensors weights in a folder, in the Hub's cache, or on the Hub."""

from __future__ import annotations

from pathlib import Path

from toolkit.core.atomic_io import expand_user, read_json
from toolkit.core.errors import ModelError, value_or
from toolkit.models.remote_code import COMMIT, check_code, check_inside
from toolkit.models.spec import ModelSpec

OTHER_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
"""Files of a model other than its weights: configs and tokenizer."""


def hub_reachable(timeout: float = 3.0) -> bool:
    """Return whether the Hugging Face Hub answers within `timeout` seconds; False with `HF_HUB_OFFLINE`."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=timeout)
    except Exception:  # each HTTP library has exceptions of its own
        return False
    return True


def hub_file(name: str, commit: str | None = None) -> Path:
    """Return the config.json of a Hub id, from the Hub, or from the cache if it does not answer.

    With a commit, its folder also has the configs, tokenizer and code of that commit, without weights.

    Raises:
        ModelError: for an incomplete commit, and for a missing, private or gated repository.
    """
    from huggingface_hub import errors, hf_hub_download, snapshot_download

    if commit is not None and not COMMIT.fullmatch(commit):
        raise ModelError(
            f"--trust-remote-code {commit}: expected a full commit of 40 digits of {name} on the Hub. A branch, a tag or "
            "a short hash may mean other code tomorrow."
        )
    enough = "" if commit else f" For a forecast `hf download {name} config.json --local-dir FOLDER` is enough."
    problems = {
        errors.HFValidationError: "is neither a folder nor a Hub id. A Hub id looks like Qwen/Qwen3-8B.",
        errors.GatedRepoError: f"is gated: ask for access at https://huggingface.co/{name}, then `hf auth login`.",
        errors.RepositoryNotFoundError: "is not on the Hub, or it is private: check the name, or `hf auth login`.",
        errors.RevisionNotFoundError: f"has no commit {commit} on the Hub. Copy it from the page of its files.",
        errors.LocalEntryNotFoundError: unreachable(name, commit) + enough,
        errors.EntryNotFoundError: "has no config.json on the Hub: expected a whole transformers model. Merge an adapter into one.",
    }
    # Without a network huggingface_hub would retry for 23 s, with a warning each time.
    offline = not hub_reachable()
    try:
        if commit is None:
            return Path(hf_hub_download(name, "config.json", local_files_only=offline))
        patterns = [*OTHER_FILES, "*.py"]
        snapshot = Path(snapshot_download(name, revision=commit, allow_patterns=patterns, local_files_only=offline))
        assert snapshot.name == commit, f"the Hub's cache calls commit {commit} {snapshot.name}"
        return snapshot / "config.json"
    except (errors.HFValidationError, errors.EntryNotFoundError, OSError) as error:
        problem = next((text for kind, text in problems.items() if isinstance(error, kind)), None)
        raise ModelError(f"model {name!r} {problem or f'cannot be read from the Hub: {first_line(error)}'}") from error


def unreachable(name: str, commit: str | None = None) -> str:
    """Return the error about an uncached Hub id without a network, and its fix."""
    at, revision = (f" at commit {commit}", f" --revision {commit}") if commit else ("", "")
    return (
        f"is not in the local cache{at} and the Hugging Face Hub cannot be reached: "
        f"run `hf download {name}{revision} --local-dir FOLDER` where there is a network, and give that folder."
    )


def cached(name: str, commit: str | None = None) -> Path | None:
    """Return a Hub id's snapshot folder in the local cache, of its main branch or of a commit."""
    from huggingface_hub import try_to_load_from_cache

    path = value_or(None, lambda: try_to_load_from_cache(name, "config.json", revision=commit))  # it may be no Hub id
    return Path(path).parent if isinstance(path, str) else None


def local_folder(source: str | Path) -> Path | None:
    """Return the folder of a path, or the cached folder of a Hub id."""
    path = expand_user(source)
    return path if path.is_dir() else cached(str(source))


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, with an indented reason that follows a colon."""
    return next(filter(None, map(str.strip, str(error).replace(":\n    ", ": ").splitlines())), type(error).__name__)


SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "C64": "complex64",
}  # fmt: skip
"""safetensors' names of dtypes → torch's."""


def local_weights(source: str | Path) -> list[Path]:
    """Return the safetensors files of a folder, or of the cached copy of a Hub id; empty without any.

    Raises:
        ModelError: for pickled weights, a missing file of the index, and a file outside of the folder.
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
        try:
            files = indexed_files(index, ".safetensors")
        except ValueError as error:
            raise ModelError(f"{index}: {error}. Copy the files there again.") from None
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
        ModelError: for missing, pickled or truncated weights, and for an adapter in the same folder.
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
            "load too, even from a pickle. Move the adapter's files into a folder of their own."
        )
    return files


def copy_code(spec: ModelSpec, folder: Path) -> None:
    """Copy the model's own code next to its saved weights; the same digest trusts it.

    Raises:
        ModelError: for code that changed after it was trusted.
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
    """Copy the base's processor configs for images and sound, which text training does not change."""
    base = local_folder(spec.source or spec.name)
    for path in sorted(base.glob("*processor_config.json")) if base is not None else ():
        (folder / path.name).write_bytes(path.read_bytes())


def _download(name: str, commit: str | None) -> None:
    """Download a Hub id's weights, configs and tokenizer unless the cache has them all."""
    from huggingface_hub import errors, snapshot_download

    problem = unreachable(name, commit)
    if hub_reachable():
        try:
            snapshot_download(name, revision=commit, allow_patterns=["model*.safetensors", *OTHER_FILES])
        except (errors.HfHubHTTPError, OSError) as error:
            raise ModelError(f"model {name!r} could not be downloaded: {first_line(error)}") from error
        problem = (
            "has no safetensors weights on the Hub, and pickles can run code: "
            "download it, convert it to safetensors where you trust it, and give that folder."
        )
    if not local_weights(cached(name, commit) or name):
        raise ModelError(f"model {name!r} {problem}")


def indexed_files(index: Path, suffix: str) -> list[Path]:
    """Return the files with this suffix that an index of weights names, in order.

    Raises:
        ValueError: for an invalid index, a name that leads out of the folder, since an index may be crafted, and a missing file.
    """
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is not an index of weights ({first_line(error)})") from None
    if not names:
        raise ValueError("it is an index of no files")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(suffix):
            raise ValueError(f"it names {name!r}, expected a {suffix} file in the same folder")
    files = [index.parent / name for name in names]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"the folder lacks {len(missing)} of the {len(files)} files, the first {missing[0]}")
    return files


def _check_complete(path: Path) -> None:
    """Refuse a truncated or crafted file. The library compares its header with its size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            return
    except SafetensorError as error:
        raise ModelError(f"{path} is not a complete safetensors file: {error}. Copy it again.") from None
