"""Strategy and TrainConfig: the vocabulary, its errors, and the flags that spell it."""

import argparse
import dataclasses
import json

import pytest

from toolkit.cli.parser import build_parser
from toolkit.cli.planning_commands import read, read_batch, strategies
from toolkit.config.fields import from_dict
from toolkit.config.flags import Parser, add_flags, given, read_assignments, to_flags
from toolkit.config.strategy import ADAPTERS, SHARDINGS, Strategy
from toolkit.config.strategy import PRECISION_WORDS as PRECISIONS
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import StrategyError

VALID = [
    Strategy(),
    Strategy(sharding="zero3", offload="cpu", adapter="qlora", precision="bf16"),
    Strategy(sharding="hsdp", dp_replicate=2, adapter="dora", lora_rank=8, lora_targets="q_proj,v_proj"),
    Strategy(sharding="none", adapter="qlora8", attention="eager", activation_checkpointing="none"),
]


@pytest.mark.parametrize(
    ("alias", "word"),
    [("FULL_SHARD", "fsdp"), ("shard_grad_op", "fsdp_grad_op"), ("NO_SHARD", "ddp"), ("Zero3", "zero3")],
)
def test_aliases_are_taken_in_any_case(alias: str, word: str) -> None:
    assert Strategy(sharding=alias).sharding == word


def test_hybrid_shard_is_hsdp_with_groups() -> None:
    assert Strategy(sharding="HYBRID_SHARD", dp_replicate=2).sharding == "hsdp"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sharding": None}, "sharding None is unknown"),
        ({"adapter": "lorra"}, "Did you mean 'lora'"),
        ({"sharding": "ddp", "offload": "cpu"}, "runs with sharding zero3"),
        ({"sharding": "zero2", "offload": "cpu"}, "it runs with none, optimizer"),
        ({"sharding": "fsdp", "dp_replicate": 2}, "belongs to sharding 'hsdp'"),
        ({"adapter": "lora", "lora_rank": 0}, "at least 1"),
        ({"sharding": "fsdp", "grad_accum_dtype": "bf16"}, "runs with sharding zero1, zero2, zero3"),
    ],
)
def test_what_cannot_be_is_said_with_the_fix(fields: dict[str, object], said: str) -> None:
    with pytest.raises(StrategyError) as refused:
        Strategy(**fields)  # type: ignore[arg-type]
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("owner", "fields"),
    [
        (Strategy, {"precision": "fp8"}),
        (Strategy, {"offload": "nvme"}),
        (Strategy, {"offload": "superoffload"}),
        (TrainConfig, {"optimizer": "adamw8bit"}),
        (TrainConfig, {"optimizer": "adafactor"}),
    ],
)
def test_later_values_say_so_and_nothing_else(owner: type, fields: dict[str, object]) -> None:
    ((name, value),) = fields.items()
    with pytest.raises(StrategyError) as refused:
        owner(**fields)
    shown = value if isinstance(value, int) else repr(value)
    assert str(refused.value).startswith(f"{name} {shown} is not available yet. Choose one of ")


@pytest.mark.parametrize(
    "fields",
    [
        {"micro_batch": 0},
        {"accumulation": -1},
        {"seq_len": 1},
        {"steps": 0},
        {"warmup": -1},
        {"max_grad_norm": float("nan")},
        {"max_grad_norm": -1.0},
        {"lr": 0.0},
        {"lr": float("inf")},
        {"micro_batch": True},
    ],
)
def test_loops_out_of_range_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(StrategyError, match=next(iter(fields))):
        TrainConfig(**fields)  # type: ignore[arg-type]


def test_every_cell_of_the_table_is_made_or_refused_in_one_sentence() -> None:
    made = 0
    for word, row in SHARDINGS.items():
        for adapter in ADAPTERS:
            for precision in PRECISIONS:
                fields = {"sharding": word, "adapter": adapter, "precision": precision}
                fields["dp_replicate"] = 2 if row.hybrid else 1  # type: ignore[assignment]
                if adapter in row.adapter and precision in row.precision:
                    Strategy(**fields)  # type: ignore[arg-type]
                    made += 1
                else:
                    with pytest.raises(StrategyError, match=r"\.$"):
                        Strategy(**fields)  # type: ignore[arg-type]
    assert made == sum(len(row.adapter) * len(row.precision) for row in SHARDINGS.values())


