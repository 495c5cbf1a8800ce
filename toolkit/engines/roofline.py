"""A card's time for work: products, memory traffic, and the starts of kernels."""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.devices.gpu_catalog import GPUSpec

PRODUCT_SHARE, MEMORY_SHARE = 0.8, 0.75
"""Shares of a data sheet's peak: the fastest product's without a measurement, and the memory's.

Round numbers, chosen by published runs on A100s.
"""

CALL = 8e-6
"""Seconds for each operator in which its kernels start and end, and products and memory stand still: by the runs on the H200."""

EFFICIENT = ", efficient attention"
"""What follows the dtype of operations of the memory-efficient attention kernel: with a mask, and on cards without flash."""

EFFICIENT_SPEED = 300e12
"""Operations a second of that kernel at most. It does not use the products of Hopper; by the H200's times from 4,096 tokens on."""


def product_seconds(card: GPUSpec, work: Mapping[str, float]) -> float:
    """Return the time of operations by kernel. A kernel's name begins with a dtype."""
    return sum(size / _sustained(card, kernel) for kernel, size in work.items())


def other_seconds(card: GPUSpec, moved: float, calls: float) -> float:
    """Return the time of bytes that other operators read and write, and of the starts of all."""
    return moved / (card.memory * 1e9 * MEMORY_SHARE) + calls * CALL


def peak_speed(card: GPUSpec, dtype: str) -> float:
    """Return the peak operations a second."""
    return (card.tflops_fp32 if dtype == "float32" else card.tflops_half) * 1e12


def _sustained(card: GPUSpec, kernel: str) -> float:
    """Return the operations a second that a training step's products sustain, in the dtype that `kernel` begins with."""
    if kernel.startswith("float32"):
        return peak_speed(card, "float32") * PRODUCT_SHARE
    speed = (card.measured_half or card.tflops_half * PRODUCT_SHARE) * 1e12 * card.sustained
    return min(speed, EFFICIENT_SPEED) if kernel.endswith(EFFICIENT) else speed
