"""What a model is trained on: `hardware()` → `Hardware`, this machine or a named one. Imports no torch, touches no device."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.show import Shown


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one machine's processor shared by its ranks."""

    kind: str
    """`cpu` or `cuda`."""
    name: str
    total_bytes: int
    free_bytes: int
    dtypes: tuple[str, ...]
    """Precisions that it computes natively: of `fp32`, `bf16`, `fp16`."""
    attentions: tuple[str, ...]
    """Attention kernels that are installed and run on it, best first."""


@dataclass(frozen=True, kw_only=True)
class Hardware(Shown):
    """Equal devices on equal nodes."""

    device: Device
    count: int
    """Devices of a node; on `cpu` the number of ranks that are asked for."""
    nodes: int = 1
    host_bytes: int
    """Memory of a node's host, total."""
    host_free_bytes: int

    @property
    def ranks(self) -> int:
        """One rank a device."""
        return self.count * self.nodes
