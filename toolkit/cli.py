"""The same verbs in a shell."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.launching import Stopped
from toolkit.show import Shown
from toolkit.strategy import SHARDINGS, Loop, Strategy, add_flags, catalog, from_dict, given, sharding_word, to_flags


def doctor(flags: argparse.Namespace) -> Shown:
    """What works on this machine, what does not and why."""
    from toolkit.doctor import examine

    return examine(compile_ops=flags.compile)


def describe(flags: argparse.Namespace) -> Shown:
    """What a model is, without reading its weights."""
    from toolkit.model import describe

    return describe(flags.model)


def config(flags: argparse.Namespace) -> None:
    """Write the Accelerate config file that a strategy is, or all of them."""
    import yaml

    from toolkit.engines.job import engine_of

    if flags.all:
        folder = Path(flags.all)
        folder.mkdir(parents=True, exist_ok=True)
        for name, strategy in catalog().items():
            ranks = 1 if strategy.sharding == "none" else 2 * strategy.replicate
            content = engine_of(strategy).to_yaml(strategy, ranks, 1)
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
        return
    strategy = from_dict(Strategy, given(flags, Strategy))
    content = engine_of(strategy).to_yaml(strategy, flags.processes, flags.nodes)
    if flags.output:
        Path(flags.output).write_text(yaml.safe_dump(content))
    elif flags.json != "-":
        print(yaml.safe_dump(content), end="")
    _write_json(content, flags.json)


def train(flags: argparse.Namespace) -> None:
    """Train a model, in processes of its own."""
    from toolkit.devices import hardware
    from toolkit.engines.job import engine_of
    from toolkit.finetune import Recipe, get_ready
    from toolkit.folder import enter, new_path, new_token
    from toolkit.launching import check_ranks, supervise

    recipe, loop = from_dict(Recipe, given(flags, Recipe)), from_dict(Loop, given(flags, Loop))
    strategy, machine = from_dict(Strategy, given(flags, Strategy)), hardware()
    check_ranks(machine, flags.processes)
    get_ready(recipe, strategy, loop, flags.processes, machine.device)
    path = Path(flags.run_dir) if flags.run_dir else new_path("runs", strategy.sharding)
    with enter(path, token=new_token()) as folder:
        arguments = ["--run-dir", str(path), *to_flags(recipe, strategy, loop)]
        content = engine_of(strategy).to_yaml(strategy, flags.processes, 1)
        with _quiet(flags.json):
            supervise(folder, "toolkit.finetune", arguments, content, output=sys.stderr if flags.json == "-" else None)
    _write_json(_outcome(path), flags.json)


def _outcome(path: Path) -> dict[str, Any]:
    """What `train --json` says: the run's folder, as `compare` reads it."""
    from toolkit.comparing import read_run

    return dataclasses.asdict(read_run(path))


def compare(flags: argparse.Namespace) -> Shown:
    """The same work under several strategies, in one table."""
    from toolkit.comparing import compare
    from toolkit.devices import hardware
    from toolkit.finetune import Recipe

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


def parser() -> argparse.ArgumentParser:
    """Every verb, with the flags that it takes."""
    from toolkit.finetune import Recipe

    made = argparse.ArgumentParser(prog="toolkit", description="One word switches how a model is trained.")
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(function: Any, *owners: type[Any], without: tuple[str, ...] = ()) -> argparse.ArgumentParser:
        told = (function.__doc__ or "").strip()
        added = verbs.add_parser(function.__name__, help=told, description=told)
        added.set_defaults(run=function)
        added.add_argument("--json", metavar="FILE", help="write the result as JSON; `-` for standard output alone")
        add_flags(added, *owners, without=without)
        return added

    verb(doctor).add_argument("--compile", action="store_true", help="compile DeepSpeed's operators now")
    verb(describe).add_argument("model", nargs="?", help="Hub id, folder or config.json; nothing: the embedded model")
    written = verb(config, Strategy)
    written.add_argument("--processes", type=int, default=2, help="ranks in all (default: 2)")
    written.add_argument("--nodes", type=int, default=1, help="machines (default: 1)")
    written.add_argument("--all", metavar="DIR", help="write a file for every strategy into this folder")
    written.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: standard output)")
    for function in (train, compare):
        added = verb(function, Recipe, Strategy, Loop)
        added.add_argument("--processes", type=int, default=1 if function is train else 2, help="ranks on this machine")
        added.add_argument("--run-dir", metavar="DIR", help="the run's folder (compare: the folder of its runs)")
    return made


@contextlib.contextmanager
def _quiet(target: str | None) -> Any:
    """With `--json -` standard output belongs to the JSON."""
    with contextlib.redirect_stdout(sys.stderr) if target == "-" else contextlib.nullcontext():
        yield


def _write_json(value: Any, target: str | None) -> None:
    if target is None:
        return
    text = json.dumps(value, indent=2)
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `toolkit`. Exit codes: 0 done, 2 a user's mistake, 130 and 143 stopped, 1 anything else."""
    flags = parser().parse_args(arguments)
    try:
        shown = flags.run(flags)
    except (ToolkitError, Stopped) as error:
        print(f"toolkit: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    if shown is not None:
        _write_json(shown.to_dict(), flags.json)
        if flags.json != "-":
            print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
