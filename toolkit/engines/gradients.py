"""Trained parameters that get no gradient: each engine would treat them in its own way, or its ranks would wait for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from toolkit.config.strategy import SHARDINGS
from toolkit.core.errors import StrategyError
from toolkit.engines.job import Job

if TYPE_CHECKING:
    import torch

_WATCHES: WeakKeyDictionary[Any, GradientWatch] = WeakKeyDictionary()


def watch_gradients(job: Job, model: torch.nn.Module) -> None:
    """Watch a prepared model on several ranks."""
    if job.ranks > 1:
        _WATCHES[model] = GradientWatch(job, model)


def check_gradients(accelerator: Any, loss: torch.Tensor) -> None:
    """Check the parameters of watched models that the backward of a loss will give gradients.

    Raises:
        StrategyError: for a parameter that would be trained otherwise than in one process, by its name.
    """
    reached = _reached_parameters(loss) if _WATCHES else set()
    for note in filter(None, [watch.check(model, reached) for model, watch in _WATCHES.items()]):
        accelerator.print(note)


class GradientWatch:
    """The trained parameters of a model that a backward reaches: the same ones on every rank and in every step.

    They are read off the graph before the backward begins: a rank that reduces other gradients hangs or aborts the others.
    """

    def __init__(self, job: Job, model: torch.nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._strategy, self._refuses = job.strategy, job.engine.needs_every_gradient
        self._names: dict[int, str] = {}
        self._frozen: dict[int, str] = {}
        self._first: set[str] | None = None
        self._called = False
        """DDP: a forward of the prepared model since the last backward that was reduced."""
        first: dict[int, str] = {}
        every = model.named_parameters(remove_duplicate=False)
        self._tied = {name: first.setdefault(id(each), name) for name, each in every}
        """Each parameter's first name: a head that is tied has the embedding's, though both modules gather it."""
        if hasattr(model, "require_backward_grad_sync"):
            model.register_forward_pre_hook(self._note_call)
        self._note(model, "")
        for name, part in model.named_modules():
            if issubclass(type(part), FSDPModule):  # its forward uses gathered parameters, which exist from then on
                part.register_forward_pre_hook(lambda module, _, name=name: self._note(module, name))

    def _note(self, module: Any, prefix: str) -> None:
        for name, each in module.named_parameters(prefix=prefix):
            trained = self._names if each.requires_grad else self._frozen
            trained[id(each)] = self._tied.get(name, name).removeprefix("module.")

    def _note_call(self, model: Any, _: Any) -> None:
        import torch

        self._called |= torch.is_grad_enabled() and model.require_backward_grad_sync

    def check(self, model: Any, reached: set[int]) -> str | None:
        """Compare the parameters that a backward reaches with the first backward's. The first is a collective.

        Returns:
            After the first backward, a note on parameters without a gradient; else None.
        """
        from accelerate.utils import gather_object

        names = {name for key, name in self._names.items() if key in reached}
        if unfrozen := sorted(name for key, name in self._frozen.items() if key in reached and key not in self._names):
            raise StrategyError(self._sentence(unfrozen[0], "gets a gradient, and it was frozen in prepare"))
        if not names:  # the loss is another model's
            return None
        if getattr(model, "require_backward_grad_sync", False):  # DDP, not in `no_sync`
            if not self._called:
                raise StrategyError(
                    f"accelerator.backward reaches {min(names)}, and the prepared model was not called since the last one. DDP "
                    "would average none of these gradients over the ranks. Call the model that prepare returned, not a part of it "
                    "or what unwrap_model returns, and add losses to one for one accelerator.backward."
                )
            self._called = False
        if self._refuses and self._strategy.unused_parameters == "find":  # DDP's own search
            return None
        missing = sorted({*self._names.values()} - names)
        first, self._first = self._first, names if self._first is None else self._first
        if first is None or self._strategy.unused_parameters == "find":
            everywhere = [set(each) for each in gather_object([missing])]
            if differing := sorted(set.union(*everywhere) - set.intersection(*everywhere)):
                raise StrategyError(self._sentence(differing[0], "gets a gradient on some ranks only"))
            if missing and self._refuses:
                raise StrategyError(self._sentence(missing[0], "gets no gradient"))
        elif changed := sorted(names ^ first):
            what = "gets a gradient, and it got none" if changed[0] in names else "gets no gradient, and it got one"
            raise StrategyError(self._sentence(changed[0], f"{what} in the first backward"))
        if first is not None or not missing:
            return None
        return f"gradients: {len(missing)} of the trained parameters get none and stay as they are, the first is {missing[0]}"

    def _sentence(self, name: str, what: str) -> str:
        """Return an error's text."""
        able = [word for word, row in SHARDINGS.items() if "find" in row.unused_parameters and word != "none"]
        return (
            f"{name} {what}. Sharding {self._strategy.sharding!r} would train it otherwise than one process does. Freeze it with "
            "requires_grad_(False) before prepare and leave it so, use it in every step on every rank, or choose "
            f"unused_parameters 'find' with sharding {', '.join(able)}."
        )


def _reached_parameters(loss: torch.Tensor) -> set[int]:
    """Return the ids of the tensors that a backward gives gradients."""
    nodes: list[Any] = [loss.grad_fn]
    seen, reached = set[Any](), set[int]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise StrategyError(
                "activation checkpointing with use_reentrant=True hides which parameters get a gradient. Write "
                "checkpoint(…, use_reentrant=False)."
            )
        if node.name() == "torch::autograd::AccumulateGrad":
            reached.add(id(node.variable))
        nodes.extend(following for following, _ in node.next_functions)
    return reached
