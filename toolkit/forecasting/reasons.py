"""Explain the differences between two forecasts by the engines' accounts of their states, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from toolkit.core.units import BYTES_OF, format_bytes, format_count, format_step_seconds
from toolkit.engines.job import Job
from toolkit.engines.records import StateMemory, on_device
from toolkit.engines.states import optimizer_bytes, parameters_of
from toolkit.forecasting.result import Forecast
from toolkit.forecasting.timing import collectives, offloads

EQUAL = 0.01
"""Differences up to this share of the larger value do not count."""

KEPT_PARTS = {"parameters": "the parameters", "master": "the master copy", "optimizer": "the moments"}
"""Parts that exist between steps → their names in sentences. Other parts exist within a step only."""

PART_NAMES = {**KEPT_PARTS, "activations": "the activations", "logits": "the logits", "gradients": "the gradients"}

SETTING_SENTENCES = {
    "micro_batch": "takes {0} sequences at once, not {1}",
    "seq_len": "takes sequences of {0} tokens, not {1}",
    "attention": "computes attention by {0}, not {1}",
    "precision": "computes in {0}, not {1}",
    "loss": "computes the loss {0}, not {1}",
    "activation_checkpointing": "{2} each layer in the backward",
}
"""Fields on which activations and logits depend; {0}: the value of the side that holds less, {1}: the other's."""


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One of the two forecasts, and its engine's account of the states."""

    label: str
    forecast: Forecast

    @property
    def job(self) -> Job:
        return self.forecast.job

    @cached_property
    def state(self) -> StateMemory:
        return self.job.engine.expected_state(self.job)

    @cached_property
    def trained(self) -> int:
        """The trained elements over all ranks."""
        return sum(state.elements for state in parameters_of(self.job) if state.trainable)

    def size(self, part: str) -> int:
        """Return the bytes on the device: of a state between steps, of another part at the peak."""
        if part in KEPT_PARTS:
            return getattr(on_device(self.job, self.state), part) or 0
        return self.forecast.parts.get(part, 0)

    def dtype(self, part: str) -> str:
        """Return the dtype of most of a part; empty where it has none."""
        frozen = [state for state in parameters_of(self.job) if not state.trainable]
        if part == "parameters" and frozen and self.job.strategy.adapter != "none":
            return max(frozen, key=lambda state: state.elements).dtype
        return self.state.dtypes.get("trainable" if part == "parameters" else part, "")

    def shard_size(self, part: str) -> int:
        """Return the ranks that share a state or the gradients."""
        if part == "gradients":
            sharded = any("reduce-scattered" in transfer.what for transfer in collectives(self.job))
        else:
            whole = optimizer_bytes(self.job, self.trained)
            if part != "optimizer":
                name = "trainable" if part == "parameters" else part
                whole = self.trained * BYTES_OF[self.state.dtypes[name]]
            if part == "parameters":
                whole += sum(state.bytes for state in parameters_of(self.job) if not state.trainable)
            sharded = (getattr(self.state, part) or 0) < 0.95 * whole
        return self.job.parallelism.shard_size if sharded else 1


