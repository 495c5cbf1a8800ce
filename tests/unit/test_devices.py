"""`hardware`: this machine as the kernel and torch see it, named machines, and the rules that hold without a GPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from programs import python

from toolkit.core.errors import RunError, ToolkitError
from toolkit.core.units import GiB
from toolkit.devices.gpu_catalog import CARDS
from toolkit.devices.machine import (
    _gpu,
    cgroup_memory,
    first_instance,
    hardware,
    host_memory,
    torch_build,
    visible,
)
from toolkit.training.setup import check_ranks, ranks_sharing_devices


def test_this_machine() -> None:
    """As torch sees it, which here is imported."""
    machine = hardware()
    if torch.cuda.is_available():
        assert (machine.device.kind, machine.count) == ("cuda", torch.cuda.device_count())
        assert machine.device.capability == torch.cuda.get_device_capability()
        assert machine.device.total_bytes >= torch.cuda.get_device_properties(0).total_memory
    else:
        assert (machine.device.kind, machine.count, machine.device.capability) == ("cpu", 1, None)
        half = ("fp16",) if torch.ops.mkldnn._is_mkldnn_fp16_supported() else ()
        assert (machine.device.dtypes, machine.device.attentions) == (("fp32", *half), ("sdpa", "eager"))
        assert machine.device.total_bytes == machine.host_bytes
    assert machine.ranks == machine.count
    assert 0 < machine.host_free_bytes < machine.host_bytes <= psutil.virtual_memory().total
    assert 0 < machine.device.free_bytes <= machine.device.total_bytes
    json.loads(machine.to_json())


def test_torch_build_is_what_torch_says() -> None:
    if torch.version.cuda:
        assert torch_build() == f"cuda {torch.version.cuda}"
    elif torch.version.hip:
        assert torch_build() == f"rocm {torch.version.hip}"
    else:
        assert torch_build() == "cpu"


@pytest.mark.parametrize(
    ("line", "build"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None", "cuda 13.0"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.1.2'", "rocm 7.1.2"),
        ('cuda = "12.6"\nhip = None', "cuda 12.6"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None", "cpu"),
    ],
)
def test_torch_build_by_its_version_file(line: str, build: str, tmp_path: Path) -> None:
    """Another torch stands first on the path of a process of its own; it would fail if it were imported."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\n")
    assert _say("print(torch_build())", tmp_path) == build


def test_nothing_heavy_is_imported() -> None:
    script = (
        "import sys; hardware(); hardware('8x H100-80GB'); print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    assert _say(script) == "set()"


def test_named_machines() -> None:
    t4 = hardware("T4")
    assert (t4.device.kind, t4.count, t4.nodes, t4.ranks) == ("cuda", 1, 1, 1)
    assert (t4.device.dtypes, t4.device.capability) == (("fp32", "fp16"), (7, 5))
    node = hardware("8x H100-80GB")
    assert (node.ranks, node.device.dtypes) == (8, ("fp32", "bf16", "fp16"))
    assert 79 * GiB < node.device.total_bytes < 80 * GiB
    assert node.host_bytes == 2048 * GiB
    assert "256 GiB for each GPU are assumed" in str(node)
    cluster = hardware("2 nodes x 8x A100-80GB")
    assert (cluster.nodes, cluster.count, cluster.ranks) == (2, 8, 16)
    ranks = hardware("2x cpu")
    assert (ranks.device.kind, ranks.ranks, ranks.host_bytes) == ("cpu", 2, host_memory()[0])
    assert hardware("cpu").count == 1


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *(
            ("h100", "H100-80GB"),
            ("NVIDIA RTX 4090", "RTX-4090"),
            ("4xl40s", "L40S"),
            ("2 NODES x V100-32gb", "V100-32GB"),
        ),
        # As nvidia-smi names them
        *(("8x NVIDIA H100 80GB HBM3", "H100-80GB"), ("NVIDIA A100-SXM4-40GB", "A100-40GB")),
        *(("Tesla V100-SXM2-16GB", "V100-16GB"), ("NVIDIA GeForce RTX 3090", "RTX-3090")),
    ],
)
def test_names_are_taken_as_people_write_them(name: str, device: str) -> None:
    assert hardware(name).device.name == device


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("A100", "say which one, A100-40GB or A100-80GB"),
        ("8x B3090", r"'8x B3090' is unknown\. Known: cpu, T4"),
        ("8x H1000", r"'8x H1000' is unknown\. Did you mean 'H100'\? Known: cpu, T4"),
        ("2x tpu", "is unknown.*Known: cpu"),
        ("8x H100 PCIe", "is unknown. The catalog has other boards of such cards"),
        ("NVIDIA RTX 4090 Laptop", "is unknown. The catalog has other boards of such cards"),
        ("", "expected a name such as '8x H100-80GB'"),
        ("0x T4", "at least one device"),
        ("0 nodes x 8x T4", "at least one node"),
    ],
)
def test_bad_names(name: str, says: str) -> None:
    with pytest.raises(ToolkitError, match=says):
        hardware(name)


