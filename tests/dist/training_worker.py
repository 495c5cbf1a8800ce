"""One process group of two ranks, with every check of the training loop."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ranks
from ranks import build, reset


def micro_batches(train_config: Any, count: int, *, tp: int = 1) -> Iterator[dict[str, Any]]:
    """This rank's part of a fixed sequence of samples of uneven length, the same global batches however they are split."""
    import torch

    rank, ranks = int(os.environ["RANK"]) // tp, int(os.environ["WORLD_SIZE"]) // tp
    generator = torch.Generator().manual_seed(3)
    samples = torch.randint(3, 256, (count, train_config.seq_len), generator=generator)
    labels = samples.clone()
    for row in range(count):  # every sample trains on another number of tokens
        labels[row, : row % (train_config.seq_len - 2)] = -100
    size, at = train_config.micro_batch * ranks, 0
    while at + size <= count:
        mine = slice(at + rank * train_config.micro_batch, at + (rank + 1) * train_config.micro_batch)
        yield {"input_ids": samples[mine], "labels": labels[mine]}
        at += size


def weights(prepared: Any) -> list[Any]:
    """Copies of all that this rank holds."""

    return [shard.tensor.clone() for shard in prepared.job.engine.shards(prepared)]


def count_reductions(model: Any) -> list[int]:
    """The buckets that DDP reduces from now on, one number each."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    reduced: list[int] = []

    # A lambda: torch refuses a hook with annotations that are strings.
    model.register_comm_hook(
        None, lambda group, bucket: (reduced.append(bucket.index()), allreduce_hook(group, bucket))[1]
    )
    return reduced


def accumulation(folder: str) -> dict[str, Any]:
    """N micro-batches of accumulation are one large batch."""
    from toolkit.config.train_config import TrainConfig
    from toolkit.training.loop import train

    results: dict[str, Any] = {}
    for sharding in ("ddp", "zero2", "zero3", "fsdp"):
        for micro, steps in ((8, 1), (2, 4)):
            reset()
            adam = {"weight_decay": 0.3, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
            rate = {"lr": 5e-3, "min_lr": 1e-3, "warmup": 2, "scheduler": "linear", "steps": 4}
            train_config = TrainConfig(micro_batch=micro, accumulation=steps, seq_len=16, **rate, **adam)
            prepared, schedule, _ = build(folder, train_config, sharding=sharding)
            reduced = count_reductions(prepared.model) if sharding == "ddp" else []
            done = list(train(prepared, micro_batches(train_config, 64), schedule))
            results[f"{sharding} {steps}"] = {
                "losses": [step.loss for step in done],
                "norms": [step.grad_norm for step in done],
                "lr": [step.lr for step in done],
                "tokens": [step.tokens for step in done],
                "reductions": len(reduced),
            }
    return results


def _poisoned(prepared: Any, at: int, how: str) -> Callable[[], None]:
    """Make rank 1's loss or gradient not a number in the forward or backward of step `at`."""
    import torch

    module = prepared.accelerator.unwrap_model(prepared.model)
    head = module.get_output_embeddings()
    calls = 0

    def spoil_forward(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return output * math.nan if calls == at and os.environ["RANK"] == "1" else output

    def spoil_backward(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == at and os.environ["RANK"] == "1":
            output.register_hook(lambda grad: grad * math.nan)
        return output

    handle = head.register_forward_hook(spoil_forward if how == "loss" else spoil_backward)
    return lambda: handle.remove()


def not_finite(folder: str) -> dict[str, Any]:
    """A NaN on one rank ends the run, and no weight has changed on any."""
    import torch

    from toolkit.config.train_config import TrainConfig
    from toolkit.core.errors import NotFinite
    from toolkit.training.loop import train

    results: dict[str, Any] = {}
    cells = [(word, "fp32", how) for word in ("ddp", "zero1", "zero2", "zero3", "fsdp") for how in ("loss", "gradient")]
    cells += [(word, "bf16", "gradient") for word in ("ddp", "zero2", "zero3", "fsdp")]
    cells += [("none", "fp32", how) for how in ("loss", "gradient")]  # with tp
    for sharding, precision, how in cells:
        reset()
        train_config, tp = (
            TrainConfig(micro_batch=2, seq_len=16, steps=4, lr=5e-3, warmup=0),
            2 if sharding == "none" else 1,
        )
        prepared, schedule, _ = build(folder, train_config, sharding=sharding, precision=precision, tp=tp)
        _poisoned(prepared, 3, how)
        before, said = [], ""
        try:
            for _ in train(
                prepared, micro_batches(train_config, 16, tp=tp), schedule, samples=lambda step: f"sample-{step}"
            ):
                before = weights(prepared)
        except NotFinite as error:
            said = str(error)
        after = weights(prepared)
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        results[f"{sharding} {precision} {how}"] = {"said": said, "same": _everywhere(prepared, same)}
    return results


def scaling(folder: str) -> dict[str, Any]:
    """fp16: steps that overflow are skipped and said, and training goes on."""
    from toolkit.config.train_config import TrainConfig
    from toolkit.core.errors import StrategyError
    from toolkit.training.loop import train

    results: dict[str, Any] = {}
    for sharding in ("zero1", "zero2", "zero3"):
        reset()
        train_config = TrainConfig(micro_batch=2, seq_len=16, steps=8, lr=5e-3, warmup=0)
        try:
            prepared, schedule, _ = build(folder, train_config, sharding=sharding, precision="fp16")
        except StrategyError as error:
            results[sharding] = {"refused": str(error)}
            continue
        _poisoned(prepared, 3, "gradient")
        done = list(train(prepared, micro_batches(train_config, 32), schedule))
        results[sharding] = {"skipped": [step.skipped for step in done], "losses": [step.loss for step in done]}
    return results


SAMPLED = ("ddp", "zero1", "zero3", "fsdp")


def sampled(prepared: Any, tokenizer: Any) -> str:
    """What the recipe prints for `--sample`."""
    from toolkit.config.run_config import RunConfig
    from toolkit.training.rank_run import RankRun

    run, lines = RankRun.__new__(RankRun), list[str]()
    run.config = RunConfig(sample="w7 w8", eval_data="embedded")
    run.preflight = SimpleNamespace(spec=prepared.job.spec)  # type: ignore[assignment]
    run.accelerator = prepared.accelerator
    run.accelerator.print = lines.append
    run._print_sample(prepared, 3, tokenizer)
    assert prepared.model.training
    return lines[0]


def saved(folder: str, out: Path) -> dict[str, Any]:
    """What each engine saves loads in plain libraries; the test opens it again. With states in host memory, too."""
    import torch.distributed as dist

    from toolkit.config.train_config import TrainConfig
    from toolkit.exporters import save, verify
    from toolkit.training.loop import train
    from toolkit.training.metrics import evaluate
    from toolkit.training.preparation import audit

    results: dict[str, Any] = {}
    cells = [{"sharding": sharding} for sharding in ("ddp", "zero1", "zero3", "fsdp", "fsdp_grad_op")]
    cells += [{"sharding": sharding, "adapter": word} for sharding in ("zero3", "fsdp") for word in ("lora", "qlora")]
    offloads = [(f"zero{stage}", "optimizer") for stage in (1, 2, 3)] + [("ddp", "none"), ("zero3", "cpu")]
    cells += [
        {"sharding": sharding, "offload": offload, "precision": precision}
        for precision in ("fp32", "bf16")
        for sharding, offload in offloads
    ]
    for words in cells:
        reset()
        train_config = TrainConfig(micro_batch=2, seq_len=16, steps=3, lr=5e-3, warmup=0)
        prepared, schedule, tokenizer = build(folder, train_config, **words)
        losses = []
        for step in train(prepared, micro_batches(train_config, 12), schedule):
            losses.append(step.loss)
            if step.step == 1:
                audit(prepared, gradients=step.gradients)
        evaluated = evaluate(prepared, micro_batches(train_config, 12))
        target = out / "-".join(words.values())
        planned = save(prepared, tokenizer, target)
        probe = next(micro_batches(train_config, 12))
        for tensor in probe.values():  # the probe has to be the same on every rank
            dist.broadcast(tensor, 0)
        export = verify(prepared, target, planned, probe)
        error = export.logits_error if export else None
        sample = sampled(prepared, tokenizer) if words["sharding"] in SAMPLED and len(words) < 3 else None
        results[" ".join(words.values())] = {
            "losses": losses,
            "evaluated": evaluated,
            "logits_error": error,
            "sample": sample,
        }
    return results


def saved_without_a_spec(folder: str, out: Path) -> dict[str, Any]:
    """A user's own model, whole or with an adapter, is saved too; a place that cannot be written is every rank's error."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from toolkit.config.strategy import Strategy
    from toolkit.core.errors import RunError
    from toolkit.exporters import save
    from toolkit.training.preparation import prepare, prepared
    from toolkit.training.setup import accelerator as make

    results: dict[str, Any] = {}
    (out / "file").write_text("")
    for sharding, adapter in (("ddp", True), ("fsdp", False), ("zero3", False)):
        reset()
        accelerator = make(Strategy(sharding=sharding))
        model = AutoModelForCausalLM.from_pretrained(folder)
        if adapter:
            model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
        ours = prepared(accelerator, prepare(accelerator, model, optimizer))
        try:
            save(ours, None, out / "file" / "below")
        except RunError as error:
            refused = str(error)
        save(ours, None, out / f"own-{sharding}")
        results[sharding] = {"refused": accelerator.gather(torch.tensor([len(refused)])).tolist(), "said": refused}
    return results


def _everywhere(prepared: Any, true: bool) -> bool:
    import torch

    return bool(prepared.accelerator.gather(torch.tensor([int(true)])).min())


def run(cell: dict[str, Any], folder: str) -> dict[str, Any]:
    """One check, by its name."""
    return {"gave": globals()[cell["check"]](folder, *map(Path, cell["out"]))}


if __name__ == "__main__":
    ranks.main(run, *sys.argv[1:])
