"""A loop of the user's own means the same on every engine: the guide's, and scripts in the manner of Accelerate's examples."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

from toolkit.config.strategy import SHARDINGS

pytestmark = pytest.mark.dist

RANKS = {"none": 1, "hsdp": 4}
SHARDED = ("ddp", "zero2", "zero3", "fsdp")

Results = dict[str, dict[str, Any]]
"""What the guide's loops and others gave, by sharding."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the guide's loops gave, by sharding."""
    root = tmp_path_factory.mktemp("loops")
    groups = [(count, [{"sharding": word} for word in SHARDINGS if RANKS.get(word, 2) == count]) for count in (1, 2, 4)]
    tiny.bert(root / "bert")
    tiny.llama(root / "tied", tie_word_embeddings=True)
    gave = tiny.run_groups("loops_worker.py", groups, tiny.llama(root / "llama"), root)
    return {result["cell"]["sharding"]: result for results in gave for result in results}


def test_readmes_loops_compute_the_same_under_every_sharding(results: Results) -> None:
    """Losses, norms and weights over the same global batches, with a norm that is clipped: to 1e-5 in fp32."""
    assert set(results) == set(SHARDINGS)
    for train_config, count in (("function", 10), ("script", 21 + 11)):
        reference = results["ddp"][train_config]
        whole = torch.load(reference["weights"])
        assert len(reference["losses"]) == count  # with 11 norms, each of a step
        for sharding, result in results.items():
            where = f"{sharding}, {train_config}"
            assert result[train_config]["losses"] == pytest.approx(reference["losses"], rel=1e-5), where
            weights = torch.load(result[train_config]["weights"])
            assert set(weights) == set(whole)
            for name, tensor in weights.items():
                torch.testing.assert_close(tensor, whole[name], rtol=1e-5, atol=1e-5, msg=f"{where}: {name}")


REFUSED_BY: dict[str, list[tuple[str, str]]] = {
    "every": [
        ("another_norm", "StrategyError: clip_grad_norm_ got max_norm 0.5"),
        ("another_norm", "clips the L2 norm at 0.05 on every engine. Give tk.TrainConfig(max_grad_norm=0.5)"),
        ("some_parameters", "got 1 of "),
        ("not_finite", "NotFinite: the gradient norm is "),
        ("single_values", "StrategyError: clip_grad_value_ got clip_value 0.5"),
        ("closure", "StrategyError: optimizer.step got a closure"),
        ("other_accumulation", "RunError: this process already has an Accelerator, with sharding {sharding!r}"),
        ("other_rates", "StrategyMismatch: the optimizer steps with the learning rates ["),
    ],
    "ranks": [
        # Two of one process each, with one precision and one accumulation, share Accelerate's state.
        ("second", "RunError: this process already has an Accelerator, with sharding {sharding!r}"),
        ("rows", "a DataLoader with batch_size=None"),
    ],
    "sharded": [
        ("two_models", "Call prepare for each: first the trained one"),
        (
            "no_sync",
            "StrategyError: model.no_sync() does not exist under sharding {sharding!r}. Write accelerator.no_sync",
        ),
    ],
    "deepspeed": [
        ("second_optimizer", "got 2 optimizers in all, and sharding {sharding!r} can step one"),
        ("backward_twice", "accelerator.backward was called twice before optimizer.step()"),
        ("plain_backward", "optimizer.step() came without accelerator.backward(loss)"),
        ("written", "embed_tokens.weight was written after prepare"),
        ("gradients_read", "a gradient was read after accelerator.backward"),
        ("rates_between", "were set after accelerator.backward"),
        ("own_backward", "torch.autograd.grad goes through the model"),
        ("accumulation", "tk.TrainConfig(accumulation=5)"),
    ],
    "fsdp": [("hook", "embed_tokens.weight has a hook on its gradient")],
    "ddp's wrapper": [("not_called", "the prepared model was not called since the last one")],
}
"""Who refuses a call → the call, and words that occur. The others do not say them."""


def test_what_an_engine_cannot_do_is_refused_in_a_sentence(results: Results) -> None:
    for sharding, result in results.items():
        here = {"every", SHARDINGS[sharding].engine}
        here |= {"none": set(), "ddp": {"ranks", "ddp's wrapper"}}.get(sharding, {"ranks", "sharded"})
        for who, calls in REFUSED_BY.items():
            for call, words in calls:
                sentence = result["refusals"][call]
                assert (words.format(sharding=sharding) in sentence) == (who in here), (sharding, call, sentence)
    assert results["none"]["refusals"]["second"] == results["ddp"]["refusals"]["no_sync"] == ""


def test_plain_prepare_raises_where_something_else_was_prepared(results: Results) -> None:
    assert "sharding 'fsdp' was requested, and something else was prepared" in results["fsdp"]["mismatch"]


def test_a_model_of_ones_own_trains_the_same_under_every_sharding(results: Results) -> None:
    """Every rank computes with rank 0's buffer, and what the spec cannot know is not compared."""
    reference = results["ddp"]["own"]
    for sharding in SHARDED:
        result = results[sharding]["own"]
        assert result["figures"] == pytest.approx(reference["figures"], rel=1e-5), sharding
        assert len(result["kept"]) == 1, sharding
        assert result["whole_shapes"] == reference["whole_shapes"], sharding
        (line,) = (line for line in result["said"] if "bytes and dtypes were not compared" in line)
        assert "(the first difference: model.embed_tokens.weight)" in line, sharding