def test_kernels_of_a_named_machine(tmp_path: Path) -> None:
    """`auto` takes the first: a flash kernel only where it is installed; by name every one that the GPU can run."""
    script = "print(*(','.join(hardware(n).device.attentions) for n in ('T4', 'A100-80GB', 'H100', 'B200')))"
    assert _say(script).split() == [
        "sdpa,eager,flex",
        "sdpa,eager,flash_attention_2,varlen,flex",
        "sdpa,eager,flash_attention_3,flash_attention_2,varlen,flex",
        "sdpa,eager,flash_attention_2,varlen,flex",
    ]
    for module, distribution, version in (
        ("flash_attn", "flash_attn", "2.8.3"),
        ("flash_attn_interface", "flash_attn_3", "3.0.0"),
    ):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('imported')")
        info = tmp_path / f"{distribution}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    assert _say(script, tmp_path).split() == [
        "sdpa,eager,flex",
        "flash_attention_2,sdpa,eager,varlen,flex",
        "flash_attention_3,flash_attention_2,sdpa,eager,varlen,flex",
        "flash_attention_2,sdpa,eager,varlen,flex",
    ]
    (tmp_path / "flash_attn-2.8.3.dist-info" / "METADATA").write_text("Name: flash-attn\nVersion: 2.1.0\n")
    assert _say(script, tmp_path).split()[1] == "sdpa,eager,flash_attention_2,varlen,flex"


@pytest.mark.parametrize(
    ("chosen", "left"),
    [
        (None, "012"),
        ("", ""),
        ("1", "1"),
        ("2, 0", "20"),
        ("0,7,1", "0"),
        ("-1", ""),
        ("GPU-b", "1"),
        ("GPU-bbb,0", "10"),
        ("GPU-", ""),
        ("GPU-x,0", ""),
        ("all", ""),
    ],
)
def test_cuda_visible_devices(chosen: str | None, left: str) -> None:
    uuids = ["GPU-aaa", "GPU-bbb", "GPU-ccc"]
    assert visible(uuids, chosen) == [uuids[int(index)] for index in left]


def test_a_mig_instance_is_visible_by_its_uuid() -> None:
    assert visible(["GPU-aaa"], "MIG-123") == ["MIG-123"]


