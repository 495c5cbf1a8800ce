# %% [markdown]
# # LoRA and QLoRA: train a few percent of the weights, over a base of four bits
#
# A base model is adapted to new text in three ways: all weights, **LoRA** (small matrices beside frozen weights)
# and **QLoRA** (the same over weights of four bits). This notebook counts what each trains and holds, measures what
# four bits do to the weights, and follows the result home: saved, merged, and loaded again with plain transformers
# and PEFT.

# %%
# Installs the toolkit where it is missing, as on Colab; elsewhere it does nothing. An installed torch stays as it is.
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile

if importlib.util.find_spec("toolkit") is None:
    wanted = "accelerate-toolkit[all]"  # or the path of a wheel
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        if importlib.util.find_spec("torch"):
            print("torch==" + importlib.metadata.version("torch"), file=constraints, flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", constraints.name]
        subprocess.run([*pip, wanted], check=True)

# %%
import toolkit as tk

tk.environment()

# %% tags=["parameters"]
GPU = tk.hardware().device.kind == "cuda"
WIDTH = 1024 if GPU else 256  # of the model
LAYERS = 12 if GPU else 4
BASE_STEPS = 300 if GPU else 60  # that make the base
STEPS = 100 if GPU else 20  # of each of the three runs
RANK = 8  # of the adapters
SEQ_LEN = 128
MICRO_BATCH = 8
EQUAL = (
    1e-2 if GPU else 1e-4
)  # relative difference up to which logits and losses count as equal: kernels round otherwise

# %% [markdown]
# ## A base to adapt
#
# There is something to adapt where a model knows something already. So that nothing has to be downloaded, a small
# Llama learns a little Python first, from Python's own library, in a loop of plain PyTorch. **Your own**: give the
# folder or the Hub id of any causal model in the place of `base`.

# %%
import os
import warnings
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.utils import logging

from toolkit.data import embedded_files, embedded_tokenizer

# What libraries would say between the cells.
logging.disable_progress_bar()
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")  # PEFT asks for it under its old name
if not GPU:
    os.environ["DS_ACCELERATOR"] = "cpu"  # else DeepSpeed warns that it finds no other

base = "base"
embedded_tokenizer(Path(base))  # a byte-level BPE of 4,096 tokens
tokenizer = AutoTokenizer.from_pretrained(base)
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=WIDTH,
    intermediate_size=3 * WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=WIDTH // 64,
    num_key_value_heads=WIDTH // 128,
    tie_word_embeddings=True,
    pad_token_id=tokenizer.pad_token_id,
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config)

# %%
code = "\n".join(path.read_text(encoding="utf-8") for path in embedded_files()[::10])
tokens = torch.tensor(tokenizer(code)["input_ids"])
device = "cuda" if GPU else "cpu"
optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=2e-3)
draw = torch.Generator().manual_seed(0)
losses = []
for _ in range(BASE_STEPS):
    starts = torch.randint(len(tokens) - SEQ_LEN, (MICRO_BATCH,), generator=draw).tolist()
    batch = torch.stack([tokens[start : start + SEQ_LEN] for start in starts]).to(device)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
model.cpu().save_pretrained(base)
spec = tk.describe(base)
f"{spec.elements:,} parameters, loss {losses[0]:.2f} → {losses[-1]:.2f}"

# %% [markdown]
# What it is adapted to is prose: the chapters of Python's language reference that `help()` shows.

# %%
from pydoc_data.topics import topics

Path("prose.txt").write_text("\n\n".join(topics.values()), encoding="utf-8")
print(topics["if"][:400])

# %% [markdown]
# ## What is trained
#
# LoRA (Hu et al. 2021) leaves a weight W of a linear layer as it is and adds B·A, where A is *rank × inputs* and B
# *outputs × rank*. So an adapter trains *rank × (inputs + outputs)* numbers where the matrix has *inputs ×
# outputs*. The count below is that sum over all linear layers, the head excepted. The next column is what
# PEFT really trains.

# %%
from peft import LoraConfig, get_peft_model

shapes = {one.name.removesuffix(".weight"): one.shape for one in spec.parameters}
counted = sum(RANK * sum(shapes[name]) for name in spec.linears)

wanted = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(spec.linears), task_type="CAUSAL_LM")
adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), wanted)
trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
f"{trained:,} of {spec.elements:,} weights: {trained / spec.elements:.2%}"

# %%
assert trained == counted

