"""The same verbs in a shell."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.launching import Stopped
from toolkit.show import Shown
from toolkit.strategy import (
    SHARDINGS,
    Loop,
    Parser,
    Strategy,
    add_flags,
    catalog,
    from_dict,
    given,
    sharding_word,
    to_flags,
)


def doctor(flags: argparse.Namespace) -> Shown:
    """What works on this machine, what does not and why."""
    from toolkit.doctor import examine

    return examine(compile_ops=flags.compile)


def describe(flags: argparse.Namespace) -> Shown:
    """What a model is, without reading its weights."""
    from toolkit.model import describe

    return describe(flags.model)


def config(flags: argparse.Namespace) -> dict[str, Any]:
    """Write the Accelerate config file that a strategy is, or all of them."""
    import yaml

    from toolkit.engines.job import engine_of

    if flags.all:
        written = {}
        for name, strategy in catalog().items():
            ranks = 1 if strategy.sharding == "none" else 2 * strategy.replicate
            written[name] = engine_of(strategy).to_yaml(strategy, ranks, 1)
            _write(Path(flags.all, f"{name}.yaml"), yaml.safe_dump(written[name]))
        return written
    strategy = from_dict(Strategy, given(flags, Strategy))
    ranks = flags.processes
    if ranks is None:
        ranks = flags.nodes if strategy.sharding == "none" else 2 * strategy.replicate * flags.nodes
    _check_file(strategy, ranks, flags.nodes)
    content = engine_of(strategy).to_yaml(strategy, ranks, flags.nodes)
    if flags.output:
        _write(Path(flags.output), yaml.safe_dump(content))
    elif flags.json != "-":
        print(yaml.safe_dump(content), end="")
    return content


def _check_file(strategy: Strategy, ranks: int, nodes: int) -> None:
    """Refuse what no machine could run: a config file may be for another one than this."""
    from toolkit.devices import hardware
    from toolkit.engines.job import resolve

    for name, value in (("processes", ranks), ("nodes", nodes)):
        if value < 1:
            raise ToolkitError(f"{name} {value}: expected at least 1.")
    if ranks % nodes:
        raise ToolkitError(f"processes {ranks}: expected a multiple of {nodes} nodes, since each runs as many.")
    open_ones = dataclasses.replace(strategy, precision="auto", attention="auto")
    resolve(open_ones, Loop(), None, ranks, hardware("1x H100-80GB").device)


def train(flags: argparse.Namespace) -> dict[str, Any]:
    """Train a model, in processes of its own."""
    from toolkit.comparing import read_run
    from toolkit.devices import hardware
    from toolkit.engines.job import engine_of
    from toolkit.folder import check_new, enter, new_path, new_token
    from toolkit.launching import supervise
    from toolkit.readying import Recipe, get_ready
    from toolkit.runtime import check_ranks

    recipe, loop = from_dict(Recipe, given(flags, Recipe)), from_dict(Loop, given(flags, Loop))
    strategy, machine = from_dict(Strategy, given(flags, Strategy)), hardware()
    check_ranks(machine, flags.processes)
    check_new(flags.run_dir or "runs/new")
    get_ready(recipe, strategy, loop, flags.processes, machine.device)
    path = Path(flags.run_dir) if flags.run_dir else new_path("runs", strategy.sharding)
    with enter(path, token=new_token()) as folder:
        arguments = ["--run-dir", str(path), *to_flags(recipe, strategy, loop)]
        content = engine_of(strategy).to_yaml(strategy, flags.processes, 1)
        supervise(folder, "toolkit.finetune", arguments, content)
    return dataclasses.asdict(read_run(path))


def compare(flags: argparse.Namespace) -> Shown:
    """The same work under several strategies, in one table."""
    from toolkit.comparing import compare
    from toolkit.devices import hardware
    from toolkit.readying import Recipe

    fields = given(flags, Strategy)
    words = [
        sharding_word(word) for word in fields.pop("sharding", "ddp,zero1,zero2,zero3,fsdp,fsdp_grad_op").split(",")
    ]
    replicate = fields.pop("replicate", 2)
    strategies = [
        from_dict(Strategy, {**fields, "sharding": word, "replicate": replicate if SHARDINGS[word].replicate else 1})
        for word in words
    ]
    loop = from_dict(Loop, {"steps": 20, **given(flags, Loop)})
    recipe = from_dict(Recipe, given(flags, Recipe))
    return compare(
        recipe, strategies, loop, ranks=flags.processes, machine=hardware(), root=Path(flags.run_dir or "runs")
    )


def parser() -> Parser:
    """Every verb, with the flags that it takes."""
    from toolkit.readying import Recipe

    made = Parser(prog="toolkit", description="One word switches how a model is trained.")
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(function: Any, *owners: type[Any], without: tuple[str, ...] = ()) -> Parser:
        told = (function.__doc__ or "").strip()
        added: Parser = verbs.add_parser(function.__name__, help=told, description=told)
        added.set_defaults(run=function)
        added.add_argument("--json", metavar="FILE", help="write the result as JSON; `-` for standard output alone")
        add_flags(added, *owners, without=without)
        return added

    verb(doctor).add_argument("--compile", action="store_true", help="compile DeepSpeed's operators now")
    verb(describe).add_argument("model", nargs="?", help="Hub id, folder or config.json; nothing: the embedded model")
    written = verb(config, Strategy)
    written.add_argument("--processes", type=int, help="ranks in all (default: the fewest that shard)")
    written.add_argument("--nodes", type=int, default=1, help="machines (default: 1)")
    written.add_argument("--all", metavar="DIR", help="write a file for every strategy into this folder")
    written.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: standard output)")
    for function in (train, compare):
        added = verb(function, Recipe, Strategy, Loop)
        added.add_argument("--processes", type=int, default=1 if function is train else 2, help="ranks on this machine")
        added.add_argument("--run-dir", metavar="DIR", help="the run's folder (compare: the folder of its runs)")
    return made


@contextlib.contextmanager
def _quiet(target: str | None) -> Iterator[None]:
    """With `--json -` standard output belongs to the JSON: what this process and its children print goes to the other."""
    if target != "-":
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _check_target(target: str | None) -> None:
    """Before hours of work: whether its result can be written."""
    if target is None or target == "-":
        return
    folder = Path(target).absolute().parent
    if Path(target).is_dir():
        why = "it is a folder"
    elif not folder.is_dir():
        why = f"there is no folder {folder}"
    else:
        why = "" if os.access(folder, os.W_OK) else f"{folder} cannot be written"
    if why:
        raise ToolkitError(f"--json {target}: {why}. Name a file in a folder that exists, or - for standard output.")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ToolkitError(f"{path} cannot be written: {error.strerror}. Choose another place.") from error


def _show(result: Shown | dict[str, Any], target: str | None) -> None:
    value = result.to_dict() if isinstance(result, Shown) else result
    if target is not None:
        text = json.dumps(value, indent=2) + "\n"
        if target == "-":
            print(text, end="")
        else:
            _write(Path(target), text)
    if isinstance(result, Shown) and target != "-":
        print(result)
    sys.stdout.flush()


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends this process as an exception does, so that drafts are removed, with exit code 143."""

    def stop(number: int, _: object) -> None:
        print("toolkit: stopped by SIGTERM", file=sys.stderr)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `toolkit`. Exit codes: 0 done, 2 a user's mistake, 130 and 143 stopped, 1 anything else."""
    try:
        with _terminable():
            flags = parser().parse_args(arguments)
            _check_target(flags.json)
            with _quiet(flags.json):
                result = flags.run(flags)
            _show(result, flags.json)
    except (ToolkitError, Stopped) as error:
        print(f"toolkit: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("toolkit: stopped by SIGINT", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read has read enough. The interpreter would write what is left once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
