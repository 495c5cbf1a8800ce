"""What a user asks for: `Strategy`, `Loop`, the flags that spell both, and one table of what runs. Knows no library."""

from __future__ import annotations

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from toolkit.errors import StrategyError, nearest
from toolkit.show import Shown, Table

OFFLOADS = ("none", "optimizer", "cpu", "nvme", "superoffload")
ADAPTERS = ("none", "lora", "dora", "qlora", "qlora8")
PRECISIONS = ("auto", "fp32", "bf16", "fp16", "bf16_pure", "fp8")
ATTENTIONS = ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex")
ACTIVATION_CHECKPOINTINGS = ("full", "none", "selective")
OPTIMIZERS = ("adamw", "adamw8bit", "adafactor")

LATER: dict[str, tuple[str, ...]] = {
    "offload": ("nvme", "superoffload"),
    "precision": ("fp8",),
    "activation_checkpointing": ("selective",),
    "optimizer": ("adamw8bit", "adafactor"),
}
"""Values that have a name already and no engine yet. Degrees above 1 of `LATER_DEGREES` belong to them."""

LATER_DEGREES = ("tensor", "context", "expert", "pipeline")


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """A row of the table: a sharding word, the engine that runs it, and the values that it supports of each field."""

    word: str
    engine: str
    """The module in `toolkit.engines`."""
    shards: str
    """What each rank holds only a part of, in words."""
    aliases: tuple[str, ...] = ()
    """What FSDP1 calls it."""
    offload: tuple[str, ...] = ("none",)
    adapter: tuple[str, ...] = ("none", "lora", "dora", "qlora")
    precision: tuple[str, ...] = ("auto", "fp32", "bf16", "fp16", "bf16_pure")
    replicate: bool = False
    """Whether it needs `replicate` > 1 (and no other takes it)."""


SHARDINGS: dict[str, Sharding] = {
    row.word: row
    for row in (
        Sharding(word="none", engine="ddp", shards="nothing, one process", adapter=ADAPTERS),
        Sharding(
            word="ddp", engine="ddp", shards="nothing, every rank holds all", aliases=("NO_SHARD",), adapter=ADAPTERS
        ),
        Sharding(word="zero1", engine="deepspeed", shards="optimizer states", offload=("none", "optimizer")),
        Sharding(word="zero2", engine="deepspeed", shards="optimizer states, gradients", offload=("none", "optimizer")),
        Sharding(
            word="zero3",
            engine="deepspeed",
            shards="optimizer states, gradients, parameters",
            offload=("none", "optimizer", "cpu"),
        ),
        Sharding(
            word="fsdp",
            engine="fsdp",
            shards="optimizer states, gradients, parameters",
            aliases=("FULL_SHARD",),
            offload=("none", "cpu"),
        ),
        Sharding(
            word="fsdp_grad_op",
            engine="fsdp",
            shards="optimizer states, gradients; parameters between steps",
            aliases=("SHARD_GRAD_OP",),
            offload=("none", "cpu"),
        ),
        Sharding(
            word="hsdp",
            engine="fsdp",
            shards="all as fsdp inside a group, groups replicate",
            aliases=("HYBRID_SHARD",),
            offload=("none", "cpu"),
            replicate=True,
        ),
    )
}

ALIASES: dict[str, str] = {alias.lower(): row.word for row in SHARDINGS.values() for alias in row.aliases}


def sharding_word(word: str) -> str:
    """The sharding that a word or an alias names, in any case: `"FULL_SHARD"` → `"fsdp"`.

    Raises:
        StrategyError: for an unknown word, with the nearest known one.
    """
    key = str(word).strip().lower()
    if key in SHARDINGS:
        return key
    if key in ALIASES:
        return ALIASES[key]
    known = [*SHARDINGS, *ALIASES]
    raise StrategyError(
        f"sharding {word!r} is unknown.{nearest(key, known)} Known: {', '.join(SHARDINGS)}; "
        f"aliases: {', '.join(alias.upper() for alias in ALIASES)}."
    )