def test_a_converted_script_keeps_its_schedule(results: Results) -> None:
    """Losses and rates of each step are those of plain Accelerate: its schedulers step once for every rank."""
    for sharding in ("none", *SHARDED):
        reference = results["none" if sharding == "none" else "ddp"]["scripts"]["plain"]
        result = results[sharding]["scripts"]["accumulation"]
        assert result == pytest.approx(reference, rel=1e-5), sharding
        assert result[-24:] == reference[-24:], (sharding, "rates of 12 micro-batches, of schedule and optimizer")


def test_an_epoch_that_is_resumed_in_its_middle_sees_the_same_rows(results: Results) -> None:
    """On one rank and on two, whatever draws the order, and without the seed of the run that was stopped."""
    for sharding in ("none", "ddp"):
        for kind, (whole, resumed, said) in results[sharding]["orders"].items():
            assert resumed == whole, (sharding, kind)
            assert len(set(map(str, whole[:3]))) == 3 or kind == "a list", "the epochs have different orders"
            assert bool(said) == (kind in ("a sampler of one's own", "batches of one's own")), (kind, said)


def test_an_epoch_after_one_that_was_left_is_the_same_after_a_resume(results: Results) -> None:
    for sharding in ("none", "ddp"):
        for kind, (whole, resumed) in results[sharding]["left"].items():
            assert resumed == whole, (sharding, kind)


def test_what_a_script_does_to_a_loaded_model_is_kept(results: Results) -> None:
    """A new head, changed and dropped layers, a parameter more, another vocabulary: the losses of one process."""
    reference = results["none"]["changed"]
    for sharding in SHARDED:
        for losses, expected in zip(results[sharding]["changed"], reference, strict=True):
            assert losses == pytest.approx(expected, rel=1e-5), sharding


def test_parameters_without_a_gradient_train_as_in_one_process_or_are_named(results: Results) -> None:
    cases = {sharding: results[sharding]["unused"] for sharding in ("none", *SHARDED)}
    for sharding, ours in cases.items():
        reference = cases["none"]
        for case in ("class token", "one parameter"):
            assert ours[case]["refuse"] == pytest.approx(reference[case]["refuse"], rel=1e-5), (sharding, case)
        for case in ("never", "some steps", "one rank"):
            for word, losses in ours[case].items() if "find" in ours[case] else ():
                if word == "find" and case != "one rank":
                    assert losses == pytest.approx(reference[case]["find"], rel=1e-5), (sharding, case)
    for sharding in SHARDED:
        assert cases[sharding]["some steps"]["refuse"].startswith(
            f"second.bias gets no gradient, and it got one in the first backward. Sharding {sharding!r} would train it otherwise"
        )
        assert ("token has no dimension" in cases[sharding]["scalar"]["refuse"]) == (sharding != "ddp")
    for sharding in ("ddp", "zero2", "fsdp"):
        assert "second.bias gets a gradient on some ranks only" in cases[sharding]["one rank"]["refuse"]
    assert cases["ddp"]["one rank"]["find"][1:] != cases["none"]["never"]["refuse"][1:]
    for sharding in ("zero2", "zero3", "fsdp"):
        never = cases[sharding]["never"]
        assert never["refuse"] == pytest.approx(cases["none"]["never"]["refuse"], rel=1e-5), sharding
        assert never["said"] == [
            "gradients: 2 of the trained parameters get none and stay as they are, the first is second.bias"
        ], sharding


def test_a_weight_under_several_names_is_trained_as_one_and_saved_under_each(results: Results) -> None:
    """Ties made by hand, a layer used twice, and an adapter's copies: as in one process, or refused before the first step."""
    reference = results["none"]["tied"]
    for sharding in ("none", *SHARDED):
        for name, result in results[sharding]["tied"].items():
            where = f"{sharding}, {name}"
            if name == "copies":
                assert (
                    "modules_to_save makes base_model.model.lm_head.modules_to_save.default.weight" in result["refused"]
                )
                assert "LoraConfig(ensure_weight_tying=True)" in result["refused"], where
            elif sharding == "fsdp" and name.startswith("across"):
                assert "are one weight, and FSDP gathers the modules around them apart" in result["refused"], where
                assert "model.layers.1." in result["refused"], where
            else:
                assert result["losses"] == pytest.approx(reference[name]["losses"], rel=1e-5), where
                assert result["error"] < 1e-5, where
                assert result["same"], where
                assert not result["unreached"], where