# %% [markdown]
# B begins as zeros, so B·A adds nothing: an adapted model begins exactly where the base is.

# %%
probe = tokens[:SEQ_LEN][None]


def logits(model):
    """What a model says on a fixed row of tokens, in fp32."""
    with torch.no_grad():
        return model.eval()(input_ids=probe.to(model.device), use_cache=False).logits.float().cpu()


def error(found, wanted):
    """‖found - wanted‖ / ‖wanted‖."""
    return float((found - wanted).norm() / wanted.norm())


whole = AutoModelForCausalLM.from_pretrained(base)
assert torch.equal(logits(adapted), logits(whole))

# %% [markdown]
# ## What four bits do to a weight
#
# **nf4** (Dettmers et al. 2023) has sixteen values: the quantiles of a normal distribution, since trained weights
# are about normal. Each 64 weights in a row are divided by the largest of them, and every weight becomes the
# nearest of the sixteen. Here is one matrix of the base after that division, and the sixteen values.

# %%
from bitsandbytes.functional import dequantize_4bit, get_4bit_type, quantize_4bit
from IPython.display import HTML

from toolkit.core.charts import Bar, bars, curve, figure
from toolkit.core.display import Table
from toolkit.core.units import format_bytes

BLOCK = 64  # weights that share one scale


def four_bits(weight, kind="nf4"):
    """A weight packed into four bits a number, and what is read back from there."""
    packed, state = quantize_4bit(weight.contiguous(), quant_type=kind, blocksize=BLOCK, compress_statistics=True)
    return packed, state, dequantize_4bit(packed, state)


weights = {name: whole.get_parameter(f"{name}.weight").detach() for name in spec.linears}
chosen = next(name for name in spec.linears if name.endswith("gate_proj"))
blocks = weights[chosen].reshape(-1, BLOCK)
scaled = (blocks / blocks.abs().amax(dim=1, keepdim=True)).flatten()
levels = get_4bit_type("nf4", device="cpu")
counts = torch.histc(scaled, bins=80, min=-1, max=1)
spikes = [
    point for level in levels.tolist() for point in ((level, 0.0), (level, counts.max().item() / 4), (level, None))
]
centres = [(place + 0.5) / 40 - 1 for place in range(80)]
HTML(
    curve(
        {"weights": list(zip(centres, counts.tolist(), strict=True)), "nf4's sixteen values": spikes},
        title=f"{chosen}: weights in units of their block's largest",
        x="weight / largest of its block",
        y="weights in a bin",
    )
)

# %% [markdown]
# Where weights are dense the values are dense, too. At both ends stand the blocks' own largest weights, which are
# exact.
#
# Now every linear layer, one by one: ‖W - Ŵ‖ / ‖W‖ of **nf4**, of **fp4** (a float of four bits) and of sixteen
# **even** steps from -1 to 1.


# %%
def nearest(weight, values):
    """Each weight as the nearest of `values`, in units of its block's largest."""
    blocks = weight.reshape(-1, BLOCK)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    place = (blocks / largest)[..., None].sub(values).abs().argmin(dim=-1)
    return (values[place] * largest).reshape(weight.shape)


errors = {}
for name, weight in weights.items():
    errors[name] = {
        "nf4": error(four_bits(weight)[2], weight),
        "fp4": error(four_bits(weight, "fp4")[2], weight),
        "even": error(nearest(weight, torch.linspace(-1, 1, 16)), weight),
    }
kinds = sorted({name.rpartition(".")[2] for name in errors})
rows = [
    (
        kind,
        *(
            f"{max(found[way] for name, found in errors.items() if name.endswith(kind)):.3f}"
            for way in ("nf4", "fp4", "even")
        ),
    )
    for kind in kinds
]
HTML(
    Table(
        title=f"Largest relative error over {LAYERS} layers", columns=("linear layer", "nf4", "fp4", "even"), rows=rows
    ).html()
)

# %% [markdown]
# nf4 is the best of the three in every layer, and loses about a tenth of a weight's size.

# %%
assert all(found["nf4"] < min(found["even"], found["fp4"]) for found in errors.values())
assert all(0.05 < found["nf4"] < 0.15 for found in errors.values())

# %% [markdown]
# What it saves: four bits a weight, and the scales. With *double quantization* a block's scale has eight bits, and
# 256 scales share one of 32 bits: 4 + 8/64 + 32/(64 · 256) = 4.127 bits a weight, where fp32 has 32 and bf16 has
# 16.

