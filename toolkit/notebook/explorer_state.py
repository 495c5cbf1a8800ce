"""The state of a panel: its controls' values and choices, and the equivalent shell command."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.fields import from_dict
from toolkit.config.flags import flag, other_values, spell
from toolkit.config.run_config import EMBEDDED
from toolkit.config.strategy import SHARDINGS, Strategy, usual_shardings
from toolkit.config.train_config import TrainConfig, pipeline_rows
from toolkit.core.glossary import meaning
from toolkit.devices.gpu_catalog import CARDS
from toolkit.devices.machine import Hardware, hardware
from toolkit.forecasting.finished_run import read_finished_run
from toolkit.models import ModelSpec, describe

HERE = "this machine"
SECOND = "against_"
"""Prefix of the names of the second strategy's controls."""

NODE = 8
"""Devices of a node, where there are more."""

USUAL_LENGTH = 4096
"""Tokens of a row at first, of a model that takes so many."""

SHARDED = ("sharding", "offload", "adapter", "precision", "attention", "activation_checkpointing")
BATCH_FIELDS = ("seq_len", "micro_batch")
CONTROLS = {
    "memory": ("model", "device", "devices", *SHARDED, *BATCH_FIELDS),
    "compare": ("model", "device", "devices", *SHARDED, *(SECOND + name for name in SHARDED), *BATCH_FIELDS),
    "timeline": ("model", "device", "devices", *SHARDED, *BATCH_FIELDS),
    "precision": ("model", "device", "precision", "adapter"),
}
"""Kind of panel → its controls: those that the answer depends on."""

LABELS = {
    "devices": ("devices", "number of devices, one rank each; more than eight are on nodes of eight"),
    "device": ("device", "the device of a rank: this machine's, or one of the catalog"),
    "model": ("model", "the trained model"),
    "seq_len": ("sequence length", ""),
    "micro_batch": ("micro-batch", ""),
}
"""Control → its label, and its help where that is not the field's. Another field's label is its name."""

