"""Commands before a run: `doctor`, `describe`, `forecast`, `timeline`, `precisions`, `preview`, `plan`, `config`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from toolkit.cli.output import check_target, show, write_config
from toolkit.config.fields import from_dict
from toolkit.config.flags import given, read_assignments
from toolkit.config.strategy import SHARDINGS, Strategy, catalog, sharding_word
from toolkit.config.train_config import TrainConfig, pipeline_rows
from toolkit.core import background
from toolkit.core.display import Result
from toolkit.core.errors import ToolkitError

Owner = TypeVar("Owner")


def read(owner: type[Owner], flags: argparse.Namespace, values: Mapping[str, Any] | None = None) -> Owner:
    """Return a dataclass from its flags, and from `values` where a flag is not given."""
    return from_dict(owner, {**(values or {}), **given(flags, owner)})


def read_batch(flags: argparse.Namespace, strategy: Strategy) -> TrainConfig:
    """Return the TrainConfig of the flags, with a pipeline's default rows (see `print_rows`)."""
    flags.rows = strategy.pp, given(flags, TrainConfig)
    return read(TrainConfig, flags, pipeline_rows(*flags.rows))


def print_rows(flags: argparse.Namespace) -> None:
    """Print a pipeline's default rows, once. Called behind the checks: a mistake stays one sentence."""
    pipeline_rows(*vars(flags).pop("rows", (1,)), say=True)


def doctor(flags: argparse.Namespace) -> Result:
    """Check what this machine can run, and why not."""
    from toolkit.diagnosis import diagnose

    return diagnose(compile_ops=flags.compile)


def describe(flags: argparse.Namespace) -> Result:
    """Print a model's architecture and parameters without reading weights."""
    from toolkit.models import describe

    return describe(flags.model, trust_remote_code=flags.trust_remote_code)


def forecast(flags: argparse.Namespace) -> Result:
    """Forecast memory and speed before a launch."""
    from toolkit.devices.machine import hardware
    from toolkit.forecasting import forecast
    from toolkit.forecasting.diffs import diff_forecasts
    from toolkit.forecasting.memory_advice import changed
    from toolkit.forecasting.usual_shardings import side_by_side
    from toolkit.models import describe

    strategy = read(Strategy, flags)
    train_config = read_batch(flags, strategy)
    spec = describe(flags.model, trust_remote_code=flags.trust_remote_code)
    options = {name: getattr(flags, name) for name in ("one_document", "allow_unquantized", "expert_imbalance")}
    options |= {"save": not flags.no_save, "num_checkpoints": int(not flags.no_checkpoints), "ranks": flags.processes}
    machine = hardware(flags.hardware, flags.host_memory)
    open_fields = {"sharding", "tp", "ep", "pp", "offload", "dp_replicate"}.isdisjoint(given(flags, Strategy))
    alone = flags.expert_imbalance == 1 and not flags.against and flags.processes is None
    if open_fields and alone and machine.ranks > 1:
        return side_by_side(spec, strategy, machine, train_config, **options)
    if not flags.against:
        return forecast(spec, strategy, machine, train_config, **options)
    change = read_assignments(flags.against, Strategy, TrainConfig, alone="sharding")
    both = ((strategy, train_config), changed(strategy, train_config, change))
    return diff_forecasts(*(forecast(spec, one, machine, batch, **options, advice=False) for one, batch in both))


OTHER_DEVICES = ("H100-80GB", "T4", "cpu")
"""Devices of which each runs other kernels."""


def add_other_devices(flags: argparse.Namespace) -> None:
    """Let the background forecast the same for other devices, after a forecast that traced a model."""
    if flags.verb != "forecast" or not background.has_work():
        return
    from toolkit.devices.machine import hardware
    from toolkit.forecasting import forecast
    from toolkit.models import describe

    strategy = read(Strategy, flags)
    train_config = read_batch(flags, strategy)

    def forecast_on(device: str) -> None:
        machine = hardware(f"{hardware(flags.hardware).ranks}x {device}")
        spec = describe(flags.model, trust_remote_code=flags.trust_remote_code)
        forecast(spec, strategy, machine, train_config, advice=False)

    background.add(f"devices {flags.model}", [partial(forecast_on, device) for device in OTHER_DEVICES])


