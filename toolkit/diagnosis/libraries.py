"""Checks that import a library and use it, in a child process that a broken library may end.

A check returns its detail, or raises an `Outcome`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from toolkit.devices.machine import hardware
from toolkit.diagnosis.result import Outcome
from toolkit.models.files import first_line
from toolkit.transforms.adapters import import_bitsandbytes

EXTRAS = {"deepspeed": "[deepspeed]", "bitsandbytes": "[qlora]"}


def library(name: str) -> str:
    """Check that a library is installed, new enough and importable. Return its version."""
    from packaging.requirements import Requirement

    if importlib.util.find_spec(name) is None:
        raise Outcome("missing", "not installed", f"`pip install 'accelerate-toolkit{EXTRAS.get(name, '')}'`")
    importlib.import_module(name)
    version = metadata.version(name)
    try:
        requirements = map(Requirement, metadata.requires("accelerate-toolkit") or ())
    except metadata.PackageNotFoundError:  # a copy of the sources
        return version
    for requirement in requirements:
        bound = requirement.specifier
        if requirement.name == name and not bound.contains(version, prereleases=True):
            raise Outcome("broken", f"{version}, expected {bound}", f"`pip install '{name}{bound}'`")
    return version


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def torch_computes() -> str:
    """Check torch with a matrix product on the training device."""
    library("torch")
    import torch

    device = _device()
    ones = torch.ones(64, 64, device=device)
    threads = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
    detail = f"{torch.__version__}, computes on {device}{threads}"
    if not bool((ones @ ones == 64).all()):
        raise Outcome("broken", f"{detail}, and wrongly")
    return detail


def bf16_computes() -> str:
    """Check bfloat16 on the training device."""
    import torch

    device = _device()
    ones = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    if not bool((ones @ ones == 64).all()):
        raise Outcome("broken", f"wrong on {device}", "Choose precision fp32.")
    native = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    return f"{'native' if native else 'runs, yet not natively: expect no speed from it'} ({device})"


def process_groups() -> str:
    """Check process groups: a real gloo group of one, and NCCL where there are GPUs."""
    import torch
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        dist.all_reduce(torch.ones(4))
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        detail = f"gloo: {first_line(error)}"
        raise Outcome("broken", detail, "Name the network interface in GLOO_SOCKET_IFNAME.") from None
    if not torch.cuda.is_available():
        return "gloo (NCCL is for GPUs)"
    if not dist.is_nccl_available():
        raise Outcome("broken", "this torch has no NCCL", "Install torch for CUDA on Linux.")
    return f"gloo, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"  # type: ignore[no-untyped-call]


def deepspeed_device() -> str:
    """Check that DeepSpeed uses the training device."""
    version, device = library("deepspeed"), _device()
    from deepspeed.accelerator import get_accelerator

    used = get_accelerator()._name
    if used != device:
        raise Outcome("broken", f"{version}, drives {used}, not {device}", f"Set DS_ACCELERATOR={device}.")
    return f"{version}, drives {used}"


def operators() -> str:
    """Check DeepSpeed's compiled operator: whether it is built, and whether it can be.

    On a CPU its collectives in shared memory are compiled by the first run (about 40 s); on a GPU its Adam for
    offloaded optimizer states (about 2 min).
    """
    builder = _builder()
    built = _is_built(builder)
    if lacks := _missing_to_load(built):
        detail = f"{builder.NAME} cannot be {'loaded' if built else 'compiled'} without {', '.join(lacks)}"
        raise Outcome("missing", detail, " ".join(lacks.values()))
    if built:
        return f"{builder.NAME} is built"
    return f"{builder.NAME} will be compiled by the first run that needs it; or now, by `toolkit doctor --compile`"


def compile_operators() -> str:
    """Compile the operator that `operators` checks."""
    begin, builder = time.perf_counter(), _builder()
    builder.load(verbose=False)
    return f"{builder.NAME} was compiled and loaded in {time.perf_counter() - begin:.0f} s"


def _builder() -> Any:
    """Return DeepSpeed's builder of the operator that training needs on this machine."""
    if importlib.util.find_spec("deepspeed") is None:
        raise Outcome("n/a", "DeepSpeed is not installed")
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    builder = accelerator.create_op_builder("ShareMemCommBuilder" if accelerator._name == "cpu" else "CPUAdamBuilder")
    if not builder.is_compatible(verbose=False):
        raise Outcome("n/a", f"{builder.NAME} is not for this system")
    return builder


def _missing_to_load(built: bool) -> dict[str, str]:
    """Return what an operator needs to be loaded, and the fix. A built one still needs ninja, to check that it is current."""
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


def bitsandbytes_packs() -> str:
    """Check bitsandbytes with a round trip through 4 bits on the training device."""
    import_bitsandbytes()
    version, device = library("bitsandbytes"), _device()
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weights = torch.linspace(-1, 1, 4096, device=device).reshape(64, 64)
    packed, state = quantize_4bit(weights, quant_type="nf4", compress_statistics=True, quant_storage=torch.float32)
    error = float((dequantize_4bit(packed, state) - weights).abs().max())
    # Two nf4 levels are at most 0.304 apart (Dettmers et al. 2023, appendix E): no value moves by more than half of it.
    if not error < 0.17:
        raise Outcome("broken", f"4 bits are off by {error:.2f} on {device}")
    return f"{version}, 4 bits work on {device}"


def flash_attention() -> str:
    """Check FlashAttention, for compute capability 8.0 or more. A build for another torch fails at import."""
    device = hardware().device
    if (device.capability or (0, 0)) < (8, 0):
        raise Outcome("n/a", "needs a GPU of compute capability 8.0 or more; sdpa serves")
    fix = "`pip install --no-build-isolation --no-cache-dir 'accelerate-toolkit[flash]'`"
    if importlib.util.find_spec("flash_attn") is None:
        other = "torch's varlen_attn" if "varlen" in device.attentions else "sdpa"
        raise Outcome("missing", f"not installed; packed rows take {other}", fix)
    try:
        importlib.import_module("flash_attn")
    except (ImportError, OSError) as error:
        raise Outcome("broken", first_line(error), fix) from None
    return metadata.version("flash-attn")
