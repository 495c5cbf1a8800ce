"""The only reader of pickles: both unpicklers build listed classes and refuse all others by name.

Tensors are read by torch's own readers (`weights_only=True`, mapped; DCP's reader and planner). Ours remain where torch's are not
as safe: its safe globals are the process's, DCP's reader unpickles `.metadata` without a restriction, its restricted unpickler
cannot read that file's protocol 4 and hashes nested tuples without a bound, and DCP's planner trusts every size and name.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from toolkit.checkpoints.importers.weights import wrap_errors
from toolkit.core.errors import CheckpointError

DEEPSPEED = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
)
"""Classes in .pt and .bin files, besides those of torch's `weights_only` unpickler (tensors, dtypes, containers)."""

DCP = (
    *("pathlib", "pathlib._local", "torch.serialization"),
    *("torch.distributed.checkpoint.filesystem", "torch.distributed.checkpoint.metadata"),
)
"""Modules of the classes in a `.metadata` file, besides `torch.Size`, torch's dtypes and `collections.OrderedDict`.

Each becomes an `OpaqueRecord`, so that nothing of these modules runs."""

NESTED = 10_000
"""The most tuples within a tuple, repeated ones counted again. The hash of a dictionary's key visits all of them: deep ones
overflow the stack, and 60 instructions with shared parts make 2⁶⁰ visits."""

_LEGACY = 5
"""Pickles at the beginning of a file in torch's old format, before zip files."""

_ZIP = b"PK\x03\x04"
_GLOBALS_LOCK = threading.RLock()
"""torch's list of safe globals belongs to the process."""


class OpaqueRecord:
    """A placeholder for an allowed class of another library: it keeps the arguments, and runs no code of that class."""

    args: tuple[Any, ...]
    """The constructor's arguments."""
    state: Any
    """The instance's fields."""

    def __new__(cls, *args: Any) -> OpaqueRecord:
        """Keep the arguments."""
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _opaque_class(path: str) -> type[OpaqueRecord]:
    return type(path, (OpaqueRecord,), {})


@contextmanager
def only_listed() -> Iterator[None]:
    """Restrict `torch.load(weights_only=True)` to torch's own list and `DEEPSPEED`, without the process's additions."""
    from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

    with _GLOBALS_LOCK:
        before = get_safe_globals()
        clear_safe_globals()
        add_safe_globals([(_opaque_class(path), path) for path in DEEPSPEED])
        try:
            yield
        finally:
            clear_safe_globals()
            add_safe_globals(before)


@contextmanager
def explain_refusals(path: Path | str) -> Iterator[None]:
    """Raise every exception as a CheckpointError with the file and the refused class, or the reason."""
    with wrap_errors(f"{path} cannot be read"):
        try:
            yield
        except Exception as error:
            text = str(error)
            refused = re.search(r"GLOBAL (\S+)", text) if isinstance(error, pickle.UnpicklingError) else None
            if refused:
                raise _refusal(path, refused[1]) from None
            if other := re.search(r"Unsupported operand (\d+)", text):
                raise CheckpointError(
                    f"{path} holds pickle's instruction {other[1]}, which torch.save's protocol 2 does not have. "
                    "No code of it was run. If you trust the file, write it again with torch.save."
                ) from None
            # torch's message is a page of advice, such as unrestricted loading; the reason is one line of it.
            if reason := re.search(r"WeightsUnpickler error: (.+)", text) or re.search(r"(.+?) In PyTorch 2\.6", text):
                raise pickle.UnpicklingError(reason[1]) from None
            raise


def _refusal(path: Path | str, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path} contains {name!r}, which is not on the list of allowed classes. No code of it was run. "
        "If you trust the file, write the checkpoint again without that object."
    )


def load(path: Path) -> Any:
    """Load a file of `torch.save`, with mapped tensors.

    Raises:
        CheckpointError: for a class that is not on the list, by its name, and for a file that cannot be read.
    """
    import torch

    with explain_refusals(path), only_listed():
        with path.open("rb") as file:
            mapped = file.read(len(_ZIP)) == _ZIP
            file.seek(0)
            for _ in range(0 if mapped else _LEGACY):
                check_tuples(file)
        if mapped:  # the reader with which torch finds the pickle
            check_tuples(io.BytesIO(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")))
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def load_metadata(path: Path) -> Any:
    """Load DCP's `.metadata` as `OpaqueRecord` records. Their types carry the names of the original classes.

    Raises:
        CheckpointError: as `load`.
    """
    with explain_refusals(path):
        data = path.read_bytes()
        check_tuples(io.BytesIO(data))
        return _Records(path, io.BytesIO(data)).load()


def check_tuples(file: IO[bytes]) -> None:
    """Refuse a pickle with tuples nested deeper than `NESTED`, by its instructions alone.

    Raises:
        UnpicklingError: for such a tuple, and for a file that is no pickle.
    """
    stack: list[int] = []  # number of tuples in each value
    marks: list[int] = []
    memo: dict[int, int] = {}
    try:
        for opcode, value, _ in pickletools.genops(file):
            name, before, argument = opcode.name, opcode.stack_before, cast("int", value)
            if name == "MARK":
                marks.append(len(stack))
            elif "PUT" in name or name == "MEMOIZE":
                memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
            elif "GET" in name:
                stack.append(memo[argument])
            elif name == "DUP":
                stack.append(stack[-1])
            elif name == "POP" and marks and marks[-1] == len(stack):
                marks.pop()
            else:
                marked = pickletools.markobject in before
                first = marks.pop() if marked else len(stack) - len(before)
                inside = sum(stack[first:])
                below = before.index(pickletools.markobject) if marked else 0  # values that it takes below the mark
                del stack[max(0, first - below) :]
                tuples = name.startswith("TUPLE") or name in ("EMPTY_TUPLE", "FROZENSET")
                stack += [1 + inside if tuples else 0] * len(opcode.stack_after)
            if stack and stack[-1] > NESTED:
                raise pickle.UnpicklingError(f"it nests more than {NESTED:,} tuples")
    except (ValueError, IndexError, KeyError) as error:
        raise pickle.UnpicklingError(f"it is not a pickle ({error})") from None


class _Records(pickle.Unpickler):
    """Builds containers, sizes, dtypes and opaque records. Each load has record types of its own, so nothing outlives it."""

    def __init__(self, path: Path, file: io.BytesIO) -> None:
        import torch

        super().__init__(file)
        self._path = path
        self._classes: dict[str, Any] = {"collections.OrderedDict": OrderedDict, "torch.Size": torch.Size}
        self._classes |= {f"torch.{name}": each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"  # compared as text: `getattr` of torch imports modules by name
        if path not in self._classes and module not in DCP:
            raise _refusal(self._path, path)
        return self._classes.setdefault(path, _opaque_class(path))
