"""Pipelines without ranks: refusals, where models are cut, the balance of stages."""

from __future__ import annotations

import dataclasses
import html
from typing import Any

import pytest
import torch.distributed.pipelining
import transformers

from toolkit import StrategyError, describe, forecast, plan
from toolkit.cli import main
from toolkit.config.strategy import PP_SCHEDULES, Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.devices.machine import hardware
from toolkit.engines.job import Job
from toolkit.engines.ledger import Ledger
from toolkit.engines.pipeline import PipelineLoop
from toolkit.engines.pipeline.actions import orders
from toolkit.engines.pipeline.anatomy import anatomy_of, held
from toolkit.engines.pipeline.balance import balanced, times, unbalanced
from toolkit.engines.pipeline.schedules import SEVERAL, idle_share, schedule_class
from toolkit.engines.pipeline.walk import Walk
from toolkit.engines.played import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, in_flight, measured, play
from toolkit.engines.resolution import resolve
from toolkit.engines.traces import Segment
from toolkit.forecasting.stages import MOST_DRAWN, format_gigabytes, schedule_picture, schedule_record, stages_table

SHAPE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
LLAMA = transformers.LlamaConfig(**SHAPE, intermediate_size=128, vocab_size=256)
DENSE_FIRST = transformers.Qwen3MoeConfig(
    **SHAPE,
    intermediate_size=64,
    vocab_size=256,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    mlp_only_layers=[0, 1],
)
EMPTY_LAYERS: dict[str, Any] = {
    "vocab_size_per_layer_input": 256,
    "vocab_size": 256,
    "intermediate_size": 64,
    "num_kv_shared_layers": 0,
}