@pytest.mark.parametrize("strategy", VALID)
def test_flags_and_json_spell_the_same(strategy: Strategy) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Strategy, TrainConfig)
    train_config = TrainConfig(steps=7, lr=1e-4)
    flags = parser.parse_args(to_flags(strategy, train_config))
    assert from_dict(Strategy, given(flags, Strategy)) == strategy
    assert from_dict(TrainConfig, given(flags, TrainConfig)) == train_config
    assert from_dict(Strategy, json.loads(strategy.to_json())) == strategy


@pytest.mark.parametrize(
    ("alias", "field"),
    [
        ("gradient_accumulation_steps", "accumulation"),
        ("per_device_train_batch_size", "micro_batch"),
        ("learning_rate", "lr"),
        ("max_steps", "steps"),
    ],
)
def test_four_aliases_of_transformers_are_flags_and_nothing_else(alias: str, field: str) -> None:
    parser = Parser()
    add_flags(parser, TrainConfig)
    for spelled in (alias, alias.replace("_", "-")):
        assert given(parser.parse_args([f"--{spelled}", "3"]), TrainConfig) == {field: 3}
    assert f"--{alias.replace('_', '-')}" in parser.format_help()
    with pytest.raises(StrategyError, match=f"TrainConfig has no field {alias!r}"):
        from_dict(TrainConfig, {alias: 3})


def test_every_field_is_a_flag_that_binds_nothing_by_itself() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Strategy, TrainConfig)
    flags = parser.parse_args([])
    for owner in (Strategy, TrainConfig):
        assert given(flags, owner) == {}
        for field in dataclasses.fields(owner):
            assert hasattr(flags, field.name)


def test_assignments_may_hold_commas() -> None:
    assigned = read_assignments(
        "fsdp,lora_targets=q_proj,v_proj, micro-batch=8,", Strategy, TrainConfig, alone="sharding"
    )
    assert assigned == {"sharding": "fsdp", "lora_targets": "q_proj,v_proj", "micro_batch": 8}


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(StrategyError, match="Did you mean 'sharding'"):
        from_dict(Strategy, {"shardin": "ddp"})


def test_results_show_themselves() -> None:
    strategy = Strategy(sharding="zero2")
    assert "zero2" in str(strategy)
    assert '<th scope="col"' in strategy._repr_html_()


@pytest.mark.parametrize("value", [2**63, -(10**400), 10**5_000], ids=["large", "negative", "unspellable"])
def test_no_integer_has_more_than_64_bits(value: int) -> None:
    """A float cannot hold it, and Python may not even spell it."""
    for fields in ({"steps": value}, {"lr": value}, {"micro_batch": value}):
        with pytest.raises(StrategyError, match=r" of [\d]+ bits: expected (int|float) of at most 63 bits"):
            TrainConfig(**fields)


def test_of_several_shardings_a_buffers_size_is_for_those_that_have_it() -> None:
    def asked(words: str) -> list[Strategy]:
        return strategies(build_parser().parse_args(["compare", "--sharding", words, "--live-elements", "1"]), "")

    assert [(one.sharding, one.live_elements) for one in asked("ddp,zero3")] == [("ddp", None), ("zero3", 1)]
    for words in ("ddp,fsdp", "ddp"):
        with pytest.raises(StrategyError, match="takes no live_elements"):
            asked(words)


@pytest.mark.parametrize(
    ("given", "rows"),
    [((), (1, 4)), (("--micro-batch", "4"), (4, 1)), (("--accumulation", "1"), (4, 1)), (("--pp", "6"), (1, 6))],
)
def test_a_pipeline_takes_its_own_default_rows_only_where_no_rows_are_given(
    given: tuple[str, ...], rows: tuple[int, int]
) -> None:
    """A value that equals a default counts as given, and the command line of a configuration says it."""
    parser = Parser()
    add_flags(parser, Strategy)
    add_flags(parser, TrainConfig)
    strategy = read(Strategy, flags := parser.parse_args(["--pp", "2", *given]))
    train_config = read_batch(flags, strategy)
    assert (train_config.micro_batch, train_config.accumulation) == rows
    again = parser.parse_args(to_flags(strategy, train_config))
    assert read_batch(again, strategy) == train_config
