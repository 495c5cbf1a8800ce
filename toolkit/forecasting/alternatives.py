"""Alternatives of a plan: the smallest changes of the request with which something fits, each forecast."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.config.flags import spell
from toolkit.core.errors import ToolkitError
from toolkit.core.units import ceil_div
from toolkit.devices.machine import Hardware
from toolkit.engines.adapters import check_quantized
from toolkit.forecasting.candidates import Candidate, Search
from toolkit.forecasting.memory_advice import changed, training_changes

FIELDS = ("adapter", "precision", "seq_len", "hardware")
"""The fields that an alternative changes, in this order."""

MOST_DEVICES, DEVICES_OF_A_NODE = 512, 8
"""Devices of the largest machine that is suggested, and of the nodes that it is made of."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A changed request, and the fastest candidate with it that fits at the smallest micro-batch."""

    change: Mapping[str, Any]
    """Fields and their new values; `hardware`: the machine's name."""
    hardware: Hardware
    global_batch: int
    candidate: Candidate

    @property
    def flags(self) -> str:
        """The change as flags."""
        return shlex.join(spell(self.change))


def find_alternatives(search: Search, fields: Collection[str] = FIELDS) -> Iterator[Alternative]:
    """Yield, for each value of these fields, the fastest candidate that fits. Sequences and machines: the first that does."""
    finished: set[str] = set()
    for field, change, request in _requests(search):
        if field not in fields or field in finished:
            continue
        candidate = request.fastest_smallest()
        if candidate is None:
            continue
        yield Alternative(
            change=change, hardware=request.machine, global_batch=request.global_batch, candidate=candidate
        )
        if field in ("seq_len", "hardware"):
            finished.add(field)


def _requests(search: Search) -> Iterator[tuple[str, dict[str, Any], Search]]:
    """Yield the changed field, the whole change, and the search with it; not what no engine or model can do."""
    machine, on_cpu = search.machine, search.machine.device.kind == "cpu"
    possible = list(training_changes(search.strategy, search.train_config, on_cpu=on_cpu))
    for field in FIELDS:
        for change in (change for change in possible if field in change):
            with contextlib.suppress(ToolkitError):
                strategy, train_config = changed(search.strategy, search.train_config, change)
                if strategy.quantized:
                    check_quantized(search.spec, allow_unquantized=False)
                yield field, change, dataclasses.replace(search, strategy=strategy, train_config=train_config)
    while machine.device.key is not None and 2 * machine.ranks <= MOST_DEVICES:
        machine = _twice(machine)
        request = dataclasses.replace(search, machine=machine)
        batch = ceil_div(search.global_batch, request.data_ranks) * request.data_ranks
        change = {"hardware": machine.label} | ({"global_batch": batch} if batch != search.global_batch else {})
        yield "hardware", change, dataclasses.replace(request, global_batch=batch)


def _twice(machine: Hardware) -> Hardware:
    """Return a machine with twice the devices: in a node up to eight, with as much more host memory; then twice the nodes."""
    if machine.count >= DEVICES_OF_A_NODE:
        return dataclasses.replace(machine, nodes=2 * machine.nodes)
    return dataclasses.replace(
        machine,
        count=2 * machine.count,
        host_bytes=2 * machine.host_bytes,
        host_free_bytes=2 * machine.host_free_bytes,
    )
