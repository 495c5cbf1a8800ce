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
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import RunError, ToolkitError
from toolkit.flags import Parser, add_flags, flag, from_dict, given, read_assignments, spell, to_flags
from toolkit.launching import Stopped
from toolkit.redacting import MARK, redact_all, redacted_output
from toolkit.show import Shown
from toolkit.strategy import SHARDINGS, Loop, Strategy, catalog, sharding_word


def doctor(flags: argparse.Namespace) -> Shown:
    """What works on this machine, what does not and why."""
    from toolkit.doctor import examine

    return examine(compile_ops=flags.compile)


def describe(flags: argparse.Namespace) -> Shown:
    """What a model is, without reading its weights."""
    from toolkit.model import describe

    return describe(flags.model, trust_remote_code=flags.trust_remote_code)


def forecast(flags: argparse.Namespace) -> Shown:
    """What a run will take, before it is launched: bytes of the fullest rank, by part and phase."""
    from toolkit.explaining import contrast
    from toolkit.forecasting import forecast
    from toolkit.model import describe
    from toolkit.smaller import changed

    spec = describe(flags.model, trust_remote_code=flags.trust_remote_code)
    strategy, loop = from_dict(Strategy, given(flags, Strategy)), from_dict(Loop, given(flags, Loop))
    beside = {"ranks": flags.processes, "one_document": flags.one_document}
    found = forecast(spec, strategy, flags.hardware, loop, **beside)
    if flags.against is None:
        return found
    other, batch = changed(strategy, loop, read_assignments(flags.against, Strategy, Loop, alone="sharding"))
    return contrast(found, forecast(spec, other, flags.hardware, batch, **beside))


def timeline(flags: argparse.Namespace) -> Shown:
    """A step phase by phase: bytes by part as forecast and, with --run, as a run measured them."""
    from toolkit.explaining import timeline
    from toolkit.explaining.seen import read_seen
    from toolkit.model import describe

    # What is not said is the run's own, where there is one.
    seen = read_seen(flags.run) if flags.run else None
    strategy, loop = (seen.strategy, seen.loop) if seen else (Strategy(), Loop())
    model = describe(flags.model, trust_remote_code=flags.trust_remote_code) if flags.model or not flags.run else None
    return timeline(
        model,
        from_dict(Strategy, {**dataclasses.asdict(strategy), **given(flags, Strategy)}),
        flags.hardware,
        from_dict(Loop, {**dataclasses.asdict(loop), **given(flags, Loop)}),
        ranks=flags.processes,
        one_document=flags.one_document,
        run=flags.run,
    )


def precisions(flags: argparse.Namespace) -> Shown:
    """Who keeps what in which dtype, stage by stage, under several shardings; with --run beside what its audit found."""
    from toolkit.explaining import precisions
    from toolkit.model import describe

    model = describe(flags.model, trust_remote_code=flags.trust_remote_code) if flags.model or not flags.run else None
    strategies = _strategies(flags, "ddp,zero3,fsdp")
    return precisions(model, strategies, flags.hardware, ranks=flags.processes, run=flags.run)


def plan(flags: argparse.Namespace) -> Shown:
    """Every strategy for this model, machine and global batch: the fastest that fits first, and why others do not."""
    from toolkit.forecasting import plan
    from toolkit.model import EMBEDDED, describe

    _check_target(flags.write, "--write")
    found = plan(
        describe(flags.model, trust_remote_code=flags.trust_remote_code),
        flags.hardware,
        global_batch=flags.global_batch,
        strategy=from_dict(Strategy, given(flags, Strategy)),
        loop=from_dict(Loop, given(flags, Loop)),
        one_document=flags.one_document,
    )
    if flags.write:
        try:
            _write_config(Path(flags.write), found.config(), "--write")
        except ToolkitError:
            _show(found, flags.json)  # what was found is not lost with the file
            raise
        print(found.command(flags.model or EMBEDDED, flags.write), file=sys.stderr)
        print(
            f"Add --data and --steps: without them it trains on the embedded text for {Loop().steps} steps.",
            file=sys.stderr,
        )
    return found


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
        _write_config(Path(flags.output), content, "--output")
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
    from toolkit.devices import hardware
    from toolkit.engines.job import engine_of
    from toolkit.folder import check_new, enter, new_path
    from toolkit.launching import Care, persevere
    from toolkit.locking import new_token
    from toolkit.readying import Recipe, get_ready
    from toolkit.reporting import reported
    from toolkit.runtime import check_ranks

    care = from_dict(Care, given(flags, Care))
    if flags.resume:
        if not flags.run_dir:
            raise ToolkitError("--resume goes on with a run, and no --run-dir names one. Give the run's folder.")
        if Path(flags.run_dir, "run.json").exists():
            return _resume(Path(flags.run_dir), flags)
    recipe, loop = from_dict(Recipe, given(flags, Recipe)), from_dict(Loop, given(flags, Loop))
    strategy, machine = from_dict(Strategy, given(flags, Strategy)), hardware()
    ranks = 1 if flags.processes is None else flags.processes
    check_ranks(machine, ranks)
    check_new(flags.run_dir or "runs/new")
    get_ready(recipe, strategy, loop, ranks, machine.device)
    path = Path(flags.run_dir) if flags.run_dir else new_path("runs", strategy.sharding)
    with enter(path, token=new_token()) as folder, reported(path):
        if flags.resume:
            print(f"no run has begun in {path}: starting from step 0", file=sys.stderr)
        first = ["--run-dir", str(path), *to_flags(recipe, strategy, loop)]
        config = engine_of(strategy).to_yaml(strategy, ranks, 1)
        persevere(folder, "toolkit.finetune", first, [*first, "--resume"], config, timeout=recipe.timeout, care=care)
    return _result(path)


