"""The Hugging Face Hub and its local cache: a model's config and weights, or one sentence that says why not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

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


def hub_config(name: str) -> Path:
    """Return the config.json of a Hub id, from the Hub, or from the cache if it does not answer."""
    from huggingface_hub import hf_hub_download

    with _explain_errors(name):
        # Asked first: without a network huggingface_hub would retry for 23 s, with a warning each time.
        return Path(hf_hub_download(name, "config.json", local_files_only=not hub_reachable()))


def hub_snapshot(name: str, commit: str) -> Path:
    """Download a Hub id at one commit: configs, tokenizer and code, without weights. Return the folder.

    Raises:
        ModelError: for what is no full commit, and for one that is not there.
    """
    from huggingface_hub import snapshot_download

    if not COMMIT.fullmatch(commit):
        raise ModelError(
            f"--trust-remote-code {commit}: expected a full commit of 40 digits of {name} on the Hub. A branch, a tag or "
            "a short hash may mean other code tomorrow."
        )
    with _explain_errors(name, commit):
        patterns = [*BESIDE, "*.py"]
        snapshot = Path(
            snapshot_download(name, revision=commit, allow_patterns=patterns, local_files_only=not hub_reachable())
        )
    assert snapshot.name == commit, f"the Hub's cache calls commit {commit} {snapshot.name}"
    return snapshot


@contextlib.contextmanager
def _explain_errors(name: str, commit: str | None = None) -> Iterator[None]:
    """Turn the Hub's errors into one sentence each."""
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError:
        raise ModelError(
            f"model {name!r} is neither a folder nor a Hub id. A Hub id looks like Qwen/Qwen3-8B."
        ) from None
    except errors.GatedRepoError:
        raise ModelError(
            f"model {name!r} is gated: ask for access at https://huggingface.co/{name}, then `hf auth login`."
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"model {name!r} is not on the Hub, or it is private: check the name, or `hf auth login`."
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(
            f"model {name!r} has no commit {commit} on the Hub. Copy it from the page of its files."
        ) from None
    except errors.LocalEntryNotFoundError:
        raise ModelError(unreachable(name, commit)) from None
    except errors.EntryNotFoundError:
        raise ModelError(f"model {name!r} has no config.json on the Hub, so it is not a transformers model.") from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise ModelError(f"model {name!r}: the Hub refused its config.json: {first_line(error)}") from error


def unreachable(name: str, commit: str | None = None) -> str:
    """Return the sentence for a Hub id without network, with the fix."""
    at = f" at commit {commit}" if commit else ""
    return (
        f"model {name!r} is not in the local cache{at} and the Hugging Face Hub cannot be reached: "
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


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
