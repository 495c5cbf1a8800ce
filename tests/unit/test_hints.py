"""What users of other tools type is answered with the flags that mean the same, and our parser accepts them."""

from __future__ import annotations

import re
import shlex

import pytest
from programs import ROOT, python

import toolkit as tk
from toolkit.cli.parser import build_parser
from toolkit.config.flags import from_dict, given
from toolkit.config.hints import HINTS, SHARDING_NAMES, VERBS, spell_hint
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy, sharding_word
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import StrategyError

VALUES = {
    "--zero": "3",
    "--scheduler": "cosine",
    "--precision": "bf16",
    "--optimizer": "adamw",
    "--attention": "flash_attention_2",
    "--lr": "2e-5",
    "--beta1": "0.5",
    "--beta2": "0.5",
}
"""A value of a flag, for hints that carry any other one than 2."""

TYPED = {
    "--num_train_epochs 3": "--epochs 3",
    "--num-train-epochs=3": "--epochs 3",
    "--bf16": "--precision bf16",
    "--bf16 True": "--precision bf16",
    "--fp16": "--precision fp16",
    "--qlora": "--adapter qlora",
    "--load_in_4bit": "--adapter qlora",
    "--load_in_8bit True": "--adapter qlora8",
    "--gradient_checkpointing": "--activation-checkpointing full",
    "--lora_r 8": "--lora-rank 8",
    "--lora_target_modules q_proj v_proj": "--lora-targets q_proj,v_proj",
    "--max_seq_length 2048": "--seq-len 2048",
    "--dataset tatsu-lab/alpaca": "--data tatsu-lab/alpaca",
    "--dataset_name my.jsonl": "--data my.jsonl",
    "--output_dir 'my out'": "--run-dir 'my out'",
    "--deepspeed ds.json": "--deepspeed-config ds.json",
    "--zero_stage 3": "--sharding zero3",
    "--fsdp 'full_shard auto_wrap'": "--sharding fsdp",
    "--fsdp 'shard_grad_op auto_wrap'": "--sharding fsdp_grad_op",
    "--model_name_or_path gpt2": "--model gpt2",
    "--warmup_ratio 0.03": "--warmup 0.03",
    "--lr_scheduler_type linear": "--scheduler linear",
    "--save_steps 500": "--save-every 500",
    "--eval_steps 50": "--eval-every 50",
    "--report_to wandb": "--tracker wandb",
    "--optim adamw_torch": "--optimizer adamw",
    "--resume_from_checkpoint out": "--resume --run-dir out",
    "--nproc_per_node 8": "--processes 8",
    "--use_flash_attention_2": "--attention flash_attention_2",
    "--num_train_epochs 3 --bf16 --output_dir out": "--epochs 3 --precision bf16 --run-dir out",
}


def refusal(line: str) -> str:
    with pytest.raises(StrategyError) as caught:
        build_parser().parse_args(shlex.split(line))
    return str(caught.value)


@pytest.mark.parametrize("typed", TYPED)
def test_a_flag_of_another_tool_names_ours_with_its_value(typed: str) -> None:
    message = refusal(f"train {typed}")
    assert f" `{TYPED[typed]}`. See `toolkit train --help`." in message


@pytest.mark.parametrize("name", HINTS)
def test_our_parser_takes_every_hint(name: str) -> None:
    """A sentence instead of flags begins with `leave it out`."""
    key, _, value = name.partition("=")
    hint = HINTS[name]
    if hint.startswith("leave it out"):
        return
    own = next((word for flag, word in VALUES.items() if f"{flag} {{}}" in hint or f"{flag}{{}}" in hint), "2")
    hint = spell_hint(key, [value or (own if "zero" not in hint else "3")])
    flags = build_parser().parse_args(["train", *shlex.split(hint)])
    fields = given(flags, Strategy) | {"dp_replicate": 2} if "hsdp" in hint else given(flags, Strategy)
    if "offload" in fields:
        fields["sharding"] = "zero3"
    from_dict(Strategy, fields)
    from_dict(TrainConfig, given(flags, TrainConfig))
    from_dict(RunConfig, {"eval_data": "x.jsonl", "eval_every": 2, **given(flags, RunConfig)})
    assert "VALUE" not in hint


@pytest.mark.parametrize("name", [name for name in HINTS if "=" not in name])
def test_a_name_that_we_have_needs_no_hint(name: str) -> None:
    flags = {
        f"--{field}" for field in (*vars(RunConfig()), *vars(Strategy()), *vars(TrainConfig()), "deepspeed_config")
    }
    assert f"--{name}" not in flags


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train --push_to_hub --bf16", "Here it is `--precision bf16`. --push_to_hub: leave it out, and upload"),
        ("train --logging_steps 10", "--logging_steps: leave it out, since every step is recorded."),
        ("train --bf16 False", "--bf16: leave it out."),
        ("train --packing True", "--packing takes no value. Give `--packing` or `--no-packing`."),
        ("train --config axolotl.yaml", "--config: leave it out, and give its fields as flags"),
        ("describe --qlora", "`toolkit train` has it as `--adapter qlora`"),
        ("train --epsilon 3", "Did you mean '--eps'?"),
        ("train --optim paged_adamw_8bit", "--optim: leave it out, since only adamw runs here"),
        ("launch --nproc_per_node 2 x.py", "Here it is `--processes 2`"),
        ("finetune", "Here it is `toolkit train`"),
        ("sft", "Here it is `toolkit train`"),
    ],
)
def test_a_refusal_says_what_to_write(line: str, said: str) -> None:
    assert said in refusal(line)


def test_names_of_verbs_and_shardings_mean_ours() -> None:
    for verb in set(VERBS.values()):
        assert f"usage: toolkit {verb} " in python("-m", "toolkit", verb, "--help", cwd=ROOT, code=0).stdout
    for name, word in SHARDING_NAMES.items():
        with pytest.raises(StrategyError, match=rf"sharding '{name}' is unknown\. Here it is --sharding {word}\."):
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
        ({"load_in_4bit": True}, "adapter='qlora'"),
        ({"lora_target_modules": ["q_proj", "v_proj"]}, "lora_targets='q_proj,v_proj'"),
        ({"sample_packing": True}, "packing=True"),
        ({"train_on_inputs": True}, "mask_prompts=False"),
    ],
)
def test_python_has_the_same_hints(fields: dict[str, object], said: str) -> None:
    with pytest.raises(StrategyError, match=rf"launch has no argument .* Here it is {re.escape(said)}\. Known:"):
        tk.launch(**fields)  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="Leave it out, and upload"):
        tk.launch(push_to_hub=True)
