"""Parameters with values elsewhere, in the files or sharded over the ranks, until something reads or writes them.

Between `toolkit.load` and `prepare` a script may change a model as if every rank held it whole. The first use of a value brings
the whole parameter to this rank, and from then on the parameter's own values count.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WITHOUT_VALUES = {
    *("dtype", "device", "layout", "requires_grad", "requires_grad_", "is_leaf", "is_meta", "is_cuda", "is_cpu"),
    *("grad", "grad_fn", "is_floating_point", "is_complex", "is_sparse", "is_quantized", "is_contiguous", "is_nested"),
    *("stride", "data_ptr", "element_size", "itemsize", "untyped_storage", "_version"),
    "_has_compatible_shallow_copy_type",
    *("register_hook", "register_post_accumulate_grad_hook", "_backward_hooks", "_post_accumulate_grad_hooks"),
}
"""Attributes and functions of a tensor that need no values."""

SHAPE_ACCESS: dict[str, Callable[..., Any]] = {
    "shape": lambda shape: shape,
    "size": lambda shape, dim=None: shape if dim is None else shape[dim],
    **dict.fromkeys(("dim", "ndim", "ndimension"), len),
    **dict.fromkeys(("numel", "nelement"), math.prod),
}
"""Attributes and functions of a tensor that follow from its shape. DeepSpeed's own say 0 elements in one dimension."""


PARTITIONING = "deepspeed.runtime.zero.partition_parameters"
"""The module of `GatheredParameters`, which works on the parameters as they are. It reads the same attributes as a script does, so
only the caller's frame tells the two apart."""


@cache
def deferred_class() -> Any:
    """Return the class of deferred parameters: torch's `Parameter` with a `__torch_function__`."""
    import torch

    class Deferred(torch.nn.Parameter):
        whole_shape: tuple[int, ...]
        fetch: Callable[[Any], None]

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            accessor = func.__name__ in ("__get__", "__set__", "__delete__")
            name = func.__self__.__name__ if accessor else func.__name__
            with torch._C.DisableTorchFunctionSubclass():
                if name in WITHOUT_VALUES or sys._getframe(1).f_globals.get("__name__") == PARTITIONING:
                    return func(*args, **kwargs)
                if name in SHAPE_ACCESS and isinstance(args[0], cls):
                    return SHAPE_ACCESS[name](args[0].whole_shape, *(() if accessor else args[1:]), **kwargs)
                if name == "to" and [type(word) for word in (*args[1:], *kwargs.values())] in ([torch.device], [str]):
                    return args[0]  # to a device: `prepare` places it
                if name == "data" and func.__name__ == "__set__":
                    if args[1] is not args[0]:
                        _end(args[0])
                        func(*args)
                    return None
            for value in torch.utils._pytree.tree_leaves((args, kwargs)):
                if isinstance(value, cls):
                    materialize(value)
            return func(*args, **kwargs)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            materialize(self)
            return self.__deepcopy__(memo)

    return Deferred


def defer(parameters: Iterable[tuple[str, Any]], fetch: Callable[[str, Any], None]) -> None:
    """Defer parameters.

    Args:
        parameters: each with its name.
        fetch: takes a name and a parameter, and gives the parameter its values.
    """
    import torch

    for name, parameter in parameters:
        if type(parameter) is torch.nn.Parameter:
            shape = torch.Size(getattr(parameter, "ds_shape", parameter.shape))
            vars(parameter).update(whole_shape=shape, fetch=partial(fetch, name))
            parameter.__class__ = deferred_class()


def is_deferred(parameter: Any) -> bool:
    """Return whether a parameter's values were never used."""
    return isinstance(parameter, deferred_class())


def materialize(parameter: Any) -> None:
    """Give a deferred parameter its values on this rank."""
    before = {"fetch": parameter.fetch, "whole_shape": parameter.whole_shape}
    _end(parameter)
    try:
        before["fetch"](parameter)
    except BaseException:  # it has no values yet, and says so at the next access, too
        vars(parameter).update(before)
        parameter.__class__ = deferred_class()
        raise


def end_deferral(model: torch.nn.Module) -> set[int]:
    """Make plain parameters of those that are still deferred, and return the ids of these."""
    left = [parameter for parameter in model.parameters() if is_deferred(parameter)]
    for parameter in left:
        _end(parameter)
    return set(map(id, left))


def broadcast(parameter: Any) -> None:
    """Give every rank the values of rank 0. A collective."""
    import torch.distributed as dist
    from accelerate import PartialState

    values = parameter.data.to(PartialState().device).contiguous()
    dist.broadcast(values, src=0)
    parameter.data = values.to(parameter.device)


def _end(parameter: Any) -> None:
    import torch

    del parameter.fetch, parameter.whole_shape
    parameter.__class__ = torch.nn.Parameter
