"""Every verb, with the flags that it takes."""

from __future__ import annotations

import argparse
from os.path import expanduser  # a shell leaves the `~` in `--run-dir=~/runs`
from typing import Any

from toolkit.cli.planning_commands import config, describe, doctor, forecast, plan, precisions, timeline
from toolkit.cli.results import compare, export, report
from toolkit.cli.run_commands import launch, resume, runs, stop, train, watch
from toolkit.config.flags import Parser, add_flags
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig

DEFAULT = "default: 1 for none; else one a device, on a CPU 2, for hsdp 2 a replica"
"""What `engines.job.default_ranks` says."""


def build_parser() -> Parser:
    """Every verb, with the flags that it takes."""
    from toolkit.config.run_config import RunConfig
    from toolkit.launcher import RestartPolicy

    made = Parser(prog="toolkit", description="One word switches how a model is trained.")
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(function: Any, *owners: type[Any], without: tuple[str, ...] = (), default: str = "") -> Parser:
        told = (function.__doc__ or "").strip()
        added: Parser = verbs.add_parser(function.__name__, help=told, description=told)
        added.set_defaults(call=function)
        added.add_argument(
            "--json", metavar="FILE", type=expanduser, help="write the result as JSON; `-` for standard output alone"
        )
        add_flags(added, *owners, without=without, default=default)
        return added

    verb(doctor).add_argument("--compile", action="store_true", help="compile DeepSpeed's operators now")
    described = verb(describe)
    described.add_argument("model", nargs="?", help="Hub id, folder or config.json; nothing: the embedded model")
    described.add_argument("--trust-remote-code", metavar="REVISION", help="run the model's own code, of this revision")
    for function in (forecast, timeline, precisions):
        command = verb(function, Strategy, *(() if function is precisions else (TrainConfig,)))
        command.add_argument("model", nargs="?", help="Hub id, folder or config.json; nothing: the embedded model")
        command.add_argument(
            "--trust-remote-code", metavar="REVISION", help="run the model's own code, of this revision"
        )
        command.add_argument(
            "--hardware", metavar="NAME", help="say '8x H100-80GB' or '2x cpu' (default: this machine)"
        )
        command.add_argument("--processes", type=int, help=f"ranks in all ({DEFAULT})")
        if function is not precisions:
            command.add_argument(
                "--one-document", action="store_true", help="rows hold one document each, and no padding"
            )
        if function is forecast:
            command.add_argument("--allow-unquantized", action="store_true", help="QLoRA with most weights unquantized")
            command.add_argument(
                "--against",
                metavar="WORDS",
                help="beside another: 'fsdp', or 'sharding=fsdp,offload=cpu,micro_batch=8'",
            )
        else:
            command.add_argument("--run", metavar="RUN", type=expanduser, help="folder of a run that is shown beside")
    kept = ("sharding", "offload", "activation_checkpointing", "dp_replicate", "micro_batch", "accumulation")
    planned = verb(plan, Strategy, TrainConfig, without=kept)
    planned.add_argument("model", nargs="?", help="Hub id, folder or config.json; nothing: the embedded model")
    planned.add_argument("--trust-remote-code", metavar="REVISION", help="run the model's own code, of this revision")
    planned.add_argument("--hardware", metavar="NAME", help="say '8x H100-80GB' or '2x cpu' (default: this machine)")
    planned.add_argument("--global-batch", type=int, required=True, help="samples of a step, over all ranks")
    planned.add_argument("--one-document", action="store_true", help="rows hold one document each, and no padding")
    planned.add_argument("--allow-unquantized", action="store_true", help="QLoRA with most weights unquantized")
    planned.add_argument(
        "--write", metavar="FILE", type=expanduser, help="write the best one's Accelerate config, and say the command"
    )
    written = verb(config, Strategy)
    written.add_argument("--processes", type=int, help=f"ranks in all ({DEFAULT}, times --nodes)")
    written.add_argument("--nodes", type=int, default=1, help="machines (default: 1)")
    written.add_argument(
        "--all", metavar="DIR", type=expanduser, help="write a file for every strategy into this folder"
    )
    written.add_argument(
        "-o", "--output", metavar="FILE", type=expanduser, help="where to write it (default: standard output)"
    )
    added = verb(train, RunConfig, Strategy, TrainConfig, RestartPolicy)
    added.add_argument("--processes", type=int, help=f"ranks on this machine ({DEFAULT})")
    added.add_argument(
        "--run-dir", metavar="DIR", type=expanduser, help="the run's folder (default: a new one under runs/)"
    )
    added.add_argument("--resume", action="store_true", help="go on with the run in --run-dir, if there is one")
    added = verb(resume, RunConfig, Strategy, TrainConfig, default="as the run was")
    add_flags(added, RestartPolicy)
    added.add_argument("run", metavar="RUN", type=expanduser, help="the run's folder")
    added.add_argument("--processes", type=int, help="ranks on this machine (default: as many as before)")
    added.add_argument(
        "--target", metavar="WORDS", help="of a run of your own script or module, that again: 'train.py --lr 3'"
    )
    added.add_argument("--trust-target", metavar="SHA256", help="run what run.json names, of this digest")
    added.add_argument("--sha256", help=argparse.SUPPRESS)  # of a function's file, which `tk.resume` wrote
    added = verb(launch, Strategy)
    added.add_argument("--processes", type=int, help=f"ranks on this machine ({DEFAULT})")
    added.add_argument(
        "--run-dir", metavar="DIR", type=expanduser, help="the run's folder (default: a new one under runs/)"
    )
    added.add_argument("--sha256", help=argparse.SUPPRESS)  # of a function's file, which `tk.launch` wrote
    added.add_argument("target", metavar="TARGET", help="a script that ends in .py, or a module")
    added.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="its own command line")
    verb(watch).add_argument("run", metavar="RUN", type=expanduser, help="the run's folder")
    verb(stop).add_argument("run", metavar="RUN", type=expanduser, help="the run's folder")
    verb(runs).add_argument(
        "root", nargs="?", default="runs", metavar="DIR", type=expanduser, help="folder of the runs (default: runs)"
    )
    added = verb(report)
    added.add_argument("run", metavar="RUN", type=expanduser, help="the run's folder")
    added.add_argument(
        "-o", "--output", metavar="FILE", type=expanduser, help="where to write it (default: report.html in the folder)"
    )
    added = verb(compare, RunConfig, Strategy, TrainConfig)
    added.add_argument("--processes", type=int, help=f"ranks on this machine ({DEFAULT})")
    added.add_argument("--run-dir", metavar="DIR", type=expanduser, help="the folder of the runs")
    added = verb(export)
    added.add_argument(
        "source",
        metavar="SOURCE",
        type=expanduser,
        help="a run's folder, a checkpoint, or a folder of DeepSpeed's or Accelerate's",
    )
    added.add_argument("-o", "--output", metavar="DIR", type=expanduser, required=True, help="a new or an empty folder")
    added.add_argument("--merge", action="store_true", help="merge an adapter into its base")
    added.add_argument("--dtype", metavar="fp32|bf16|fp16", help="save in this dtype (default: the checkpoint's own)")
    added.add_argument("--model", metavar="MODEL", help="what was trained from (default: what the checkpoint names)")
    added.add_argument("--trust-remote-code", metavar="REVISION", help="run the model's own code, of this revision")
    return made
