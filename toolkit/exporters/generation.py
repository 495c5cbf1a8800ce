"""`generate()`: the answer of a saved model to a prompt; and the parts of it that a training uses for its samples."""

from __future__ import annotations

import dataclasses
import math
import shlex
from pathlib import Path
from typing import Any

from toolkit.checkpoints.manifest import MANIFEST
from toolkit.config.run_config import EMBEDDED
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.config.unknown_names import by_name
from toolkit.core.atomic_io import read_json
from toolkit.core.errors import ModelError, RunError, ToolkitError, value_or
from toolkit.data import resolve_spec
from toolkit.engines.job import Job
from toolkit.exporters.verification import reopen, reopen_whole, single_process_job
from toolkit.models import ModelSpec, require_weights
from toolkit.models.files import first_line, local_folder
from toolkit.models.hf_loading import SHOWS_PROGRESS, load_tokenizer, quiet_bars
from toolkit.run_folder.run_json import read_run_json
from toolkit.transforms.adapters import require_libraries

ANSWER_TOKENS, SAMPLE_TOKENS = 256, 64
"""The most new tokens of an answer, unless asked for more, and of a sample in a training."""

ADAPTER_CONFIG = "adapter_config.json"
GREEDY = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}


class _Printed(str):
    """A text that was printed already, so that a notebook does not show it again."""

    def _ipython_display_(self) -> None: ...


@by_name
def generate(
    source: str | Path,
    prompt: str,
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    chat_template: bool = True,
    model: str | None = None,
    trust_remote_code: str | None = None,
    stream: bool = True,
) -> str:
    """Return a saved model's answer to a prompt, and print it word by word meanwhile.

    The prompt becomes a user's message where the tokenizer has a chat template. Decoding is greedy by default: the same prompt
    has the same answer. transformers' `generate` does it, on this machine's first device.

    Args:
        source: a run with a saved model or adapter, a folder of either, or a Hub id in the local cache.
        prompt: a text.
        max_new_tokens: tokens of the answer at most; by default 256, or what the model has positions for.
        temperature: 0 takes the most likely token. Above, tokens are drawn, within the model's own top-k and top-p.
        chat_template: False gives the prompt as it is.
        model: the base of an adapter; by default the one that it was trained over.
        trust_remote_code: as in `describe`.
        stream: False prints nothing.

    Raises:
        RunError: for a run without a saved model.
        ModelError: for a folder without a model that can be opened.
        ToolkitError: for an empty or too long prompt, and for a value out of range.
    """
    from transformers import TextStreamer

    if not prompt.strip():
        raise ToolkitError(f"prompt {prompt!r}: expected text. Give it in quotes.")
    if not 0 <= temperature < math.inf:
        raise ToolkitError(f"temperature {temperature}: expected a finite number from 0 on. Use 0 for greedy decoding.")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ToolkitError(f"max_new_tokens {max_new_tokens}: expected at least 1. Leave it out for {ANSWER_TOKENS}.")
    spec, job, folder = _find(source, model, trust_remote_code)
    own = (folder / "tokenizer_config.json").is_file()  # of an adapter, too
    tokenizer = load_tokenizer(dataclasses.replace(spec, source=str(folder)) if own else spec)
    ids, room = encode(tokenizer, spec, prompt, new=max_new_tokens or 1, chat=chat_template)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    most = max_new_tokens or min(ANSWER_TOKENS, room)
    opened = _open(spec, job, folder)
    text = answer(opened, tokenizer, ids, max_new_tokens=most, temperature=temperature, streamer=streamer)
    return _Printed(text) if stream else text


def encode(tokenizer: Any, spec: ModelSpec, prompt: str, *, new: int = 1, chat: bool = True) -> tuple[list[int], int]:
    """Return a prompt's tokens as a training reads them, and how many may follow.

    Args:
        new: tokens that have to follow.
        chat: make the prompt a user's message where the tokenizer has a chat template.

    Raises:
        ToolkitError: for a prompt without a token, for too many of them, and where the chat template refuses it.
    """
    causal, text, chat = spec.kind == "causal", prompt, bool(chat and tokenizer.chat_template)
    message = {"role": "user", "content": prompt}
    try:
        if chat:
            text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise Jinja's errors, TypeError, their own raise_exception
        problem = f"the chat template refuses the prompt: {first_line(error)}"
        raise ModelError(f"{spec.name}: {problem}. Change one of them.") from error
    ids = list(tokenizer(text, add_special_tokens=not chat)["input_ids"])
    if causal and not chat and ids[-1:] == [tokenizer.eos_token_id]:
        ids = ids[:-1]  # the tokenizer closes a text, and this one goes on
    limit = spec.max_positions or 2**31
    room = limit - (len(ids) if causal else 1)
    if not ids or len(ids) > limit or room < new:
        raise ToolkitError(
            f"the prompt has {len(ids):,} tokens, and {new:,} more are to follow. Expected are 1 or more in a prompt, and at "
            f"most {limit:,} together, the positions of {spec.name}. Change the prompt, or ask for fewer tokens."
        )
    return ids, room


