"""Forecasts side by side, phase by phase and dtype by dtype; and the panels over them, with real widgets."""

import dataclasses
import html
import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from runs import Page
from transformers import GPT2Config, LlamaConfig

import toolkit as tk
from toolkit.cli import main
from toolkit.config.run_config import RunConfig
from toolkit.core.cache import cache_folder
from toolkit.core.display import Table
from toolkit.core.errors import RunError, ToolkitError
from toolkit.core.glossary import glossary_terms
from toolkit.core.phases import PHASES
from toolkit.engines.resolution import resolve
from toolkit.forecasting import Forecast, trace_cache
from toolkit.forecasting.diffs import Difference, ForecastDiff, diff_forecasts
from toolkit.forecasting.dtype_reports import dtype_report
from toolkit.forecasting.timelines import Timeline, timeline
from toolkit.models import ModelSpec
from toolkit.notebook import answer_panel, explorer, explorer_state, widgets
from toolkit.notebook.explorer import Explorer, lengths_ahead, start_prefetch
from toolkit.notebook.explorer_state import command, train_command

LOOP = tk.TrainConfig(seq_len=64, micro_batch=2)
VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return tk.describe(None)


def ask(spec: ModelSpec, on: str = "2x A100-80GB", train_config: tk.TrainConfig = LOOP, **strategy: Any) -> Forecast:
    return tk.forecast(spec, tk.Strategy(**strategy), on, train_config)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, spec: ModelSpec) -> Path:
    """A folder as a run under ZeRO-3 in bf16 leaves it, with bytes a little above its forecast."""
    folder = tmp_path_factory.mktemp("run")
    result = ask(spec, "2x cpu", sharding="zero3", precision="bf16")
    phases = {phase: round(size * 1.25) for phase, size in result.phases.items()}
    top = {"peak_bytes": max(phases.values()), "peak_phase": result.peak_phase, "phases": phases}
    measured = {**top, "per_rank": [{"device": "cpu", **top}]}
    dtypes = {**result.job.engine.expected_state(result.job).dtypes, "gradients": "bfloat16"}
    words = {"strategy": dataclasses.asdict(result.strategy), "train_config": dataclasses.asdict(result.train_config)}
    memory = {"measured": measured, "reason": None, "forecast": result.to_dict()}
    memory["audits"] = [{"measured": {"dtypes": dtypes}}]
    runs.write(folder, [], record=runs.about(RunConfig(), **words), memory=memory)
    return folder


# Two forecasts ---------------------------------------------------------------------------------------------------------


def why(one: Forecast, other: Forecast) -> dict[str, str]:
    result: dict[str, str] = {}
    for subject, said in diff_forecasts(one, other).why:
        result[subject] = f"{result.get(subject, '')} {said}".strip()
    return result


def test_two_shardings_differ_in_what_their_engines_account_for(spec: ModelSpec) -> None:
    said = why(ask(spec, "2x cpu", sharding="ddp"), ask(spec, "2x cpu", sharding="zero3"))
    assert said["parameters"] == "zero3 shards the parameters over 2 ranks: 9.6 MiB of a rank instead of 19.3 MiB."
    assert said["optimizer"] == "zero3 shards the moments over 2 ranks: 19.3 MiB of a rank instead of 38.5 MiB."
    assert said["master"].startswith("ddp steps its weights without a master copy in float32: 0 B of a rank")
    assert "ddp sends 19.3 MiB in a step: gradients, all-reduced" in said["communication"]
    assert "zero3 sends 28.9 MiB in a step: parameters, all-gathered for the forward" in said["communication"]


@pytest.mark.parametrize(
    ("one", "other", "subject", "said"),
    [
        ({}, {"offload": "cpu"}, "parameters", "offload cpu keeps the parameters in the host's memory"),
        ({}, {"offload": "cpu"}, "communication", "offload cpu moves"),
        ({"precision": "fp32"}, {"precision": "bf16"}, "parameters", "in bfloat16, not float32"),
        (
            {},
            {"activation_checkpointing": "none"},
            "activations",
            "activation_checkpointing full recomputes each layer",
        ),
        ({}, {"activation_checkpointing": "none"}, "time", "it computes"),
    ],
)
def test_every_choice_says_what_it_does(
    spec: ModelSpec, one: dict[str, Any], other: dict[str, Any], subject: str, said: str
) -> None:
    assert said in why(ask(spec, sharding="zero3", **one), ask(spec, sharding="zero3", **other))[subject]