def job(
    config: Any = LLAMA,
    ranks: int | None = None,
    accumulation: int = 4,
    seq_len: int = 64,
    on: str = "8x cpu",
    **fields: Any,
) -> Job:
    strategy = Strategy(**{"pp": 2, **fields})
    train_config = TrainConfig(seq_len=seq_len, accumulation=accumulation)
    return resolve(strategy, train_config, describe(config), ranks or strategy.pp, hardware(on).device)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sharding": "ddp"}, ("ddp, pp 2", "4 ranks", "got 2")),
        ({"sharding": "fsdp"}, ("fsdp, pp 2", "4 ranks", "got 2")),
        ({"sharding": "fsdp_grad_op", "ranks": 4}, ("'fsdp_grad_op'", "whole in any case", "fsdp")),
        ({"sharding": "zero1", "ranks": 4}, ("'zero1'", "DeepSpeed", "fsdp")),
        ({"sharding": "zero2", "ranks": 4}, ("'zero2'", "every micro-batch", "fsdp")),
        ({"sharding": "zero3", "ranks": 4}, ("'zero3'", "gather every parameter", "fsdp")),
        ({"adapter": "dora", "tp": 2, "ranks": 4}, ("adapter 'dora'", "tp 2", "lora")),
        (
            {"config": DENSE_FIRST, "adapter": "lora", "lora_targets": "up_proj"},
            ("'up_proj' adapts nothing in layers", "to 3", "all-linear"),
        ),
        ({"adapter": "qlora"}, ("adapter 'qlora'", "packed weights", "lora")),
        ({"precision": "fp16"}, ("precision 'fp16'", "loss scale", "bf16")),
        (
            {"sharding": "fsdp", "offload": "cpu", "ranks": 4, "on": "8x H100-80GB"},
            ("offload 'cpu'", "pp 2", "two micro-batches"),
        ),
        ({"pp_schedule": "ScheduleDualPipeV"}, ("'ScheduleDualPipeV'", "first and the last stage", "zero_bubble")),
        ({"pp_schedule": "zero_bubble", "loss": "chunked"}, ("loss 'chunked'", "--loss whole")),
        (
            {"pp_schedule": "zero_bubble", "activation_offload": True, "activation_checkpointing": "full"},
            ("activation_offload", "--no-activation-offload"),
        ),
        (
            {"pp_schedule": "zero_bubble", "activation_checkpointing": "full"},
            ("a layer for each of its weights", "--activation-checkpointing none"),
        ),
        ({"cp": 2, "ranks": 4}, ("--cp", "pp 2")),
        ({"ep": 2}, ("--ep", "pp 2")),
        ({"ep": 2, "ranks": 3}, ("--ep", "pp 2")),
        ({"compile": True}, ("--compile", "pp 2")),
        ({"ranks": 4}, ("4 ranks", "Choose sharding 'fsdp', or 2 processes")),
        ({"ranks": 3}, ("pp 2", "3 ranks", "multiple of 2")),
        ({"accumulation": 1}, ("accumulation 1", "'1f1b'", "--accumulation 2", "gpipe")),
        ({"accumulation": 5, "pp_schedule": "interleaved"}, ("accumulation 5", "multiple of 2", "--accumulation 6")),
        ({"pp_schedule": "interleaved", "pp_stages_per_rank": 1}, ("pp_stages_per_rank 1", "at least 2")),
        ({"pp_stages_per_rank": 2}, ("pp_stages_per_rank 2", "interleaved")),
        ({"pp": 5, "accumulation": 5}, ("5 stages", "4 layers")),
        ({"config": transformers.T5Config(d_model=64, num_layers=1)}, ("T5", "causal")),
        (
            {"config": transformers.XLNetConfig(d_model=64, n_layer=4, n_head=4, d_inner=64, vocab_size=256)},
            ("XLNet", "its forward in bf16 fails", "expected scalar type", "--pp 1"),
        ),
        (
            {"config": transformers.Gemma3nTextConfig(**SHAPE, num_key_value_heads=2, head_dim=16, **EMPTY_LAYERS)},
            ("Gemma3n", "hidden states"),
        ),
        (
            {
                "config": transformers.MixtralConfig(
                    **SHAPE, num_key_value_heads=2, vocab_size=256, output_router_logits=True
                )
            },
            ("Mixtral", "output_router_logits"),
        ),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_job_that_it_cannot_run_is_refused(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(StrategyError) as refused:
        job(**fields)
    assert [word for word in words if word not in str(refused.value)] == []


class Recording:
    """A stage that notes what torch's schedule runs."""

    stage_index, is_first, is_last, has_backward, submod = 0, False, False, True, None

    def __init__(self, number: int, count: int, ranks: int = 0) -> None:
        self.stage_index, self.num_stages = number, count
        self.group_size, self.group_rank = ranks or count, number
        self.ran: list[tuple[str, int]] = []

    def forward_one_chunk(self, micro: int, *_: Any, **__: Any) -> None:
        self.ran.append(("F", micro))

    def backward_one_chunk(self, micro: int, **_: Any) -> None:
        self.ran.append(("B", micro))

    def perform_reduce_grad(self, _: int) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_ops"):
            return lambda _: []
        raise AttributeError(name)


def make_schedule(job: Job, pp: int, count: int) -> Any:
    """torch's schedule of a job's first rank, with another number of micro-batches."""
    each = job.settings["stages_per_rank"]
    stages = [Recording(pp * turn, pp * each, pp) for turn in range(each)]
    several = job.strategy.pp_schedule in SEVERAL
    return schedule_class(job)(stages if several else stages[0], count, loss_fn=lambda *_: None)


@pytest.mark.parametrize(("schedule", "count"), [("1f1b", 3), ("interleaved", 11), ("zero_bubble", 11)])
def test_torch_refuses_the_numbers_of_micro_batches_that_we_refuse(schedule: str, count: int) -> None:
    config = transformers.LlamaConfig(**{**SHAPE, "num_hidden_layers": 8}, vocab_size=256)
    able = job(config, pp=4, accumulation=8, pp_schedule=schedule)
    assert make_schedule(able, 4, 8)
    with pytest.raises(ValueError, match=r"icrobatches"):
        make_schedule(able, 4, count)
    with pytest.raises(StrategyError, match=f"accumulation {count}"):
        job(config, pp=4, accumulation=count, pp_schedule=schedule)


@pytest.mark.parametrize("schedule", PP_SCHEDULES)
def test_each_schedule_takes_its_own_numbers_of_micro_batches(schedule: str) -> None:
    """1F1B fills the pipeline once; rounds of an interleaved one are equally long, as torch's classes require."""
    for pp, count in ((2, 1), (2, 3), (2, 4), (2, 5), (4, 3), (4, 6), (4, 10), (4, 11)):
        rounds = max(1, count // pp)
        in_rounds = count >= pp and count % rounds == 0
        able = {"1f1b": count >= pp, "interleaved": in_rounds, "zero_bubble": in_rounds}.get(schedule, True)
        config = transformers.LlamaConfig(**{**SHAPE, "num_hidden_layers": 8}, vocab_size=256)
        if able:
            made = job(config, pp=pp, accumulation=count, pp_schedule=schedule)
            assert made.settings["schedule"] == schedule
            assert make_schedule(made, pp, count)  # torch takes what we take
        else:
            with pytest.raises(StrategyError, match=f"accumulation {count}"):
                job(config, pp=pp, accumulation=count, pp_schedule=schedule)


def test_a_schedule_has_the_name_of_torchs_class_too() -> None:
    """Each with and without `Schedule`, in any case; torch has the class, and schedules of several stages run two by default."""
    for schedule, name in PP_SCHEDULES.items():
        words = (schedule, name, name.lower(), f"Schedule{name}")
        jobs = [job(pp_schedule=word) for word in words]
        assert {each.strategy.pp_schedule for each in jobs} == {schedule}
        assert schedule_class(jobs[0]) is getattr(torch.distributed.pipelining, f"Schedule{name}")
        assert jobs[0].settings["stages_per_rank"] == (2 if schedule in SEVERAL else 1)


def test_data_parallel_ranks_of_a_stage_read_different_rows() -> None:
    """Those of one data-parallel rank, of all stages, read the same: pp is the outermost dimension."""
    made = job(ranks=8, sharding="fsdp", tp=2)
    places = [made.coordinates(rank) for rank in range(8)]
    assert [(place.pp, place.dp_rank, place.tp) for place in places] == [
        (pp, dp, tp) for pp in range(2) for dp in range(2) for tp in range(2)
    ]
    assert list(made.parallelism.loss_ranks()) == [4, 6]
    rows = TrainConfig(micro_batch=8, accumulation=32)
    four = resolve(Strategy(pp=2, sharding="fsdp"), rows, describe(LLAMA), 8, hardware("8x cpu").device)
    assert four.global_batch == 8 * 32 * 4 == 1024


def test_fsdp_shards_the_states_of_a_stage_between_steps() -> None:
    whole, half = job(), job(ranks=4, sharding="fsdp")
    for rank in range(4):
        expected = whole.engine.expected_state(whole, rank // 2)
        state = half.engine.expected_state(half, rank)
        assert (2 * state.trainable, 2 * state.optimizer) == (expected.trainable, expected.optimizer)
    assert "whole within a step" in half.engine.compute_note(half)
    assert "whole" not in whole.engine.compute_note(whole)


def test_forecast_and_plan_of_a_pipeline() -> None:
    """All ranks read the same rows. The first stage holds more micro-batches, the last one the logits."""
    spec, strategy = describe(LLAMA), Strategy(pp=2, activation_checkpointing="none")
    made = forecast(spec, strategy, "2x H100-80GB", TrainConfig(seq_len=64, accumulation=4))
    assert made.pipeline is not None
    first, last = made.pipeline.stages
    assert (first.rank, first.in_flight, last.rank, last.in_flight) == (0, 2, 1, 1)
    assert made.peak_bytes == max(stage.peak_bytes for stage in (first, last))
    assert made.pipeline.fullest_rank == (0 if first.peak_bytes > last.peak_bytes else 1)
    assert made.step_seconds is not None
    assert made.step_seconds > 4 * max(stage.forward + stage.backward for stage in (first, last))
    assert made.to_dict()["pipeline"]["idle_share"] == made.pipeline.idle_share
    assert "the fullest" in str(made)
    best = plan(spec, "2x H100-80GB", strategy=strategy, global_batch=8, seq_len=64).best
    assert best.strategy.pp == 2
    assert best.train_config.accumulation * best.train_config.micro_batch == 8


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "micro"), [(2, 2), (2, 5), (4, 4), (4, 9)])
def test_actions_are_in_the_order_in_which_torch_runs_them(schedule: str, pp: int, micro: int) -> None:
    made = job(pp=pp, accumulation=micro, pp_schedule=schedule)
    for rank, own in enumerate(orders(made)):
        stage = Recording(rank, pp)
        theirs = schedule_class(made)(stage, micro, loss_fn=lambda *_: None)
        theirs._initialize_stage = lambda *_: None
        theirs._step_microbatches()
        assert [(action.kind, action.micro) for action in own] == stage.ran


@pytest.mark.parametrize(
    ("schedule", "flight"), [("gpipe", [8] * 4), ("1f1b", [4, 3, 2, 1]), ("interleaved", [11, 9, 7, 5])]
)
def test_equal_stages_wait_as_the_formula_says(schedule: str, flight: list[int]) -> None:
    config = transformers.LlamaConfig(**{**SHAPE, "num_hidden_layers": 8}, vocab_size=256)
    made = job(config, pp=4, accumulation=8, pp_schedule=schedule)
    order = orders(made)
    stages = len(made.settings["stages"])
    played = play(order, {(kind, stage): 1 + (kind == "B") for kind in "FB" for stage in range(stages)})
    assert played.idle_share == pytest.approx(idle_share(made))
    assert [in_flight(own) for own in order] == flight
    slow = play(order, {(kind, stage): 1 + (stage == 0) for kind in "FB" for stage in range(stages)})
    assert slow.idle[0] < min(slow.idle[1:])


def test_a_measured_step_is_drawn_below_its_forecast() -> None:
    """Of the steps that ranks keep the one of median length; idle is what lies outside of its actions."""
    config = TrainConfig(seq_len=64, accumulation=2)
    need = forecast(describe(LLAMA), Strategy(pp=2), "2x cpu", config, ranks=2).pipeline
    assert need is not None
    pipeline = need.to_dict()

    def step(slow: float) -> list[list[tuple[Action, float, float]]]:
        """Of both ranks: 1 and 3 seconds of two forwards and 2 and 6 of two backwards, from second 7 on."""
        first = [("F", 0, 0, 0, 1), ("F", 0, 1, 1, 2), ("B", 0, 0, 10, 11), ("B", 0, 1, 11, 12 * slow)]
        second = [("F", 1, 0, 1, 4), ("B", 1, 0, 4, 7), ("F", 1, 1, 7, 9), ("B", 1, 1, 9, 11)]
        return [[(Action(*each[:3]), 7 + each[3], 7 + each[4]) for each in own] for own in (first, second)]

    ranks = list(zip(step(3), step(1), step(2), strict=True))
    ran = schedule_record(measured([list(own) for own in ranks]))
    assert ran["length"] == 24
    assert ran["idle"] == pytest.approx([1 - 16 / 24, 1 - 10 / 24])
    image = html.unescape(schedule_picture(pipeline, ran))
    assert f"rank 1 {pipeline['stages'][1]['idle']:.1%}, measured 58.3%" in image
    table = stages_table(pipeline, image, ran)
    assert [row[-1] for row in table.rows] == ["33.3%", "58.3%"]
    assert "45.8% of the median step" in table.text()


def test_stages_that_fsdp_shards_are_whole_within_a_step() -> None:
    """Between steps a rank holds a half; forecasts count the whole stage's parameters and gradients in the backward."""
    spec, train_config = describe(LLAMA), TrainConfig(seq_len=64, accumulation=4)
    alone = forecast(spec, Strategy(pp=2), "4x cpu", train_config, ranks=2)
    shared = forecast(spec, Strategy(pp=2, sharding="fsdp"), "4x cpu", train_config, ranks=4)
    assert alone.pipeline is not None
    assert shared.pipeline is not None
    assert "a stage's parameters and gradients are whole within a step (ZeRO-1)" in " ".join(str(shared).split())
    assert "ZeRO-1" not in str(alone)
    assert [stage.rank for stage in shared.pipeline.stages] == [0, 2]
    assert shared.phases["prepare"] < alone.phases["prepare"]
    whole = 4 * sum(parameter.elements for parameter in spec.parameters) / 2
    assert shared.phases["backward"] - shared.phases["step"] > whole


@pytest.mark.parametrize(("precision", "added"), [("fp32", 5), ("bf16", 10)])
def test_the_first_part_of_a_backward_frees_logits_and_the_second_leaves_gradients(precision: str, added: int) -> None:
    """Under FSDP2 the next first part adds them up, in fp32, and the last second part reduces them."""
    strategy = Strategy(pp=2, sharding="fsdp", precision=precision, pp_schedule="zero_bubble")
    job = resolve(strategy, TrainConfig(seq_len=64, accumulation=4), describe(LLAMA), 4, hardware("4x cpu").device)
    last = len(job.settings["stages"]) - 1
    forward = Segment(100, 100, 60, 60, "backward", 0, "")
    step = [forward, Segment(40, -60, 40, -60, "gradient", 10, "lm_head.weight"), Segment(0, -40, 0, 0, "", 0, "")]
    halfway = Ledger(shared=True)
    Walk(halfway, job, {last: step}).run([Action(kind, last, 0) for kind in (FORWARD, BACKWARD_INPUT)])
    assert halfway.held["logits"] == 0 < 40 < halfway.held["activations"]
    apart = [Action(kind, last, micro) for micro in (0, 1) for kind in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)]
    together = [Action(kind, last, micro) for kind in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT) for micro in (0, 1)]
    for order in (apart, together):  # in the second nothing is added up in another dtype
        done = Ledger(shared=True)
        done.hold("parameters", 7)
        walk = Walk(done, job, {last: step})
        walk.sharded[last] = 7, added
        walk.run(order)
        assert done.held == {"gradients": added, "activations": 0, "logits": 0, "buffers": 0, "parameters": 0}


