"""Accelerate's config file: the part that every engine's file has."""

from __future__ import annotations

from typing import Any

from toolkit.config.strategy import Strategy

SPELLED = ("bf16", "fp16", "fp8")
"""Precisions that Accelerate's file can say: there bf16 and fp16 keep fp32 masters, too."""


def base_yaml(strategy: Strategy, ranks: int, nodes: int) -> dict[str, Any]:
    """Return the fields that every config file has. Precisions that Accelerate does not know are written "no"."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": strategy.precision if strategy.precision in SPELLED else "no",
        "num_machines": nodes,
        "num_processes": ranks,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }


def read_precision(written: str | None) -> dict[str, str]:
    """Return the precision that a config file's `mixed_precision` sets: "no" leaves it open."""
    return {"precision": written} if written in SPELLED else {}
