"""`--compile`: each block of a model alone. Blocks of a kind share a graph, and engines communicate between graphs."""

from __future__ import annotations

import os
import shutil
import sysconfig
import time
from pathlib import Path
from typing import Any

from toolkit.core.errors import MissingLibrary, StrategyError
from toolkit.engines.job import Job, Transform
from toolkit.engines.registry import register_transform
from toolkit.models.structure import module_lists


class Compile(Transform):
    """`--compile`. Only forwards with gradients are compiled: evaluation and generation have other lengths and a cache.

    The trace of a forecast stays eager: a compiled block keeps at most its activations.
    """

    name = "compile"

    def settings(self, job: Job) -> bool | None:
        return job.strategy.compile or None

    def refuse(self, job: Job) -> None:
        values, kind = job.strategy, str(job.spec.config.get("model_type")) if job.spec else ""
        policy = values.activation_checkpointing
        for what, refused, why in (
            ("sharding 'zero3'", values.sharding == "zero3", "it gathers inside the blocks, which breaks their graphs"),
            (f"tp {values.tp}", values.tp > 1, "its collectives would be parts of the graphs"),
            (f"ep {values.ep}", values.ep > 1, "its exchange of tokens waits for the host"),
            (f"adapter {values.adapter!r}", values.quantized, "bitsandbytes' products are no parts of a graph"),
            (f"attention {values.attention!r}", values.attention == "flex", "it has a graph of its own"),
            (
                f"activation_checkpointing {policy!r}",
                policy != "none" and "t5" in kind,
                f"{kind}'s bias breaks the graphs",
            ),
        ):
            if refused:
                raise StrategyError(f"compile does not run with {what}: {why}. Leave out one of the two.")
        if job.device.kind == "cpu":
            _require_compiler("CXX", "g++", "clang++")

    def apply(self, model: Any, job: Job) -> Any:
        if next(model.parameters()).is_meta:  # a trace
            return model
        if job.device.kind != "cpu":
            _require_compiler("CC", "gcc", "clang")
        for owner, blocks in _stacks(model, job):
            for block in blocks:
                block.compile()  # in place: names of parameters stay as they are
            owner.register_forward_pre_hook(_begin)
            owner.register_forward_hook(_end, always_call=True)
        return model

    def after_prepare(self, prepared: Any) -> None:
        """Print after the first step how long it took, and the graphs. Refuse a graph break."""
        from torch._dynamo.utils import counters
        from torch.optim.optimizer import register_optimizer_step_post_hook

        begin, graphs_before, breaks_before = time.monotonic(), _graphs(), counters["graph_break"].copy()

        def report(*_: Any) -> None:
            handle.remove()
            for reason in counters["graph_break"] - breaks_before:
                raise StrategyError(
                    f"compile does not run with this model: a block is no single graph ({reason.splitlines()[0].rstrip('.')}). "
                    "Leave out --compile."
                )
            blocks = sum(len(blocks) for _, blocks in _stacks(prepared.model, prepared.job))
            graphs, seconds = _graphs() - graphs_before, time.monotonic() - begin
            prepared.accelerator.print(
                f"compile: {blocks} blocks, {graphs} graph{'s' * (graphs != 1)}; {seconds:.1f} s to the first step"
            )

        handle = register_optimizer_step_post_hook(report)


register_transform(Compile())


def _graphs() -> int:
    """Return the graphs that this process has compiled."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _stacks(model: Any, job: Job) -> list[tuple[Any, list[Any]]]:
    """Return the blocks of each stack, with the module that calls them. FSDP puts its name before a class's."""
    kinds: Any = job.spec.blocks if job.spec else ()
    stacks = []
    for name, stack in module_lists(model):
        blocks = [block for block in stack.children() if type(block).__name__.removeprefix("FSDP") in kinds]
        stacks.append((model.get_submodule(name.rpartition(".")[0]), blocks))
    return stacks


def _begin(*_: Any) -> None:
    import torch

    if not torch.is_grad_enabled():
        torch.compiler.set_stance("force_eager")


def _end(*_: Any) -> None:
    import torch

    if not torch.is_grad_enabled():
        torch.compiler.set_stance("default")


def _require_compiler(variable: str, *names: str) -> None:
    """Refuse a machine that cannot compile.

    Raises:
        MissingLibrary: with the command that installs what is missing.
    """
    names = (os.environ[variable],) if os.environ.get(variable) else names
    for what, package, present in (
        (f"the compiler {names[0]}", "g++", any(map(shutil.which, names))),
        ("Python.h", "python3-dev", Path(sysconfig.get_paths()["include"], "Python.h").exists()),
    ):
        if not present:
            raise MissingLibrary(
                f"compile needs {what}, which is not installed. Install it with `apt-get install {package}`, or leave out "
                "--compile."
            )