METADATA = {field.name: field.metadata for owner in (Strategy, TrainConfig) for field in dataclasses.fields(owner)}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A control: its label, its help, and its values. Numbers are a slider, words a list."""

    name: str
    label: str
    help: str
    values: tuple[Any, ...]
    value: Any
    """The current value."""
    group: str = ""
    """The strategy that it belongs to, in a panel with two."""


@dataclass(frozen=True, kw_only=True)
class ExplorerState:
    """The controls' values, and the rest of the request."""

    models: Mapping[str, ModelSpec]
    here: Hardware
    here_name: str
    """The name of `here` among the choices."""
    implied: bool
    """Whether a shell command without a machine means `here`, too."""
    base: Strategy
    second: Strategy
    batch: TrainConfig
    values: Mapping[str, Any]
    """Control → value."""
    first_values: Mapping[str, Any]
    """The first values."""
    run: str | None = None
    """The folder of a run to show with the forecast."""

    @classmethod
    def begin(
        cls,
        kind: str,
        model: Any,
        on: Hardware | str | None,
        strategy: Strategy | None,
        train_config: TrainConfig | None,
        *,
        against: Strategy | None = None,
        run: Any = None,
    ) -> ExplorerState:
        """Return the state that `explore` was called with; a run's own values fill the gaps.

        Raises:
            ToolkitError: for a model, a machine or a run that is not known.
        """
        folder, implied = None if run is None else str(getattr(run, "folder", run)), on is None
        if folder is not None:
            finished = read_finished_run(folder)
            model = finished.model if model is None else model
            strategy, train_config = strategy or finished.strategy, train_config or finished.train_config
            if on is None:
                on = finished.hardware or hardware()
                on = dataclasses.replace(on, count=finished.ranks // on.nodes)
        several = model if isinstance(model, list | tuple) else [EMBEDDED if model is None else model]
        specs = [candidate if isinstance(candidate, ModelSpec) else describe(candidate) for candidate in several]
        machine = on if isinstance(on, Hardware) else hardware(on)
        base = strategy or (Strategy(sharding=_full_shardings()[0]) if machine.ranks > 1 else Strategy())
        second = against or dataclasses.replace(base, sharding=_compared_sharding(base, machine.ranks), dp_replicate=1)
        length = min(USUAL_LENGTH, specs[0].max_positions or USUAL_LENGTH)
        batch = train_config or from_dict(TrainConfig, {"seq_len": length, **pipeline_rows(base.pp)})
        here_name = machine.device.name  # this machine's own name is long
        if on is None or machine.device.kind == "cpu":
            here_name = HERE if on is None else "cpu"
        values: dict[str, Any] = {"model": specs[0].name, "device": here_name, "devices": machine.ranks}
        for name in [name for name in CONTROLS[kind] if name not in values]:
            owner = second if name.startswith(SECOND) else batch if name in BATCH_FIELDS else base
            values[name] = getattr(owner, name.removeprefix(SECOND))
        return cls(
            models={spec.name: spec for spec in specs},
            here=machine,
            here_name=here_name,
            implied=implied,
            base=base,
            second=second,
            batch=batch,
            values=values,
            first_values=dict(values),
            run=folder,
        )

    def but(self, **values: Any) -> ExplorerState:
        """Return the same state with other values."""
        return dataclasses.replace(self, values={**self.values, **values})

    @property
    def spec(self) -> ModelSpec:
        """The model's."""
        return self.models[self.values["model"]]

    @property
    def machine(self) -> Hardware:
        """So many of the chosen device, on nodes of eight."""
        count, nodes = self._nodes()
        if self.values["device"] == self.here_name:
            return dataclasses.replace(self.here, count=count, nodes=nodes)
        return hardware(self.machine_words)

    @property
    def machine_words(self) -> str:
        """As `hardware` takes it: a device by its name in the catalog, where it has one."""
        count, nodes = self._nodes()
        own, word = self.here.device, str(self.values["device"])
        if word == self.here_name:
            word = "cpu" if own.kind == "cpu" else own.key or f"<{own.name}, which the catalog lacks>"
        return (f"{nodes} nodes x " if nodes > 1 else "") + f"{count}x {word}"

    def _nodes(self) -> tuple[int, int]:
        devices = self.values["devices"]
        if devices == self.here.ranks:
            return self.here.count, self.here.nodes
        cpu = self.values["device"] == self.here_name and self.here.device.kind == "cpu"
        return (devices, 1) if cpu or devices % NODE else (NODE, devices // NODE)

    def fields(self, owner: Strategy | TrainConfig, before: str = "") -> dict[str, Any]:
        """Return a dataclass's fields as the controls have them, valid or not."""
        fields = {name: self.values.get(before + name, value) for name, value in dataclasses.asdict(owner).items()}
        if "sharding" in fields:
            row = SHARDINGS.get(fields["sharding"])
            fields["dp_replicate"] = max(2, fields["dp_replicate"]) if row and row.hybrid else 1
        return fields

    @property
    def strategy(self) -> Strategy:
        """The first strategy.

        Raises:
            StrategyError: for what no engine can run.
        """
        return from_dict(Strategy, self.fields(self.base))

    @property
    def against(self) -> Strategy:
        """The second strategy.

        Raises:
            StrategyError: for what no engine can run.
        """
        return from_dict(Strategy, self.fields(self.second, SECOND))

    @property
    def strategies(self) -> list[Strategy]:
        """One strategy of each engine.

        Raises:
            StrategyError: for what no engine can run.
        """
        fields = {**self.fields(self.base), "offload": "none", "dp_replicate": 1}
        return [from_dict(Strategy, {**fields, "sharding": word}) for word in usual_shardings()]

    @property
    def train_config(self) -> TrainConfig:
        """Batch and lengths.

        Raises:
            StrategyError: for a value out of its range.
        """
        return from_dict(TrainConfig, self.fields(self.batch))


def _compared_sharding(strategy: Strategy, ranks: int) -> str:
    """Return a sharding to compare with: another one that shards, else one that replicates."""
    able = _full_shardings()[::-1] if ranks > 1 else _full_shardings()
    return next((word for word in (*able, *usual_shardings()) if word != strategy.sharding), strategy.sharding)


def _full_shardings() -> list[str]:
    """Return the usual shardings that shard everything."""
    return [word for word in usual_shardings() if not SHARDINGS[word].smaller]


def choices(kind: str, state: ExplorerState) -> list[Choice]:
    """Return the controls of a panel, in order, without those that have a single value."""
    choices_ = [_choice(name, state, kind) for name in CONTROLS[kind]]
    return [choice for choice in choices_ if len(choice.values) > 1]


def _choice(name: str, state: ExplorerState, kind: str) -> Choice:
    value, field = state.values[name], name.removeprefix(SECOND)
    label, help = LABELS.get(name, (field.replace("_", " "), ""))
    if name == "model":
        values: tuple[Any, ...] = tuple(state.models)
    elif name == "device":
        values = tuple(dict.fromkeys((state.here_name, *CARDS)))
    elif name == "devices":
        values = _counts(1, 512, state.here.ranks, value)
    elif name == "micro_batch":
        values = _counts(1, 64, state.batch.micro_batch, value)
    elif name == "seq_len":  # without lengths that the model refuses
        longest = min(131_072, max((spec.max_positions or 131_072) for spec in state.models.values()))
        values = _counts(min(128, longest), longest, state.batch.seq_len, value)
    else:
        words = (word for word in METADATA[field]["values"] if word not in METADATA[field]["later"] and ":" not in word)
        values = tuple(dict.fromkeys((*words, value)))
    return Choice(
        name=name,
        label=label,
        help=". ".join(filter(None, (help or METADATA[field]["help"], meaning(label)))),
        values=values,
        value=value,
        group="" if kind != "compare" or field not in SHARDED else "second" if name != field else "first",
    )


def _counts(least: int, most: int, *own: int) -> tuple[int, ...]:
    """Return powers of two, and these numbers."""
    powers = {2**power for power in range(20) if least <= 2**power <= most}
    return tuple(sorted(powers | set(own)))


def command(kind: str, state: ExplorerState) -> str:
    """Return the shell command of the state's question."""
    verb = {"memory": "forecast", "compare": "forecast", "timeline": "timeline", "precision": "precisions"}[kind]
    words = ["toolkit", verb, *_model_word(state)]
    stays = state.implied and all(state.values[name] == state.first_values[name] for name in ("device", "devices"))
    words += [] if stays else ["--hardware", state.machine_words]
    strategy, second = state.fields(state.base), state.fields(state.second, SECOND)
    # The shell takes a run's own values, too.
    plain, batch = (state.base, state.batch) if state.run else (Strategy(), TrainConfig())
    if kind == "precision":
        strategy |= {"sharding": ",".join(usual_shardings()), "offload": "none", "dp_replicate": 1}
    words += spell(other_values(strategy, plain))
    if kind != "precision":
        words += spell(other_values(state.fields(state.batch), batch, state.base.pp))
    if kind == "compare":
        differing = [f"{name}={second[name]}" for name in second if second[name] != strategy[name]]
        words += [flag("against"), ",".join(differing) or f"sharding={second['sharding']}"]
    if state.run is not None:
        words += ["--run", state.run]
    return shlex.join(words)


def train_command(state: ExplorerState) -> str:
    """Return the shell command that trains the first strategy; empty for several nodes, of which each has its own."""
    count, nodes = state._nodes()
    if nodes > 1:
        return ""
    words, model = ["toolkit", "train"], _model_word(state)
    words += ["--model", *model, "--data", "<your data>"] if model else []
    words += ["--processes", str(count)] if count > 1 else []
    words += spell(other_values(state.fields(state.base), Strategy()))
    words += spell(other_values(state.fields(state.batch), TrainConfig(), state.base.pp))
    return shlex.join(words)


def _model_word(state: ExplorerState) -> list[str]:
    """Return the model's words in a shell; a config from Python has none until it is saved."""
    name = state.spec.name
    if name == EMBEDDED or (state.run is not None and state.values["model"] == state.first_values["model"]):
        return []
    return ["<where its config is saved>" if state.spec.source is None and not Path(name).exists() else name]