def test_equal_forecasts_differ_in_nothing(spec: ModelSpec) -> None:
    result = diff_forecasts(ask(spec, sharding="fsdp"), ask(spec, sharding="fsdp"))
    assert (result.why, result.fields) == ((), {})
    assert all(row.ratio in (1.0, None) for row in result.differences)
    assert json.loads(result.to_json())["one"]["device"]["peak_bytes"] == result.one.peak_bytes


def test_a_batch_is_a_difference_too(spec: ModelSpec) -> None:
    large, half = (dataclasses.replace(LOOP, micro_batch=size) for size in (64, 32))
    result = diff_forecasts(
        ask(spec, train_config=large, sharding="zero3"), ask(spec, train_config=half, sharding="zero3")
    )
    assert result.labels == ("micro_batch 64", "micro_batch 32")
    assert dict(result.why)["logits"].startswith("micro_batch 32 takes 32 sequences at once, not 64")


def test_steps_of_other_rows_are_compared_by_their_tokens(spec: ModelSpec) -> None:
    """The smaller step is the shorter one, and trains fewer tokens a second: each step sends the same gradients."""
    many, few = (
        ask(spec, train_config=dataclasses.replace(LOOP, micro_batch=size), sharding="ddp") for size in (64, 1)
    )
    assert few.step_seconds < many.step_seconds
    result = diff_forecasts(few, many)
    ratio = many.tokens_per_second / few.tokens_per_second
    assert ratio > 1.1
    assert result.reason.endswith(f"micro_batch 64 is {ratio:.2f} times as fast.")
    said = dict(result.why)["time"]
    assert said.startswith(
        f"The {many.job.global_batch * LOOP.seq_len:,} tokens of a step of micro_batch 64 take micro_batch 1 "
    )
    assert "it sends more" in said


@pytest.mark.parametrize(
    ("one", "other", "shown"), [(256, 4_194_304, "–"), (0, 5, "–"), (4, 2, "0.50"), (2, 2000, "1000.00")]
)
def test_a_ratio_of_next_to_nothing_is_not_told(one: int, other: int, shown: str) -> None:
    assert Difference(what="sent", one=one, other=other, unit="bytes").cells[-1] == shown


def test_an_adapter_trains_less(spec: ModelSpec) -> None:
    whole = ask(spec, sharding="zero3")
    job = resolve(tk.Strategy(sharding="zero3", adapter="lora"), LOOP, spec, 2, whole.hardware.device)
    said = why(whole, dataclasses.replace(whole, job=job))  # what is held follows from the job alone, without a trace
    assert "adapter lora trains 299.01K weights, not 5.05M, so the moments are of those alone" in said["optimizer"]


# Phase by phase --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3", "fsdp"])
def test_parts_add_up_in_every_phase(spec: ModelSpec, sharding: str) -> None:
    result = timeline(spec, tk.Strategy(sharding=sharding), "2x cpu", dataclasses.replace(LOOP, accumulation=2))
    plain = tk.forecast(spec, tk.Strategy(sharding=sharding), "2x cpu", dataclasses.replace(LOOP, accumulation=2))
    assert result.forecast.phases == plain.phases
    assert {phase: sum(parts.values()) for phase, parts in result.parts.items()} == dict(plain.phases)
    assert list(result.parts) == list(PHASES)
    highest = {phase: max(size for name, size in result.course if name == phase) for phase in PHASES}
    assert highest == dict(plain.phases)


def test_a_run_stands_beside_its_forecast(run: Path) -> None:
    result = timeline(run=run)
    (table,) = result.tables()
    rows = {row[0]: row[-1] for row in table.rows}
    assert set(rows.values()) == {"0.80"}
    assert result.notes == ()
    assert "measured total" in result._repr_html_()
    other = timeline(run=run, train_config=dataclasses.replace(LOOP, micro_batch=4))
    assert other.notes[0].startswith("The run was another: micro_batch 2, not 4.")


