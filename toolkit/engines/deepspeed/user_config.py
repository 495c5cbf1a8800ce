"""A user's DeepSpeed file as fields of Strategy and TrainConfig. Each of its keys is followed or refused.

A key that is absent or "auto" is left to the flags, as Accelerate leaves it to the program.

DeepSpeed's schedulers use the lowest rate in their first two steps. The toolkit's schedule begins at the second of them under
`log`, and at the third under `linear`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.config.fields import check_value
from toolkit.config.strategy import BUCKETS, Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.atomic_io import (
    LONGEST_JSON,
    check_fields,
    expand_user,
    parse_json,
    read_limited,
    shorten_value,
    unique_names,
)
from toolkit.core.errors import StrategyError, value_or

OPEN = (None, "auto")


def _whole(number: Any) -> int:
    """Read a whole number, which a file may spell as 2e8."""
    if int(number) != number:
        raise ValueError(number)
    return int(number)


WITHOUT_EFFECT = (
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "optimizer.params.torch_adam",
    "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.offload_param.pin_memory",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
)
"""Keys with the same training whatever their value: what is printed, who computes Adam, pinned memory, the export."""

FIXED_VALUES: Mapping[str, Any] = {
    "fp16.auto_cast": False,
    "fp16.loss_scale": 0,
    "fp16.hysteresis": 2,
    "fp16.min_loss_scale": 1,
    "optimizer.params.adam_w_mode": True,
    "optimizer.params.bias_correction": True,
    "zero_optimization.allgather_partitions": True,
    "zero_optimization.reduce_scatter": True,
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.round_robin_gradients": False,
    "zero_optimization.sub_group_size": 1e9,
    "zero_optimization.stage3_param_persistence_threshold": "auto",
}
"""The one value that the toolkit runs: DeepSpeed's default, or its own rule (`auto`)."""

NUMBER_KEYS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "train_micro_batch_size_per_gpu": ("micro_batch", _whole),
    "gradient_accumulation_steps": ("accumulation", _whole),
    "gradient_clipping": ("max_grad_norm", float),
    "fp16.initial_scale_power": ("loss_scale", lambda power: 2.0 ** _whole(power)),
    "fp16.loss_scale_window": ("loss_scale_window", _whole),
    "zero_optimization.reduce_bucket_size": ("bucket_elements", _whole),
    "zero_optimization.allgather_bucket_size": ("gather_bucket_elements", _whole),
    "zero_optimization.stage3_prefetch_bucket_size": ("gather_bucket_elements", _whole),
    "zero_optimization.stage3_max_live_parameters": ("live_elements", _whole),
    "zero_optimization.stage3_max_reuse_distance": ("live_elements", _whole),
    "optimizer.params.lr": ("lr", float),
    "optimizer.params.weight_decay": ("weight_decay", float),
    "optimizer.params.eps": ("eps", float),
    "scheduler.params.warmup_min_lr": ("min_lr", float),
    "scheduler.params.warmup_max_lr": ("lr", float),
    "scheduler.params.warmup_num_steps": ("warmup", _whole),
    "scheduler.params.total_num_steps": ("steps", _whole),
}
"""The field of each numeric key."""

LIVE_KEYS = tuple(key for key, (name, _) in NUMBER_KEYS.items() if name == "live_elements")
DEFAULT_LIVE = 10**9
"""DeepSpeed's value of both."""

CHOICES: Mapping[str, Mapping[Any, dict[str, Any]]] = {
    "fp16.enabled": {True: {"precision": "fp16"}, False: {}},
    "bf16.enabled": {True: {"precision": "bf16"}, False: {}},
    "data_types.grad_accum_dtype": {word: {"grad_accum_dtype": word} for word in ("fp32", "bf16", "fp16")},
    "optimizer.type": {"AdamW": {"optimizer": "adamw"}, "Adam": {"optimizer": "adamw"}},
    "scheduler.type": {
        "WarmupDecayLR": {"scheduler": "linear", "warmup_type": "log"},
        "WarmupLR": {"scheduler": "constant", "warmup_type": "log"},
    },
    "scheduler.params.warmup_type": {word: {"warmup_type": word} for word in ("log", "linear")},
    "zero_optimization.stage": {stage: {"sharding": f"zero{stage}"} for stage in (1, 2, 3)},
    "zero_optimization.overlap_comm": {True: {"overlap_comm": "on"}, False: {"overlap_comm": "off"}},
    "zero_optimization.offload_optimizer.device": {"none": {}, "cpu": {"offload": "optimizer"}},
    "zero_optimization.offload_param.device": {"none": {}, "cpu": {"offload": "cpu"}},
}
"""The fields that each value of a key sets. A later row overrides an earlier one."""


Refuse = Callable[[str, str], StrategyError]
"""Takes a key and what is expected, and returns the error to raise."""

_KNOWN_KEYS = (*CHOICES, *NUMBER_KEYS, *FIXED_VALUES, *WITHOUT_EFFECT, "optimizer.params.betas", "train_batch_size")


