"""The one loss: of the loop, of evaluation, of every engine, and of a forecast's trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.core.errors import StrategyError
from toolkit.engines.job import Job

if TYPE_CHECKING:
    import torch


@dataclass
class HeadCall:
    """A forward's labels, for a head that computes the loss itself (`transforms/chunked_loss.py`)."""

    labels: torch.Tensor
    """[b, s], shifted."""
    trained: torch.Tensor | None
    """Positions of the trained ones in the flat labels; None where the host does not know them."""
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Set by the head: takes what the model returned as its logits, returns the loss sum."""


HEAD_CALL: ContextVar[HeadCall | None] = ContextVar("HEAD_CALL", default=None)

LOGITS_BYTES, LARGE_LOGITS, GPU_CHUNK = 12, 0.05, 2048
"""On a GPU: bytes of a whole logit in training (measured on an H200 in bf16: 11.5), the share of memory from which `auto` avoids
them, and tokens of a chunk: so many that adding to the weight's gradient costs nothing."""

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Names in configs of the load-balancing loss's weight."""


def choose_loss(job: Job) -> str:
    """Return `chunked` on a CPU, and on a GPU where whole logits are large beside the states; else `whole`."""
    spec, train_config = job.spec, job.train_config
    if spec is None or spec.runs_code or job.settings.get("splits_backward"):
        return "whole"
    state, tokens = job.engine.expected_state(job), train_config.micro_batch * train_config.seq_len
    logits = LOGITS_BYTES * tokens * spec.vocab
    large = logits > LARGE_LOGITS * (logits + state.parameters + state.master + (state.optimizer or 0))
    return "chunked" if job.device.kind == "cpu" or (tokens > GPU_CHUNK and large) else "whole"


def loss_kind(job: Job, model: Any) -> str:
    """Return the kind of a model's loss: `causal` or `seq2seq` by the spec, else by the model's class.

    Without a spec, a model that is not a causal one of transformers trains on the loss that it returns: `own`.
    """
    if job.spec is not None:
        return job.spec.kind
    module = getattr(model, "module", model)
    causal = getattr(module, "loss_type", None) == "ForCausalLM" or "LMHeadModel" in type(module).__name__
    return "causal" if causal else "own"


def with_trained(batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Add the trained positions of a batch on the host, which need not wait for the device to find them."""
    labels = batch["labels"]
    return batch if labels.device.type != "cpu" else {**batch, "trained": (labels.flatten() != -100).nonzero()[:, 0]}


def loss_sum(model: Any, batch: Mapping[str, torch.Tensor], kind: str) -> torch.Tensor:
    """Run a forward and return the sum of the cross-entropy over the trained positions, in fp32.

    Args:
        model: returns logits [b, s, vocabulary].
        batch: its inputs, and `labels` [b, s] as `shift_labels` makes them; -100 is not trained. `trained` may hold the trained
            positions among the flat labels.
        kind: see `loss_kind`. A sequence-to-sequence model makes its decoder's input from the labels, and its loss is ignored.
            Of `own`, the loss that the model returns is taken for the mean over the trained positions.

    Raises:
        StrategyError: for an output without a loss or logits, and for a model that adds a loss of another kind.
    """
    outside = ("trained", "labels") if kind == "causal" else ("trained",)
    inputs = {name: tensor for name, tensor in batch.items() if name not in outside}
    labels = batch["labels"]
    if kind == "own":
        return _mean(model, model(**inputs, use_cache=False)) * (labels != -100).sum()
    call = HeadCall(labels, batch.get("trained"))
    token = HEAD_CALL.set(call)
    try:
        output = model(**inputs, use_cache=False)
    finally:
        HEAD_CALL.reset(token)
    loss = call.finish(output.logits) if call.finish else cross_entropy_sum(output.logits, labels)
    return loss + _auxiliary(model, output, labels)


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over the trained positions; `labels` stand where the logits that predict them do."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def loss(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss over the trained positions of a batch, in a user's own loop.

    A model of `tk.load` computes it without whole logits where `Strategy.loss` says so.

    Args:
        model: of transformers, prepared or not.
        batch: on the model's device, with `labels` as transformers takes them: not shifted, -100 is not trained.
    """
    kind = "seq2seq" if getattr(model, "module", model).config.is_encoder_decoder else "causal"
    labels = shift_labels(batch["labels"], kind)
    return loss_sum(model, with_trained({**batch, "labels": labels}), kind) / (labels != -100).sum().clamp(min=1)


def _mean(model: Any, output: Any) -> torch.Tensor:
    """Return the loss that a model returned; zero where no position is trained, where the mean is NaN."""
    loss: torch.Tensor | None = getattr(output, "loss", None)
    if loss is None:
        raise StrategyError(
            f"{type(getattr(model, 'module', model)).__name__} returned no loss for a batch with labels. Return an output with "
            "a loss, or describe the model and give tk.accelerator its spec."
        )
    return loss.float().nan_to_num()


def _auxiliary(model: Any, output: Any, labels: torch.Tensor) -> torch.Tensor | float:
    """Return the load-balancing loss of a mixture of experts that has one, once for each trained token."""
    config: Any = getattr(getattr(model, "module", model), "config", None)
    if getattr(config, "z_loss_coefficient", 0):
        raise StrategyError(
            f"{type(config).__name__} has z_loss_coefficient {config.z_loss_coefficient}, and the toolkit's loss has no such "
            "term. Set it to 0 in config.json."
        )
    balance = getattr(output, "aux_loss", None)
    if balance is None:
        return 0.0
    config = config.get_text_config()
    coefficient = next((value for name in COEFFICIENTS if (value := getattr(config, name, None)) is not None), None)
    if coefficient is None:
        raise StrategyError(
            f"{type(config).__name__} has output_router_logits and no coefficient of its load-balancing loss: expected one of "
            f"{', '.join(COEFFICIENTS)}. Set output_router_logits to false in config.json."
        )
    weighted: torch.Tensor = coefficient * balance.to(labels.device) * (labels != -100).sum()
    return weighted


def shift_labels(labels: torch.Tensor, kind: str) -> torch.Tensor:
    """Put each label where the logits that predict it stand: on whole rows [b, s], before anything splits them.

    A causal model predicts the next token, so labels move one place to the left. Those of another kind stay.
    """
    from torch.nn.functional import pad

    return pad(labels[:, 1:], (0, 1), value=-100) if kind == "causal" else labels
