"""An engine from outside the package: DDP, but each rank keeps Adam's moments of its own parameters only.

Every rank steps its parameters and broadcasts them. The test that uses it changes no file of `toolkit/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolkit.config.strategy import Sharding
from toolkit.core.phases import phase
from toolkit.core.units import BYTES_OF
from toolkit.engines.ddp import DDP
from toolkit.engines.job import Job
from toolkit.engines.ledger import Ledger
from toolkit.engines.records import Prepared, StateMemory, StepResult, Transfer
from toolkit.engines.registry import register
from toolkit.engines.shards import PARAMETER, Shard, whole_box
from toolkit.engines.simulation import Simulation
from toolkit.engines.states import State, buffer_shards, optimizer_bytes, optimizer_shards, parameters_of


def owner_of(job: Job) -> dict[str, int]:
    """Parameter → the rank that steps it: the one with the fewest elements so far."""
    owned = [0] * job.ranks
    owners = {}
    for state in sorted(trained(job), key=lambda state: -state.elements):
        owners[state.name] = owned.index(min(owned))
        owned[owners[state.name]] += state.elements
    return owners


def trained(job: Job) -> list[State]:
    return [state for state in parameters_of(job) if state.trainable]


class Moments(DDP):
    """`moments`."""

    def from_env(self, environ: Mapping[str, str]) -> dict[str, Any] | None:
        bound = super().from_env(environ)
        return bound | {"sharding": "moments"} if bound else None

    def owned(self, job: Job, rank: int) -> list[State]:
        owners = owner_of(job)
        return [state for state in trained(job) if owners[state.name] == rank]

    def simulated_ranks(self, job: Job) -> Sequence[int]:
        return range(job.ranks)

    def expected_state(self, job: Job, rank: int = 0) -> StateMemory:
        elements = sum(state.elements for state in self.owned(job, rank))
        return replace(super().expected_state(job, rank), optimizer=optimizer_bytes(job, elements))

    def simulate_step(self, simulation: Simulation) -> None:
        ledger, state = simulation.ledger, simulation.state
        simulation.hold_loaded(state.parameters)
        ledger.touch("buffers", state.parameters)
        ledger.hold("buffers", state.trainable)
        simulation.hold_moments()
        simulation.walk(Gradients(ledger))
        simulation.optimizer_step(state.elements for state in self.owned(simulation.job, simulation.rank))
        ledger.hold("gradients", -ledger.held["gradients"])

    def communication(self, job: Job) -> list[Transfer]:
        size = sum(state.elements for state in trained(job)) * BYTES_OF[job.weight_dtype] * (job.ranks - 1) / job.ranks
        return [
            Transfer(2 * size, 1, "backward", "ring", "gradients, all-reduced"),
            Transfer(size, 1, "nothing", "ring", "updated parameters, broadcast"),
        ]

    def steps_on_device(self, prepared: Prepared) -> bool:
        return False

    def step(self, prepared: Prepared, found_inf: Any = None) -> StepResult:
        import torch.distributed as dist

        owners, rank = owner_of(prepared.job), prepared.accelerator.process_index
        named = dict(prepared.accelerator.unwrap_model(prepared.model).named_parameters())
        with phase("step"):
            norm = float(self.clip(list(named.values()), prepared.job.train_config.max_grad_norm))
            for name, owner in owners.items():
                if owner != rank:
                    named[name].grad = None
            prepared.optimizer.step()
            prepared.optimizer.zero_grad()
            for name, owner in owners.items():
                dist.broadcast(named[name].data, owner)
        return StepResult(norm=norm, skipped=False, gradients=prepared.job.weight_dtype)

    def shards(self, prepared: Prepared, create: bool = False) -> Iterator[Shard]:
        owners, rank = owner_of(prepared.job), prepared.accelerator.process_index
        module = prepared.accelerator.unwrap_model(prepared.model)
        for name, parameter in module.named_parameters():
            shape = tuple(parameter.shape)
            shard = Shard(name, PARAMETER, shape, whole_box(shape), 0, parameter.detach())
            yield shard
            if owners[name] == rank:
                optimizer, keep = prepared.optimizer, lambda tensor: tensor
                yield from optimizer_shards(prepared.job, optimizer, parameter, shard, keep, create)
        yield from buffer_shards(module)


class Gradients:
    """Gradients stay until the step has ended."""

    grows = True

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.names = ledger, set[str]()

    def event(self, what: str, size: int, name: str, backward: bool) -> None:
        if what == "gradient" and name not in self.names:
            self.ledger.hold("gradients", size)
            self.names.add(name)


register(
    Sharding(word="moments", engine="moments", shards="optimizer states, by whole parameters", adapter=("none",)),
    Moments(),
)