def guard(flags: argparse.Namespace) -> Result:
    """Compare a small copy of a model, cut over CPU ranks by tp, cp and ep, with one process."""
    from toolkit.models import describe
    from toolkit.training.certificates import guard

    certificate = guard(
        describe(flags.model, trust_remote_code=flags.trust_remote_code), read(Strategy, flags), ranks=flags.processes
    )
    if not certificate.agrees:
        print(certificate)
        raise ToolkitError("guard: the cut does not compute what one process computes: see the table above.")
    return certificate


def rehearse(flags: argparse.Namespace) -> Result:
    """Run one rank of many on this machine, without the others: measured memory beside the forecast."""
    from toolkit.models import describe
    from toolkit.training.rehearsal import rehearse

    spec = describe(flags.model, trust_remote_code=flags.trust_remote_code)
    strategy = read(Strategy, flags)
    return rehearse(spec, strategy, read_batch(flags, strategy), ranks=flags.ranks, rank=flags.rank)


def timeline(flags: argparse.Namespace) -> Result:
    """Forecast the memory of each phase; with --run, compare a measured run."""
    from toolkit.forecasting.finished_run import read_finished_run
    from toolkit.forecasting.timelines import timeline
    from toolkit.models import describe

    # Flags that are not given have the run's values.
    finished = read_finished_run(flags.run) if flags.run else None
    strategy = read(Strategy, flags, dataclasses.asdict(finished.strategy) if finished else None)
    recorded = dataclasses.asdict(finished.train_config) if finished else {}
    train_config = read(TrainConfig, flags, recorded) if recorded else read_batch(flags, strategy)
    model = describe(flags.model, trust_remote_code=flags.trust_remote_code) if flags.model or not flags.run else None
    return timeline(
        model,
        strategy,
        flags.hardware,
        train_config,
        ranks=flags.processes,
        one_document=flags.one_document,
        run=flags.run,
    )


def precisions(flags: argparse.Namespace) -> Result:
    """List the dtype of each state at each stage, for several shardings."""
    from toolkit.forecasting.dtype_reports import dtype_report
    from toolkit.models import describe

    model = describe(flags.model, trust_remote_code=flags.trust_remote_code) if flags.model or not flags.run else None
    strategies_ = strategies(flags, "ddp,zero3,fsdp")
    return dtype_report(model, strategies_, flags.hardware, ranks=flags.processes, run=flags.run)


def preview(flags: argparse.Namespace) -> Result:
    """Show the first documents of a data set as tokens, with the trained ones marked. Starts no run."""
    from toolkit.config.run_config import RunConfig
    from toolkit.data_preview import preview

    seq_len = read(TrainConfig, flags).seq_len
    return preview(flags.model, flags.data, run_config=read(RunConfig, flags), seq_len=seq_len)


def plan(flags: argparse.Namespace) -> Result:
    """Rank the strategies that fit a model, a machine and a global batch.

    `--adapter any` and `--precision any` list other values that fit below what was asked.
    """
    from toolkit.config.run_config import EMBEDDED
    from toolkit.devices.machine import hardware
    from toolkit.forecasting import plan
    from toolkit.models import describe

    check_target(flags.write, "--write")
    fields = given(flags, Strategy)
    vary = [name for name in ("adapter", "precision") if fields.get(name) == "any"]
    machine = flags.hardware
    if machine and machine.lower().startswith("any x "):
        machine = machine[len("any x ") :]
        vary.append("hardware")
    result = plan(
        describe(flags.model, trust_remote_code=flags.trust_remote_code),
        hardware(machine, flags.host_memory),
        global_batch=flags.global_batch,
        strategy=from_dict(Strategy, fields | {name: getattr(Strategy(), name) for name in vary if name in fields}),
        vary=vary,
        tokens=flags.tokens,
        price=flags.price,
        whole=flags.all,
        train_config=read(TrainConfig, flags),
        one_document=flags.one_document,
        allow_unquantized=flags.allow_unquantized,
    )
    if flags.write:
        try:
            write_config(Path(flags.write), result.config(), "--write")
        except ToolkitError:
            show(result, flags.json)  # the result is shown even if the file cannot be written
            raise
        print(result.command(flags.model or EMBEDDED, flags.write), file=sys.stderr)
    return result