def test_a_run_that_measured_nothing_is_refused(run: Path, tmp_path: Path) -> None:
    for name in ("run.json", "memory.json"):
        (tmp_path / name).write_text((run / name).read_text())
    memory = json.loads((run / "memory.json").read_text())
    (tmp_path / "memory.json").write_text(json.dumps({**memory, "measured": None, "reason": "it was switched off"}))
    with pytest.raises(RunError, match="measured nothing: it was switched off"):
        timeline(run=tmp_path)
    with pytest.raises(RunError, match="holds no run"):
        timeline(run=tmp_path / "nowhere")


# Dtype by dtype --------------------------------------------------------------------------------------------------------


def test_the_ledger_is_the_engines_own(spec: ModelSpec) -> None:
    strategies = [tk.Strategy(sharding=word, precision="bf16") for word in ("ddp", "zero3", "fsdp")]
    result = {one.label: one for one in dtype_report(spec, strategies, "8x H100").columns}
    for label, one in result.items():
        job = resolve(one.strategy, LOOP, spec, 8, tk.hardware("8x H100").device)
        kept = job.engine.expected_state(job).dtypes
        assert one.dtypes["preparation", "weights"] == one.dtypes["loading", "weights"] == kept["trainable"]
        assert one.dtypes["checkpoint", "weights"] == "float32", label
        assert one.dtypes["reduction", "gradients, between ranks"] == kept["reduce"] == "float32"
    assert result["zero3"].dtypes["preparation", "master copy"] == "float32"
    assert ("preparation", "master copy") not in result["fsdp"].dtypes
    assert result["zero3"].element_bytes == {"parameters": 2, "master": 4, "gradients": 4, "optimizer": 8}
    assert "autocast" in result["ddp"].computing
    assert "all-gather" in result["fsdp"].computing


def test_what_cannot_run_is_a_sentence_beside_what_can(spec: ModelSpec) -> None:
    words = [
        tk.Strategy(sharding=word, precision="bf16_pure", offload=o) for word, o in (("zero3", "cpu"), ("fsdp", "none"))
    ]
    result = dtype_report(spec, words, "8x H100")
    assert [bool(one.refused) for one in result.columns] == [True, False]
    assert "cannot run in precision 'bf16_pure'" in str(result)
    assert "float32" not in {*result.columns[1].dtypes.values()}


def test_packed_weights_say_what_they_lie_in(spec: ModelSpec) -> None:
    (one,) = dtype_report(spec, [tk.Strategy(sharding="zero3", adapter="qlora", precision="bf16")], "8x H100").columns
    assert one.dtypes["preparation", "frozen weights"] == "4 bits in bfloat16"


def test_an_audit_that_found_otherwise_is_said(run: Path) -> None:
    result = dtype_report(run=run)
    (one,) = result.columns
    assert one.measured["optimizer", "moments"] == one.dtypes["optimizer", "moments"]
    assert "found otherwise: gradients, added up at compute" in result.reason


# Shell -----------------------------------------------------------------------------------------------------------------


def test_the_shell_asks_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = ["--seq-len", "64", "--micro-batch", "2", "--hardware", "2x cpu"]
    assert (
        main(["forecast", "--sharding", "zero3", *batch, "--against", "sharding=fsdp,micro-batch=1", "--json", "-"])
        == 0
    )
    asked = json.loads(capsys.readouterr().out)["fields"]
    assert (asked["sharding"], asked["micro_batch"]) == (["zero3", "fsdp"], [2, 1])
    assert main(["timeline", "--run", str(run)]) == 0
    assert "The run measured" in capsys.readouterr().out
    assert main(["precisions", "--sharding", "zero2,fsdp", "--precision", "bf16", "--hardware", "8x H100"]) == 0
    assert "zero2 keeps 18 bytes" in capsys.readouterr().out
    for words, said in (("fsdq", "Did you mean 'fsdp'"), ("shard=fsdp", "no field 'shard'"), ("micro_batch=x", "int")):
        assert main(["forecast", *batch, "--against", words]) == 2
        assert said in capsys.readouterr().err


# Panels ----------------------------------------------------------------------------------------------------------------