def test_a_loop_of_the_users_own_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"tk\.forward_backward"):
        PipelineLoop().backward(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "layers", "before", "after"),
    [
        (LLAMA, "model.layers", {"model.embed_tokens"}, {"model.norm", "lm_head"}),
        (
            transformers.OPTConfig(**SHAPE, ffn_dim=64, vocab_size=256, word_embed_proj_dim=32),
            "model.decoder.layers",
            {"model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.project_in"},
            {"model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head"},
        ),
        (
            transformers.BloomConfig(hidden_size=64, n_layer=4, n_head=4, vocab_size=256),
            "transformer.h",
            {"transformer.word_embeddings", "transformer.word_embeddings_layernorm"},
            {"transformer.ln_f", "lm_head"},
        ),
    ],
    ids=["llama", "opt", "bloom"],
)
def test_parts_are_found_by_the_order_of_calls(config: Any, layers: str, before: set[str], after: set[str]) -> None:
    """OPT's last norm is written before its layers, and runs after them."""
    parts = anatomy_of(describe(config))
    assert (parts.layers, parts.count) == (layers, 4)
    assert (parts.before, parts.after) == (before, after)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_on_one_rank_and_tied_ones_on_two(schedule: str, tied: bool) -> None:
    config = transformers.LlamaConfig(**SHAPE, vocab_size=256, tie_word_embeddings=tied)
    made = job(config, pp_schedule=schedule)
    assert made.spec is not None
    ranks = [held(made, rank) for rank in range(2)]
    names = {parameter.name for parameter in made.spec.parameters}
    assert ranks[0] | ranks[1] == names
    assert ranks[0] & ranks[1] == ({"model.embed_tokens.weight"} if tied else set())
    states = [made.engine.expected_state(made, rank).trainable for rank in range(2)]
    twice = 4 * 256 * 64 if tied else 0
    assert sum(states) == 4 * made.spec.elements + twice


