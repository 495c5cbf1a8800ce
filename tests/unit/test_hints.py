"""What users of other tools type is answered with the flags that mean the same, and our parser accepts them."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
from programs import ROOT, text_table

import toolkit as tk
from toolkit.cli import main
from toolkit.cli.parser import build_parser
from toolkit.config.fields import from_dict
from toolkit.config.flags import given, spell
from toolkit.config.hints import HINTS, PYTHON_NAMES, SHARDING_NAMES, VERBS
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy, sharding_word
from toolkit.config.train_config import TrainConfig
from toolkit.config.unknown_names import meaning_of
from toolkit.core.errors import StrategyError

PARSER = build_parser()

VALUES = {
    "epochs": "3", "scheduler": "cosine", "precision": "bf16", "attention": "sdpa", "lr": "2e-5", "warmup": "0.03",
    "beta1": "0.5", "beta2": "0.5", "data": "x.jsonl", "eval_data": "x.jsonl", "tracker": "wandb", "sharding": "3",
}  # fmt: skip
"""A value of our field, for names that carry any other one than 2."""

VERBS_OF = {"temperature": ["generate", "RUN", "a prompt"], "on": ["forecast"]}
"""The verb of a hint's first field, if not `train`."""

TYPED = dict(text_table("typed_flags.txt"))


def refusal(line: str) -> str:
    with pytest.raises(StrategyError) as caught:
        PARSER.parse_args(shlex.split(line))
    return str(caught.value)


@pytest.mark.parametrize("typed", TYPED)
def test_a_flag_of_another_tool_names_ours_with_its_value(typed: str) -> None:
    message = refusal(f"train {typed}")
    assert f" Here it is `{TYPED[typed]}`." in message


@pytest.mark.parametrize("name", HINTS)
def test_our_parser_takes_every_hint(name: str) -> None:
    """Where it is no sentence, with a value that the name usually has."""
    key, _, value = name.partition("=")
    field = HINTS[name].partition("--")[2].partition(" ")[0].replace("-", "_")
    verb = VERBS_OF.get(field, ["train"])
    known = vars(PARSER.parse_args(verb))
    meaning = meaning_of({f"--{key}" if key[0] != "." else key: [value or VALUES.get(field, "2")]}, known, {})
    if HINTS[name].startswith(("--", "?")):
        assert meaning.fields
        assert not meaning.notes
    flags = PARSER.parse_args([*verb, *spell(meaning.fields)])
    fields = given(flags, Strategy)
    if "offload" in fields:
        fields["sharding"] = "fsdp" if fields["offload"] == "cpu" else "zero3"
    from_dict(Strategy, fields)
    from_dict(TrainConfig, given(flags, TrainConfig))
    from_dict(RunConfig, given(flags, RunConfig) if verb == ["train"] else {})
    assert "VALUE" not in spell(meaning.fields)


@pytest.mark.parametrize("name", [name for name in HINTS if "=" not in name])
def test_a_name_that_we_have_needs_no_hint(name: str) -> None:
    flags = {
        f"--{field}" for field in (*vars(RunConfig()), *vars(Strategy()), *vars(TrainConfig()), "deepspeed_config")
    }
    assert f"--{name}" not in flags


@pytest.mark.parametrize(
    "name",
    ["stage", "torch_compile", "use_liger_kernel", "tf32", "fp8", "debug", "logging_dir", "group_by_length"],
)
def test_no_guess_is_far_off(name: str) -> None:
    assert "Did you mean" not in refusal(f"train --{name} 1")


def test_our_flags_may_have_underscores() -> None:
    words = ["train", "--lora_rank", "8", "--weight_decay=0.1", "--no_packing", "--adapter", "lora"]
    flags = PARSER.parse_args(words)
    assert (flags.lora_rank, flags.weight_decay, flags.packing) == (8, 0.1, False)
    own = PARSER.parse_args(["launch", "--dp_replicate", "2", "own.py", "--seq_len", "8"])
    assert (own.dp_replicate, own.arguments) == (2, ["--seq_len", "8"])


