"""The Hugging Face Hub and its local cache: a model's config and weights, or one sentence that says why not."""

from __future__ import annotations

from pathlib import Path

from toolkit.core.atomic_io import expand_user
from toolkit.core.errors import ModelError
from toolkit.models.remote_code import COMMIT

BESIDE = ("*.json", "*.model", "*.txt", "*.jinja")
"""Files that a model needs besides its weights: configs and tokenizer."""


def hub_reachable(timeout: float = 3.0) -> bool:
    """Return whether the Hugging Face Hub answers within `timeout` seconds; False with `HF_HUB_OFFLINE`."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=timeout)
    except Exception:  # whatever the HTTP library raises, nothing answered
        return False
    return True


def hub_file(name: str, commit: str | None = None) -> Path:
    """Return the config.json of a Hub id, from the Hub, or from the cache if it does not answer.

    With a commit, its folder also has the configs, tokenizer and code of that commit, without weights.

    Raises:
        ModelError: for what is no full commit, and for a repository that is not there, private or gated.
    """
    from huggingface_hub import errors, hf_hub_download, snapshot_download

    if commit is not None and not COMMIT.fullmatch(commit):
        raise ModelError(
            f"--trust-remote-code {commit}: expected a full commit of 40 digits of {name} on the Hub. A branch, a tag or "
            "a short hash may mean other code tomorrow."
        )
    problems = {
        errors.HFValidationError: "is neither a folder nor a Hub id. A Hub id looks like Qwen/Qwen3-8B.",
        errors.GatedRepoError: f"is gated: ask for access at https://huggingface.co/{name}, then `hf auth login`.",
        errors.RepositoryNotFoundError: "is not on the Hub, or it is private: check the name, or `hf auth login`.",
        errors.RevisionNotFoundError: f"has no commit {commit} on the Hub. Copy it from the page of its files.",
        errors.LocalEntryNotFoundError: unreachable(name, commit),
        errors.EntryNotFoundError: "has no config.json on the Hub, so it is not a transformers model.",
    }
    # Asked first: without a network huggingface_hub would retry for 23 s, with a warning each time.
    offline = not hub_reachable()
    try:
        if commit is None:
            return Path(hf_hub_download(name, "config.json", local_files_only=offline))
        patterns = [*BESIDE, "*.py"]
        snapshot = Path(snapshot_download(name, revision=commit, allow_patterns=patterns, local_files_only=offline))
        assert snapshot.name == commit, f"the Hub's cache calls commit {commit} {snapshot.name}"
        return snapshot / "config.json"
    except (errors.HFValidationError, errors.EntryNotFoundError, OSError) as error:
        problem = next((text for kind, text in problems.items() if isinstance(error, kind)), None)
        raise ModelError(f"model {name!r} {problem or f'cannot be read from the Hub: {first_line(error)}'}") from error


def unreachable(name: str, commit: str | None = None) -> str:
    """Return what is wrong with a Hub id without network, and the fix."""
    at = f" at commit {commit}" if commit else ""
    return (
        f"is not in the local cache{at} and the Hugging Face Hub cannot be reached: "
        f"run `hf download {name} --local-dir FOLDER` where there is a network, and give that folder."
    )


def cached(name: str, commit: str | None = None) -> Path | None:
    """Return a Hub id's snapshot folder in the local cache, of its main branch or of a commit."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, "config.json", revision=commit)
    except HFValidationError:
        return None
    return Path(path).parent if isinstance(path, str) else None


def local_folder(source: str | Path) -> Path | None:
    """Return a folder itself, or the cached folder of a Hub id."""
    path = expand_user(source)
    return path if path.is_dir() else cached(str(source))


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