class Nvml:
    """An H100 with two MIG instances as NVML describes it: names, memory, slices."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotFound(NVMLError):
        pass

    def __init__(self, instances: dict[int, str]) -> None:
        self.instances = instances

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: str) -> int:
        return 7 if self.instances else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: str, index: int) -> str:
        if index not in self.instances:
            raise self.NVMLError_NotFound
        return self.instances[index]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        total = 80 * GiB if handle == "gpu" else 20 * GiB
        return SimpleNamespace(total=total, free=total - GiB)

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H100 80GB HBM3" + ("" if handle == "gpu" else " MIG 2g.20gb")

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:
        assert handle == "gpu", "NVML answers this for a GPU alone"
        return 9, 0

    def nvmlDeviceGetAttributes(self, handle: str) -> Any:
        return SimpleNamespace(computeInstanceSliceCount=2)


def test_a_mig_instance_has_its_share_of_the_card() -> None:
    nvml = Nvml({1: "first", 3: "second"})
    assert first_instance(nvml, "gpu") == "first"
    assert first_instance(Nvml({}), "gpu") == "gpu"
    whole, part = (_gpu(nvml, handle, "gpu") for handle in ("gpu", "first"))
    assert whole.card == CARDS["H100-80GB"]
    assert (part.total_bytes, part.free_bytes, part.capability) == (20 * GiB, 19 * GiB, (9, 0))
    assert part.card.tflops_half == pytest.approx(989 * 2 / 7)
    assert part.card.memory == pytest.approx(3350 / 4)
    assert part.card.peer == part.card.host, "an instance has no NVLink"


def test_ranks_of_a_scheduler_have_devices_of_their_own() -> None:
    one = hardware("T4")
    check_ranks(hardware("1x cpu"), 4)
    check_ranks(one, ranks_sharing_devices({"LOCAL_WORLD_SIZE": "4"}))
    with pytest.raises(RunError, match=r"processes 4: this machine has 1 cuda device.*--processes 1"):
        check_ranks(one, ranks_sharing_devices({"LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}))


def test_limits_of_control_groups(tmp_path: Path) -> None:
    """Version 2, with a limit on the parent; version 1; a container that sees another path; and no limit at all."""
    own = tmp_path / "self"

    def group(path: str, maximum: str, **files: str) -> None:
        folder = tmp_path / path
        folder.mkdir(parents=True, exist_ok=True)
        names = ("memory.max", "memory.current")
        if path.startswith("memory"):  # version 1
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        for name, text in zip((*names, "memory.stat"), (maximum, files["used"], files["stat"]), strict=True):
            (folder / name).write_text(text + "\n")

    group("job/step", "max", used="500", stat="anon 100\ninactive_file 300")
    group("job", "4000", used="1500", stat="anon 1200\ninactive_file 300\nfile 9")
    own.write_text("0::/job/step\n")
    assert cgroup_memory(tmp_path, own) == [(4000, 2800)]
    group("memory/box", "8000", used="3000", stat="inactive_file 1\ntotal_inactive_file 1000")
    own.write_text("4:memory:/box\n1:cpu:/\n0::/elsewhere/unseen\n")
    assert cgroup_memory(tmp_path, own) == [(8000, 6000)]
    group("", "2000", used="100", stat="inactive_file 0")
    assert cgroup_memory(tmp_path, own) == [(8000, 6000), (2000, 1900)]
    assert cgroup_memory(tmp_path, tmp_path / "absent") == []


def test_host_memory_describes_the_machine() -> None:
    named = hardware("2x TITAN-RTX", "60GiB")
    assert (named.host_bytes, named.host_free_bytes, named.notes) == (60 * GiB, 60 * GiB, ())
    assert "assumed" in str(hardware("2x TITAN-RTX"))
    assert hardware("2x cpu", "60 GB").device.free_bytes == 60 * 10**9
    with pytest.raises(ToolkitError, match="host_memory 'much': expected a size such as 60GiB"):
        hardware("T4", "much")


def _say(script: str, *paths: Path) -> str:
    """What a script prints in a process of its own, with these folders first on its path."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*paths, *filter(None, sys.path)]))}
    head = "from toolkit.devices.machine import hardware, torch_build\n"
    return python("-c", head + script, env=environ, code=0).stdout.strip()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("8x TPU v5e", "need PyTorch/XLA"),
        ("Cerebras CS-3", "compile a whole model"),
        ("rocm", "Name the card, such as MI250X"),
    ],
)
def test_other_platforms_are_refused_by_name(name: str, said: str) -> None:
    with pytest.raises(ToolkitError, match=said):
        hardware(name)


def test_each_chip_of_an_mi250x_is_a_device() -> None:
    assert hardware("8x MI250X").device.total_bytes == pytest.approx(64 * GiB, rel=0.01)
