"""`Strategy`: how a model is trained, and the table of shardings. Imports no library."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from toolkit.config.fields import amount, choice, fields_table, validate
from toolkit.config.hints import SHARDING_NAMES
from toolkit.config.tables import ATTENTIONS, OPTIMIZERS, PRECISIONS
from toolkit.config.unknown_names import by_name
from toolkit.core.display import Result, Table
from toolkit.core.errors import StrategyError, nearest
from toolkit.core.units import ceil_div

OFFLOADS = ("none", "optimizer", "cpu", "nvme", "superoffload")
ADAPTERS = ("none", "lora", "dora", "qlora", "qlora8")
PRECISION_WORDS = ("auto", *PRECISIONS, "fp8")
ATTENTION_WORDS = ("auto", *ATTENTIONS)
GRAD_ACCUM_DTYPES = ("auto", "fp32", "bf16", "fp16")
ACTIVATION_CHECKPOINTINGS = ("auto", "none", "selective", "attention", "full", "every:K")
MLP_TILES = ("none", "auto", "K")
UNUSED_PARAMETERS = ("refuse", "find")
PP_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "zero_bubble": "InterleavedZeroBubble",
}
"""Schedule of a pipeline → its class in torch, without `Schedule`; these names are aliases."""
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
OPTIMIZER_WORDS = (*OPTIMIZERS, "adamw8bit", "adafactor")

LATER: dict[str, tuple[str, ...]] = {
    "offload": ("nvme", "superoffload"),
    "precision": ("fp8",),
    "optimizer": ("adamw8bit", "adafactor"),
}
"""Values that have a name already and no engine yet."""

BUCKETS = ("bucket_elements", "gather_bucket_elements", "live_elements")
"""Sizes of communication buffers, and of what stays gathered."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """A row of the table: a sharding word, the engine that runs it, and the values that it supports of each field."""

    word: str
    engine: str
    """The module in `toolkit.engines`, or the name that an engine from elsewhere is registered under."""
    shards: str
    """The states that are sharded, as text."""
    aliases: tuple[str, ...] = ()
    """Its names in FSDP1."""
    offload: tuple[str, ...] = ("none",)
    adapter: tuple[str, ...] = ("none", "lora", "dora", "qlora")
    precision: tuple[str, ...] = ("auto", *PRECISIONS)
    grad_accum_dtype: tuple[str, ...] = ("auto",)
    overlap_comm: tuple[str, ...] = ("auto",)
    unused_parameters: tuple[str, ...] = ("refuse",)
    buckets: tuple[str, ...] = ()
    """The fields of `BUCKETS` that it takes: the others have no such buffer there."""
    data_parallel: str = "shard"
    """Relation of data-parallel ranks: `none` (there is one), `replicate`, `shard`, or `hybrid`: groups of shards."""
    smaller: tuple[str, ...] = ("fsdp", "zero3")
    """Shardings that hold less on a rank, the one that holds least first."""
    usual: bool = False
    """Whether it represents its engine in views with one sharding of each engine."""

    @property
    def hybrid(self) -> bool:
        """Whether it needs `dp_replicate` of at least 2, which no other sharding takes."""
        return self.data_parallel == "hybrid"


_ddp = partial(Sharding, engine="ddp", adapter=ADAPTERS, unused_parameters=UNUSED_PARAMETERS)
_zero = partial(
    Sharding,
    engine="deepspeed",
    offload=("none", "optimizer"),
    grad_accum_dtype=GRAD_ACCUM_DTYPES,
    overlap_comm=("auto", "on", "off"),
    buckets=BUCKETS[:2],
)
_fsdp = partial(Sharding, engine="fsdp", offload=("none", "cpu"), unused_parameters=UNUSED_PARAMETERS)
_ALL = "optimizer states, gradients, parameters"

SHARDINGS: dict[str, Sharding] = {
    row.word: row
    for row in (
        _ddp(word="none", shards="nothing, one process", data_parallel="none", smaller=()),
        _ddp(
            word="ddp",
            shards="nothing, every rank holds all",
            aliases=("NO_SHARD",),
            data_parallel="replicate",
            buckets=BUCKETS[:1],
            usual=True,
        ),
        _zero(word="zero1", shards="optimizer states", overlap_comm=("auto", "off")),
        _zero(word="zero2", shards="optimizer states, gradients"),
        _zero(word="zero3", shards=_ALL, offload=("none", "optimizer", "cpu"), buckets=BUCKETS, smaller=(), usual=True),
        _fsdp(word="fsdp", shards=_ALL, aliases=("FULL_SHARD",), smaller=(), usual=True),
        _fsdp(
            word="fsdp_grad_op",
            shards="optimizer states, gradients; parameters between steps",
            aliases=("SHARD_GRAD_OP",),
        ),
        _fsdp(
            word="hsdp",
            shards="all as fsdp inside a group, groups replicate",
            aliases=("HYBRID_SHARD",),
            data_parallel="hybrid",
        ),
    )
}


def usual_shardings() -> list[str]:
    """Return one sharding of each engine, in the order of the table."""
    first: dict[str, str] = {}
    for row in sorted(SHARDINGS.values(), key=lambda row: not row.usual):
        first.setdefault(row.engine, row.word)
    return [word for word in SHARDINGS if word in first.values()]


def sharding_word(word: str) -> str:
    """Return the sharding of a word or an alias, in any case: `"FULL_SHARD"` → `"fsdp"`.

    Raises:
        StrategyError: for an unknown word, with the nearest known one.
    """
    key = word.strip().lower() if isinstance(word, str) else ""
    if key in SHARDINGS:
        return key
    names = {alias.lower(): row.word for row in SHARDINGS.values() for alias in row.aliases}
    if key in names:
        return names[key]
    aliases = [alias.upper() for alias in names]
    meant = SHARDING_NAMES.get(key)
    near = f" Here it is sharding {meant!r}." if meant else nearest(key, [*SHARDINGS, *aliases])
    raise StrategyError(
        f"sharding {word!r} is unknown.{near} Known: {', '.join(SHARDINGS)}; aliases: {', '.join(aliases)}."
    )


def schedule_word(word: str) -> str:
    """Return the schedule of a word or of a class of torch, in any case: `"ScheduleGPipe"` → `"gpipe"`. Others stay as they are.

    Raises:
        StrategyError: for a schedule with stages that lie on the ranks in a V.
    """
    key = word.strip().lower().removeprefix("schedule") if isinstance(word, str) else word
    if key in map(str.lower, V_SCHEDULES):
        raise StrategyError(
            f"pp_schedule {word!r} needs the first and the last stage on one rank, and here rank r holds stages r, r + pp, …. "
            "Choose pp_schedule 'zero_bubble'."
        )
    return next((own for own, name in PP_SCHEDULES.items() if key in (own, name.lower())), word)


@by_name
@dataclass(frozen=True, kw_only=True)
class Strategy(Result):
    """How a model is trained. The same words in Python, the shell, JSON and YAML.

    Raises:
        StrategyError: for a value that is unknown or not available yet, and for a combination that no engine can run.
    """

    sharding: str = choice("none", SHARDINGS, "states that are sharded over ranks; FSDP1's names are aliases")
    offload: str = choice(
        "none", OFFLOADS, "states in host memory between their uses; cpu: parameters too", LATER["offload"]
    )
    adapter: str = choice("none", ADAPTERS, "train all weights (none), or a PEFT adapter over frozen ones")
    precision: str = choice(
        "auto",
        PRECISION_WORDS,
        "auto: bf16 where it is native, else fp16 on a GPU, fp32 on a CPU; bf16 and fp16 keep fp32 masters",
        LATER["precision"],
    )
    grad_accum_dtype: str = choice(
        "auto",
        GRAD_ACCUM_DTYPES,
        "zero1-3: dtype of gradient sums; auto: fp32; the compute dtype takes half the bytes, and rounds each sum",
    )
    """The losses of fp32 and bf16 over 200 steps of 8 micro-batches each differ by 0.65% at most, by 0.22% in the last 20
    (benchmarks/results/grad_accum.md)."""
    overlap_comm: str = choice(
        "auto",
        ("auto", "on", "off"),
        "zero2, zero3: reduce gradients during the backward; takes a second bucket; auto: zero3 on a GPU",
    )
    bucket_elements: int | None = amount(
        None,
        "ddp, zero1-3: gradient elements in one reduction; open: 25 MiB, or the square of the hidden size",
        least=1,
    )
    gather_bucket_elements: int | None = amount(
        None,
        "zero1-3: parameter elements in one gather; open: 0.9 to 1 times the square of the hidden size",
        least=1,
    )
    live_elements: int | None = amount(
        None, "zero3: parameter elements that stay gathered for their next use; open: 1e9, a small model whole", least=1
    )
    unused_parameters: str = choice(
        "refuse",
        UNUSED_PARAMETERS,
        "find: parameters may get a gradient in some steps only, under ddp on some ranks only; costs time in each step",
    )
    attention: str = choice("auto", ATTENTION_WORDS, "auto: the best installed kernel for this dtype and device")
    activation_checkpointing: str = choice(
        "auto",
        ACTIVATION_CHECKPOINTINGS,
        "full: recompute each layer in the backward; attention: all but attention; selective: nor every second product; "
        "every:2: every second layer; auto: train takes the fastest that leaves 5%% of the memory, all else full",
    )
    activation_offload: bool = amount(False, "recomputed layers' inputs wait for the backward in host memory")
    loss: str = choice(
        "auto",
        ("auto", "chunked", "whole"),
        "chunked: the head computes the loss, without whole logits; auto: train takes it where those are large, all else whole",
    )
    mlp_tiles: str = choice(
        "none",
        MLP_TILES,
        "compute each MLP in K pieces of a row, recomputed in the backward; auto: pieces of the hidden size",
    )
    compile: bool = amount(False, "compile each block of the model; not with zero3, --tp, --ep, qlora")
    dp_replicate: int = amount(1, "hsdp: groups, each with a whole sharded copy", least=1)
    tp: int = amount(1, "tensor parallelism: ranks of each matrix product; with none or fsdp", least=1)
    tp_sequence: bool = amount(
        False, "between the products of a layer, each rank of a tp group holds a part of the tokens", needs="tp"
    )
    cp: int = amount(1, "context parallelism: ranks that share each sequence", least=1)
    cp_attention: str = choice(
        "auto",
        ("auto", "ulysses", "gather"),
        "ulysses: exchange heads; gather: all keys and values on each rank; auto: ulysses where cp divides the heads",
    )
    ep: int = amount(1, "expert parallelism: ranks that share the experts of each layer", least=1)
    pp: int = amount(
        1,
        "pipeline parallelism: ranks that each hold some layers; with none, ddp, and fsdp or hsdp, which keep a stage whole within "
        "a step, and shard it between steps (ZeRO-1)",
        least=1,
    )
    pp_schedule: str = choice(
        "1f1b",
        PP_SCHEDULES,
        "order of a step's micro-batches, which are its accumulation; the last three: several stages on each rank; torch's names, "
        "as Interleaved1F1B, are aliases",
    )
    pp_stages_per_rank: int | None = amount(
        None, "stages on each rank; open: 2 for schedules of several, otherwise 1", needs="pp", least=1
    )
    lora_rank: int = amount(16, "rank of the adapter's matrices", needs="adapter", least=1)
    lora_alpha: int | None = amount(
        None, "scale of the adapter times its rank; open: twice the rank", needs="adapter", least=1
    )
    lora_dropout: float = amount(
        0.0, "share of an adapter's inputs dropped in training", needs="adapter", least=0, below=1
    )
    lora_targets: str = amount(
        "all-linear", "modules with an adapter: all-linear (not the head), or names with commas", needs="adapter"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "sharding", sharding_word(self.sharding))
        object.__setattr__(self, "mlp_tiles", str(self.mlp_tiles))  # Python and JSON may give a number
        object.__setattr__(self, "pp_schedule", schedule_word(self.pp_schedule))
        if self.cp_attention == "ring":
            raise StrategyError(
                "cp_attention 'ring' is not available: 'gather' sends the same keys and values at once, and 'ulysses' fewer bytes. "
                "Choose cp_attention 'auto'."
            )
        validate(self)
        self._check_table()

    def _check_table(self) -> None:
        row = SHARDINGS[self.sharding]
        for name in ("offload", "adapter", "precision", "grad_accum_dtype", "overlap_comm", "unused_parameters"):
            value, supported = getattr(self, name), getattr(row, name)
            if value not in supported:
                able = [word for word, other in SHARDINGS.items() if value in getattr(other, name)]
                raise StrategyError(
                    f"sharding {self.sharding!r} cannot run with {name} {value!r}: it runs with "
                    f"{', '.join(supported)}. {name} {value!r} runs with sharding {', '.join(able)}."
                )
        for name in BUCKETS:
            if getattr(self, name) is not None and name not in row.buckets:
                able = [word for word, other in SHARDINGS.items() if name in other.buckets]
                raise StrategyError(
                    f"sharding {self.sharding!r} takes no {name}: it has no such buffer. Leave it out, or choose sharding "
                    f"{', '.join(able)}."
                )
        if row.hybrid and self.dp_replicate < 2:
            raise StrategyError(
                f"sharding {self.sharding!r} needs dp_replicate of at least 2, the number of groups that each hold a "
                f"whole sharded copy; got {self.dp_replicate}. Try dp_replicate 2, or sharding 'fsdp' for one group."
            )
        if not row.hybrid and self.dp_replicate > 1:
            raise StrategyError(
                f"dp_replicate {self.dp_replicate} belongs to sharding 'hsdp', not to {self.sharding!r}. "
                "Choose sharding 'hsdp', or leave dp_replicate at 1."
            )

    @property
    def engine(self) -> str:
        """The module in `toolkit.engines` that runs it."""
        return SHARDINGS[self.sharding].engine

    @property
    def label(self) -> str:
        """Sharding and degrees of parallelism: `fsdp`, `fsdp, tp 2`."""
        return ", ".join(
            [
                self.sharding,
                *(f"{name} {getattr(self, name)}" for name in ("tp", "cp", "ep", "pp") if getattr(self, name) > 1),
            ]
        )

    @property
    def single_process(self) -> bool:
        """Whether it runs in one process."""
        return self.least_ranks == 1

    @property
    def least_ranks(self) -> int:
        """The fewest ranks on which every dimension does something."""
        kind = SHARDINGS[self.sharding].data_parallel
        copy = ceil_div((1 if kind == "none" else 2) * self.tp * self.cp, self.ep) * self.ep  # ranks of one copy
        return copy * (self.dp_replicate if kind == "hybrid" else 1) * self.pp

    @property
    def token_parts(self) -> int:
        """Ranks over which a row's tokens are divided between the products of a layer."""
        return self.cp * (self.tp if self.tp_sequence else 1)

    @property
    def recomputed_share(self) -> float:
        """The share of the layers that the backward computes again, in whole or in part."""
        word, _, every = self.activation_checkpointing.partition(":")
        return 1 / int(every) if every else float(word != "none")

    @property
    def quantized(self) -> bool:
        """Whether the frozen weights are stored in 4 or 8 bits."""
        return self.adapter in ("qlora", "qlora8")

    def tables(self) -> list[Table]:
        return [fields_table("Strategy", self)]


def catalog() -> dict[str, Strategy]:
    """Return a Strategy for each sharding and offload, by the name of its file in `accelerate_configs/`."""
    return {
        row.word + (f"_offload_{offload}" if offload != "none" else ""): Strategy(
            sharding=row.word, offload=offload, dp_replicate=2 if row.hybrid else 1
        )
        for row in SHARDINGS.values()
        for offload in row.offload
        if offload not in LATER["offload"]
    }