def check_page(text: str) -> None:
    """A picture with a name, a table, nothing that runs or that is fetched, and no id that a page could have twice."""
    page = Page(text)
    tags = {tag for tag, _ in page.tags}
    assert {"img", "table", "caption"} <= tags
    assert not {"script", "svg", "link", "iframe"} & tags
    assert not [value for _, values in page.tags for name, value in values.items() if name == "id"]
    assert not re.findall(r'(?:href|src)="http', text)


def made(kind: str, spec: ModelSpec, **options: Any) -> Explorer:
    strategy = options.pop("strategy", tk.Strategy(sharding="zero3"))
    return tk.explore(kind, spec, options.pop("hardware", "2x A100-80GB"), strategy, LOOP, **options)


@pytest.mark.parametrize("kind", ["memory", "compare", "timeline", "precision"])
def test_every_panel_answers_with_labelled_controls(spec: ModelSpec, kind: str) -> None:
    panel = made(kind, spec)
    check_page(panel.static_html())
    assert panel.value is not None
    assert panel.sentence in panel.panel._status.value.replace("&#x27;", "'")
    assert 'aria-live="polite"' in panel.panel._status.value
    for name, control in panel.controls.items():
        assert control.description, name
        assert control.tooltip, name
    bundle = panel._repr_mimebundle_()
    assert bundle[VIEW]["model_id"] == panel.panel.box.model_id
    assert bundle["text/html"] == panel.static_html()
    assert "toolkit" in re.sub("<[^>]*>", "", panel.static_html())


def test_a_moved_control_changes_the_picture(spec: ModelSpec) -> None:
    panel = made("memory", spec)
    before, page = panel.value, panel.static_html()
    panel.controls["sharding"].value = "ddp"
    assert isinstance(panel.value, Forecast)
    assert panel.value.peak_bytes == ask(spec, sharding="ddp").peak_bytes != before.peak_bytes  # type: ignore[union-attr]
    assert panel.static_html() != page
    panel.controls["devices"].value = 16
    assert (panel.value.hardware.nodes, panel.value.ranks) == (2, 16)
    panel.controls["device"].value = "H100-80GB"
    assert panel.value.hardware.device.name == "H100-80GB"
    assert "--hardware &#39;2 nodes x 8x H100-80GB&#39; --sharding ddp" in panel.static_html()
    panel.set(micro_batch=48)
    assert (panel.controls["micro_batch"].value, panel.value.train_config.micro_batch) == (48, 48)
    panel.set(**panel.state.first_values)
    assert panel.value is before
    assert panel.static_html() == page
    panel.forget()
    panel.set(micro_batch=panel.state.values["micro_batch"])
    assert panel.value is not before
    assert panel.static_html() == page


@pytest.mark.parametrize("kind", ["memory", "compare", "timeline"])
def test_attention_changes_the_bytes(spec: ModelSpec, kind: str) -> None:
    panel = made(kind, spec, strategy=tk.Strategy(sharding="ddp", activation_checkpointing="none"))
    panel.set(seq_len=256, micro_batch=8)
    pictures = {}
    for attention in ("eager", "sdpa"):
        panel.controls["attention"].value = attention
        assert panel.refusal == ""
        pictures[attention] = re.findall('src="(data:[^"]+)"', panel.static_html())[0]
        assert f"--attention {attention}" in re.sub("<[^>]*>", "", panel.static_html())
    assert pictures["eager"] != pictures["sdpa"]


def test_a_refusal_is_a_sentence_and_the_next_move_an_answer(spec: ModelSpec) -> None:
    panel = made("memory", spec)
    panel.controls["devices"].value = 1
    panel.controls["sharding"].value = "fsdp"
    assert panel.value is None
    assert "needs at least 2 ranks to shard over" in panel.refusal
    assert "needs at least 2 ranks to shard over" in panel.panel._status.value
    assert "Traceback" not in panel.static_html()
    panel.set(sharding="zero9")
    assert panel.refusal.startswith("sharding 'zero9' is unknown")
    panel.set(sharding="hsdp", devices=4)
    assert panel.value is not None
    with pytest.raises(ToolkitError, match=r"memory has no control 'micro_bach'. Did you mean 'micro_batch'"):
        panel.set(micro_bach=3)