def read_config(path: str | Path, ranks: int | None = None) -> dict[str, Any]:
    """Return the fields of Strategy and TrainConfig that a DeepSpeed file sets.

    Args:
        path: the JSON file.
        ranks: the world size; it decides whether a numeric `train_batch_size` holds.

    Raises:
        StrategyError: for a file that cannot be read, and for a key or value that the toolkit would not follow.
    """
    keys = _read_keys(path)
    fields: dict[str, Any] = {}

    def refuse(key: str, expected: str) -> StrategyError:
        value = shorten_value(value_or("nested", json.dumps, keys[key]))
        return StrategyError(f"{path}: {shorten_value(key, 80)} is {value}. Expected {expected}.")

    def set_fields(key: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name in ("lr", "precision", "live_elements") and fields.get(name, value) != value:
                raise refuse(key, f"{fields[name]!r}, as another key has it")
            fields[name] = value

    _check_known(keys, refuse)
    for key, choices in CHOICES.items():
        value = _as_word(keys.get(key))
        if value not in OPEN:
            matches = [values for word, values in choices.items() if _same(value, word)]
            if not matches:
                raise refuse(key, ", ".join(json.dumps(word) for word in choices))
            set_fields(key, matches[0])
    if "sharding" not in fields:
        raise StrategyError(f"{path} sets no zero_optimization.stage. Expected 1, 2 or 3; or choose sharding 'ddp'.")
    for key, (name, kind) in NUMBER_KEYS.items():
        unused = name in BUCKETS[1:] and ("stage3" in key) != (fields["sharding"] == "zero3")
        if keys.get(key) not in OPEN and not unused:
            set_fields(key, {name: _number(key, keys[key], name, kind, refuse)})
    given = [key for key in LIVE_KEYS if keys.get(key) not in OPEN]
    if len(given) == 1 and fields["live_elements"] != DEFAULT_LIVE:
        raise refuse(
            given[0], f"{DEFAULT_LIVE:.0e}, or the same value of {next(key for key in LIVE_KEYS if key not in given)}"
        )
    for key, only in FIXED_VALUES.items():
        if not any(_same(keys.get(key), word) for word in (*OPEN, only)):
            raise refuse(key, json.dumps(only))
    betas = keys.get("optimizer.params.betas")
    if betas not in OPEN:
        if not isinstance(betas, list) or len(betas) != 2:
            raise refuse("optimizer.params.betas", "two numbers")
        for name, beta in zip(("beta1", "beta2"), betas, strict=True):
            fields[name] = _number("optimizer.params.betas", beta, name, float, refuse)
    if fields.get("offload") == "cpu" and keys.get("zero_optimization.offload_optimizer.device") != "cpu":
        raise refuse("zero_optimization.offload_param.device", '"none": parameters are offloaded with the optimizer')
    _check_batch(keys, fields, ranks, refuse)
    return fields


def read_environment(environ: Mapping[str, str], owner: type[Any]) -> dict[str, Any]:
    """Return the fields of one dataclass in the file that `accelerate launch` names in a worker's environment."""
    path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if environ.get("ACCELERATE_USE_DEEPSPEED") != "true" or path.lower() == "none":
        return {}
    names = {field.name for field in dataclasses.fields(owner)}
    fields = read_config(path, int(environ.get("WORLD_SIZE", "1")))
    return {name: value for name, value in fields.items() if name in names}


def _check_known(keys: Mapping[str, Any], refuse: Refuse) -> None:
    """Check that the toolkit knows every key. An empty object at the place of several is none."""
    for key, value in keys.items():
        section = any(known.startswith(f"{key}.") for known in _KNOWN_KEYS)
        if key not in _KNOWN_KEYS and not (section and value == {}):
            raise refuse(key, "an object" if section else "no such key: the toolkit does not set it")


def _number(key: str, value: Any, name: str, kind: Callable[[Any], Any], refuse: Refuse) -> Any:
    """Return a number that its field takes."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(value)
        result = kind(value)
        check_value(TrainConfig if hasattr(TrainConfig, name) else Strategy, name, result)
    except (ValueError, OverflowError):
        raise refuse(key, 'a number (whole where it counts), or "auto"') from None
    except StrategyError as error:
        raise refuse(key, str(error).rpartition("expected ")[2].rstrip(".")) from None
    return result


def _check_batch(keys: Mapping[str, Any], fields: dict[str, Any], ranks: int | None, refuse: Refuse) -> None:
    """Derive the micro-batch from the global batch, or check the product."""
    batch = keys.get("train_batch_size")
    if batch in OPEN:
        return
    if ranks is None or type(batch) is not int:
        raise refuse("train_batch_size", '"auto", or a whole number with --processes')
    accumulation = fields.setdefault("accumulation", 1)
    micro = fields.setdefault("micro_batch", max(1, batch // (accumulation * max(1, ranks))))
    if micro * accumulation * ranks != batch:
        raise refuse("train_batch_size", f"micro-batch {micro} x accumulation {accumulation} x {ranks} ranks")


def _as_word(value: Any) -> Any:
    """Read a switch that is spelled as a string, as files of Accelerate's articles have it."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _same(value: Any, word: Any) -> bool:
    """Return whether two values of JSON are equal; for Python, true is 1, too."""
    return (type(value) is bool, value) == (type(word) is bool, word)


def _read_keys(path: str | Path) -> dict[str, Any]:
    """Return each value of the file under its keys, joined by points."""
    try:
        data = read_limited(expand_user(path), LONGEST_JSON).decode()
        config = parse_json(data, finite=False, object_pairs_hook=unique_names)
        check_fields(config, {})
        return dict(_flatten(config))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        problem = f"DeepSpeed's file {str(path)!r} cannot be read as a JSON object"
        raise StrategyError(f"{problem}: {reason}. Correct it, or name another file.") from None


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of a nested object under its keys joined by points; an empty object is a value."""
    for key, value in config.items():
        if "." in key:
            raise ValueError(f"the name {shorten_value(key)!r} has a point, expected objects in objects")
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