def explain(first: Forecast, second: Forecast, labels: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Yield reasons: states, memory within a step, communication, time."""
    sides = _Side(label=labels[0], forecast=first), _Side(label=labels[1], forecast=second)
    for part in (*PART_NAMES, "buffers"):
        yield from ((part, sentence) for sentence in _explain_part(sides, part))
    yield from (("communication", sentence) for sentence in _explain_communication(sides))
    yield from (("time", sentence) for sentence in _explain_time(sides))
    if first.peak_phase != second.peak_phase:
        yield (
            "peak",
            f"The highest moment of {labels[0]} lies in {first.peak_phase}, that of {labels[1]} in {second.peak_phase}: "
            "their parts are not of the same moment.",
        )


def why_faster(first: Forecast, second: Forecast, labels: tuple[str, str]) -> str:
    """Return why one step takes longer, in a sentence; empty where both take as long."""
    sides = _Side(label=labels[0], forecast=first), _Side(label=labels[1], forecast=second)
    return next(_explain_time(sides), "")


def _in_order(sides: Sequence[_Side], sizes: Sequence[float]) -> tuple[_Side, _Side, float, float] | None:
    """Return the lesser and the greater side, and both sizes; None where they are equal."""
    if abs(sizes[0] - sizes[1]) <= EQUAL * max(sizes):
        return None
    few, many = (0, 1) if sizes[0] < sizes[1] else (1, 0)
    return sides[few], sides[many], sizes[few], sizes[many]


def _explain_part(sides: Sequence[_Side], part: str) -> Iterator[str]:
    pair = _in_order(sides, [side.size(part) for side in sides])
    if pair is None:
        return
    less, more, few, many = pair
    if part not in KEPT_PARTS and many < EQUAL * max(side.forecast.peak_bytes for side in sides):
        return
    if part in ("activations", "logits"):
        causes = list(_setting_causes(less, more))
    else:
        causes = list(_state_causes(less, more, part)) if part in PART_NAMES else []
    verbs = " and ".join(causes) or f"holds less of {PART_NAMES.get(part, f'the {part}')}"
    moment = "of a rank" if part in KEPT_PARTS else "at its peak"
    yield f"{less.label} {verbs}: {format_bytes(few)} {moment} instead of {format_bytes(many)}."


def _state_causes(less: _Side, more: _Side, part: str) -> Iterator[str]:
    """Yield the causes of a smaller state or smaller gradients, each a verb with its object."""
    words = PART_NAMES[part]
    if part == "master" and not less.dtype(part):
        yield f"steps its weights without a master copy in {more.dtype(part)}"
        return
    if part in KEPT_PARTS and not less.size(part):
        yield f"keeps {words} in the host's memory"
        return
    ranks, others = less.shard_size(part), more.shard_size(part)
    if ranks > others:
        yield f"shards {words} over {ranks} ranks{f', not {others}' if others > 1 else ''}"
    if less.trained < more.trained and part != "parameters":
        share = f"{format_count(less.trained)} weights, not {format_count(more.trained)}"
        yield f"trains {share}, so {words} are of those alone"
    dtypes = less.dtype(part), more.dtype(part)
    if part == "parameters" and less.job.strategy.quantized and not more.job.strategy.quantized:
        yield "packs frozen weights into fewer bits"
    elif all(dtypes) and BYTES_OF[dtypes[0]] < BYTES_OF[dtypes[1]]:
        yield f"holds {words} in {dtypes[0]}, not {dtypes[1]}"


def _setting_causes(less: _Side, more: _Side) -> Iterator[str]:
    """Yield the settings that reduce activations."""
    fields = [{**vars(side.job.strategy), **vars(side.job.train_config)} for side in (less, more)]
    policies = [values["activation_checkpointing"] for values in fields]
    verb = "does not recompute" if policies[0] == "none" else "recomputes" + " more of" * (policies[1] != "none")
    for name, words in SETTING_SENTENCES.items():
        if fields[0][name] != fields[1][name]:
            yield words.format(fields[0][name], fields[1][name], verb)


def _explain_communication(sides: Sequence[_Side]) -> Iterator[str]:
    """Explain communication among the ranks, and with the host."""
    pair = _in_order(sides, [side.forecast.communication_bytes for side in sides])
    if pair is not None:
        yield " ".join(f"{side.label} sends {_list_transfers(side)}." for side in pair[:2])
    for side, opposite in (sides, sides[::-1]):
        if (moved := offloads(side.job)) and not offloads(opposite.job):
            total = format_bytes(sum(transfer.size * transfer.times for transfer in moved))
            yield f"{side.label} moves {total} between device and host in a step, {opposite.label} nothing."


def _list_transfers(side: _Side) -> str:
    """List everything that a rank sends in a step, and how often."""
    sent = [
        f"{transfer.what} ({format_bytes(transfer.size)}{f' {transfer.times} times' if transfer.times > 1 else ''})"
        for transfer in collectives(side.job)
    ]
    total = format_bytes(side.forecast.communication_bytes)
    return f"{total} in a step: {'; '.join(sent)}" if sent else "nothing"


def _explain_time(sides: Sequence[_Side]) -> Iterator[str]:
    """Explain more time for the same tokens: more computation, more communication, less overlap."""
    tokens = [side.job.global_batch * side.job.train_config.seq_len for side in sides]
    speeds = [side.forecast.tokens_per_second for side in sides]
    pair = _in_order(sides, [1 / speed for speed in speeds if speed]) if all(speeds) else None
    if pair is None:
        return
    less, more = pair[:2]
    # Steps may have different numbers of rows: the slower side's figures are of as many tokens as a step of the faster one.
    scale = tokens[sides.index(less)] / tokens[sides.index(more)]
    few, many = less.forecast.step_seconds or 0, scale * (more.forecast.step_seconds or 0)
    ratio = scale * more.forecast.operations / less.forecast.operations
    stepped = scale * (more.state.optimizer or 0) / max(1, less.state.optimizer or 0)
    exposed, moved = (
        [
            factor * sum(sent.size * sent.times for sent in list_(side.job) if unhidden in ("", sent.overlaps))
            for side, factor in ((less, 1), (more, scale))
        ]
        for list_, unhidden in ((collectives, "nothing"), (offloads, ""))
    )
    offload = more.job.strategy.offload != "none" and less.job.strategy.offload == "none"
    causes = {
        f"it computes {ratio - 1:.0%} more": ratio > 1 + EQUAL,
        "it sends more": scale * more.forecast.communication_bytes > (1 + EQUAL) * less.forecast.communication_bytes,
        f"its optimizer steps {stepped:.1f} times as much on each rank": stepped > 1 + EQUAL,
        "its optimizer steps on the host": offload,
        f"it moves {format_bytes(moved[1])} between device and host": moved[1] > (1 + EQUAL) * moved[0],
        f"no computation overlaps {format_bytes(exposed[1])} of its transfers": exposed[1] > exposed[0],
    }
    why = ", and ".join(cause for cause, holds in causes.items() if holds)
    of_step = f"The {tokens[sides.index(less)]:,} tokens of a step of {less.label} take {more.label}"
    what = f"A step of {more.label} takes" if scale == 1 else of_step
    sentence = f"{what} {format_step_seconds(many)} instead of {format_step_seconds(few)}"
    yield f"{sentence}: {why}." if why else f"{sentence}."