def test_a_slider_of_what_was_traced_traces_and_describes_nothing(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work is counted, not time: one forecast a move, from what is in the cache."""
    panel = made("memory", spec)
    panel.controls["micro_batch"].value = 4
    count = []
    real = explorer.forecast
    monkeypatch.setattr(explorer, "forecast", lambda *words: count.append(words) or real(*words))
    monkeypatch.setattr(trace_cache, "_trace_batches", None)
    monkeypatch.setattr(explorer_state, "describe", None)
    for name, values in {"micro_batch": (8, 16, 64), "devices": (4, 64), "sharding": ("zero2", "fsdp")}.items():
        for value in values:
            panel.controls[name].value = value
    assert (len(count), panel.refusal) == (7, "")
    assert not panel.controls["seq_len"].continuous_update
    assert panel.controls["devices"].continuous_update


def test_who_waits_is_told(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    panel = made("memory", spec)
    said, real = [], explorer.forecast
    panel.panel._status.observe(lambda change: said.append(change["new"]), names="value")

    def slow(*words: Any) -> Forecast:
        deadline = time.monotonic() + 20
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        return real(*words)

    monkeypatch.setattr(explorer, "forecast", slow)
    shown: list[str] = []
    panel._shown = SimpleNamespace(update=lambda page: shown.append(page.data))
    panel._page = before = panel.static_html()
    panel.controls["sharding"].value = "ddp"
    assert [widgets.TRACING_NOTE in one for one in said] == [True, False]
    assert ["<progress>" in one for one in said] == [True, False]
    assert panel.sentence in said[-1]
    assert shown == [f'<div aria-busy="true" style="{answer_panel.OLD}">{before}</div>', panel.static_html()]


def test_a_shell_is_told_what_it_can_find(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with GPUs, as their driver names them: the catalog's name, or none."""
    known = tk.hardware("2x H100-80GB")
    there = dataclasses.replace(known, device=dataclasses.replace(known.device, name="NVIDIA H100 80GB HBM3"))
    monkeypatch.setattr(explorer_state, "hardware", lambda name=None: there if name is None else tk.hardware(name))
    panel = tk.explore("memory", spec, None, tk.Strategy(sharding="zero3"), LOOP)
    assert "--hardware" not in command("memory", panel.state)
    panel.set(devices=4)
    assert "--hardware '4x H100-80GB'" in command("memory", panel.state)
    panel.set(devices=2, device="L4")
    assert "--hardware '2x L4'" in command("memory", panel.state)
    words = made("memory", spec, hardware=there).state.machine_words
    assert (words, tk.hardware(words).device.name) == ("2x H100-80GB", "H100-80GB")
    unknown = dataclasses.replace(there, device=dataclasses.replace(there.device, name="NVIDIA X1", card=None))
    assert "'2x <NVIDIA X1, which the catalog lacks>'" in command(
        "memory", made("memory", spec, hardware=unknown).state
    )


def test_a_panel_starts_at_a_realistic_length_and_copies_the_command_that_trains(spec: ModelSpec) -> None:
    panel = tk.explore("memory", spec, "4x A100-80GB")
    assert panel.value.train_config.seq_len == spec.max_positions == 2048
    longer = tk.describe(LlamaConfig(num_hidden_layers=1, hidden_size=64, max_position_embeddings=131_072))
    assert tk.explore("precision", longer, "4x A100-80GB").state.train_config.seq_len == 4096
    assert panel.panel.copy.command == "toolkit train --processes 4 --sharding zero3 --seq-len 2048"
    panel.set(sharding="ddp", devices=1, adapter="lora")
    assert panel.panel.copy.command == "toolkit train --sharding ddp --adapter lora --seq-len 2048"
    panel.set(devices=16)
    assert panel.panel.copy.command == "", "each node has a command of its own"
    assert made("compare", spec).panel.copy is None
    assert "--model '<where its config is saved>' --data '<your data>'" in train_command(
        tk.explore("memory", longer, "A100-80GB").state
    )


def test_words_are_explained_on_hover(spec: ModelSpec) -> None:
    panel = made("memory", spec)
    page, terms = panel.static_html(), glossary_terms()
    for term in ("rank", "master", "workspace", "MFU"):
        assert page.count(f'<abbr title="{html.escape(terms[term])}">{term}</abbr>') >= 1, term
    assert f'title="{html.escape(terms["buffer"])}">buffers</abbr>' in page
    assert terms["micro-batch"] in panel.controls["micro_batch"].tooltip
    table = Table(columns=("rank", "bytes"), rows=[("rank 0", "1"), ("rank 1", "2"), ("<master>", "3")])
    assert table.html().count("<abbr") == 2, "each term once a table"
    assert "&lt;<abbr" in table.html()
    assert "<abbr" not in Table(columns=("zero",), rows=[]).html()
    assert ">ZeRO</abbr>" in Table(columns=("ZeRO",), rows=[]).html()
    assert "<p><code>a&lt;b</code> is &lt;b&gt;</p>" in Table(columns=("",), rows=[], notes=("`a<b` is <b>",)).html()


def test_a_config_that_is_in_no_file_is_called_none(spec: ModelSpec) -> None:
    asked = made("memory", tk.describe(GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=512))).state
    assert "toolkit forecast '<where its config is saved>'" in command("memory", asked)