def test_stages_are_balanced_by_layers_and_head() -> None:
    """A head of six layers' elements: the last stage gets fewer layers, and no cut has a smaller largest stage."""
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=12, num_attention_heads=4, intermediate_size=128, vocab_size=4096
    )
    stages = balanced(job(config, pp=4))
    assert [first for first, _ in stages] == [0, *(end for _, end in stages[:-1])]
    assert stages[-1][1] == 12
    sizes = [end - first for first, end in stages]
    assert sizes[-1] == 1
    assert max(sizes) - min(sizes[:-1]) <= 1


def bloom(hidden: int, layers: int, heads: int, vocabulary: int) -> Any:
    return transformers.BloomConfig(hidden_size=hidden, n_layer=layers, n_head=heads, vocab_size=vocabulary)


def slowest(made: Job) -> float:
    """The slowest stage's time over the mean."""
    layers, head = times(made)
    stages = [sum(layers[first:end]) for first, end in made.settings["stages"]]
    stages[-1] += head
    return max(stages) * len(stages) / sum(stages)


def test_a_large_vocabulary_leaves_the_last_stage_fewer_blocks() -> None:
    made = job(bloom(1024, 24, 16, 250_000), pp=4, seq_len=2048, on="4x A100-80GB")
    sizes = [end - first for first, end in made.settings["stages"]]
    assert sizes[-1] < min(sizes[:-1])
    assert slowest(made) <= 1.10