def _choose(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise StrategyError(f"{name} {value!r} is unknown.{nearest(value, known)} Known: {', '.join(known)}.")
    if value in LATER.get(name, ()):
        raise StrategyError(f"{name} {value!r} is not available yet.")


def _count(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise StrategyError(f"{name} {value!r}: expected a whole number of at least {least}.")


@dataclass(frozen=True, kw_only=True)
class Strategy(Shown):
    """How a model is trained. The same words in Python, the shell, JSON and YAML.

    Raises:
        StrategyError: for a value that is unknown or not available yet, and for a combination that no engine can run.
    """

    sharding: str = field(default="none", metadata={"values": tuple(SHARDINGS)})
    """Who holds what: see `SHARDINGS`. FSDP1's names are taken as aliases."""
    offload: str = field(default="none", metadata={"values": OFFLOADS})
    """What lives in host memory between its uses: `optimizer` states, or `cpu`: parameters too."""
    adapter: str = field(default="none", metadata={"values": ADAPTERS})
    """What is trained: all weights (`none`), or a PEFT adapter over frozen ones."""
    precision: str = field(default="auto", metadata={"values": PRECISIONS})
    """`auto`: bf16 where the device has it natively, else fp16 on a GPU, fp32 on a CPU. bf16 and fp16 keep fp32 masters."""
    attention: str = field(default="auto", metadata={"values": ATTENTIONS})
    """The attention kernel. `auto`: the best one that is installed and works for this dtype and device."""
    activation_checkpointing: str = field(default="full", metadata={"values": ACTIVATION_CHECKPOINTINGS})
    """`full`: recompute each layer in the backward."""
    tensor: int = 1
    """Degree of tensor parallelism."""
    context: int = 1
    """Degree of context (sequence) parallelism."""
    expert: int = 1
    """Degree of expert parallelism."""
    pipeline: int = 1
    """Number of pipeline stages."""
    replicate: int = 1
    """hsdp: the number of groups that each hold a whole sharded copy."""
    lora_rank: int = 16
    """Rank of the adapter's matrices; its alpha is twice that."""
    lora_targets: str = "all-linear"
    """Which modules get an adapter: `all-linear` (the head excepted), or names separated by commas."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sharding", sharding_word(self.sharding))
        for name in ("offload", "adapter", "precision", "attention", "activation_checkpointing"):
            _choose(name, getattr(self, name), _values(Strategy, name))
        for name in (*LATER_DEGREES, "replicate", "lora_rank"):
            _count(name, getattr(self, name))
        for name in LATER_DEGREES:
            if getattr(self, name) > 1:
                raise StrategyError(f"{name} {getattr(self, name)} is not available yet.")
        self._check_table()

    def _check_table(self) -> None:
        row = SHARDINGS[self.sharding]
        for name in ("offload", "adapter", "precision"):
            value, supported = getattr(self, name), getattr(row, name)
            if value not in supported:
                able = [word for word, other in SHARDINGS.items() if value in getattr(other, name)]
                raise StrategyError(
                    f"sharding {self.sharding!r} cannot run with {name} {value!r}: it runs with "
                    f"{', '.join(supported)}. {name} {value!r} runs with sharding {', '.join(able)}."
                )
        if row.replicate and self.replicate < 2:
            raise StrategyError(
                f"sharding {self.sharding!r} needs replicate of at least 2, the number of groups that each hold a "
                f"whole sharded copy; got {self.replicate}. Try replicate 2, or sharding 'fsdp' for one group."
            )
        if not row.replicate and self.replicate > 1:
            raise StrategyError(
                f"replicate {self.replicate} belongs to sharding 'hsdp', not to {self.sharding!r}. "
                "Choose sharding 'hsdp', or leave replicate at 1."
            )

    @property
    def engine(self) -> str:
        """The module in `toolkit.engines` that runs it."""
        return SHARDINGS[self.sharding].engine

    @property
    def quantized(self) -> bool:
        """Whether the frozen weights are stored in 4 or 8 bits."""
        return self.adapter in ("qlora", "qlora8")

    def tables(self) -> list[Table]:
        return [_fields_table("Strategy", self)]


@dataclass(frozen=True, kw_only=True)
class Loop(Shown):
    """What one step is, and how many there are.

    Raises:
        StrategyError: for a value out of its range.
    """

    micro_batch: int = 4
    """Sequences that a rank takes through the model at once."""
    accumulation: int = 1
    """Micro-batches before one optimizer step. Global batch = micro_batch × accumulation × data-parallel ranks."""
    seq_len: int = 256
    """Tokens of a sequence."""
    max_grad_norm: float = 1.0
    """The global gradient norm is clipped to this; 0 clips nothing."""
    optimizer: str = field(default="adamw", metadata={"values": OPTIMIZERS})
    """The optimizer, with torch's defaults."""
    lr: float | None = None
    """Peak learning rate. Left open: 1e-3 for the embedded model, 2e-4 for an adapter, 2e-5 for all weights."""
    warmup: int = 5
    """Steps in which the learning rate rises linearly; then it falls as a cosine, towards 0."""
    steps: int = 100
    """Optimizer steps."""
    seed: int = 0
    """Of the data's order, dropout, and an adapter's first weights."""

    def __post_init__(self) -> None:
        for name in ("micro_batch", "accumulation", "seq_len", "steps"):
            _count(name, getattr(self, name))
        for name in ("warmup", "seed"):
            _count(name, getattr(self, name), least=0)
        if self.seq_len < 2:
            raise StrategyError(f"seq_len {self.seq_len}: expected at least 2, since each token predicts the next.")
        if not (math.isfinite(self.max_grad_norm) and self.max_grad_norm >= 0):
            raise StrategyError(f"max_grad_norm {self.max_grad_norm}: expected a number of at least 0.")
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise StrategyError(f"lr {self.lr}: expected a number above 0.")
        _choose("optimizer", self.optimizer, OPTIMIZERS)

    def tables(self) -> list[Table]:
        return [_fields_table("Loop", self)]


Owner = TypeVar("Owner")


def _values(owner: type[Any], name: str) -> tuple[str, ...]:
    found: tuple[str, ...] = next(f.metadata.get("values", ()) for f in dataclasses.fields(owner) if f.name == name)
    return found


def _fields_table(title: str, owner: Any) -> Table:
    rows = [
        (f.name, "open" if getattr(owner, f.name) is None else getattr(owner, f.name))
        for f in dataclasses.fields(owner)
    ]
    return Table(title=title, columns=("field", "value"), rows=rows)


def catalog() -> dict[str, Strategy]:
    """One Strategy for each sharding and each offload that it supports, by the name of its file in `accelerate_configs/`."""
    return {
        row.word + (f"_offload_{offload}" if offload != "none" else ""): Strategy(
            sharding=row.word, offload=offload, replicate=2 if row.replicate else 1
        )
        for row in SHARDINGS.values()
        for offload in row.offload
        if offload not in LATER["offload"]
    }


def flag(name: str) -> str:
    """A field's flag: `"micro_batch"` → `"--micro-batch"`."""
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """A command line whose flags are written out whole, and whose mistakes are one sentence.

    Raises:
        StrategyError: for a flag or value that is not known, in place of a usage text and the interpreter's end.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> typing.NoReturn:
        raise StrategyError(f"{message}. See `{self.prog} --help`.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse what is not known where the flags are: a verb's own parser names the nearest of its flags."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = nearest(unknown[0], self._option_string_actions)
            raise StrategyError(f"{self.prog} does not know {unknown[0]!r}.{near} See `{self.prog} --help`.")
        return found, unknown


def add_flags(parser: argparse.ArgumentParser, *owners: type[Any], without: tuple[str, ...] = ()) -> None:
    """Give `parser` one flag for each field of dataclasses. A flag that is not given stays `None`, so that it binds nothing."""
    for owner in owners:
        group = parser.add_argument_group(owner.__name__)
        kinds = typing.get_type_hints(owner)
        for f in dataclasses.fields(owner):
            if f.name in without:
                continue
            kind, values = _plain(kinds[f.name]), f.metadata.get("values")
            told = (
                f"{f.metadata['help']} (default: {_default(f)})" if "help" in f.metadata else f"default: {_default(f)}"
            )
            if kind is bool:
                group.add_argument(flag(f.name), action=argparse.BooleanOptionalAction, default=None, help=told)
            else:
                shown = "|".join(values) if values else kind.__name__.upper()
                group.add_argument(flag(f.name), type=kind, metavar=shown, help=told)


def _plain(kind: Any) -> type[Any]:
    """The type of a field that may be left open: `float | None` → `float`."""
    if isinstance(kind, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    found: type[Any] = kind
    return found


def _default(f: dataclasses.Field[Any]) -> str:
    return "open" if f.default is None else str(f.default)


def given(flags: argparse.Namespace, owner: type[Any]) -> dict[str, Any]:
    """The fields of `owner` that were given as flags, with their values."""
    found = {f.name: getattr(flags, f.name, None) for f in dataclasses.fields(owner)}
    return {name: value for name, value in found.items() if value is not None}


def to_flags(*owners: Any) -> list[str]:
    """The shortest command line that says the same: only fields that differ from their defaults."""
    differing = {
        f.name: getattr(owner, f.name)
        for owner in owners
        for f in dataclasses.fields(owner)
        if getattr(owner, f.name) != f.default
    }
    return spell(differing)


def spell(values: Mapping[str, Any]) -> list[str]:
    """A command line that gives these fields these values."""
    words: list[str] = []
    for name, value in values.items():
        if value is True:
            words.append(flag(name))
        elif value is False:
            words.append("--no-" + flag(name).removeprefix("--"))
        else:
            words += [flag(name), str(value)]
    return words


def from_dict(owner: type[Owner], values: Mapping[str, Any]) -> Owner:
    """A Strategy or Loop from JSON.

    Raises:
        StrategyError: for a field that does not exist, with the nearest one, and for a value of another type.
    """
    known = [f.name for f in dataclasses.fields(owner)]  # type: ignore[arg-type]
    kinds = typing.get_type_hints(owner)
    for name, value in values.items():
        if name not in known:
            raise StrategyError(
                f"{owner.__name__} has no field {name!r}.{nearest(name, known)} Known: {', '.join(known)}."
            )
        kind = _plain(kinds[name])
        right = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) <= (kind is bool)
        if not right and not (value is None and kind != kinds[name]):
            raise StrategyError(f"{name} {value!r}: expected {kind.__name__}.")
    return owner(**values)
