"""Explain the differences between two forecasts by the engines' own accounts, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.core.units import BYTES_OF, format_bytes, format_count, format_step_seconds
from toolkit.engines.base import engine_of
from toolkit.engines.job import Job
from toolkit.engines.records import StateMemory, on_device
from toolkit.engines.states import optimizer_bytes, parameters_of
from toolkit.forecasting import Forecast
from toolkit.forecasting.timing import collectives, offloads

EQUAL = 0.01
"""Differences up to this share of the larger value are none."""


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One of the two, and what its engine says of it."""

    label: str
    forecast: Forecast

    @property
    def job(self) -> Job:
        return self.forecast.job

    @property
    def state_memory(self) -> StateMemory:
        return engine_of(self.job.strategy).expected_state(self.job)

    @property
    def device_memory(self) -> StateMemory:
        return on_device(self.job, self.state_memory)

    @property
    def trained(self) -> int:
        """Return the trained elements over all ranks."""
        return sum(state.elements for state in parameters_of(self.job) if state.trainable)

    def whole(self, part: str) -> int:
        """Return the bytes of an unsharded state in the engine's dtype."""
        dtypes = self.state_memory.dtypes
        frozen = sum(state.bytes for state in parameters_of(self.job) if not state.trainable)
        if part == "parameters":
            return self.trained * BYTES_OF[dtypes["trainable"]] + frozen
        if part == "optimizer":
            return optimizer_bytes(self.job, self.trained)
        return self.trained * BYTES_OF[dtypes[part]] if part in dtypes else 0

    def size(self, part: str) -> int:
        return int(getattr(self.device_memory, part) or 0)

    def sharded(self, part: str) -> bool:
        return int(getattr(self.state_memory, part) or 0) < 0.95 * self.whole(part)

    def offloaded(self, part: str) -> bool:
        return bool(getattr(self.state_memory, part)) and not getattr(self.device_memory, part)


