"""The process of `rehearse()`: load, prepare and four steps of one rank over torch's fake process group.

The fake group copies what a rank sends into what it gets, and leaves what it receives from another stage as it is.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.config.fields import from_dict
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import ToolkitError
from toolkit.core.process_lifecycle import die_with_parent, import_libraries, skip_last_collection
from toolkit.devices.machine import hardware
from toolkit.engines.records import Prepared
from toolkit.engines.upstream import patched
from toolkit.models import describe
from toolkit.models.files import SAFETENSORS_DTYPES, first_line
from toolkit.training.expert_load import routed_modules
from toolkit.training.small_run import SAID

STEPS = 4
"""The first makes the moments, the third is like all that follow. What the last one sends is counted, which changes its memory."""


def write_zeros(folder: str, config: Mapping[str, Any]) -> None:
    """Write a model's folder: a config, a tokenizer of one token, and weights of zeros in a file that takes no space on a disk."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, PreTrainedTokenizerFast

    from toolkit.models.hf_loading import auto_class

    values = dict(config)
    made = AutoConfig.for_model(values.pop("model_type"), **values)
    made.save_pretrained(folder)
    one_token = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))  # for a vocabulary of any size
    PreTrainedTokenizerFast(tokenizer_object=one_token, pad_token="<pad>").save_pretrained(folder)
    with torch.device("meta"):
        model = auto_class(describe(folder)).from_config(made)
    names = {name: code for code, name in SAFETENSORS_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, known = 0, set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in known:  # tied
            continue
        known.add(id(tensor))
        begin, end = end, end + tensor.nbytes
        dtype = names[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with Path(folder, "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _rows(vocab: int, train_config: TrainConfig, positions: bool) -> Iterator[dict[str, Any]]:
    """Yield the rank's micro-batches: one document a row, without padding."""
    import torch

    shape = (train_config.micro_batch, train_config.seq_len)
    for _ in range(STEPS * train_config.accumulation):
        ids = torch.randint(vocab, shape)
        batch = {"input_ids": ids, "labels": ids.clone()}
        yield batch | ({"position_ids": torch.arange(shape[1]).repeat(shape[0], 1)} if positions else {})


def _allocate_as_gloo(copies: list[Any], *, keeps: bool) -> None:
    """Let FSDP2's collectives take the memory that gloo takes: it gathers and reduces in buffers of its own.

    Args:
        copies: gets the copy of the gradients that were reduced last. On busy processors gloo's thread frees it once the next
            module's backward begins (`_free_copies`).
        keeps: False where an all-reduce follows, which takes longer than that.
    """
    import torch
    import torch.distributed as dist

    def collect(original: Any, output: torch.Tensor, input: torch.Tensor, **named: Any) -> Any:
        copies.clear()
        copies.append(torch.empty_like(max(output, input, key=torch.Tensor.numel)))
        if not keeps or output.numel() > input.numel():
            copies.clear()
        return original(output, input, **named)

    for name in ("all_gather_single", "reduce_scatter_single"):
        vars(dist)[name] = partial(collect, getattr(dist, name))


def _free_copies(model: Any, copies: list[Any]) -> None:
    """Free gloo's copies as the backward of a module with gathered parameters begins, after FSDP2's own hooks."""
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torch.utils._pytree import tree_leaves

    def after(module: Any, inputs: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: copies.clear())  # type: ignore[no-untyped-call]

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_hook(after)  # type: ignore[attr-defined]


def _balance_experts(prepared: Prepared) -> None:
    """Send equally many tokens to each expert, as the forecast assumes: zeros would send all to the first ones."""
    import torch

    def route(module: Any, args: Any, kwargs: dict[str, Any], *, name: str, experts: int) -> Any:
        ids = kwargs[name] if name in kwargs else args[1]
        even = torch.arange(ids.numel(), device=ids.device).remainder(experts).view_as(ids)
        return (args, {**kwargs, name: even}) if name in kwargs else ((args[0], even, *args[2:]), kwargs)

    for module, name, experts in routed_modules(prepared):
        module.register_forward_pre_hook(partial(route, name=name, experts=experts), with_kwargs=True)


@contextlib.contextmanager
def _other_stages() -> Iterator[None]:
    """Let other stages answer as far as a pipeline's rank needs it.

    They know the shapes of what they exchange, as this one does: torch asks all stages before the first step, and would infer
    shapes by a forward otherwise. Their hidden states and gradients are zeros: what memory happens to hold may be no number.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import stage as module

    stage: Any = module

    def agree(tensor: torch.Tensor, *_: Any, **__: Any) -> int:
        tensor.fill_(1)
        return 0

    def make_zeros(meta: Any, device: Any) -> Any:
        return make(meta, device).zero_()

    make = stage._make_tensor_from_meta
    with patched(dist, recv=agree), patched(stage, _make_tensor_from_meta=make_zeros):
        yield


def _measure(folder: str, request: Mapping[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from toolkit import measurement
    from toolkit.core.phases import observe, phase
    from toolkit.models.varlen import separates_documents
    from toolkit.training.loading import load
    from toolkit.training.loop import train
    from toolkit.training.optimizers import make_optimizer, make_schedule
    from toolkit.training.preparation import prepare, prepared
    from toolkit.training.sent_bytes import counting_sent
    from toolkit.training.setup import accelerator as make
    from toolkit.training.setup import seed_everything

    spec, strategy = describe(folder), from_dict(Strategy, request["strategy"])
    spec = replace(spec, tp_plan=request["tp_plan"])
    train_config = replace(from_dict(TrainConfig, request["train_config"]), steps=STEPS, epochs=None, warmup=0)
    dist.init_process_group("fake", store=FakeStore(), rank=request["rank"], world_size=request["ranks"])
    copies: list[Any] = []
    observe(lambda *_: copies.clear())
    window = measurement.start(kind := hardware().device.kind)
    if kind == "cpu":
        _allocate_as_gloo(copies, keeps=strategy.dp_replicate == 1)
    with phase("load"):
        accelerator = make(strategy, train_config, spec)
        accelerator.print = lambda *_: None
        seed_everything(accelerator)
        model, _ = load(accelerator)
        optimizer: Any = make_optimizer(model, train_config, fused=accelerator.scaler is None)
        schedule = make_schedule(optimizer, train_config)
    with phase("prepare"):
        model, optimizer = prepare(accelerator, model, optimizer)
    _free_copies(model, copies)
    rows, seconds = _rows(spec.vocab, train_config, separates_documents(spec, joined=False)), 0.0
    rank = prepared(accelerator, (model, optimizer))
    _balance_experts(rank)
    sent = counting_sent()
    with _other_stages(), contextlib.ExitStack() as last:
        for step in train(rank, rows, schedule):
            if step.step == STEPS - 1:
                seconds = step.seconds
                window.close()
                last.enter_context(sent)
    result = window.result()
    if result.peak_bytes is None:
        raise ToolkitError(f"nothing was measured: {result.reason}")
    return {
        "phases": dict(result.phases),
        "peak_bytes": result.peak_bytes,
        "step_seconds": seconds,
        "sent_bytes": sum(sent.by_collective.values()),
    }


def main(parent: int) -> None:
    """Read a request from standard input, and print what was measured as JSON. It ends with the process `parent`."""
    die_with_parent(parent)
    request = json.load(sys.stdin)
    skip_last_collection()
    import_libraries("transformers.modeling_utils")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        try:
            write_zeros(folder, request["config"])
            answer = _measure(folder, request)
        except Exception as error:
            print(f"{SAID}{first_line(error)} ({type(error).__name__})", file=sys.stderr)
            raise
    print(json.dumps(answer))
