"""The one loss: of the loop, of evaluation, of every engine, and of a forecast's trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.errors import StrategyError

if TYPE_CHECKING:
    import torch

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Names of the weight of the load-balancing loss in configs."""


def loss_sum(model: Any, batch: Mapping[str, torch.Tensor], kind: str) -> torch.Tensor:
    """Run a forward and return the sum of the cross-entropy over the trained positions, in fp32.

    Args:
        model: returns logits [b, s, vocabulary].
        batch: its inputs, and `labels` [b, s] as `shift_labels` makes them; -100 is not trained.
        kind: of the spec. A sequence-to-sequence model makes its decoder's input from the labels, and its own loss is ignored.
    """
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels" or kind == "seq2seq"}
    output = model(**inputs, use_cache=False)
    labels = batch["labels"]
    return cross_entropy_sum(output.logits, labels) + _auxiliary(model, output, labels)


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over the trained positions; `labels` stand where the logits that predict them do."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def _auxiliary(model: Any, output: Any, labels: torch.Tensor) -> torch.Tensor | float:
    """The load-balancing loss of a mixture of experts that asks for one, once for each trained token."""
    balance = getattr(output, "aux_loss", None)
    if balance is None:
        return 0.0
    config = getattr(model, "module", model).config.get_text_config()
    coefficient = next((value for name in COEFFICIENTS if (value := getattr(config, name, None)) is not None), None)
    if coefficient is None:
        raise StrategyError(
            f"{type(config).__name__} asks for a load-balancing loss and names no coefficient: expected one of "
            f"{', '.join(COEFFICIENTS)}. Set output_router_logits to false in config.json."
        )
    weighted: torch.Tensor = coefficient * balance.to(labels.device) * (labels != -100).sum()
    return weighted


def shift_labels(labels: torch.Tensor, kind: str) -> torch.Tensor:
    """Put each label where the logits that predict it stand: on whole rows [b, s], before anything splits them.

    A causal model predicts the next token, so labels move one place to the left. A sequence-to-sequence model's stay.
    """
    from torch.nn.functional import pad

    return labels if kind == "seq2seq" else pad(labels[:, 1:], (0, 1), value=-100)