def test_two_strategies_have_controls_of_their_own(spec: ModelSpec) -> None:
    panel = made("compare", spec, against=tk.Strategy(sharding="ddp"))
    panel.controls["against_sharding"].value = "fsdp"
    panel.controls["against_offload"].value = "cpu"
    assert isinstance(panel.value, ForecastDiff)
    assert panel.value.fields["offload"] == ("none", "cpu")
    assert "--against sharding=fsdp,offload=cpu" in panel.static_html()


def test_a_panel_begins_where_its_run_was(run: Path) -> None:
    panel = tk.explore("timeline", run=run)
    assert isinstance(panel.value, Timeline)
    assert panel.controls["precision"].value == "bf16"
    assert panel.value.notes == ()
    assert f"toolkit timeline --run {run}" in panel.static_html()
    panel.controls["micro_batch"].value = 4
    assert "The run was another" in panel.static_html()
    assert "otherwise: gradients" in tk.explore("precision", run=run).sentence


def test_other_sequence_lengths_are_traced_ahead(spec: ModelSpec) -> None:
    panel = made("memory", spec)
    assert start_prefetch("memory", panel.state).wait(timeout=600) == 0
    traces = cache_folder("traces")
    cached = sorted(traces.iterdir())
    for length in lengths_ahead("memory", panel.state):
        panel.controls["seq_len"].value = length
        assert panel.value.train_config.seq_len == length
    assert length == 2048
    assert sorted(traces.iterdir()) == cached


@pytest.mark.parametrize("missing", ["ipywidgets", "anywidget"])
def test_without_widgets_the_answer_stands_with_the_fix(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    panel = made("memory", spec)
    assert (panel.panel, panel.controls) == (None, {})
    bundle = panel._repr_mimebundle_()
    assert "pip install ipywidgets" in bundle["text/html"]
    assert VIEW not in bundle
    check_page(bundle["text/html"])
    panel.set(sharding="ddp")
    assert "sharding ddp" in repr(panel)


def test_a_cell_shows_controls_and_answer_as_two_outputs(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_BACKGROUND", "1")
    shell = InteractiveShell.instance()
    try:
        panel = made("memory", spec)
        with capture_output() as shown:
            panel._ipython_display_()
            panel._ipython_display_()
            ahead = panel._ahead
            panel.controls["seq_len"].value = 128
            assert panel._ahead is ahead
            panel.controls["sharding"].value = "ddp"
            assert panel._ahead is not ahead
            assert ahead.returncode is not None
        controls, answer, _, again, *_, moved = shown.outputs  # one that is waited for is greyed before
        assert answer.transient == again.transient == moved.transient != {}
        assert controls.data[VIEW]["model_id"] == panel.panel.box.model_id
        assert VIEW not in answer.data
        assert moved.data["text/html"] == panel.static_html() != answer.data["text/html"]
    finally:
        shell.clear_instance()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "compare2"}, r"explore 'compare2': expected one of .* Did you mean 'compare'"),
        ({"hardware": "2x H1000"}, "hardware '2x H1000' is unknown"),
        ({"kind": "timeline", "run": "nowhere"}, "holds no run"),
        ({"run": "nowhere"}, "run: memory does not show a run"),
        ({"model": "no/such-model"}, "no/such-model"),
    ],
)
def test_what_is_not_known_is_said_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolkitError, match=said):
        tk.explore(**options)