def test_a_module_with_a_batch_norm_is_evaluated_alike_on_every_rank(results: Results) -> None:
    """With rank 0's statistics; an iterable's rows come once; what hides or adds gradients is named."""
    for sharding in ("none", *SHARDED):
        result = results[sharding]["modules"]
        assert result["seen"] == list(range(10)), sharding
        assert len(set(result["evaluated"])) == 1, sharding
        if sharding != "none":
            assert result["losses"] == pytest.approx(results["ddp"]["modules"]["losses"], rel=1e-6), sharding
            assert result["evaluated"][0] == pytest.approx(results["ddp"]["modules"]["evaluated"][0], rel=1e-6), (
                sharding
            )
            assert "use_reentrant=True hides which parameters" in result["said"]["reentrant"], sharding
            assert "0.bias gets a gradient, and it " in result["said"]["unfrozen"], sharding


def test_a_trainer_of_transformers_is_sharded_as_launched_and_audited(results: Results) -> None:
    """Equal losses under every word, which are the run's; and where another sharding was launched, the audit raises."""
    kinds = {"none": "LlamaForCausalLM", "ddp": "DistributedDataParallel", "fsdp": "FSDPLlamaForCausalLM"}
    for sharding in ("none", *SHARDED):
        result, ranks = results[sharding]["trainer"], RANKS.get(sharding, 2)
        assert result["losses"] == pytest.approx(results["none"]["trainer"]["losses"], rel=1e-5), sharding
        assert result["kind"] == kinds.get(sharding, "DeepSpeedEngine")
        assert result["audited"] == {"sharding": sharding, "engine": result["kind"], "ranks": ranks}
        assert [line["loss"] for line in result["logged"]] == result["losses"]
        clips = "this loop clips the gradient norm at 0.5, and DeepSpeed at 1" in result["clips"]
        assert clips == sharding.startswith("zero"), (sharding, result["clips"])
        if sharding in ("none", "ddp"):
            assert result["said"] == result["kind"]
        else:
            assert "sharding 'ddp' was requested, and something else was prepared" in result["said"], sharding


def test_scripts_of_others_give_the_same_under_every_sharding(results: Results) -> None:
    """With the one line changed; where an engine has no `model.no_sync()`, also with what the sentence says."""
    reference = results["ddp"]["scripts"]
    assert reference["tokens"] == reference["tokens as they are"]
    for sharding in SHARDED:
        result = results[sharding]["scripts"]
        for name in ("accumulation", "tokens", "checkpoints", "resumed"):
            assert result[name] == pytest.approx(reference[name], rel=1e-5), (sharding, name)
        assert result["resumed"] == pytest.approx(result["checkpoints"][4:], rel=1e-6), sharding
        if sharding != "ddp":
            assert "Write accelerator.no_sync(model)" in result["tokens as they are"]


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_generate_in_the_middle_of_training_is_that_of_one_process(results: Results, adapter: str) -> None:
    """In train mode activation checkpointing would drop the KV cache. The losses are those of a loop without it."""
    losses = results["ddp"]["silent"][adapter]["losses"]
    for sharding in ("none", *SHARDED):
        result = results[sharding]["saving"][adapter]
        for mode in ("eval", "train", "wrapped"):
            assert result[mode] == result["one process"], (sharding, mode)
        assert len(result["eval"]) == 12
        assert result["losses"] == pytest.approx(losses, rel=1e-5), sharding


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_what_a_script_saves_is_whole_or_refused(results: Results, adapter: str) -> None:
    for sharding in ("none", *SHARDED):
        result = results[sharding]["saving"][adapter]
        count = 21 if adapter == "none" else 28
        for way in ("save_pretrained", "documented", "save_model", "state_dict"):
            if way == "state_dict" and sharding in ("zero3", "fsdp"):
                assert result[way].startswith("state_dict() holds parts of tensors"), sharding
                assert "tk.save(" in result[way], sharding
            else:
                assert result[way] == f"{count} of {count} tensors are right", (sharding, way)
    said = results["zero3"]["saving"][adapter]["alone"]
    assert said.startswith("RunError: get_state_dict was called on 1 of 2 ranks, and no other came in 0.9 s.")
    assert "Call it on every rank, as tk.save" in said