def explain(first: Forecast, second: Forecast, labels: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Yield reasons: parameters, masters, moments, transient memory, communication, time."""
    sides = _Side(label=labels[0], forecast=first), _Side(label=labels[1], forecast=second)
    for part, words in (("parameters", "the parameters"), ("master", "the master copy"), ("optimizer", "the moments")):
        for sentence in _explain_state(sides, part, words):
            yield part, sentence
    yield from _explain_transient(sides)
    for sentence in _explain_communication(sides):
        yield "communication", sentence
    for sentence in _explain_time(sides):
        yield "time", sentence
    if first.peak_phase != second.peak_phase:
        yield (
            "peak",
            f"The highest moment of {labels[0]} lies in {first.peak_phase}, that of {labels[1]} in {second.peak_phase}: "
            "their parts are not of the same moment.",
        )


def _order_sides(sides: tuple[_Side, _Side], sizes: tuple[float, float]) -> tuple[_Side, _Side, float, float] | None:
    """Return the lesser and the greater side, and both sizes; None where they are equal."""
    if abs(sizes[0] - sizes[1]) <= EQUAL * max(sizes):
        return None
    few, many = (0, 1) if sizes[0] < sizes[1] else (1, 0)
    return sides[few], sides[many], sizes[few], sizes[many]


def _explain_state(sides: tuple[_Side, _Side], part: str, words: str) -> Iterator[str]:
    """Explain a state that stays between steps."""
    pair = _order_sides(sides, (sides[0].size(part), sides[1].size(part)))
    if pair is None:
        return
    less, more, few, many = pair
    if part == "master" and part not in less.state_memory.dtypes:
        dtype = more.state_memory.dtypes[part]
        yield (
            f"{more.label} keeps a second copy of its trained weights, in {dtype}, from which it steps: "
            f"{format_bytes(many)}. {less.label} steps the parameters themselves."
        )
        return
    verbs = list(_verbs(less, more, part, words)) or [f"holds less of {words}"]
    yield f"{less.label} {' and '.join(verbs)}: {format_bytes(few)} of a rank instead of {format_bytes(many)}."


def _verbs(less: _Side, more: _Side, part: str, words: str) -> Iterator[str]:
    """Return what makes a state smaller."""
    if less.offloaded(part) and not more.offloaded(part):
        yield f"keeps {words} in the host's memory"
        return
    if less.sharded(part) and not more.sharded(part):
        yield f"shards {words} over {less.job.parallelism.shard_size} ranks"
    elif less.sharded(part) and less.job.parallelism.shard_size > more.job.parallelism.shard_size:
        yield f"shards {words} over {less.job.parallelism.shard_size} ranks, not {more.job.parallelism.shard_size}"
    if less.trained < more.trained and part != "parameters":
        share = f"{format_count(less.trained)} weights, not {format_count(more.trained)}"
        yield f"trains {share}, so {words} are of those alone"
    if part == "parameters" and less.job.strategy.quantized and not more.job.strategy.quantized:
        yield "packs frozen weights into 4 bits"
        return
    name = "trainable" if part == "parameters" else part
    mine, theirs = less.state_memory.dtypes.get(name), more.state_memory.dtypes.get(name)
    if mine and theirs and BYTES_OF[mine] < BYTES_OF[theirs]:
        yield f"holds {words} in {mine}, not {theirs}"
    elif part == "parameters" and less.job.strategy.adapter != "none" and more.job.strategy.adapter == "none":
        frozen = {state.dtype for state in parameters_of(less.job) if not state.trainable}
        if min(BYTES_OF[name] for name in frozen) < BYTES_OF[theirs or "float32"]:
            yield f"holds frozen weights in {', '.join(sorted(frozen))}"


CAUSES = {
    "micro_batch": "takes {value} sequences at once, not {others}",
    "seq_len": "takes sequences of {value} tokens, not {others}",
    "activation_checkpointing": "{checkpoints}",
    "attention": "computes attention by {value}, not {others}",
    "precision": "computes in {value}, not {others}",
}
"""Fields that change a step's transient memory."""


def _explain_transient(sides: tuple[_Side, _Side]) -> Iterator[tuple[str, str]]:
    """Explain the memory that a step allocates and frees, by part, at the two peaks."""
    for part in ("activations", "logits", "gradients", "buffers"):
        pair = _order_sides(sides, (sides[0].forecast.parts.get(part, 0), sides[1].forecast.parts.get(part, 0)))
        if pair is None or pair[3] < EQUAL * max(side.forecast.peak_bytes for side in sides):
            continue
        less, more, few, many = pair
        causes = list(_activation_causes(less, more)) if part in ("activations", "logits") else []
        if part == "gradients" and less.trained < more.trained:
            causes.append(f"has gradients of {format_count(less.trained)} weights, not {format_count(more.trained)}")
        elif part == "gradients" and _reduce_scatters(less) and not _reduce_scatters(more):
            causes.append(f"keeps of each gradient only its shard, over {less.job.parallelism.shard_size} ranks")
        less_bytes, more_bytes = format_bytes(few), format_bytes(many)
        if part == "buffers":
            whither = "to gather into and to send from"
            sentence = f"{more.label} has {more_bytes} in buffers at its peak, {whither}; {less.label} {less_bytes}."
        elif causes:
            sentence = (
                f"{less.label} {' and '.join(causes)}: {less_bytes} of {part} at its peak instead of {more_bytes}."
            )
        elif not few:
            sentence = f"At its highest moment {less.label} has no {part}; {more.label} holds {more_bytes}."
        else:
            sentence = f"At their peaks {less.label} holds {less_bytes} of {part}, {more.label} {more_bytes}."
        yield part, sentence


def _reduce_scatters(side: _Side) -> bool:
    return any("reduce-scattered" in sent.what for sent in collectives(side.job))


def _activation_causes(less: _Side, more: _Side) -> Iterator[str]:
    """Return the fields that make activations smaller."""
    for name, words in CAUSES.items():
        owner = "train_config" if hasattr(less.job.train_config, name) else "strategy"
        value, others = getattr(getattr(less.job, owner), name), getattr(getattr(more.job, owner), name)
        if value != others:
            effect = "recomputes each layer in the backward instead of keeping its activations"
            other = "keeps each layer's activations instead of recomputing them"
            yield words.format(value=value, others=others, checkpoints=effect if value == "full" else other)


def _explain_communication(sides: tuple[_Side, _Side]) -> Iterator[str]:
    """Explain communication among the ranks, and with the host."""
    pair = _order_sides(sides, (sides[0].forecast.communication_bytes, sides[1].forecast.communication_bytes))
    if pair is not None:
        yield " ".join(f"{side.label} sends {_list_transfers(side)}." for side in pair[:2])
    for side, opposite in (sides, sides[::-1]):
        if (moved := offloads(side.job)) and not offloads(opposite.job):
            total = sum(sent.size * sent.times for sent in moved)
            yield f"{side.label} moves {format_bytes(total)} between device and host in a step, {opposite.label} nothing."


def _list_transfers(side: _Side) -> str:
    """List everything that a rank sends in a step, and how often."""
    sent = [
        f"{transfer.what} ({format_bytes(transfer.size)}{f' {transfer.times} times' if transfer.times > 1 else ''})"
        for transfer in collectives(side.job)
    ]
    total = format_bytes(side.forecast.communication_bytes)
    return f"{total} in a step: {'; '.join(sent)}" if sent else "nothing"


def _explain_time(sides: tuple[_Side, _Side]) -> Iterator[str]:
    """Explain a longer step: more computation, more communication, less overlap."""
    timings = [side.forecast.timing for side in sides]
    if timings[0] is None or timings[1] is None:
        return
    pair = _order_sides(sides, (timings[0].step_seconds, timings[1].step_seconds))
    if pair is None:
        return
    less, more, few, many = pair
    why = []
    if more.forecast.operations > (1 + EQUAL) * less.forecast.operations:
        why.append(f"it computes {more.forecast.operations / less.forecast.operations - 1:.0%} more")
    if more.forecast.communication_bytes > (1 + EQUAL) * less.forecast.communication_bytes:
        why.append("it sends more")
    stepped = [int(side.state_memory.optimizer or 0) for side in (less, more)]
    if stepped[1] > (1 + EQUAL) * stepped[0]:
        why.append(f"its optimizer steps {stepped[1] / max(1, stepped[0]):.1f} times as much on each rank")
    if more.job.strategy.offload != "none" and less.job.strategy.offload == "none":
        why.append("its optimizer steps on the host")
    bare = [sum(s.size * s.times for s in collectives(side.job) if s.overlaps == "nothing") for side in (less, more)]
    if bare[1] > bare[0]:
        why.append(f"{format_bytes(bare[1])} of what it sends nothing hides")
    sentence = f"A step of {more.label} takes {format_step_seconds(many)} instead of {format_step_seconds(few)}"
    yield f"{sentence}: {', and '.join(why)}." if why else f"{sentence}."