def test_a_panel_shows_the_named_controls_alone(spec: ModelSpec) -> None:
    panel = made("memory", spec, controls=["sharding", "devices"])
    assert list(panel.controls) == ["devices", "sharding"]
    panel.set(devices=4)
    assert panel.value.ranks == 4
    with pytest.raises(ToolkitError, match=r"memory has no control 'micro_batch'. It has sharding, devices"):
        panel.set(micro_batch=2)
    with pytest.raises(ToolkitError, match=r"memory has no control 'device5'. Did you mean 'device'"):
        made("memory", spec, controls=["device5"])


# A function with controls --------------------------------------------------------------------------------------------


def test_a_function_answers_each_question_once() -> None:
    calls = []

    def product(rank: int, kind: str) -> Table:
        calls.append((rank, kind))
        return Table(columns=("what", "is"), rows=[(kind, 3 * rank)], title="A product")

    panel = tk.vary(product, rank=[1, 2, 4], kind=("plain", "wide"))
    assert calls == [(2, "wide")]
    assert {name: type(control).__name__ for name, control in panel.controls.items()} == {
        "rank": "Control",
        "kind": "Control",
    }
    assert "<td" in panel.static_html()
    assert "in a shell" not in panel.static_html()
    panel.controls["rank"].value = 4
    assert panel.value.rows == [("wide", 12)]
    panel.set(rank=2)
    panel.set(rank=4)
    assert panel.controls["rank"].value == 4
    assert calls == [(2, "wide"), (4, "wide")]
    bundle = panel._repr_mimebundle_()
    assert bundle[VIEW]["model_id"] == panel.panel.box.model_id
    assert bundle["text/html"] == panel.static_html()


def test_a_slow_function_answers_ahead_and_is_drawn_once(spec: ModelSpec) -> None:
    calls = []

    def answer(rows: int, kind: str) -> Any:
        calls.append((rows, kind))
        if kind == "refused":
            raise ToolkitError(f"{rows} are too many. Expected none. Take them away.")
        return ask(spec)

    panel = tk.vary(answer, rows=[1, 2], kind=["result", "refused"], start={"rows": 2, "kind": "result"}, ahead=True)
    assert sorted(calls) == [(1, "refused"), (1, "result"), (2, "refused"), (2, "result")]
    assert panel.controls["rows"].continuous_update
    check_page(panel.static_html())
    drawn = panel._parts()
    panel.set(rows=1)
    assert panel._parts() is not drawn
    panel.set(rows=2)
    assert panel._parts() is drawn
    assert len(calls) == 4
    panel.set(kind="refused")
    assert panel.refusal.startswith("2 are too many")


def test_a_function_answers_with_a_sentence_a_picture_or_a_refusal(spec: ModelSpec) -> None:
    def answer(kind: str) -> Any:
        if kind == "refusal":
            raise ToolkitError("Three is too many. Expected two. Take one away.")
        return {"sentence": "1 < 2", "picture": "<img alt='a line'>", "result": ask(spec)}[kind]

    panel = tk.vary(
        answer, kind=["sentence", "picture", "result", "refusal"], start={"kind": "refusal"}, title="Answers"
    )
    assert "Three is too many" in panel.static_html()
    assert "Three is too many" in panel.panel._status.value
    panel.set(kind="sentence")
    assert (panel.refusal, panel.value) == ("", "1 < 2")
    assert "1 &lt; 2" in panel.static_html()
    panel.set(kind="picture")
    assert "<img alt='a line'>" in panel.static_html()
    panel.set(kind="result")
    check_page(panel.static_html())
    panel.set(kind="other")
    assert panel.refusal.startswith("kind 'other' is not a choice of this panel. Expected one of sentence, picture")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "there is nothing to move"),
        ({"rank": []}, r"rank=\[\] is not a choice"),
        ({"rank": "124"}, "rank='124' is not a choice"),
        ({"rank": [1, 2], "start": {"rank": 3}}, "rank 3 is not a choice of this panel. Expected one of 1, 2."),
        ({"rank": [1, 2], "start": {"rang": 1}}, "vary has no control 'rang'. Did you mean 'rank'"),
    ],
)
def test_a_function_without_choices_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolkitError, match=said):
        tk.vary(str, **options)
