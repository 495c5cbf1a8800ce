"""Checks that import a library and use it, in a child process: `python -m toolkit.diagnosis PARENT CHECK…`.

Each prints one line of JSON as soon as it is done, so that the parent knows which one a broken library ended.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.core.process_lifecycle import die_with_parent
from toolkit.devices.machine import hardware
from toolkit.diagnosis.result import Finding
from toolkit.engines.adapters import import_bitsandbytes

COMPILE = "+compile"
"""The suffix of a check that also compiles operators."""

_INSTALLED = ("torch", "transformers", "accelerate", "datasets", "deepspeed", "bitsandbytes", "peft")
_EXTRAS = {"deepspeed": "deepspeed", "bitsandbytes": "qlora"}


def library(name: str) -> Finding:
    """Check that a library is installed, new enough and importable."""
    from importlib import metadata

    missing = absent(name)
    if missing:
        return missing
    importlib.import_module(name)
    version = metadata.version(name)
    bound = _required_versions(name)
    if bound is not None and not bound.contains(version, prereleases=True):
        fix = f"`pip install '{name}{bound}'`"
        return Finding(check=name, status="broken", detail=f"{version}, expected {bound}", fix=fix)
    return Finding(check=name, status="ok", detail=version)


def absent(name: str) -> Finding | None:
    """Return the finding for a library that is not installed."""
    if importlib.util.find_spec(name) is not None:
        return None
    extra = f"[{_EXTRAS[name]}]" if name in _EXTRAS else ""
    fix = f"`pip install 'accelerate-toolkit{extra}'`"
    return Finding(check=name, status="missing", detail="not installed", fix=fix)


def _required_versions(name: str) -> Any:
    """Return the required versions of a library; None where the toolkit is not installed as a distribution."""
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(line) for line in metadata.requires("accelerate-toolkit") or ()]
    except metadata.PackageNotFoundError:
        return None
    return next((requirement.specifier for requirement in requirements if requirement.name == name), None)


def torch_computes() -> Finding:
    """Check torch with a matrix product on the training device."""
    finding = library("torch")
    if finding.status != "ok":
        return finding
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ones = torch.ones(64, 64, device=device)
    right = bool((ones @ ones == 64).all())
    threads = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
    detail = f"{torch.__version__}, computes on {device}{threads}"
    if not right:
        return Finding(check="torch", status="broken", detail=f"{detail}, and wrongly", fix="Install torch again.")
    return Finding(check="torch", status="ok", detail=detail)


def bf16_computes() -> Finding:
    """Check bfloat16 on the training device."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ones = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    if not bool((ones @ ones == 64).all()):
        return Finding(check="bf16", status="broken", detail=f"wrong on {device}", fix="Choose precision fp32.")
    native = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    how = "native" if native else "runs, yet not natively: expect no speed from it"
    return Finding(check="bf16", status="ok", detail=f"{how} ({device})")


def processes_talk() -> Finding:
    """Check process groups: a real gloo group of one, and NCCL where there are GPUs."""
    import torch
    import torch.distributed as dist

    fix = "Name the network interface in GLOO_SOCKET_IFNAME."
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        ones = torch.ones(4)
        dist.all_reduce(ones)
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        return Finding(check="processes", status="broken", detail=f"gloo: {_first_line(error)}", fix=fix)
    if not torch.cuda.is_available():
        return Finding(check="processes", status="ok", detail="gloo (NCCL is for GPUs)")
    if not dist.is_nccl_available():
        fix = "Install torch for CUDA on Linux."
        return Finding(check="processes", status="broken", detail="this torch has no NCCL", fix=fix)
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return Finding(check="processes", status="ok", detail=f"gloo, NCCL {version}")


def deepspeed_drives() -> Finding:
    """Check that DeepSpeed uses the training device."""
    finding = library("deepspeed")
    if finding.status != "ok":
        return finding
    import torch
    from deepspeed.accelerator import get_accelerator

    drives, device = get_accelerator()._name, "cuda" if torch.cuda.is_available() else "cpu"
    if drives != device:
        what = f"{finding.detail}, drives {drives}, not {device}"
        return Finding(check="deepspeed", status="broken", detail=what, fix=f"Set DS_ACCELERATOR={device}.")
    return Finding(check="deepspeed", status="ok", detail=f"{finding.detail}, drives {drives}")


def operators(compile_them: bool = False) -> Finding:
    """Check DeepSpeed's compiled operators: which are built, and whether the others can be.

    On a CPU its collectives in shared memory are compiled by the first run (about 40 s); on a GPU its Adam for
    offloaded optimizer states (about 2 min).
    """
    if absent("deepspeed"):
        return Finding(check="deepspeed operators", status="n/a", detail="DeepSpeed is not installed")
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    class_name = "ShareMemCommBuilder" if accelerator._name == "cpu" else "CPUAdamBuilder"
    builder = accelerator.create_op_builder(class_name)
    if not builder.is_compatible(verbose=False):
        return Finding(check="deepspeed operators", status="n/a", detail=f"{builder.NAME} is not for this system")
    done = _is_built(builder)
    lacks = _missing_to_load(done)
    if lacks:
        what = f"{builder.NAME} cannot be {'loaded' if done else 'compiled'} without {', '.join(lacks)}"
        return Finding(check="deepspeed operators", status="missing", detail=what, fix=" ".join(lacks.values()))
    if done:
        return Finding(check="deepspeed operators", status="ok", detail=f"{builder.NAME} is built")
    if not compile_them:
        detail = (
            f"{builder.NAME} will be compiled by the first run that needs it; or now, by `toolkit doctor --compile`"
        )
        return Finding(check="deepspeed operators", status="ok", detail=detail)
    begin = time.perf_counter()
    builder.load(verbose=False)
    detail = f"{builder.NAME} was compiled in {time.perf_counter() - begin:.0f} s"
    return Finding(check="deepspeed operators", status="ok", detail=detail)