def config(flags: argparse.Namespace) -> dict[str, Any]:
    """Write Accelerate config files."""
    import yaml

    from toolkit.devices.machine import hardware
    from toolkit.engines.resolution import accelerate_config, default_ranks

    if flags.all:
        contents = {}
        for name, strategy in catalog().items():
            contents[name] = accelerate_config(strategy, strategy.least_ranks)
            write_config(Path(flags.all, f"{name}.yaml"), contents[name], "--all")
        return contents
    strategy = read(Strategy, flags)
    nodes = flags.nodes
    if nodes < 1:
        raise ToolkitError(f"nodes {nodes}: expected at least 1.")
    ranks = flags.processes
    if ranks is None:
        ranks = default_ranks(strategy, hardware()) * nodes
    _check_file(strategy, ranks, nodes)
    content = accelerate_config(strategy, ranks, nodes) | _rendezvous(flags)
    if flags.output:
        write_config(Path(flags.output), content, "--output")
    elif flags.json != "-":
        print(yaml.safe_dump(content), end="")
    return content


def _rendezvous(flags: argparse.Namespace) -> dict[str, Any]:
    """Return how the nodes find each other, in the words of Accelerate's file; nothing for one node."""
    if flags.nodes == 1 and flags.node_rank is None and flags.main_address is None:
        return {}
    if flags.nodes == 1 or flags.node_rank is None or flags.main_address is None:
        raise ToolkitError(
            f"nodes {flags.nodes}: expected --main-address and --node-rank with two nodes or more, and without them one "
            "node. Write a file for each node: node 0 listens at --main-address, as in `--nodes 2 --node-rank 0 "
            "--main-address 10.0.0.1:29500`."
        )
    if not 0 <= flags.node_rank < flags.nodes:
        raise ToolkitError(f"node_rank {flags.node_rank}: expected 0 to {flags.nodes - 1} of {flags.nodes} nodes.")
    host, _, port = flags.main_address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ToolkitError(f"main_address {flags.main_address!r}: expected HOST:PORT, such as 10.0.0.1:29500.")
    return {"machine_rank": flags.node_rank, "main_process_ip": host, "main_process_port": int(port)}


def _check_file(strategy: Strategy, ranks: int, nodes: int) -> None:
    """Refuse a request that no machine can run; the file may be for another machine than this one."""
    from toolkit.devices.machine import hardware
    from toolkit.engines.resolution import resolve

    if ranks < 1:
        raise ToolkitError(f"processes {ranks}: expected at least 1.")
    if ranks % nodes:
        raise ToolkitError(f"processes {ranks}: expected a multiple of {nodes} nodes, since each runs as many.")
    open_ones = dataclasses.replace(strategy, precision="auto", attention="auto")
    resolve(open_ones, TrainConfig(accumulation=2 * strategy.pp), None, ranks, hardware("1x H100-80GB").device)


def strategies(flags: argparse.Namespace, shardings: str) -> list[Strategy]:
    """Return a strategy for each sharding that `--sharding` lists, or for each of `default`.

    The size of a buffer is for those of them that have it.
    """
    fields = given(flags, Strategy)
    rows = [SHARDINGS[sharding_word(word)] for word in fields.pop("sharding", shardings).split(",")]
    groups, sizes = fields.pop("dp_replicate", 2), {size for row in rows for size in row.buckets}
    return [
        from_dict(
            Strategy,
            {name: value for name, value in fields.items() if name not in sizes or name in row.buckets}
            | {"sharding": row.word, "dp_replicate": groups if row.hybrid else 1},
        )
        for row in rows
    ]