def test_names_of_verbs_and_shardings_mean_ours() -> None:
    parser = PARSER
    verbs = parser._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    for meant in VERBS.values():
        tool, verb, *_ = meant.split()
        assert tool != "toolkit" or verb in verbs or verb == "--version"
    for name, word in SHARDING_NAMES.items():
        with pytest.raises(StrategyError, match=rf"sharding '{name}' is unknown\. Here it is sharding '{word}'\."):
            sharding_word(name)
        Strategy(sharding=word)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_train_epochs": 3}, "epochs=3"),
        ({"bf16": True}, "precision='bf16'"),
        ({"output_dir": "out"}, "run_dir='out'"),
        ({"nproc_per_node": 4}, "processes=4"),
        ({"learning_rate": 2e-5}, "lr=2e-05"),
        ({"load_in_4bit": True, "use_peft": True, "lora_r": 8}, "adapter='qlora', lora_rank=8"),
        ({"lora_target_modules": ["q_proj", "v_proj"]}, "lora_targets='q_proj,v_proj', adapter='lora'"),
        ({"sample_packing": True}, "packing=True"),
        ({"train_on_inputs": True}, "mask_prompts=False"),
    ],
)
def test_python_has_the_same_hints(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(StrategyError, match=rf"launch has no argument .* Here it is {re.escape(said)}\.$"):
        tk.launch(**fields)
    with pytest.raises(StrategyError, match="leave it out, and upload"):
        tk.launch(push_to_hub=True)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: tk.TrainConfig(learning_rate=1e-4, bf16=True), "lr=0.0001. tk.Strategy has it: precision='bf16'."),
        (lambda: tk.TrainConfig(num_train_epochs=3, per_device_train_batch_size=2), "epochs=3, micro_batch=2."),
        (lambda: tk.Strategy(zero_stage=3, load_in_4bit=True), "sharding='zero3', adapter='qlora'."),
        (lambda: tk.Strategy("zero3"), "Strategy('zero3'): expected names, such as sharding='zero3'."),
        (
            lambda: tk.Strategy(lora_rank=16),
            "lora_rank 16: without effect, since adapter is not given. Give --adapter too",
        ),
        (lambda: tk.TrainConfig(num_train_epochs=3, foo=1), "Here it is epochs=3. foo has no meaning here."),
        (lambda: tk.RunConfig(output_dir="x"), "tk.launch has it: run_dir='x'."),
        (lambda: tk.RunConfig(max_seq_length=128), "tk.TrainConfig has it: seq_len=128."),
        (lambda: tk.preview("embedded", "embedded", max_seq_length=128), "seq_len=128."),
        (lambda: tk.forecast("embedded", sharding="zero3"), "Give strategy=tk.Strategy(sharding='zero3')."),
        (lambda: tk.forecast("embedded", hardware="8x H100"), "Here it is on='8x H100'."),
        (lambda: tk.plan("embedded", hardware="8x H100"), "Here it is on='8x H100'."),
        (lambda: tk.generate("run", "p", max_length=5, do_sample=True), "max_new_tokens=5, temperature=1.0."),
        (lambda: tk.train(model="x", data="y"), "tk.launch has it: model='x', data='y'."),
    ],
)
def test_unknown_names_in_python_are_answered(call: Callable[[], object], said: str) -> None:
    with pytest.raises(StrategyError) as caught:
        call()
    assert said in str(caught.value)
    assert (
        not isinstance(caught.value, TypeError)
        or "has no" in str(caught.value)
        or "expected names" in str(caught.value)
    )


@pytest.mark.parametrize("name", PYTHON_NAMES)
def test_names_that_people_look_for_say_what_to_use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tk, name, raising=False)  # `finetune` is a module that another test may have imported
    with pytest.raises(AttributeError, match=re.escape(PYTHON_NAMES[name])):
        getattr(tk, name)


def test_the_version_and_the_help_of_a_verb_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for words in (["--version"], ["-V"]):
        with pytest.raises(SystemExit, match="0"):
            main(words)
        assert capsys.readouterr().out == f"toolkit {project['version']}\n"
    assert tk.__version__ == project["version"]
    for words, text in ((["help"], "usage: toolkit "), (["help", "train"], "usage: toolkit train ")):
        with pytest.raises(SystemExit, match="0"):
            main(words)
        assert capsys.readouterr().out.startswith(text)


@pytest.mark.parametrize("words", ["train --lora-rank 16", "compare --lora-targets q_proj", "forecast --lora-alpha 4"])
def test_flags_of_an_adapter_need_one(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert "without effect, since adapter is not given. Give --adapter too" in capsys.readouterr().err
