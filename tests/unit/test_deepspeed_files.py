"""DeepSpeed files of a user: both of Hugging Face's «Accelerate Large Model Training using DeepSpeed», word for word."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR

import toolkit as tk
from toolkit.cli.parser import parse
from toolkit.config.fields import from_dict
from toolkit.config.flags import given
from toolkit.core.errors import StrategyError
from toolkit.devices.machine import hardware
from toolkit.engines.deepspeed.user_config import (
    _KNOWN_KEYS,
    CHOICES,
    FIXED_VALUES,
    NUMBER_KEYS,
    WITHOUT_EFFECT,
    read_config,
)
from toolkit.engines.resolution import resolve
from toolkit.training.setup import agree, agree_train_config

FILES = Path(__file__).parent / "deepspeed_files"
ZERO2, ZERO3 = FILES / "zero2_config_accelerate.json", FILES / "zero3_offload_config_accelerate.json"

COMMON = {
    "precision": "fp16",
    "optimizer": "adamw",
    "scheduler": "linear",
    "warmup_type": "log",
    "overlap_comm": "on",
}
COMMON |= {"accumulation": 1, "loss_scale_window": 1000}
FIELDS: dict[Path, dict[str, Any]] = {
    ZERO2: {
        **COMMON,
        "sharding": "zero2",
        "loss_scale": 2.0**15,
        "bucket_elements": 200_000_000,
        "gather_bucket_elements": 200_000_000,
    },
    ZERO3: {**COMMON, "sharding": "zero3", "offload": "cpu", "loss_scale": 2.0**16, "live_elements": 10**9},
}

FLAGS = "--lr 1e-6 --weight-decay 0 --warmup 100 --steps 500 --micro-batch 200 --max-grad-norm 0.5"
"""What "auto" leaves to the program."""


@pytest.mark.parametrize("path", [ZERO2, ZERO3], ids=lambda path: path.stem)
def test_launcher_and_flag_resolve_to_the_same_settings(path: Path) -> None:
    """Strategy, train config, and what goes to DeepSpeed."""
    flags = parse(["train", "--deepspeed-config", str(path), "--processes", "2", *FLAGS.split()])
    strategy = from_dict(tk.Strategy, given(flags, tk.Strategy))
    step = from_dict(tk.TrainConfig, given(flags, tk.TrainConfig))
    environ = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path), "WORLD_SIZE": "2"}
    environ |= {"ACCELERATE_MIXED_PRECISION": "fp16"}
    ours = parse(["train", *FLAGS.split()])
    assert (
        agree({}, environ)
        == agree(tk.Strategy(sharding=strategy.sharding, offload=strategy.offload), environ)
        == strategy
    )
    assert agree_train_config(given(ours, tk.TrainConfig), environ) == step
    assert {**FIELDS[path]}.items() <= {**vars(strategy), **vars(step)}.items()

    machine = hardware("2x TITAN-RTX")
    job = resolve(strategy, step, tk.describe("embedded"), 2, machine.device)
    file = json.loads(path.read_text())
    sent, zero = job.settings, job.settings["zero_optimization"]
    assert sent["fp16"] == {
        "enabled": True,
        "initial_scale_power": file["fp16"]["initial_scale_power"],
        "loss_scale_window": 1000,
    }
    assert not sent["bf16"]["enabled"]
    assert (sent["train_micro_batch_size_per_gpu"], sent["gradient_clipping"]) == (200, 0.5)
    given_zero = file["zero_optimization"]
    for key, value in zero.items():
        if given_zero.get(key) not in (None, "auto") and key != "stage3_gather_16bit_weights_on_model_save":
            assert given_zero[key] == value, key
    assert sent["gradient_accumulation_steps"] == file["gradient_accumulation_steps"]


@pytest.mark.parametrize("path", [ZERO2, ZERO3], ids=lambda path: path.stem)
def test_a_processor_without_fp16_refuses_the_file_by_name(path: Path) -> None:
    flags = parse(["train", "--deepspeed-config", str(path)])
    device = dataclasses.replace(hardware("cpu").device, dtypes=("fp32",))
    with pytest.raises(StrategyError, match="cannot train in precision 'fp16'"):
        resolve(from_dict(tk.Strategy, given(flags, tk.Strategy)), tk.TrainConfig(), None, 2, device)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4. Expected 1, 2, 3"),
        ({"zero_optimization": {}}, "sets no zero_optimization.stage"),
        ({"zero_optimization": {"stage": 2, "sub_group_size": 5}}, "sub_group_size is 5. Expected 1000000000.0"),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": 2.5}},
            "reduce_bucket_size is 2.5. Expected a number",
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "Expected 'fp16', as another key has it"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale is 128. Expected 0"),
        ({"optimizer": {"type": "Lamb"}}, 'optimizer.type is "Lamb"'),
        ({"scheduler": {"type": "OneCycle"}}, 'scheduler.type is "OneCycle"'),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning.enabled is true. Expected no such key"),
        ({"train_batch_size": 7}, "Expected micro-batch 3 x accumulation 1 x 2 ranks"),
        ({"train_batch_size": True}, "train_batch_size is true. Expected "),
        (
            {"gradient_accumulation_steps": 0, "train_batch_size": 4},
            "accumulation_steps is 0. Expected int of at least 1",
        ),
        ({"gradient_clipping": {}}, "gradient_clipping is {}. Expected a number"),
        ({"zero_optimization": 2}, "zero_optimization is 2. Expected an object"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage is true. Expected 1, 2, 3"),
        ({"zero_optimization": {"stage": {}}}, "zero_optimization.stage is {}. Expected 1, 2, 3"),
        ({"fp16": {"initial_scale_power": 1_000_000}}, "fp16.initial_scale_power is 1000000. Expected a number"),
        ({"fp16": {"initial_scale_power": 15.5}}, "fp16.initial_scale_power is 15.5. Expected a number"),
        ({"optimizer": {"params": {"betas": [0.9, None]}}}, "optimizer.params.betas is [0.9, null]. Expected a number"),
        ({"optimizer": {"params": {"betas": [0.9, 1]}}}, "betas is [0.9, 1]. Expected float below 1"),
        (
            {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e8}},
            "stage3_max_reuse_distance is 100000000.0. Expected 1000000000, as another key has it",
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 3e7}},
            "stage3_max_live_parameters is 30000000.0. Expected 1e+09, or the same value of "
            "zero_optimization.stage3_max_reuse_distance",
        ),
        ({"optimizer": {"params": {"lr": -1}}}, "optimizer.params.lr is -1. Expected float above 0"),
    ],
)
def test_what_would_not_be_followed_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, **change}))
    with pytest.raises(StrategyError) as error:
        read_config(path, 2)
    assert said in str(error.value)


JUNK = (
    "1e999", "-1e999", "NaN", "-1", "1" + "0" * 30, "9" * 4_000, "true", '""', '"x"', '"1e-3"', "[]", "[[[1]]]", '{"a": 1}',
    "[" * 90 + "]" * 90, '"' + "x" * 100_000 + '"', '"\\ud800"', '{"a": ' * 90 + "1" + "}" * 90,
)  # fmt: skip
"""Values that no key takes, as JSON."""


def test_no_value_of_any_key_ends_in_a_traceback(tmp_path: Path) -> None:
    """Each is refused in one sentence that names file, key and expectation; keys without effect may have any value."""
    path = tmp_path / "ds.json"
    sections = {"fp16", "optimizer", "optimizer.params", "scheduler", "zero_optimization"}
    for key in {*_KNOWN_KEYS, *sections} - {*WITHOUT_EFFECT}:
        for junk in JUNK:
            stage = 3 if "stage3" in key else 2  # a key of stage 3 has no effect under another
            config: dict[str, Any] = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 1}
            place, names = config, key.split(".")
            for name in names[:-1]:
                place = place.setdefault(name, {})
            place[names[-1]] = "HERE"
            path.write_text(json.dumps(config).replace('"HERE"', junk))
            switch = junk == "true" and "true" in map(json.dumps, (*CHOICES.get(key, ()), FIXED_VALUES.get(key)))
            if switch or (junk == JUNK[4] and NUMBER_KEYS.get(key, ("", int))[1] is float):
                assert read_config(path, 2)
                continue
            with pytest.raises(StrategyError, match=rf"^{path}: {key}\S* is .{{1,50}}\. Expected .{{1,100}}\.$"):
                read_config(path, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "it is not JSON"),
        (b"[]", "expected a JSON object, found list"),
        (b"[" * 200_000, "it is nested too deeply"),
        (b'{"a":' * 200_000, "it is nested too deeply"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "Exceeds the limit (4300 digits)"),
        (b'{"a": "\xfc"}', "'utf-8' codec can't decode byte 0xfc"),
        (b" " * (16 * 2**20 + 1), "it has more than 16,777,216 bytes"),
        (b'{"zero_optimization": {"stage": 2, "stage": 3}}', "the name 'stage' stands twice in an object"),
        (b'{"zero_optimization": {}, "zero_optimization": {"stage": 3}}', "the name 'zero_optimization' stands twice"),
        (
            b'{"zero_optimization": {"stage": 2}, "zero_optimization.stage": 3}',
            "the name 'zero_optimization.stage' has a point",
        ),
    ],
)
def test_what_is_no_file_of_deepspeeds_is_refused(text: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(text)
    with pytest.raises(StrategyError) as error:
        parse(["train", "--deepspeed-config", str(path)])
    assert str(error.value).startswith(f"DeepSpeed's file {str(path)!r} cannot be read as a JSON object: {said}")


def test_no_place_is_waited_for_or_read_for_ever(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    places = [
        tmp_path,
        tmp_path / "pipe",
        tmp_path / "circle",
        "/dev/zero",
        "~nobodys/ds.json",
        "\0",
        "",
        tmp_path / "no",
    ]
    for place in places:
        with pytest.raises(StrategyError, match="cannot be read as a JSON object"):
            read_config(place)


def test_a_global_batch_gives_the_micro_batch(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps({"zero_optimization": {"stage": 1}, "train_batch_size": 24, "gradient_accumulation_steps": 3})
    )
    assert read_config(path, 2)["micro_batch"] == 4
    with pytest.raises(StrategyError, match="with --processes"):
        read_config(path)


def test_a_flag_that_contradicts_the_file_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"--sharding zero3 contradicts .* which sets zero2"):
        parse(["train", "--deepspeed-config", str(ZERO2), "--sharding", "zero3"])
    environ = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(ZERO2)}
    with pytest.raises(StrategyError, match="mixed_precision bf16 of the Accelerate config file contradicts"):
        agree({}, environ | {"ACCELERATE_MIXED_PRECISION": "bf16"})
    with pytest.raises(StrategyError, match="scheduler 'constant' was requested"):
        agree_train_config(tk.TrainConfig(scheduler="constant"), environ)


@pytest.mark.parametrize(("warmup_type", "ahead"), [("log", 1), ("linear", 2)])
def test_the_rate_runs_ahead_of_deepspeeds(warmup_type: str, ahead: int) -> None:
    """DeepSpeed's first two steps have the lowest rate."""
    step = tk.TrainConfig(lr=1e-3, min_lr=1e-5, warmup=10, warmup_type=warmup_type, scheduler="linear", steps=40)
    schedule = WarmupDecayLR(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3), 40, 1e-5, 1e-3, 10, warmup_type
    )
    rates = []
    for _ in range(10 + ahead):
        rates.append(schedule.get_last_lr()[0])
        schedule.step()  # DeepSpeed's engine does so after each step
    assert rates[0] == rates[1] == 1e-5
    assert [1e-3 * step.rate_factor(done) for done in range(10)] == pytest.approx(rates[ahead:])


def test_schedules() -> None:
    def rates(**fields: Any) -> list[float]:
        step = tk.TrainConfig(lr=1.0, warmup=2, steps=6, **fields)
        return [round(step.rate_factor(done), 6) for done in range(7)]

    assert rates(scheduler="constant") == [0.5, 1, 1, 1, 1, 1, 1]
    assert rates(scheduler="linear") == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    assert rates(scheduler="linear", min_lr=0.2) == [0.6, 1, 1, 0.8, 0.6, 0.4, 0.2]
    cosine = [round(0.5 * (1 + math.cos(math.pi * done / 4)), 6) for done in range(5)]
    assert rates() == [0.5, 1, *cosine]