def launch(flags: argparse.Namespace) -> Shown:
    """Run a script or module of your own in processes that `tk.accelerator()` finds ready, with a run's folder."""
    from toolkit.devices import hardware
    from toolkit.folder import check_new, new_path
    from toolkit.launching.running import Run
    from toolkit.launching.sessions import hold_session
    from toolkit.launching.targets import Target, named

    strategy = from_dict(Strategy, given(flags, Strategy))
    if flags.sha256:
        target = Target(kind="function", name=flags.target, sha256=flags.sha256)
    else:
        target = named(flags.target, flags.arguments)
    check_new(flags.run_dir or "runs/new")
    path = Path(flags.run_dir) if flags.run_dir else new_path("runs", strategy.sharding)
    hold_session(path, target, strategy, 1 if flags.processes is None else flags.processes, hardware())
    return Run(path)


def runs(flags: argparse.Namespace) -> Shown:
    """The runs in a folder, the newest first: how far each is, and how it ended."""
    from toolkit.launching.running import runs

    return runs(flags.root)


def watch(flags: argparse.Namespace) -> Shown:
    """Show a run until it ends; Ctrl-C ends the watching alone."""
    from toolkit.launching import attach

    return attach(flags.run).wait()


def stop(flags: argparse.Namespace) -> Shown:
    """End a run's step, publish a checkpoint, and leave no process."""
    from toolkit.launching import attach

    return attach(flags.run).stop()


def resume(flags: argparse.Namespace) -> dict[str, Any]:
    """Go on with a run from its newest checkpoint, also with another strategy or number of processes."""
    return _resume(Path(flags.run), flags)


def _resume(path: Path, flags: argparse.Namespace) -> dict[str, Any]:
    from toolkit.continuing import continued, finished
    from toolkit.devices import hardware
    from toolkit.engines.job import engine_of
    from toolkit.folder import enter, read_run_json
    from toolkit.launching import Care, persevere
    from toolkit.launching.running import Run
    from toolkit.launching.sessions import check_trusted, hold_session, hosted
    from toolkit.locking import new_token
    from toolkit.readying import Recipe, get_ready
    from toolkit.reporting import reported
    from toolkit.runtime import check_ranks

    care = from_dict(Care, given(flags, Care))
    was, machine = read_run_json(path), hardware()
    ranks = was["ranks"] if flags.processes is None else flags.processes
    if target := hosted(was):
        strategy = from_dict(Strategy, {**was["strategy"], **given(flags, Strategy)})
        trusted = getattr(flags, "trust_function", None)
        check_trusted(path, target, trusted=trusted is not None)
        target = dataclasses.replace(target, sha256=trusted or target.sha256)
        hold_session(path, target, strategy, ranks, machine, resume=True)
        return Run(path).to_dict()
    new = {owner: given(flags, owner) for owner in (Recipe, Loop, Strategy)}
    recipe, loop, fields = continued(was, new[Recipe], new[Loop], new[Strategy], ranks)
    strategy = from_dict(Strategy, fields)
    if said := finished(path, was, loop):
        asked = {**new[Recipe], **new[Loop], **{name: getattr(strategy, name) for name in new[Strategy]}}
        if other := _otherwise(was, {**asked, "processes": flags.processes}):
            raise RunError(f"{said} {' and '.join(other)} would change nothing of it: leave such flags out.")
        print(said, file=sys.stderr)
        return _result(path)
    check_ranks(machine, ranks)
    get_ready(recipe, strategy, loop, ranks, machine.device)
    with enter(path, resume=True, token=new_token()) as folder, reported(path):
        again = ["--run-dir", str(path), "--resume", *spell({**new[Recipe], **new[Loop], **new[Strategy]})]
        config = engine_of(strategy).to_yaml(strategy, ranks, 1)
        persevere(folder, "toolkit.finetune", again, again, config, timeout=recipe.timeout, care=care)
    return _result(path)