# %%
packed, state, _ = four_bits(weights[chosen])
scales = state.absmax.nbytes + state.state2.absmax.nbytes
bits = 8 * (packed.nbytes + scales) / weights[chosen].numel()
f"{bits:.3f} bits a weight"

# %%
assert abs(bits - 4.127) < 0.02

# %% [markdown]
# The embedding, the norms and the head are no such layers and stay as they are: of this small model they are a
# large share, of an 8B model little. Loaded by transformers, the quantized model holds exactly what was computed
# above, and its logits are off by:

# %%
from transformers import BitsAndBytesConfig

nf4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
    bnb_4bit_quant_storage=torch.float32,
)
small = AutoModelForCausalLM.from_pretrained(base, quantization_config=nf4, device_map={"": "cpu"})
# On CPUs with AVX512-BF16 bitsandbytes would evaluate in bf16, 1e-2 off; the toolkit does the same.
for module in small.modules():
    if hasattr(module, "support_avx512bf16_for_cpu"):
        module.support_avx512bf16_for_cpu = False
held = small.get_submodule(chosen).weight
same = dequantize_4bit(held.data.view(torch.uint8), held.quant_state)
assert torch.equal(same, four_bits(weights[chosen])[2])
f"logits of the model in four bits: off by {error(logits(small), logits(whole)):.1%}"

# %% [markdown]
# ## What a GPU would need: forecast
#
# Before anything runs: a Llama of 8B parameters, one row of 2,048 tokens, on a card of 24 GB. Only shapes are
# needed for that, no weights. This is a forecast; the small trainings below show how true such forecasts are.

# %%
big = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)
train_config = tk.TrainConfig(seq_len=2048, micro_batch=1)
ways = {"all weights": "none", "LoRA": "lora", "QLoRA": "qlora"}
large = tk.describe(big)
needs = {
    way: tk.forecast(large, tk.Strategy(adapter=word, precision="bf16", lora_rank=16), "RTX-4090", train_config)
    for way, word in ways.items()
}
HTML(
    bars(
        [Bar(label=way, parts=found.parts) for way, found in needs.items()],
        title=f"Forecast: {spec.architecture} of {large.elements / 1e9:.1f}B on one card",
        limit=needs["QLoRA"].limit_bytes,
        limit_label="RTX-4090",
    )
)

# %% [markdown]
# All weights need 16 bytes each: the fp32 weight that is trained, its gradient, and AdamW's two moments; the
# workspace is what AdamW computes in. LoRA needs these for its adapter alone, and two bytes for each frozen weight.
# QLoRA needs about half a byte for most of them.

# %%
assert not needs["all weights"].fits
assert needs["QLoRA"].fits
assert needs["QLoRA"].parts["parameters"] < needs["LoRA"].parts["parameters"] / 2
assert needs["LoRA"].parts["optimizer"] < needs["all weights"].parts["optimizer"] / 100

# %% [markdown]
# ## The same model, trained in three ways
#
# Now for real, on the small base: the recipe's own steps over the same rows in the same order, in this process.
# Learning rates differ, as they do in practice: an adapter takes ten times what all weights take.

# %%
rates = {"all weights": 1e-3, "LoRA": 1e-2, "QLoRA": 1e-2}
run_config = tk.RunConfig(model=base, data="prose.txt")
loops = {way: tk.TrainConfig(steps=STEPS, seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, lr=rates[way]) for way in ways}
rank = {way: {"lora_rank": RANK} if word != "none" else {} for way, word in ways.items()}
asked = {way: tk.Strategy(adapter=word, precision="fp32", **rank[way]) for way, word in ways.items()}
trials = {way: tk.profile_steps(asked[way], loops[way], run_config) for way in ways}
lines = {way: list(enumerate(trial.losses, start=1)) for way, trial in trials.items()}
HTML(curve(lines, title="Loss on the prose", x="step", y="loss, nats a token"))

# %% [markdown]
# The first losses tell much. LoRA begins where all weights begin: at the base. QLoRA begins at the base in four
# bits, a little off. (In few steps over so raw a base all weights may well learn more; an adapter is for a base
# that knows much.)

# %%
first = {way: trial.losses[0] for way, trial in trials.items()}
assert abs(first["LoRA"] / first["all weights"] - 1) < EQUAL
assert 0 < abs(first["QLoRA"] / first["all weights"] - 1) < 0.05
assert STEPS < 20 or all(trial.losses[-1] < first["all weights"] for trial in trials.values())
first

