"""A run resumes under the same strategy bit for bit, and under any other with the same weights and moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

from toolkit.checkpoints import read_manifest

pytestmark = pytest.mark.dist

TWO, FOUR = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp_grad_op"), ("zero3", "fsdp", "hsdp")
ADAPTERS = {"none": TWO, "lora": ("ddp", "zero2", "fsdp"), "qlora": ("ddp", "zero3", "fsdp")}
"""What two ranks train under which shardings."""
CHAIN = [
    (1, "none"),
    (2, "zero3"),
    (2, "fsdp"),
    (2, "zero2"),
    (2, "ddp"),
    (4, "hsdp"),
    (4, "zero1"),
    (2, "fsdp_grad_op"),
    (1, "none"),
]
"""One step-2 checkpoint, read and written again under each in turn."""

Lives = dict[str, list[dict[str, Any]]]


def strategy(word: str, adapter: str = "none", **more: Any) -> dict[str, Any]:
    return {"sharding": word, "adapter": adapter, "dp_replicate": 2 if word == "hsdp" else 1, **more}


def stopped_and_not(name: str, root: Path, asked: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """A run of four steps that saves after the second and the last; and one that goes on after the second."""
    whole, resumed = root / name / "whole", root / name / "resumed"
    begun = {"strategy": asked, "upto": 4, "saves": [2, 4], "into": str(whole), "name": name, **more}
    return [begun, {**begun, "saves": [4], "into": str(resumed), "from": str(whole / "step-00000002")}]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def lives_of(root: Path) -> Lives:
    """Every life of every run: name → what it gave, in order."""
    # Dropout draws from the generators that a checkpoint keeps.
    model = tiny.llama(root / "llama", attention_dropout=0.1)
    plain = tiny.llama(root / "plain", tie_word_embeddings=True)
    mixture, t5, glm = tiny.mixtral(root / "mixtral"), tiny.t5(root / "t5"), tiny.glm4_moe(root / "glm")
    one = [life for a in ADAPTERS for life in stopped_and_not(f"1 none {a}", root, strategy("none", a))]
    two = [life for a in ADAPTERS for w in ADAPTERS[a] for life in stopped_and_not(f"2 {w} {a}", root, strategy(w, a))]
    for word in ("zero3", "fsdp"):
        two += stopped_and_not(f"2 {word} bf16", root, strategy(word, precision="bf16"))
        two += stopped_and_not(f"2 {word} mixtral", root, strategy(word), folder=str(mixture))
    two += stopped_and_not("2 zero3 dora", root, strategy("zero3", "dora"))
    two += stopped_and_not("2 fsdp buffers", root, strategy("fsdp"), folder=str(glm))
    two += stopped_and_not("2 fsdp t5", root, strategy("fsdp"), folder=str(t5))
    two += stopped_and_not("2 zero3 offload", root, strategy("zero3", offload="cpu"))
    two += stopped_and_not("2 zero2 offload", root, strategy("zero2", offload="optimizer"))
    four = [life for w in FOUR for life in stopped_and_not(f"4 {w} none", root, strategy(w))]
    groups: list[tuple[int, list[dict[str, Any]]]] = [(1, one), (2, two), (4, four)]
    before = None
    for place, (ranks, word) in enumerate(CHAIN):
        into = root / "chain" / str(place)
        link = {"strategy": strategy(word), "folder": str(plain), "into": str(into), "name": f"chain {place}"}
        first = {"upto": 5, "saves": [2]} if before is None else {"upto": 5, "saves": [2], "from": str(before)}
        if groups[-1][0] != ranks:
            groups.append((ranks, []))
        groups[-1][1].append({**link, **first})
        before = into / "step-00000002"
    lives: Lives = {}
    for results in tiny.run_groups("checkpoint_worker.py", groups, model, root / "scratch"):
        for result in results:
            lives.setdefault(result["cell"]["name"], []).append(result)
    return lives


def test_a_resumed_run_is_the_run_that_was_never_stopped(lives_of: Lives, root: Path) -> None:
    runs = {name: lives for name, lives in lives_of.items() if not name.startswith("chain")}
    assert len(runs) == 3 + 12 + 7 + 2 + 3
    for name, (whole, resumed) in runs.items():
        assert (whole["start"], resumed["start"]) == (0, 2), name
        assert resumed["steps"] == whole["steps"][2:], name  # losses, norms and rates, to the last bit
        assert resumed["drawn"] == whole["drawn"], name
        last = "step-00000004"
        assert not tiny.differing(root / name / "whole" / last, root / name / "resumed" / last), name


def test_weights_and_moments_move_between_strategies_bit_for_bit(lives_of: Lives, root: Path) -> None:
    for place in range(1, len(CHAIN)):
        path = root / "chain" / str(place) / "step-00000002"
        assert not tiny.differing(root / "chain" / "0" / "step-00000002", path), CHAIN[place]


def test_a_run_goes_on_under_another_strategy(lives_of: Lives) -> None:
    whole = lives_of["chain 0"][0]["steps"][2:]
    assert len(whole) == 3
    for place in range(1, len(CHAIN)):
        (life,) = lives_of[f"chain {place}"]
        assert life["start"] == 2
        for mine, first in zip(life["steps"], whole, strict=True):
            assert mine == pytest.approx(first, rel=1e-5), CHAIN[place]


def test_every_rank_writes_its_part_alone(lives_of: Lives, root: Path) -> None:
    for word in TWO:
        checkpoint = root / f"2 {word} none" / "whole" / "step-00000004"
        sizes = [path.stat().st_size for path in sorted(checkpoint.glob("rank-*.safetensors"))]
        assert len(sizes) == 2
        # Elements are written once: 12 bytes each. The generators' states and the headers come on top.
        elements = sum(
            tensor.numel() for (_, kind), tensor in tiny.stored_tensors(checkpoint).items() if kind == "weight"
        )
        assert 12 * elements < sum(sizes) < 12 * elements + 2 * 64 * 1024
        assert max(sizes) < 1.1 * sum(sizes) / 2


def test_persistent_buffers_are_in_a_checkpoint_once(lives_of: Lives, root: Path) -> None:
    checkpoint = root / "2 fsdp buffers" / "whole" / "step-00000004"
    assert [name for name, kind in tiny.stored_tensors(checkpoint) if kind == "buffer"]


def test_an_adapters_checkpoint_holds_the_adapter_alone(lives_of: Lives, root: Path) -> None:
    checkpoint = root / "2 zero3 qlora" / "whole" / "step-00000004"
    manifest = read_manifest(checkpoint)
    assert all("lora_" in name for name in manifest.tensors)
    assert list(manifest.identity["base"]["files"]) == ["model.safetensors"]
    assert manifest.identity["adapter"]["adapter"] == "qlora"