CARE = ("timeout", "keep", "workers", "tracker", "memory_window", "save_every", "save_seconds")
"""Flags that say how a run is looked after, and nothing of what it trains."""


def _otherwise(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What was asked anew, and is otherwise than the run was, in words."""
    before = {**was["recipe"], **was["loop"], **was["strategy"], "processes": was["ranks"]}
    return [
        f"{flag(name)} {value} (it was {before.get(name)})"
        for name, value in now.items()
        if name not in CARE and value not in (None, "auto", before.get(name)) and MARK not in str(before.get(name))
    ]


def _result(path: Path) -> dict[str, Any]:
    from toolkit.comparing import read_run

    return dataclasses.asdict(read_run(path))


def report(flags: argparse.Namespace) -> Shown:
    """Write a run's report.html, and show what is in it: also of a run that goes on, was stopped or failed."""
    from toolkit.reporting import report

    found = report(flags.run)
    print(f"report: {found.write(flags.output)}", file=sys.stderr)
    return found


def compare(flags: argparse.Namespace) -> Shown:
    """The same work under several strategies, in one table."""
    from toolkit.comparing import compare
    from toolkit.devices import hardware
    from toolkit.readying import Recipe

    strategies = _strategies(flags, "ddp,zero1,zero2,zero3,fsdp,fsdp_grad_op")
    loop = from_dict(Loop, {"steps": 20, **given(flags, Loop)})
    recipe = from_dict(Recipe, given(flags, Recipe))
    return compare(
        recipe, strategies, loop, ranks=flags.processes, machine=hardware(), root=Path(flags.run_dir or "runs")
    )


def _strategies(flags: argparse.Namespace, shardings: str) -> list[Strategy]:
    """One for each of the shardings that `--sharding` lists, or of these."""
    fields = given(flags, Strategy)
    words = [sharding_word(word) for word in fields.pop("sharding", shardings).split(",")]
    replicate = fields.pop("replicate", 2)
    return [
        from_dict(Strategy, {**fields, "sharding": word, "replicate": replicate if SHARDINGS[word].replicate else 1})
        for word in words
    ]


def export(flags: argparse.Namespace) -> Shown:
    """Write what a checkpoint holds as Hugging Face files, and check them."""
    from toolkit.exporting import export
    from toolkit.model import EMBEDDED
    from toolkit.readying import embedded_model

    model = str(embedded_model()) if flags.model == EMBEDDED else flags.model
    return export(
        flags.source,
        flags.output,
        merge=flags.merge,
        dtype=flags.dtype,
        model=model,
        trust_remote_code=flags.trust_remote_code,
    )


def parser() -> Parser:
    """Every verb, with the flags that it takes."""
    from toolkit.launching import Care
    from toolkit.readying import Recipe

    made = Parser(prog="toolkit", description="One word switches how a model is trained.")
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(function: Any, *owners: type[Any], without: tuple[str, ...] = (), default: str = "") -> Parser:
        told = (function.__doc__ or "").strip()
        added: Parser = verbs.add_parser(function.__name__, help=told, description=told)
        added.set_defaults(call=function)
        added.add_argument("--json", metavar="FILE", help="write the result as JSON; `-` for standard output alone")
        add_flags(added, *owners, without=without, default=default)
        return added

    verb(doctor).add_argument("--compile", action="store_true", help="compile DeepSpeed's operators now")
    described = verb(describe)
    described.add_argument("model", nargs="?", help="Hub id, folder or config.json; nothing: the embedded model")
    described.add_argument("--trust-remote-code", metavar="REVISION", help="run the model's own code, of this revision")
    for function in (forecast, timeline, precisions):
        foretold = verb(function, Strategy, *(() if function is precisions else (Loop,)))
        foretold.add_argument("model", nargs="?", help="Hub id, folder or config.json; nothing: the embedded model")
        foretold.add_argument(
            "--trust-remote-code", metavar="REVISION", help="run the model's own code, of this revision"
        )
        foretold.add_argument(
            "--hardware", metavar="NAME", help="say '8x H100-80GB' or '2x cpu' (default: this machine)"
        )
        foretold.add_argument("--processes", type=int, help="ranks in all (default: one a device)")
        if function is not precisions:
            foretold.add_argument(
                "--one-document", action="store_true", help="rows hold one document each, and no padding"
            )
        if function is forecast:
            foretold.add_argument(
                "--against",
                metavar="WORDS",
                help="beside another: 'fsdp', or 'sharding=fsdp,offload=cpu,micro_batch=8'",
            )
        else:
            foretold.add_argument("--run", metavar="RUN", help="folder of a run that is shown beside")
    kept = ("sharding", "offload", "activation_checkpointing", "replicate", "micro_batch", "accumulation")
    planned = verb(plan, Strategy, Loop, without=kept)
    planned.add_argument("model", nargs="?", help="Hub id, folder or config.json; nothing: the embedded model")
    planned.add_argument("--trust-remote-code", metavar="REVISION", help="run the model's own code, of this revision")
    planned.add_argument("--hardware", metavar="NAME", help="say '8x H100-80GB' or '2x cpu' (default: this machine)")
    planned.add_argument("--global-batch", type=int, required=True, help="samples of a step, over all ranks")
    planned.add_argument("--one-document", action="store_true", help="rows hold one document each, and no padding")
    planned.add_argument("--write", metavar="FILE", help="write the best one's Accelerate config, and say the command")
    written = verb(config, Strategy)
    written.add_argument("--processes", type=int, help="ranks in all (default: the fewest that shard)")
    written.add_argument("--nodes", type=int, default=1, help="machines (default: 1)")
    written.add_argument("--all", metavar="DIR", help="write a file for every strategy into this folder")
    written.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: standard output)")
    added = verb(train, Recipe, Strategy, Loop, Care)
    added.add_argument("--processes", type=int, help="ranks on this machine (default: 1)")
    added.add_argument("--run-dir", metavar="DIR", help="the run's folder (default: a new one under runs/)")
    added.add_argument("--resume", action="store_true", help="go on with the run in --run-dir, if there is one")
    added = verb(resume, Recipe, Strategy, Loop, default="as the run was")
    add_flags(added, Care)
    added.add_argument("run", metavar="RUN", help="the run's folder")
    added.add_argument("--processes", type=int, help="ranks on this machine (default: as many as before)")
    added.add_argument(
        "--trust-function",
        metavar="SHA256",
        nargs="?",
        const="",
        help="run the function that a notebook shipped into the folder, as it is there",
    )
    added = verb(launch, Strategy)
    added.add_argument("--processes", type=int, help="ranks on this machine (default: 1)")
    added.add_argument("--run-dir", metavar="DIR", help="the run's folder (default: a new one under runs/)")
    added.add_argument("--sha256", help=argparse.SUPPRESS)  # of a function's file, which `tk.launch` wrote
    added.add_argument("target", metavar="TARGET", help="a script that ends in .py, or a module")
    added.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="its own command line")
    verb(watch).add_argument("run", metavar="RUN", help="the run's folder")
    verb(stop).add_argument("run", metavar="RUN", help="the run's folder")
    verb(runs).add_argument("root", nargs="?", default="runs", metavar="DIR", help="folder of the runs (default: runs)")
    added = verb(report)
    added.add_argument("run", metavar="RUN", help="the run's folder")
    added.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: report.html in the folder)")
    added = verb(compare, Recipe, Strategy, Loop)
    added.add_argument("--processes", type=int, default=2, help="ranks on this machine")
    added.add_argument("--run-dir", metavar="DIR", help="the folder of the runs")
    added = verb(export)
    added.add_argument(
        "source", metavar="SOURCE", help="a run's folder, a checkpoint, or a folder of DeepSpeed's or Accelerate's"
    )
    added.add_argument("-o", "--output", metavar="DIR", required=True, help="a new or an empty folder")
    added.add_argument("--merge", action="store_true", help="merge an adapter into its base")
    added.add_argument("--dtype", metavar="fp32|bf16|fp16", help="save in this dtype (default: the checkpoint's own)")
    added.add_argument("--model", metavar="MODEL", help="what was trained from (default: what the checkpoint names)")
    added.add_argument("--trust-remote-code", metavar="REVISION", help="run the model's own code, of this revision")
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


def _check_target(target: str | None, flag: str) -> None:
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
        raise ToolkitError(f"{flag} {target}: {why}. Name a file in a folder that exists, or - for standard output.")


def _write_config(path: Path, content: dict[str, Any], flag: str) -> None:
    """An Accelerate config file. Somebody's own file is not written over."""
    import yaml

    text = yaml.safe_dump(content)
    if path.is_file() and path.read_bytes() != text.encode():
        raise ToolkitError(f"{path} exists and says something else. Remove it, or name another file with {flag}.")
    _write(path, text)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ToolkitError(f"{path} cannot be written: {error.strerror}. Choose another place.") from error


def _show(result: Shown | dict[str, Any], target: str | None) -> None:
    value = redact_all(result.to_dict() if isinstance(result, Shown) else result)
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


@redacted_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command `toolkit`. Exit codes: 0 done, 2 a user's mistake, 130 and 143 stopped, 1 anything else."""
    try:
        with _terminable():
            flags = parser().parse_args(arguments)
            _check_target(flags.json, "--json")
            with _quiet(flags.json):
                result = flags.call(flags)
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
    except Exception:  # a bug of ours: as the interpreter would show it, but redacted
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
