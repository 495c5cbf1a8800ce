"""What the checks mean for a Strategy: which value of which field can run here, and why another cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from toolkit.devices import Hardware, hardware
from toolkit.doctor.finding import Finding
from toolkit.errors import ToolkitError
from toolkit.strategy import ADAPTERS, ATTENTIONS, LATER, OFFLOADS, PRECISIONS, SHARDINGS


@dataclass(frozen=True, kw_only=True)
class Ability:
    """Whether a value of a Strategy's field can run on this machine, as far as that field decides."""

    field: str
    value: str
    runs: bool
    reason: str
    """Why not, or on which condition; empty where there is nothing to say."""


def judge(findings: Sequence[Finding]) -> Iterator[Ability]:
    """Every value of sharding, offload, adapter, precision and attention, in the order of the Strategy's own lists."""
    found = {finding.check: finding for finding in findings}
    try:
        machine = hardware()
    except ToolkitError:  # the check of the GPUs says what is wrong with them
        machine = hardware("cpu")
    rules = {
        "sharding": (tuple(SHARDINGS), _sharding),
        "offload": (OFFLOADS, _offload),
        "adapter": (ADAPTERS, _adapter),
        "precision": (PRECISIONS, _precision),
        "attention": (ATTENTIONS, _attention),
    }
    for field, (values, rule) in rules.items():
        for value in values:
            later = value in LATER.get(field, ())
            runs, reason = (False, "not available yet") if later else rule(value, machine, found)
            yield Ability(field=field, value=value, runs=runs, reason=reason)


Found = dict[str, Finding]


def _lacking(found: Found, *checks: str) -> str:
    """The first of these checks that failed, as a reason."""
    return next((f"{c}: {found[c].detail}" for c in checks if found[c].status in ("missing", "broken")), "")


def _sharding(word: str, machine: Hardware, found: Found) -> tuple[bool, str]:
    row, gpus = SHARDINGS[word], machine.count if machine.device.kind == "cuda" else None
    needs = ["torch", "transformers", "accelerate", *(["processes"] if word != "none" else [])]
    if row.engine == "deepspeed":
        # On a CPU DeepSpeed loads its collectives when it starts; on a GPU nothing compiled is needed without offload.
        needs += ["deepspeed", *(["deepspeed operators"] if gpus is None else [])]
    if reason := _lacking(found, *needs):
        return False, reason
    least = 4 if row.replicate else 2 if row.engine == "fsdp" else 1
    if gpus is not None and gpus < least:
        return False, f"needs {least} GPUs, and there {'is' if gpus == 1 else 'are'} {gpus}"
    return True, "with one process: there is one GPU" if gpus == 1 and word != "none" else ""


def _offload(value: str, machine: Hardware, found: Found) -> tuple[bool, str]:
    if value == "none":
        return True, ""
    on_gpu = machine.device.kind == "cuda"
    reason = _lacking(found, "deepspeed", "deepspeed operators")
    fsdp = value == "cpu" and on_gpu and not _lacking(found, "processes")
    if reason:
        return fsdp, f"with fsdp only; {reason}" if fsdp else reason
    able = [word for word, row in SHARDINGS.items() if value in row.offload and (on_gpu or row.engine == "deepspeed")]
    return True, f"with {', '.join(able)}"


def _adapter(value: str, machine: Hardware, found: Found) -> tuple[bool, str]:
    needs = {"none": (), "qlora": ("peft", "bitsandbytes"), "qlora8": ("peft", "bitsandbytes")}.get(value, ("peft",))
    reason = _lacking(found, *needs)
    return not reason, reason


def _precision(value: str, machine: Hardware, found: Found) -> tuple[bool, str]:
    device = machine.device
    if value == "auto":
        best = "fp32" if device.kind == "cpu" else "bf16" if "bf16" in device.dtypes else "fp16"
        return True, f"takes {best}"
    if value == "fp16" and device.kind == "cpu":
        reason = _lacking(found, "deepspeed", "deepspeed operators")
        return not reason, reason or "with zero1, zero2, zero3: others have no loss scaling on a CPU"
    if value.startswith("bf16"):
        reason = _lacking(found, "bf16")
        return not reason, reason or ("" if "bf16" in device.dtypes else "not native: no faster than fp32")
    runs = value in device.dtypes
    return runs, "" if runs else f"{device.name} has no {value}"


def _attention(value: str, machine: Hardware, found: Found) -> tuple[bool, str]:
    kernels, kind = machine.device.attentions, machine.device.kind
    if value == "auto":
        return True, f"takes {kernels[0]} where the model and the precision allow it"
    if value in kernels:
        return True, ""
    if kind == "cpu":
        return False, "has no backward on a CPU" if value == "flex" else "needs a GPU"
    return False, "not installed, or not for this GPU"
