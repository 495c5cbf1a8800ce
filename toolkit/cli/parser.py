"""The command line: every verb, with its flags."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from os.path import expanduser  # a shell leaves the `~` in `--run-dir=~/runs`
from typing import Any

from toolkit.cli.planning_commands import (
    config,
    describe,
    doctor,
    forecast,
    guard,
    plan,
    precisions,
    preview,
    rehearse,
    timeline,
)
from toolkit.cli.run_commands import compare, export, generate, launch, report, resume, runs, stop, train, watch
from toolkit.config.flags import Parser, add_flags, flag
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core import VERSION
from toolkit.core.errors import StrategyError
from toolkit.launcher import RestartPolicy

RANKS = "default: 1 for none; else one a device, on a CPU 2, for hsdp 2 a replica"
"""The result of `engines.job.default_ranks`, for help."""

CHOSEN_BY_PLAN = ("sharding", "offload", "activation_checkpointing", "dp_replicate", "micro_batch", "accumulation")

Argument = tuple[Sequence[str], Mapping[str, Any]]


def _argument(*names: str, **options: Any) -> Argument:
    return names, options


def _path(*names: str, metavar: str, help: str, **options: Any) -> Argument:
    return names, {"metavar": metavar, "type": expanduser, "help": help, **options}


def _switch(name: str, help: str) -> Argument:
    return (name,), {"action": "store_true", "help": help}


JSON = _path("--json", metavar="FILE", help="write the result as JSON; `-`: to standard output, and nothing else there")
MODEL = _argument(
    "model", nargs="?", metavar="[MODEL]", help="Hub id, folder or config.json (default: the embedded model)"
)
REMOTE_CODE = _argument("--trust-remote-code", metavar="REVISION", help="run the model's own code, of this revision")
HARDWARE = _argument("--hardware", metavar="NAME", help="such as '8x H100-80GB' or '2x cpu' (default: this machine)")
HOST_MEMORY = _argument(
    "--host-memory", metavar="SIZE", help="memory of a node's host, such as 60GiB (default: of --hardware)"
)
MACHINES = _argument(
    "--hardware", metavar="NAME", help="as '8x H100-80GB'; 'any x H100-80GB': one or more (default: this machine)"
)
BUDGET = (
    _argument("--tokens", type=float, help="tokens of the whole training, such as 2e9: adds hours"),
    _argument("--price", type=float, help="price of a device for an hour: adds costs"),
    _switch("--all", "show every candidate, not only the first ones and the reasons"),
)
ONE_DOCUMENT = _switch("--one-document", "each row holds one document, without padding")
SAVES = (
    _switch("--no-save", "the run exports no result"),
    _switch("--no-checkpoints", "the run writes no checkpoints"),
)
IMBALANCE = _argument(
    "--expert-imbalance",
    type=float,
    default=1.0,
    metavar="X",
    help="with --ep: tokens of the rank with most, over the ranks' mean (default: 1)",
)
UNQUANTIZED = _switch("--allow-unquantized", "allow QLoRA with most weights unquantized")
TOTAL_RANKS = _argument("--processes", type=int, help=f"ranks in all ({RANKS})")
RANKS_HERE = _argument("--processes", type=int, help=f"ranks on this machine ({RANKS})")
DEEPSPEED_FILE = _path(
    "--deepspeed-config", metavar="FILE", help='take the fields of a DeepSpeed file; "auto" in it is left to the flags'
)
RUN = _path("run", metavar="RUN", help="the run's folder")
COMPARED_RUN = _path("--run", metavar="RUN", help="folder of a run to compare with")
NEW_DIR = _path("--run-dir", metavar="DIR", help="the run's folder (default: a new one under runs/)")
TARGET_DIGEST = _argument("--sha256", help=argparse.SUPPRESS)  # of a function's file, which `tk.launch` wrote


FORECASTING = (MODEL, REMOTE_CODE, HARDWARE, TOTAL_RANKS)
AGAINST = _argument(
    "--against", metavar="FIELDS", help="compare with: 'fsdp', or 'sharding=fsdp,offload=cpu,micro_batch=8'"
)
REHEARSED = (
    _argument("--ranks", type=int, required=True, metavar="N", help="ranks of the planned run"),
    _argument("--rank", type=int, default=0, metavar="R", help="which of them, from 0 (default: 0)"),
)
PLANNING = (
    MODEL,
    REMOTE_CODE,
    MACHINES,
    HOST_MEMORY,
    _argument(
        "--global-batch",
        type=int,
        help="samples of a step, over all ranks (default: 32, or the next multiple of the ranks)",
    ),
    ONE_DOCUMENT,
    UNQUANTIZED,
    _path("--write", metavar="FILE", help="write the best one's Accelerate config, and print its command"),
    *BUDGET,
)
PREVIEW = (
    _argument("model", metavar="MODEL", help="Hub id, folder, or embedded"),
    _argument("data", metavar="DATA", help="text, JSONL, folder, dataset, or embedded"),
    REMOTE_CODE,
    _argument("--seq-len", type=int, help=f"tokens of a row (default: {TrainConfig().seq_len})"),
)
PREVIEWED = (
    "mask_prompts",
    "train_on",
    "add_end_token",
    "too_long",
    "chat_template",
    "text_column",
    "columns",
    "data_format",
    "packing",
)
"""The fields of `RunConfig` that decide how data are read and what is trained of them."""

CONFIG = (
    _argument("--processes", type=int, help=f"ranks in all ({RANKS}, times --nodes)"),
    _argument("--nodes", type=int, default=1, help="machines (default: 1)"),
    _argument("--node-rank", type=int, metavar="N", help="the node of the file, from 0; with --nodes"),
    _argument("--main-address", metavar="HOST:PORT", help="address of node 0; with --nodes"),
    _path("--all", metavar="DIR", help="write a file for every strategy into this folder"),
    _path("-o", "--output", metavar="FILE", help="the file to write (default: standard output)"),
)
PLAIN = _switch("--plain", "for comparisons: --loss whole --activation-checkpointing none")
CONTINUE = _switch("--resume", "continue the run in --run-dir, if there is one")
RESUME = (
    RUN,
    _argument("--processes", type=int, help="ranks on this machine (default: as many as before)"),
    _argument("--target", metavar="COMMAND", help="of a run of your own script or module: 'train.py --lr 3'"),
    _argument("--trust-target", metavar="SHA256", help="run the target in run.json, of this digest"),
    TARGET_DIGEST,
)
LAUNCH = (
    RANKS_HERE,
    NEW_DIR,
    _argument("--timeout", type=float, metavar="S", help="seconds a rank waits in a collective (default: torch's)"),
    TARGET_DIGEST,
    _argument("target", metavar="TARGET", help="a script that ends in .py, or a module"),
    _argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="the target's own command line"),
)
RUNS = _path("root", nargs="?", default="runs", metavar="DIR", help="folder of the runs (default: runs)")
PAGE = _path("-o", "--output", metavar="FILE", help="the file to write (default: report.html in the folder)")
RUNS_DIR = _path("--run-dir", metavar="DIR", help="the folder of the runs")
EXPORT = (
    _path("source", metavar="SOURCE", help="a run, a checkpoint, or a folder of DeepSpeed's or Accelerate's"),
    _path("-o", "--output", metavar="DIR", required=True, help="a new or an empty folder"),
    _switch("--merge", "merge an adapter into its base"),
    _argument("--dtype", metavar="fp32|bf16|fp16", help="save in this dtype (default: the checkpoint's own)"),
    _argument("--model", metavar="MODEL", help="the base model (default: from the checkpoint)"),
    REMOTE_CODE,
)
GENERATE = (
    _path("run", metavar="RUN", help="a run with a saved model or adapter, or a folder of either"),
    _argument("prompt", nargs="+", metavar="PROMPT", help="a text; where there is a chat template, a user's message"),
    _argument("--max-new-tokens", type=int, metavar="N", help="tokens of the answer at most (default: 256)"),
    _argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy, the same each time (default: 0)"),
    _argument("--no-chat-template", dest="chat_template", action="store_false", help="give the prompt as it is"),
    _argument("--model", metavar="MODEL", help="the base of an adapter (default: the one that it was trained over)"),
    REMOTE_CODE,
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line. Fields of `--deepspeed-config` become flags.

    Raises:
        StrategyError: for a flag that contradicts the file.
    """
    flags = build_parser().parse_args(arguments)
    if path := getattr(flags, "deepspeed_config", None):
        from toolkit.engines.deepspeed.user_config import read_config

        for name, value in read_config(path, flags.processes).items():
            if getattr(flags, name) not in (None, value):
                flag_text = f"{flag(name)} {getattr(flags, name)}"
                raise StrategyError(
                    f"{flag_text} contradicts {path}, which sets {value}. Change one, or leave the flag out."
                )
            setattr(flags, name, value)
    return flags