def test_the_largest_published_pipeline_has_72_slots() -> None:
    """BLOOM-176B's blocks, embedding and head on 12 stages. Its last stages held fewer blocks."""
    made = forecast(bloom(14_336, 70, 112, 250_880), Strategy(pp=12), "12x A100-80GB", TrainConfig(accumulation=12))
    assert made.pipeline is not None
    text = str(made)
    assert "72 slots: 70 blocks of 4.9 GB, the embedding with 7.2 GB, the head with 7.2 GB." in text
    shown = next(table for table in made.tables() if table.title.startswith("Stages"))
    sizes = [dict(zip(shown.columns, row, strict=True)) for row in shown.rows]
    assert len(sizes) == 12
    for row, stage in zip(sizes, made.pipeline.stages, strict=True):
        assert row["weights"] == format_gigabytes(stage.weight_bytes)
        assert row["equal slots"] == format_gigabytes(stage.unbalanced_bytes)
    assert sizes[-1]["weights"] != sizes[-1]["equal slots"]


def test_a_long_schedule_is_not_written_action_by_action() -> None:
    spec, micro = describe(LLAMA), MOST_DRAWN // 4 + 1
    made = {
        count: forecast(spec, Strategy(pp=2), "2x cpu", TrainConfig(seq_len=64, accumulation=count)).to_dict()[
            "pipeline"
        ]
        for count in (4, micro)
    }
    assert len(made[4]["actions"]) == 4 * 4
    assert made[micro]["actions"] == []
    assert schedule_picture(made[4])
    assert not schedule_picture(made[micro])
    assert made[micro]["idle_share"] < made[4]["idle_share"]


