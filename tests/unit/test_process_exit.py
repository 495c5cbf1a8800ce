"""How a process with gloo's threads ends, where they still have tensors to drop; and what it keeps of freed ones."""

from __future__ import annotations

import json

from programs import python

SCRIPT = """
import ctypes, gc, json, os, sys, tempfile, time
import torch, torch.distributed as dist
import torch._dynamo  # DDP imports it
from toolkit.engines import upstream

def busy_worker():
    # The main thread holds the GIL from here to the end: the worker has dropped nothing when the process ends.
    sys.setswitchinterval(1000)
    dist.all_gather([torch.empty(4_000_000)], torch.ones(4_000_000), async_op=True)
    ctypes.PyDLL(None).usleep(100_000)

def init(store, rank, ranks):
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store)
    while len(list(upstream.workers())) < 2:  # a thread names itself as it starts
        time.sleep(0.01)

def one_rank():
    init(dist.HashStore(), 0, 1)

def returns():
    one_rank()
    busy_worker()

def exits():
    returns()
    sys.exit(3)

def raises():
    returns()
    raise RuntimeError("uncaught")

def destroys():
    one_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    busy_worker()
    dist.destroy_process_group()
    del model
    gc.collect()  # DDP's reducer has the last reference to the group

def never_meets_its_peer():
    path = os.path.join(tempfile.mkdtemp(), "store")
    parent = os.getpid()
    peer = os.fork()
    init(dist.FileStore(path, 2), int(peer == 0), 2)
    if peer == 0:
        while os.getppid() == parent:
            time.sleep(0.05)
        os._exit(0)
    dist.all_reduce(torch.ones(10), async_op=True)
    raise RuntimeError("uncaught")

def sees_workers():
    one_rank()
    dist.all_reduce(torch.ones(10))
    upstream.wait_for_workers()
    idle = [upstream._is_idle(worker) for worker in upstream.workers()]
    assert idle == [True, True], idle

upstream.wait_at_exit()
codes = {}
for case in (returns, exits, raises, destroys, never_meets_its_peer, sees_workers):
    child = os.fork()
    if child == 0:
        case()
        sys.exit()
    deadline = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.01)
    codes[case.__name__] = os.waitstatus_to_exitcode(ended[1])
print(json.dumps(codes))
"""


def test_a_process_ends_with_its_own_exit_code() -> None:
    """Each case in a forked process: torch is imported once."""
    done = python("-c", SCRIPT)
    assert done.stderr.count("RuntimeError: uncaught") == 2
    assert json.loads(done.stdout) == {
        "returns": 0,
        "exits": 3,
        "raises": 1,
        "destroys": 0,
        "never_meets_its_peer": 1,
        "sees_workers": 0,
    }, done.stderr


FREED = """
import pathlib, re, torch
from toolkit.core.process_lifecycle import freed_at_once

def own():
    return int(re.search(r"RssAnon:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])

torch.empty(30 << 20, dtype=torch.uint8)  # glibc raises its threshold as this is freed
with freed_at_once():
    tensors = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(64)]
    before = own()
    del tensors[::2]
    print(before - own())
"""


def test_what_is_freed_while_weights_are_read_leaves_the_process() -> None:
    assert int(python("-c", FREED, code=0).stdout) > 30 * 1024
