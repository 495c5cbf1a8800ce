"""Calls in which all ranks take part: work of rank 0 for all, a value of rank 0, a meeting, a question to all."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.core import errors
from toolkit.core.errors import RunError, ToolkitError
from toolkit.engines.timeouts import limit_of
from toolkit.run_folder.heartbeat import BEAT_SECONDS, show_waiting

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")

LONGEST_PAUSE = 0.1
"""Seconds between two looks at the store, at most."""

_calls = itertools.count()
_met: Counter[str] = Counter()
"""Calls that all ranks have met in."""


def is_rehearsal() -> bool:
    """Return whether this process is one rank without the others: what it sends goes nowhere."""
    import torch.distributed as dist

    return dist.is_initialized() and str(dist.get_backend()) == "fake"


def on_main(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on every rank, however long that takes. A collective.

    The other ranks poll the process group's store. They are in no collective, so no time limit runs. Rank 0 counts in
    the store while it works, and the others give up when the count stands still for the process group's time limit.

    Args:
        accelerator: of all ranks.
        work: returns what JSON can hold. Its collectives would hang.

    Raises:
        ToolkitError: on every rank, where `work` raises one. Any other exception ends rank 0 alone, as it is.
        TimeoutError: on the other ranks, without a sign of life from rank 0.
    """
    if accelerator.num_processes == 1 or is_rehearsal():
        return work()
    import torch.distributed as dist

    store, number = dist.distributed_c10d._get_default_store(), next(_calls)
    alive, done = f"toolkit/{number}/alive", f"toolkit/{number}/done"
    result: Any = None
    failed: ToolkitError | None = None
    with show_waiting(main=accelerator.is_main_process):
        if accelerator.is_main_process:
            with ticking(lambda: store.add(alive, 1)):
                try:
                    result = work()
                except ToolkitError as error:
                    failed = error
            store.set(done, json.dumps([result, failed and [type(failed).__name__, str(failed)]]))
        else:
            result, answer = json.loads(wait_for(store, alive, done, limit_of(accelerator)))
            failed = answer and getattr(errors, answer[0], ToolkitError)(answer[1])
    if failed is not None:
        raise failed
    accelerator.wait_for_everyone()  # rank 0 may hold the store, and must not end before the others have read it
    return result  # type: ignore[no-any-return]


def from_main(value: T) -> T:
    """Return rank 0's value on every rank. A collective."""
    from accelerate.utils import broadcast_object_list

    if is_rehearsal():
        return value
    values = [value]
    broadcast_object_list(values, from_process=0)
    return values[0]


def on_any_rank(here: bool) -> bool:
    """Return whether `here` is true on any rank. A collective."""
    import torch
    from accelerate import PartialState
    from accelerate.utils import reduce

    flag = torch.tensor(float(here), device=PartialState().device)
    return bool(reduce(flag, reduction="sum").item())


def meet(accelerator: Accelerator, call: str, advice: str) -> None:
    """Wait until every rank has come to this call. No rank is in a collective before all are there.

    Raises:
        RunError: on the ranks that came, a little before the process group's time limit ends the others.
    """
    import torch.distributed as dist

    if accelerator.num_processes == 1 or is_rehearsal():
        return
    store, ranks = dist.distributed_c10d._get_default_store(), accelerator.num_processes
    key = f"toolkit/{call}/{_met[call]}"
    limit, pause = 0.9 * limit_of(accelerator), 0.001
    end = time.monotonic() + limit
    store.add(key, 1)
    while (came := store.add(key, 0)) < ranks:
        if time.monotonic() > end:
            store.add(key, -1)
            raise RunError(f"{call} was called on {came} of {ranks} ranks, and no other came in {limit:g} s. {advice}")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    _met[call] += 1


def wait_for(store: Any, alive: str, done: str, limit: float) -> bytes:
    """Return the value of the key `done` as soon as it exists.

    Raises:
        TimeoutError: where the counter `alive` stands still for `limit` seconds.
    """
    count, silent, pause = -1, 0.0, 0.001
    while not store.check([done]):
        now = store.add(alive, 0)
        count, silent = (count, silent + pause) if now == count else (now, 0.0)
        if silent > limit:
            raise TimeoutError(f"timed out after {limit:g} s without a sign of life from rank 0, which works alone")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    value: bytes = store.get(done)
    return value


@contextlib.contextmanager
def ticking(tick: Callable[[], object]) -> Iterator[None]:
    """Call `tick` once a second from a thread, so that others see that this process works."""
    stop = threading.Event()

    def run() -> None:
        # Where it fails, the others see no sign of life, and say so.
        with contextlib.suppress(OSError, RuntimeError):
            while not stop.wait(BEAT_SECONDS):
                tick()

    thread = threading.Thread(target=run, name="toolkit-tick", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