def _missing_to_load(built: bool) -> dict[str, str]:
    """Return what an operator needs to be loaded, and the fix. A built one still asks ninja whether it is current."""
    from torch.utils.cpp_extension import get_cxx_compiler, is_ninja_available

    lacks = {}
    if not is_ninja_available():
        ninja = Path(sys.executable).with_name("ninja")
        here = f"`export PATH={ninja.parent}:$PATH`." if ninja.is_file() else "`pip install ninja`."
        lacks["ninja on the PATH"] = here
    if not built and shutil.which(get_cxx_compiler()) is None:  # type: ignore[no-untyped-call]
        lacks["a C++ compiler"] = "`apt-get install g++`."
    if not built and not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        lacks["Python's headers"] = "`apt-get install python3-dev`."
    return lacks


def _is_built(builder: Any) -> bool:
    """Return whether an operator is built, with DeepSpeed or by an earlier run (torch/utils/cpp_extension.py)."""
    import torch
    from deepspeed.git_version_info import installed_ops
    from torch.utils.cpp_extension import get_default_build_root

    kind = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path(get_default_build_root(), f"{python}_{kind}")
    return bool(installed_ops.get(builder.NAME)) or Path(root, builder.NAME, f"{builder.NAME}.so").is_file()


def bitsandbytes_packs() -> Finding:
    """Check bitsandbytes with a round trip through 4 bits on the training device."""
    import_bitsandbytes()
    finding = library("bitsandbytes")
    if finding.status != "ok":
        return finding
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = torch.linspace(-1, 1, 4096, device=device).reshape(64, 64)
    packed, state = quantize_4bit(weights, quant_type="nf4", compress_statistics=True, quant_storage=torch.float32)
    error = float((dequantize_4bit(packed, state) - weights).abs().max())
    # Two nf4 levels are at most 0.304 apart (Dettmers et al. 2023, appendix E): no value moves by more than half of it.
    if not error < 0.17:
        return broken("bitsandbytes", f"4 bits are off by {error:.2f} on {device}")
    return Finding(check="bitsandbytes", status="ok", detail=f"{finding.detail}, 4 bits work on {device}")


def flash_attention() -> Finding:
    """Check FlashAttention, for compute capability 8.0 or more. A build for another torch fails at import."""
    from importlib import metadata

    capability = hardware().device.capability
    if capability is None or capability < (8, 0):
        detail = "needs a GPU of compute capability 8.0 or more; sdpa serves"
        return Finding(check="flash-attn", status="n/a", detail=detail)
    fix = "`pip install --no-build-isolation --no-cache-dir 'accelerate-toolkit[flash]'`"
    if importlib.util.find_spec("flash_attn") is None:
        return Finding(check="flash-attn", status="missing", detail="not installed; sdpa serves", fix=fix)
    try:
        importlib.import_module("flash_attn")
    except (ImportError, OSError) as error:
        return Finding(check="flash-attn", status="broken", detail=_first_line(error), fix=fix)
    return Finding(check="flash-attn", status="ok", detail=metadata.version("flash-attn"))


CHECKS: dict[str, Callable[[], Finding]] = {
    "torch": torch_computes,
    "bf16": bf16_computes,
    "processes": processes_talk,
    "transformers": lambda: library("transformers"),
    "accelerate": lambda: library("accelerate"),
    "datasets": lambda: library("datasets"),
    "deepspeed": deepspeed_drives,
    "deepspeed operators": operators,
    f"deepspeed operators{COMPILE}": lambda: operators(compile_them=True),
    "bitsandbytes": bitsandbytes_packs,
    "peft": lambda: library("peft"),
    "flash-attn": flash_attention,
}


def check(name: str) -> Finding:
    """Run one check; whatever a library raises becomes a finding."""
    try:
        return CHECKS[name]()
    except Exception as error:  # a broken library may raise anything
        return broken(name, f"{type(error).__name__}: {_first_line(error)}")


def broken(name: str, detail: str) -> Finding:
    """Return the finding for a check that did not finish."""
    plain = name.removesuffix(COMPILE)
    fix = f"`pip install --force-reinstall {plain}`" if plain in _INSTALLED else ""
    return Finding(check=plain, status="broken", detail=detail, fix=fix)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def read(line: str) -> Finding:
    """Return the finding in a line that the child printed."""
    return Finding(**json.loads(line))


def main(parent: int, names: list[str]) -> None:
    """Run checks in order, a line of JSON each on the standard output, which libraries cannot write to."""
    die_with_parent(parent)
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in names:
        print(json.dumps(dataclasses.asdict(check(name))), file=results, flush=True)