# %% [markdown]
# What each held and took, beside what was forecast before its first byte. All is in fp32 here, so a frozen weight
# of LoRA has four bytes. Of so small a model logits and activations are most, and no adapter makes those smaller.

# %%
rows = []
for way, trial in trials.items():
    held = trial.audit.measured
    sizes = (held.trainable, held.frozen, held.optimizer, trial.peak_bytes)
    rows.append((way, *map(format_bytes, sizes), f"{trial.ratio:.3f}"))
table = Table(
    title="Measured in three trainings",
    columns=("trained", "trainable", "frozen", "optimizer", "peak", "peak's forecast / measured"),
    rows=rows,
)
HTML(
    figure(
        bars(
            [Bar(label=way, parts=trial.forecast.parts) for way, trial in trials.items()],
            title="Forecast: the peak by part",
        ),
        table,
    )
)

# %%
held = {way: trial.audit.measured for way, trial in trials.items()}
assert {way: one.trainable // 4 for way, one in held.items()} == {
    "all weights": spec.elements,
    "LoRA": counted,
    "QLoRA": counted,
}
assert all(one.optimizer >= 2 * one.trainable for one in held.values())  # AdamW's two moments
assert held["QLoRA"].frozen < held["LoRA"].frozen / 2
assert all(abs(trial.ratio - 1) < 0.08 for trial in trials.values())

# %% [markdown]
# ## Save, and load back
#
# What is to be kept is a run, in processes of its own, with a folder: `tk.launch` comes back at once. The same
# QLoRA once more; at its end the run saves the adapter, opens it again and compares logits.

# %%
train_config = loops["QLoRA"]
run = tk.launch(
    "toolkit.finetune",
    asked["QLoRA"],
    processes=1,
    model=base,
    data="prose.txt",
    steps=STEPS,
    seq_len=SEQ_LEN,
    micro_batch=MICRO_BATCH,
    lr=train_config.lr,
    run_dir="runs/qlora",
)
run.wait()

# %%
again = [float(loss) for loss in run.metrics["loss"]]
assert all(
    abs(one / two - 1) < EQUAL for one, two in zip(again, trials["QLoRA"].losses, strict=True)
)  # the trial told true
adapter = run.folder / "export"
size = (adapter / "adapter_model.safetensors").stat().st_size
assert size < (Path(base) / "model.safetensors").stat().st_size / 10
f"an adapter of {format_bytes(size)}"

# %% [markdown]
# PEFT loads it over its base. These lines know nothing of this toolkit, and nothing is said by the adapter alone:
# its base has to be there, **in four bits**.

# %%
from peft import PeftModel

over_four_bits = logits(PeftModel.from_pretrained(small, adapter))
assert error(over_four_bits, logits(whole)) > 1e-3  # it is not the base any more

# %% [markdown]
# **Merged**, W + B·A is one matrix again: a plain model that needs no PEFT. In a shell: `toolkit export runs/qlora
# -o merged --merge`.

# %%
tk.export(run.folder, "merged", merge=True)

# %%
plain = AutoModelForCausalLM.from_pretrained("merged")
assert sum(parameter.numel() for parameter in plain.parameters()) == spec.elements
assert error(logits(plain), over_four_bits) < EQUAL

# %% [markdown]
# Equal logits, from plain transformers. But see what was merged into: Ŵ, the weights as four bits hold them, for it
# is those that the adapter was trained over. **Over the weights that the four bits were made from, it is another
# model**:

# %%
over_whole = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))
off = {"merged": error(logits(plain), over_four_bits), "over the whole base": error(over_whole, over_four_bits)}
assert off["over the whole base"] > off["merged"]
{name: f"{share:.1e}" for name, share in off.items()}

# %% [markdown]
# ## Exercises
#
# 1. Double `RANK`. What of the table of the three trainings doubles, and what stays?
# 2. `lora_targets="q_proj,v_proj"` in the Strategy adapts two matrices of each layer, as the first paper did. Say
#    how many weights that trains before you run it.
# 3. Set `BLOCK` to 256. What do a weight's bits and its error become? The loader takes 64: what speaks for it?
# 4. Put your own model in the place of `base`, and ask `tk.forecast` which of the three ways your GPU can hold.
# 5. Train with `adapter="dora"`. What does it add to the numbers that are trained? (Liu et al. 2024: a length for
#    each output.)
