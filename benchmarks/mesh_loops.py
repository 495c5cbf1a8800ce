"""Loops written by hand over two ranks: a pipeline, tensor parallelism, context parallelism. What `mesh_speed.py` compares with.

They call the same functions as the toolkit: torch's schedule, transformers' plan, the toolkit's attention over parts of a sequence.
The loop around them, the loss, the clipping and the optimizer are written here, as somebody who needs one of the three would.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask

IGNORED = -100
"""The label of a token that is not trained."""


def steps_of(loader: Iterable[Any], accumulation: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yield the micro-batches of each step, with each label at the position that predicts it."""
    batches = iter(loader)
    while micro_batches := list(itertools.islice(batches, accumulation)):
        yield [{**each, "labels": pad(each["labels"][:, 1:], (0, 1), value=IGNORED)} for each in micro_batches]


def tokens_of(micro_batches: list[dict[str, torch.Tensor]]) -> int:
    """Return the trained tokens of a step."""
    return sum(int((each["labels"] != IGNORED).sum()) for each in micro_batches)


def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed cross-entropy."""
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def read(source: str, **options: Any) -> Any:
    """Read the model."""
    options = {"dtype": torch.float32, "attn_implementation": "sdpa", **options}
    return AutoModelForCausalLM.from_pretrained(source, **options).train()


def adamw(parameters: Iterable[torch.Tensor], config: Any) -> torch.optim.Optimizer:
    """Return the optimizer. Its kernels take DTensors and plain tensors apart."""
    whole = list(parameters)
    groups = [[each for each in whole if hasattr(each, "placements") == split] for split in (False, True)]
    options = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": True}
    return torch.optim.AdamW([{"params": group} for group in groups if group], **options)


def clip(parameters: Iterable[torch.Tensor], limit: float, every_rank_apart: bool) -> None:
    """Clip by the norm over both ranks. Without `every_rank_apart`, what is not split is the same on both."""
    gradients: list[Any] = [each.grad for each in parameters if each.grad is not None]
    apart, alike = torch.zeros(()), torch.zeros(())
    for each in gradients:
        split = hasattr(each, "placements")
        square = torch.linalg.vector_norm(each.to_local() if split else each) ** 2
        if every_rank_apart or (split and each.placements[0].is_shard()):  # an embedding's gradient is whole
            apart += square
        else:
            alike += square
    dist.all_reduce(apart)
    factor = (limit / ((apart + alike).sqrt() + 1e-6)).clamp(max=1.0)
    for each in gradients:
        (each.to_local() if hasattr(each, "placements") else each).mul_(factor)


# A pipeline -----------------------------------------------------------------------------------------------------------


class LlamaStage(nn.Module):
    """Some layers of a Llama, with the embedding before the first one and the head behind the last one."""

    def __init__(self, model: Any, first: int, end: int) -> None:
        super().__init__()
        inner, last = model.model, end == len(model.model.layers)
        self.config, self.rotary = model.config, inner.rotary_emb
        self.embedding = inner.embed_tokens if first == 0 else None
        self.layers = inner.layers[first:end]
        self.norm = inner.norm if last else None
        self.head = model.lm_head if last else None

    def forward(self, given: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute token ids [b, s], or hidden states [b, s, hidden], to hidden states, or to logits."""
        hidden = given if self.embedding is None else self.embedding(given)
        mask = create_causal_mask(self.config, hidden, None, None, position_ids=positions)
        rotation = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        return hidden if self.head is None or self.norm is None else self.head(self.norm(hidden))


def pipeline(job: Any, source: str, loader: Iterable[Any]) -> Iterator[float]:
    """Train two stages by torch's 1F1B; yield each step's loss."""
    rank, config = dist.get_rank(), job.train_config
    stage = LlamaStage(read(source), *job.settings["stages"][rank])
    optimizer, tokens = adamw(stage.parameters(), config), 1

    def weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_sum(logits, labels) / tokens

    piped = PipelineStage(stage, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(piped, config.accumulation, loss_fn=weighted, scale_grads=False)
    for micro_batches in steps_of(loader, config.accumulation):
        tokens = tokens_of(micro_batches)
        names = ("input_ids", "labels", "position_ids")
        ids, labels, positions = (torch.cat([each[name] for each in micro_batches]) for name in names)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(ids, positions=positions, return_outputs=False)
        else:
            schedule.step(target=labels, losses=losses, positions=positions, return_outputs=False)
        clip(stage.parameters(), config.max_grad_norm, every_rank_apart=True)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        dist.all_reduce(loss)
        yield loss.item()


# Tensor parallelism ---------------------------------------------------------------------------------------------------


def tensor(job: Any, source: str, loader: Iterable[Any]) -> Iterator[float]:
    """Train by transformers' plan over two ranks; yield each step's loss."""
    from transformers.distributed import DistributedConfig

    config, model = job.train_config, read(source, distributed_config=DistributedConfig(tp_size=2))
    optimizer = adamw(model.parameters(), config)
    for micro_batches in steps_of(loader, config.accumulation):
        tokens, total = tokens_of(micro_batches), torch.zeros(())
        for batch in micro_batches:
            labels = batch.pop("labels")
            loss: Any = loss_sum(model(**batch, use_cache=False).logits, labels) / tokens
            loss.backward()
            total += loss.detach()
        clip(model.parameters(), config.max_grad_norm, every_rank_apart=False)
        optimizer.step()
        optimizer.zero_grad()
        yield total.item()


# Context parallelism --------------------------------------------------------------------------------------------------


def context(job: Any, source: str, loader: Iterable[Any]) -> Iterator[float]:
    """Train over two halves of each row, under torch's DDP; yield each step's loss."""
    from toolkit.transforms.context_parallel import ContextParallel

    config, rank, halves = job.train_config, dist.get_rank(), ContextParallel()
    model = DistributedDataParallel(halves.apply(read(source), job))
    optimizer = adamw(model.parameters(), config)
    for micro_batches in steps_of(loader, config.accumulation):
        tokens, total = tokens_of(micro_batches), torch.zeros(())
        for number, batch in enumerate(micro_batches, 1):
            mine = halves.split(batch, job, rank)
            labels = mine.pop("labels")
            with contextlib.nullcontext() if number == len(micro_batches) else model.no_sync():
                loss: Any = loss_sum(model(**mine, use_cache=False).logits, labels) / tokens
                (loss * dist.get_world_size()).backward()  # DDP averages
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        yield total.item()


LOOPS = {"pp": pipeline, "tp": tensor, "cp": context}
