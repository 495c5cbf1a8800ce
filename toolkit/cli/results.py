"""Commands after a run: `report`, `compare`, `export`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from toolkit.cli.planning_commands import strategies
from toolkit.config.flags import from_dict, given
from toolkit.config.train_config import TrainConfig
from toolkit.core.display import Result


def report(flags: argparse.Namespace) -> Result:
    """Write and print the report of a run."""
    from toolkit.reports import report

    result = report(flags.run)
    print(f"report: {result.write(flags.output)}", file=sys.stderr)
    return result


def compare(flags: argparse.Namespace) -> Result:
    """Train the same work under several strategies; print one table."""
    from toolkit.comparison import compare
    from toolkit.config.run_config import RunConfig
    from toolkit.devices.machine import hardware

    chosen = strategies(flags, "ddp,zero1,zero2,zero3,fsdp,fsdp_grad_op")
    train_config = from_dict(TrainConfig, {"steps": 20, **given(flags, TrainConfig)})
    run_config = from_dict(RunConfig, given(flags, RunConfig))
    root = Path(flags.run_dir or "runs")
    return compare(run_config, chosen, train_config, machine=hardware(), root=root, processes=flags.processes)


def export(flags: argparse.Namespace) -> Result:
    """Export a checkpoint as Hugging Face files and verify them."""
    from toolkit.config.run_config import EMBEDDED
    from toolkit.data.embedded import embedded_model
    from toolkit.exporters import export

    model = str(embedded_model()) if flags.model == EMBEDDED else flags.model
    return export(
        flags.source,
        flags.output,
        merge=flags.merge,
        dtype=flags.dtype,
        model=model,
        trust_remote_code=flags.trust_remote_code,
    )