def test_a_stage_fits_a_rank_where_a_cut_does() -> None:
    """The embedding's states are most of what a rank has: the first stage gives layers to the others, which are slower then."""
    config = transformers.LlamaConfig(
        hidden_size=1024, num_hidden_layers=16, num_attention_heads=16, intermediate_size=2752, vocab_size=64_000
    )
    made = job(config, pp=4, on="4x L4", seq_len=2048)
    small = dataclasses.replace(made.device, total_bytes=1_800_000_000)
    assert made.spec is not None
    within = resolve(made.strategy, made.train_config, made.spec, 4, small)
    assert within.settings["stages"][0][1] < made.settings["stages"][0][1]
    assert slowest(within) > slowest(made)
    nothing = resolve(made.strategy, made.train_config, made.spec, 4, dataclasses.replace(small, total_bytes=1_000))
    assert nothing.settings["stages"] == made.settings["stages"]


def test_stages_without_balancing_have_equally_many_slots() -> None:
    cuts = unbalanced(describe(bloom(64, 70, 4, 256)), 12)
    assert [end - first for first, end in cuts] == [5, *[6] * 10, 5]


def test_the_idle_share_is_the_formula() -> None:
    assert idle_share(job(accumulation=4)) == pytest.approx(1 / 5)
    assert idle_share(job(accumulation=4, pp_schedule="interleaved")) == pytest.approx(1 / 9)
    assert idle_share(job(accumulation=1, pp_schedule="gpipe")) == pytest.approx(1 / 2)


def test_default_rows_are_printed_once_beside_a_result(capfd: pytest.CaptureFixture[str]) -> None:
    """Not where rows are given. A refusal prints none (refused_commands.txt)."""
    for flags, count in (([], 1), (["--accumulation", "2"], 0)):
        assert main(["forecast", "--pp", "2", "--hardware", "2x cpu", *flags]) == 0
        said = capfd.readouterr().err
        assert said.count("pp 2: --micro-batch 1 --accumulation 4, so that all stages have work\n") == count, said