def build_parser() -> Parser:
    """Return the parser of `toolkit`, with a parser for each verb."""
    parser = Parser(prog="toolkit", description="One word switches how a model is trained.")
    parser.add_argument("-V", "--version", action="version", version=f"toolkit {VERSION}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add(function: Any, arguments: Sequence[Argument], *owners: type[Any], **options: Any) -> Parser:
        """Add the verb of a function: its docstring is the help, and each field of `owners` a flag."""
        name, text = function.__name__, (function.__doc__ or "").strip()
        words = [f"{options.get('metavar', names[0])}" for names, options in arguments if names[0][0] != "-"]
        usage = " ".join(["toolkit", name, "[flags]", *words])
        summary = text.partition("\n\n")[0]
        verb: Parser = verbs.add_parser(name, help=summary, description=" ".join(text.split()), usage=usage)
        verb.set_defaults(call=function)
        for names, argument_options in (JSON, *arguments):
            verb.add_argument(*names, **argument_options)
        add_flags(verb, *owners, **options)
        return verb

    add(doctor, [_switch("--compile", "compile DeepSpeed's operators now")])
    add(describe, [MODEL, REMOTE_CODE])
    add(
        forecast,
        [*FORECASTING, HOST_MEMORY, DEEPSPEED_FILE, ONE_DOCUMENT, *SAVES, UNQUANTIZED, IMBALANCE, AGAINST],
        Strategy,
        TrainConfig,
    )
    add(timeline, [*FORECASTING, ONE_DOCUMENT, COMPARED_RUN], Strategy, TrainConfig)
    add(precisions, [*FORECASTING, COMPARED_RUN], Strategy)
    other_fields = tuple(field.name for field in dataclasses.fields(RunConfig) if field.name not in PREVIEWED)
    add(guard, [MODEL, REMOTE_CODE, TOTAL_RANKS], Strategy)
    add(rehearse, [MODEL, REMOTE_CODE, *REHEARSED], Strategy, TrainConfig)
    add(preview, PREVIEW, RunConfig, without=other_fields)
    add(plan, PLANNING, Strategy, TrainConfig, without=CHOSEN_BY_PLAN)
    add(config, CONFIG, Strategy)
    add(train, [RANKS_HERE, NEW_DIR, CONTINUE, PLAIN, DEEPSPEED_FILE], RunConfig, Strategy, TrainConfig, RestartPolicy)
    resumed = add(resume, RESUME, RunConfig, Strategy, TrainConfig, default="as the run was")
    add_flags(resumed, RestartPolicy)
    add(launch, LAUNCH, Strategy)
    add(watch, [RUN])
    add(stop, [RUN])
    add(runs, [RUNS])
    add(report, [RUN, PAGE])
    add(compare, [RANKS_HERE, RUNS_DIR], RunConfig, Strategy, TrainConfig)
    add(export, EXPORT)
    add(generate, GENERATE)
    return parser