def answer(
    model: Any, tokenizer: Any, ids: list[int], *, max_new_tokens: int, temperature: float = 0.0, streamer: Any = None
) -> str:
    """Return the text that a model writes after a prompt's tokens. It ends at the tokenizer's end token, or at the model's own."""
    import torch

    tokens = torch.tensor([ids], device=model.device)
    ends = getattr(model.generation_config, "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    special = {"eos_token_id": sorted(ends) or None, "pad_token_id": tokenizer.pad_token_id}
    how = {"do_sample": True, "temperature": temperature} if temperature else GREEDY
    how = {**how, "max_new_tokens": max_new_tokens, "use_cache": True, "streamer": streamer}  # training uses no cache
    with quiet_bars(shown=False):
        (output,) = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **special, **how)
    start = 0 if model.config.is_encoder_decoder else len(ids)
    return str(tokenizer.decode(output[start:], skip_special_tokens=True))


def _find(source: str | Path, model: str | None, trust: str | None) -> tuple[ModelSpec, Job, Path]:
    """Return the spec of a saved model or of an adapter's base, the job that opens it, and its folder."""
    path = local_folder(source)
    if path is None:
        raise RunError(
            f"{source}: there is no such run or folder. `toolkit runs` lists runs, `hf download` fetches models."
        )
    run = next((each for each in (path, path.parent) if (each / "run.json").is_file()), None)
    recorded = read_run_json(run) if run else {}
    folder = path / "export" if run == path else path
    if (path / MANIFEST).is_file() or not folder.is_dir():
        best = f" Or give {path / 'best'}." if (path / "best").is_dir() else ""
        raise RunError(
            f"{path} has no saved model: expected a finished run that was not trained with --no-save. `toolkit export "
            f"{shlex.quote(str(path))} -o FOLDER` makes one from a checkpoint; then give FOLDER.{best}"
        )
    strategy: dict[str, Any] = {"adapter": "none", "precision": "auto"}
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        ours = {} if recorded.get("target") else recorded.get("strategy", {})
        strategy = {"adapter": "lora", "precision": "auto"} | {name: ours[name] for name in strategy if name in ours}
        spec = resolve_spec(model or _base(folder, recorded["run_config"].get("model") if ours else None), trust)
    elif model:
        raise ModelError(f"model {model!r} is for an adapter, and {source} is none. Leave --model out.")
    else:
        spec = resolve_spec(str(folder), trust)
    require_weights(spec)
    job = single_process_job(spec, Strategy(**strategy), TrainConfig())
    require_libraries(job)
    return spec, job, folder


def _base(folder: Path, recorded: str | None) -> str:
    """Return the base model of an adapter. A name in a folder starts no download."""
    name = recorded or value_or(None, lambda: str(read_json(folder / ADAPTER_CONFIG)["base_model_name_or_path"]))
    if name is None or (name != EMBEDDED and local_folder(name) is None):
        problem = f"{folder} is an adapter over {name!r}, which is not on this machine"
        raise ModelError(f"{problem}. Give its folder or Hub id with --model.")
    return name


def _open(spec: ModelSpec, job: Job, folder: Path) -> Any:
    """Open a saved model in the dtype of its files, or an adapter over its base as it was trained."""
    adapter, attention = job.strategy.adapter != "none", job.strategy.attention
    try:
        if adapter and not (folder / "adapter_model.safetensors").is_file():  # PEFT would read a pickle
            raise RunError("it has no adapter_model.safetensors")
        with quiet_bars(shown=spec.elements >= SHOWS_PROGRESS):
            model = reopen(job, folder) if adapter else reopen_whole(spec, folder, dtype="auto", attention=attention)
    except (OSError, ValueError, RuntimeError, RunError) as error:
        raise ModelError(f"{folder} cannot be opened: {first_line(error)}. Copy it again from its source.") from error
    return model if job.strategy.quantized or spec.quantization else model.to(job.device.kind)
