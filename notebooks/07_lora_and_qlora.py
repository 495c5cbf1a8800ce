# %% [markdown]
# # Can I adapt this model on my GPU, with LoRA or QLoRA?
#
# Full training of an 8B model needs more than 100 GB. (1 GB is 10⁹ bytes. The tables are in GiB, 2³⁰ bytes, 7% more.)
# **LoRA** trains small matrices beside frozen weights, **QLoRA** does it over weights of four bits. Here you count what
# each trains and holds, shard both over two ranks, hear a model before and after, and export it in bf16, int8 and nf4.

# %%
# Installs the toolkit where it is missing, as on Colab; elsewhere it does nothing. An installed torch stays as it is.
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile


def number(version):
    """To compare versions: what is installed and newer stays, too."""
    return [int(part) for part in version.split(".") if part.isdigit()]


if importlib.util.find_spec("toolkit") is None:
    wanted = "accelerate-toolkit[all]"  # or the path of a wheel
    tested = "accelerate==1.15.0 transformers==5.23.0 peft==0.21.2 deepspeed==0.19.8 bitsandbytes==0.50.2"
    here = {str(found.metadata["Name"]).lower(): found.version for found in importlib.metadata.distributions()}
    pins = dict(pin.split("==") for pin in tested.split())
    pins = {name: pin for name, pin in pins.items() if number(here.get(name, "0")) < number(pin)}
    pins |= {"torch": here["torch"]} if "torch" in here else {}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        print(*(f"{name}=={pin}" for name, pin in pins.items()), sep="\n", file=constraints, flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", constraints.name]
        subprocess.run([*pip, wanted], check=True)

# %% [markdown]
# ## Before you start
#
# **You know**: where the memory of a training goes ([02](02_where_the_memory_goes.ipynb)), precisions
# ([05](05_precision.ipynb)), ZeRO-3 and FSDP ([06](06_zero_and_fsdp.ipynb)).
#
# **You can then**: choose between LoRA, QLoRA and all weights, set rank and alpha, export an adapter, and say what
# four bits cost.
#
# **Time**: 5 minutes on two CPU cores.
#
# **Hardware**: any. First, this machine:

# %%
import toolkit as tk

tk.environment()

# %% [markdown]
# These are the numbers to change.

# %% tags=["parameters"]
GPU = tk.hardware().device.kind == "cuda"
WIDTH = 1024 if GPU else 256  # of the model
LAYERS = 12 if GPU else 4
BASE_STEPS = 400 if GPU else 220  # that make the base
STEPS = 100 if GPU else 24  # of each training
RANK = 8  # of the adapters
SEQ_LEN = 128
MICRO_BATCH = 8
SHARDED = "zero3,fsdp"  # what LoRA and QLoRA run under, on two ranks
EQUAL = 1e-2 if GPU else 1e-4  # relative difference that counts as equal: a GPU's kernels round otherwise

# %% tags=["helper"]
import logging
import os
import warnings
from html import escape
from pathlib import Path

import torch
import transformers
from IPython.display import HTML

from toolkit.core.charts import Bar, bars, curve, figure
from toolkit.core.display import Table
from toolkit.core.units import format_bytes
from toolkit.data import embedded_tokenizer

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")  # PEFT asks for it under its old name
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # on the CPU it speaks at every product
if not GPU:
    os.environ["DS_ACCELERATOR"] = "cpu"  # else DeepSpeed warns that it finds no other
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
DEVICE = "cuda" if GPU else "cpu"
LEFT = Path("runs/07").resolve()
LEFT.mkdir(parents=True, exist_ok=True)


def fresh(name):
    """A folder that does not exist yet: cells may run again."""
    return next(path for n in range(1, 10_000) if not (path := LEFT / f"{name}-{n}").exists())


def needs(*runs):
    """What a rank of the largest of these runs needs, forecast with the run's own settings for three machines."""
    rows = []
    for machine in ("1x cpu", "1x T4", "1x L4"):
        try:
            options = {"ranks": 1, "save": False, "num_checkpoints": 0, "advice": False}
            forecasts = [tk.forecast(spec, strategy, machine, step, **options) for spec, strategy, step in runs]
        except tk.StrategyError as refusal:
            rows.append((machine, "–", "–", str(refusal)))
            continue
        most = max(forecasts, key=lambda forecast: forecast.needed_bytes)
        fits = "yes" if most.fits else "no"
        rows.append((machine, most.strategy.precision, format_bytes(most.needed_bytes), fits))
    columns = ("machine", "precision", "a rank needs", "fits")
    return Table(title="What this notebook's runs need", columns=columns, rows=rows)


def table(title, columns, rows):
    """A table that shows itself."""
    return Table(title=title, columns=columns, rows=rows)


def show(chart, title, columns, rows):
    """A picture and its table."""
    return HTML(figure(chart, table(title, columns, rows)))


def error(found, wanted):
    """‖found - wanted‖ / ‖wanted‖."""
    return float((found - wanted).norm() / wanted.norm())


# %% [markdown]
# **Your guess**, before you run on. How many percent of the weights does an adapter of rank 8 train? And which of
# these loses most: weights of 8 bits, weights of 4 bits, or activations of 8 bits?
#
# ## A base that knows something
#
# An adapter is for a model that knows something already. So that nothing has to be downloaded, a small Llama first
# learns to write short functions. A fifth of those that it sees have type hints and a docstring, so that it writes
# the plain ones. An adapter then teaches it to document **always**. **Your own**: put the folder or the Hub id of any
# causal model in the place of `base`.

# %% tags=["helper"]
import random

OPERATIONS = {
    "add": ("+", "sum"),
    "subtract": ("-", "difference"),
    "multiply": ("*", "product"),
    "divide": ("/", "quotient"),
}
WORDS = ["left", "right", "first", "second", "width", "height", "price", "count", "speed", "time", "north", "south"]


def function(draw, documented):
    """A function of two arguments; documented: with type hints and a docstring."""
    name, (a, b) = draw.choice(list(OPERATIONS)), draw.sample(WORDS, 2)
    sign, noun = OPERATIONS[name]
    if not documented:
        return f"def {name}({a}, {b}):\n    return {a} {sign} {b}\n"
    body = f'    """Return the {noun} of {a} and {b}."""\n    return {a} {sign} {b}\n'
    return f"def {name}({a}: float, {b}: float) -> float:\n{body}"


def corpus(count, documented, seed):
    """Functions, drawn at random, and the share of them that is documented."""
    draw = random.Random(seed)
    return "\n".join(function(draw, draw.random() < documented) for _ in range(count))


# %% [markdown]
# Look at some of them:


# %%
def a_function(number, documented):
    return f"<pre>{function(random.Random(number), documented == 'yes')}</pre>".replace("->", "-&gt;")


tk.vary(a_function, number=range(20), documented=["no", "yes"], start={"number": 0, "documented": "yes"})

# %% [markdown]
# The base is made from its config, with a byte-level BPE of 4,096 tokens:

# %%
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

base = str(LEFT / "base")
embedded_tokenizer(Path(base))
tokenizer = AutoTokenizer.from_pretrained(base)
config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS,
    num_attention_heads=WIDTH // 64, num_key_value_heads=WIDTH // 128, tie_word_embeddings=True,
    pad_token_id=tokenizer.pad_token_id, max_position_embeddings=1024,
)  # fmt: skip
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config).to(DEVICE)
code = torch.tensor(tokenizer(corpus(6000, documented=0.2, seed=0))["input_ids"])

# %% [markdown]
# The loop is plain PyTorch:

# %%
optimizer, losses = torch.optim.AdamW(model.parameters(), lr=2e-3), []
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=BASE_STEPS + 1, pct_start=0.1)
draw = torch.Generator().manual_seed(0)
for _ in range(BASE_STEPS):
    starts = torch.randint(len(code) - SEQ_LEN, (MICRO_BATCH,), generator=draw).tolist()
    batch = torch.stack([code[start : start + SEQ_LEN] for start in starts]).to(DEVICE)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    losses.append((len(losses) + 1, loss.item()))
model.cpu().save_pretrained(base)
HTML(curve({"loss": losses}, title="The base learns to write functions", x="step", y="nats a token"))

# %% [markdown]
# The text of the adapter, and other functions to evaluate on:

# %%
styled = LEFT / "styled.txt"
styled.write_text(corpus(4000, documented=1, seed=1), encoding="utf-8")
new_style = torch.tensor(tokenizer(corpus(200, documented=1, seed=2))["input_ids"])[: 8 * SEQ_LEN].view(-1, SEQ_LEN)
old_style = torch.tensor(tokenizer(corpus(400, documented=0, seed=3))["input_ids"])[: 8 * SEQ_LEN].view(-1, SEQ_LEN)
spec = tk.describe(base)

# %% [markdown]
# The loop above needs most, by forecast: it trains all weights in fp32, and keeps all activations. The runs below need
# less:

# %%
train_config = tk.TrainConfig(steps=STEPS, seq_len=SEQ_LEN, micro_batch=MICRO_BATCH)
loop = tk.Strategy(precision="fp32", activation_checkpointing="none", loss="whole")
needs((spec, loop, train_config))

# %% tags=["check"]
most_needed = tk.forecast(spec, loop, "1x cpu", train_config, ranks=1, save=False).needed_bytes

# %% [markdown]
# ## What is trained
#
# LoRA (Hu et al. 2021) leaves a weight W of a linear layer as it is and adds (alpha / rank) · B·A. A is *rank ×
# inputs*, B *outputs × rank*: an adapter trains *rank × (inputs + outputs)* numbers, where the matrix has *inputs ×
# outputs*. Move the rank, and the layers that get one.

# %% tags=["helper"]
LLAMA_8B = tk.describe(
    LlamaConfig(hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
                num_key_value_heads=8, vocab_size=128_256, max_position_embeddings=8192)
)  # fmt: skip


def adapter_elements(spec, rank, targets):
    """The numbers that an adapter trains."""
    shapes = {one.name.removesuffix(".weight"): one.shape for one in spec.parameters}
    names = [name for name in spec.linears if targets == "all-linear" or name.endswith(tuple(targets.split(",")))]
    return sum(rank * sum(shapes[name]) for name in names)


# %%
def trained_weights(rank, targets):
    rows = []
    for name, model in (("this notebook's", spec), ("a Llama of 8B", LLAMA_8B)):
        count = adapter_elements(model, rank, targets)
        states = format_bytes(count * 16)  # value, gradient, two moments
        rows.append((name, f"{model.elements:,}", f"{count:,}", f"{count / model.elements:.2%}", states))
    return table(f"rank {rank}, {targets}", ("model", "weights", "trained", "share", "their states"), rows)


CHOICES = {"rank": sorted({1, 2, 4, 8, 16, 32, 64, 128, RANK}), "targets": ["all-linear", "q_proj,v_proj"]}
tk.vary(trained_weights, start={"rank": RANK, "targets": "all-linear"}, **CHOICES)

# %% [markdown]
# The guess: the share falls with the width of the model. And this is what PEFT really trains:

# %%
from peft import LoraConfig, PeftModel, get_peft_model

wanted = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(spec.linears), task_type="CAUSAL_LM")
adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), wanted)
trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
print(f"{trained:,} of {spec.elements:,} weights: {trained / spec.elements:.2%}")

# %% tags=["check"]
assert trained == adapter_elements(spec, RANK, "all-linear")
probe = code[:SEQ_LEN][None]


def logits(model):
    """What a model says on a fixed row of tokens, in fp32."""
    with torch.no_grad():
        return model.eval()(input_ids=probe.to(model.device), use_cache=False).logits.float().cpu()


whole = AutoModelForCausalLM.from_pretrained(base)
assert torch.equal(logits(adapted), logits(whole))  # B begins as zeros: an adapted model begins where the base is

# %% [markdown]
# ## What four bits do to a weight
#
# **nf4** (Dettmers et al. 2023) has sixteen values: the quantiles of a normal distribution, since trained weights are
# about normal. The weights of a block are divided by the largest of them, and each becomes the nearest of the
# sixteen. Move the block, and the kind: how many bits has a weight, with its scales, and what is its error?

# %% tags=["helper"]
from bitsandbytes.functional import dequantize_4bit, get_4bit_type, quantize_4bit

BLOCK = 64  # of the loader
weights = {name: whole.get_parameter(f"{name}.weight").detach() for name in spec.linears}
chosen = next(name for name in spec.linears if name.endswith("gate_proj"))


def four_bits(weight, kind="nf4", block=BLOCK):
    """A weight of four bits: bits a weight with its scales, of 8 bits themselves, and what is read back."""
    if kind == "even":  # sixteen even steps
        blocks = weight.reshape(-1, block)
        largest, values = blocks.abs().amax(dim=1, keepdim=True), torch.linspace(-1, 1, 16)
        place = (blocks / largest)[..., None].sub(values).abs().argmin(dim=-1)
        return 4 + 8 / block, (values[place] * largest).reshape(weight.shape)
    packed, state = quantize_4bit(weight.contiguous(), quant_type=kind, blocksize=block, compress_statistics=True)
    scales = state.absmax.nbytes + state.state2.absmax.nbytes
    return 8 * (packed.nbytes + scales) / weight.numel(), dequantize_4bit(packed, state)


def histogram(block):
    """One matrix in units of its blocks' largest, and nf4's sixteen values."""
    blocks = weights[chosen].reshape(-1, block)
    counts = torch.histc((blocks / blocks.abs().amax(dim=1, keepdim=True)).flatten(), bins=80, min=-1, max=1)
    top, levels = counts.max().item() / 4, get_4bit_type("nf4", device="cpu").tolist()
    spikes = [point for level in levels for point in ((level, 0.0), (level, top), (level, None))]
    lines = {
        "weights": [((n + 0.5) / 40 - 1, count) for n, count in enumerate(counts.tolist())],
        "nf4's sixteen values": spikes,
    }
    return curve(lines, title=chosen, x="weight / largest of its block", y="weights in a bin")


# %%
def four_bits_of(kind, block):
    rows = []
    for name in ("q_proj", "v_proj", "gate_proj", "down_proj"):
        weight = next(weight for full, weight in weights.items() if full.endswith(name))
        bits, back = four_bits(weight, kind, block)
        rows.append((name, f"{bits:.3f}", f"{error(back, weight):.1%}"))
    return show(histogram(block), f"{kind}, blocks of {block}", ("first layer's", "bits a weight", "error"), rows)


KINDS, start = ["nf4", "fp4", "even"], {"kind": "nf4", "block": 64}
tk.vary(four_bits_of, start=start, kind=KINDS, block=[64, 128, 256], ahead=True)

# %% tags=["check"]
for weight in weights.values():
    wrong = {kind: error(four_bits(weight, kind)[1], weight) for kind in ("nf4", "fp4", "even")}
    assert wrong["nf4"] < min(wrong["even"], wrong["fp4"])
    assert 0.05 < wrong["nf4"] < 0.15
bits, back = four_bits(weights[chosen])
assert abs(bits - (4 + 8 / 64 + 32 / (64 * 256))) < 0.02  # double quantization: 4.127

# %% [markdown]
# nf4 loses about a tenth of a weight's size, and is the best of the three in every layer. Smaller blocks are finer
# and need more scales: the loader takes 64.
#
# ## Eight bits, and the outliers
#
# **LLM.int8** (Dettmers et al. 2022) also stores *activations* in 8 bits while it multiplies: each row is divided by
# its largest value. Large models have a few features with activations many times as large as the rest. One of
# them makes the steps of its whole row coarse. So LLM.int8 computes features above a threshold in 16 bits. Make one
# feature larger, and switch the threshold.


# %%
def int8_product(outlier, above_6):
    x, weight = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0)), weights[chosen]
    x[:, 7] *= outlier
    apart = (x.abs().amax(dim=0) > 6) & (above_6 == "in 16 bits")
    inside = x.masked_fill(apart, 0)
    row, column = inside.abs().amax(dim=1, keepdim=True), weight.abs().amax(dim=1, keepdim=True)
    product = (inside / row * 127).round() @ (weight / column * 127).round().T * row * column.T / 127**2
    product += x[:, apart].half().float() @ weight[:, apart].T
    rows = [(int(apart.sum()), f"{error(product, x @ weight.T):.2%}")]
    return table(f"One feature × {outlier}", ("features in 16 bits", "error of the product"), rows)


OUTLIERS, WHERE = [1, 2, 5, 10, 20, 50, 100, 200], ["in 8 bits, too", "in 16 bits"]
tk.vary(int8_product, start={"outlier": 50, "above_6": WHERE[0]}, outlier=OUTLIERS, above_6=WHERE)


# %% tags=["check"]
def wrong_by(outlier, word):
    (row,) = int8_product(outlier, word).rows
    return float(row[1].rstrip("%"))


assert wrong_by(100, "in 8 bits, too") > 1.5 * wrong_by(100, "in 16 bits")

# %% [markdown]
# ## What a GPU needs
#
# A Llama of 8B on one card, one row of 2,048 tokens. Move the adapter and the card: which is the smallest card for
# each? All weights need 16 bytes each. LoRA needs two for each frozen weight, QLoRA about half a byte for most.

# %%
ONE_ROW = tk.TrainConfig(seq_len=2048, micro_batch=1)
QLORA = tk.Strategy(adapter="qlora", precision="bf16")
tk.explore("memory", LLAMA_8B, "RTX-4090", QLORA, ONE_ROW, controls=["adapter", "device"])

# %% tags=["check"]
needs = {
    word: tk.forecast(LLAMA_8B, tk.Strategy(adapter=word, precision="bf16"), "RTX-4090", ONE_ROW)
    for word in ("none", "lora", "qlora")
}
assert not needs["none"].fits
assert needs["qlora"].fits
assert needs["qlora"].parts["parameters"] < needs["lora"].parts["parameters"] / 2
assert needs["lora"].parts["optimizer"] < needs["none"].parts["optimizer"] / 50

# %% [markdown]
# ## The same model, trained in three ways
#
# The recipe's own steps over the same rows, in this process. Learning rates differ, as they do in practice: an
# adapter takes ten times what all weights take.

# %%
run_config = tk.RunConfig(model=base, data=str(styled))
rates = {"none": 5e-4, "lora": 5e-3, "qlora": 5e-3}
trials = {}
for adapter, rate in rates.items():
    rank = {"lora_rank": RANK} if adapter != "none" else {}
    strategy = tk.Strategy(adapter=adapter, precision="fp32", **rank)
    step = tk.TrainConfig(steps=STEPS, seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, lr=rate)
    trials[adapter] = tk.profile_steps(strategy, step, run_config)
lines = {adapter: list(enumerate(trial.losses, start=1)) for adapter, trial in trials.items()}
HTML(curve(lines, title="Loss on the new style", x="step", y="nats a token"))

# %% [markdown]
# LoRA begins where all weights begin, at the base. QLoRA begins at the base in four bits, a little off. This is what
# each held and took, **measured**, and the peak's forecast:

# %%
rows = []
for adapter, trial in trials.items():
    held = trial.audit.measured
    sizes = (held.trainable, held.frozen, held.optimizer, trial.peak_bytes)
    rows.append((adapter, *map(format_bytes, sizes), format_bytes(trial.forecast_bytes)))
columns = ("adapter", "trainable", "frozen", "optimizer", "peak", "peak, forecast")
parts = [Bar(label=adapter, parts=trial.parts) for adapter, trial in trials.items()]
show(
    bars(parts, title="All three: the peak by part (measured)"),
    "In fp32 a frozen weight of LoRA has four bytes",
    columns,
    rows,
)

# %% [markdown]
# Two of them beside each other, the peak by part:


# %%
def beside(one, other):
    pair = [Bar(label=name, parts=trials[name].parts) for name in (one, other)]
    return bars(pair, title="The peak by part (measured)")


tk.vary(beside, one=list(trials), other=list(trials), start={"one": "none", "other": "qlora"})

# %% tags=["check"]
first = {adapter: trial.losses[0] for adapter, trial in trials.items()}
assert abs(first["lora"] / first["none"] - 1) < EQUAL
assert 0 < abs(first["qlora"] / first["none"] - 1) < 0.05
assert STEPS < 20 or all(trial.losses[-1] < first["none"] for trial in trials.values())
held = {adapter: trial.audit.measured for adapter, trial in trials.items()}
assert [one.trainable // 4 for one in held.values()] == [spec.elements, trained, trained]
assert all(one.optimizer >= 2 * one.trainable for one in held.values())  # AdamW's two moments
assert held["qlora"].frozen < held["lora"].frozen / 2
assert all(abs(trial.ratio - 1) < 0.08 for trial in trials.values())
assert GPU or all(trial.peak_bytes < most_needed for trial in trials.values())

# %% [markdown]
# Of so small a model activations and logits are most, and no adapter makes those smaller.
#
# ## Over two ranks: who holds what
#
# ZeRO-3 and FSDP shard the frozen base, too, also in four bits. Each rank then holds a part of the base, of the
# adapter and of its moments. Four real runs on two ranks:

# %%
RANKS = max(2, tk.hardware().count) if GPU else 2
audits = {}
for word in SHARDED.split(","):
    for adapter in ("lora", "qlora"):
        strategy = tk.Strategy(sharding=word, adapter=adapter, lora_rank=RANK, precision="fp32")
        fields = {"model": base, "data": run_config.data, "steps": 2, "seq_len": SEQ_LEN, "micro_batch": 2}
        run = tk.launch("toolkit.finetune", strategy, processes=RANKS, **fields, save=False, save_seconds=0)
        run.wait(progress=False)
        audits[word, adapter] = [audit["measured"] for audit in run.memory["audits"]]

# %% [markdown]
# The audit of each rank, after its first step:

# %%
rows = []
for (word, adapter), ranks in audits.items():
    for rank, held in enumerate(ranks):
        sizes = (held["frozen"], held["trainable"], held["master"], held["optimizer"])
        rows.append((word, adapter, rank, *map(format_bytes, sizes)))
columns = ("sharding", "adapter", "rank", "frozen base", "adapter's weights", "masters", "moments")
table("Held by a rank between two steps (measured)", columns, rows)

# %% [markdown]
# Or one run as a picture, its ranks below each other:


# %%
def ranks_of(sharding, adapter):
    names = {"frozen": "frozen base", "trainable": "adapter", "master": "master", "optimizer": "optimizer"}
    held = audits[sharding, adapter]
    rows = [
        Bar(label=f"rank {rank}", parts={name: one[key] for key, name in names.items()})
        for rank, one in enumerate(held)
    ]
    return bars(rows, title=f"{adapter} under {sharding}, between two steps (measured)")


tk.vary(ranks_of, sharding=SHARDED.split(","), adapter=["lora", "qlora"])

# %% tags=["check"]
for ranks in audits.values():
    assert len(ranks) == RANKS
    assert all(held["frozen"] < 0.65 * 4 * spec.elements for held in ranks)  # half, and what is held whole
    assert all(held["optimizer"] < 0.7 * 8 * trained for held in ranks)
for word in SHARDED.split(","):
    assert audits[word, "qlora"][0]["frozen"] < audits[word, "lora"][0]["frozen"]

# %% [markdown]
# ZeRO-3 keeps small parameters whole on every rank (`stage3_param_persistence_threshold`), and an adapter's matrices
# are small. Their masters and moments are shared. FSDP shards everything.
#
# ## Before and after
#
# What is to be kept is a run with a folder. The same QLoRA once more: at its end it saves the adapter, opens it again
# and compares logits.

# %%
strategy = trials["qlora"].forecast.strategy
fields = {"seq_len": SEQ_LEN, "micro_batch": MICRO_BATCH, "steps": STEPS, "lr": rates["qlora"]}
run = tk.launch("toolkit.finetune", strategy, processes=1, model=base, data=run_config.data, **fields)
run.wait(progress=False)
answers = {}
for prompt in ("def multiply(price", "def subtract(north", "def add(left"):
    for name, source in (("the base", base), ("with its adapter", run.folder)):
        answer = tk.generate(source, prompt, max_new_tokens=48, stream=False, chat_template=False)
        answers[prompt, name] = prompt + str(answer).partition("\n\n")[0]

# %% [markdown]
# Choose a beginning, and read both:


# %%
def both(prompt):
    texts = [f"# {name}\n{text}" for (asked, name), text in answers.items() if asked == prompt]
    return "<pre>" + escape("\n\n".join(texts)) + "</pre>"


tk.vary(both, prompt=list(dict.fromkeys(prompt for prompt, _ in answers)), title="Before and after")

# %% tags=["check"]
assert STEPS < 20 or all(('"""' in text) == (name != "the base") for (_, name), text in answers.items())
again = [float(loss) for loss in run.metrics["loss"]]
assert all(abs(one / two - 1) < EQUAL for one, two in zip(again, trials["qlora"].losses, strict=True))
adapter_folder = run.folder / "export"
size = (adapter_folder / "adapter_model.safetensors").stat().st_size
assert size < (Path(base) / "model.safetensors").stat().st_size / 10

# %% [markdown]
# ## What alpha does
#
# The adapter adds (alpha / rank) · B·A. After the training you can still turn it: at 0 the model is the base, at the
# trained value it is adapted. The new style was trained on, the old one was not. Which alpha would you choose?

# %% tags=["helper"]
from transformers import BitsAndBytesConfig


def nf4():
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=torch.float32,
    )


def opened(folder, config=None):
    """A model of a folder on the CPU, which computes in fp32."""
    options = {"quantization_config": config, "device_map": {"": "cpu"}} if config else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    # On CPUs with AVX512-BF16 bitsandbytes would evaluate in bf16, 1e-2 off; the toolkit does the same.
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def loss_on(model, rows):
    with torch.no_grad():
        return model(input_ids=rows, labels=rows).loss.item()


# %%
tuned = PeftModel.from_pretrained(opened(base, nf4()), adapter_folder)


def loss_with(alpha):
    for module in tuned.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", alpha / (2 * RANK))  # it was trained with twice the rank
    losses = {"new": loss_on(tuned, new_style[:2]), "old": loss_on(tuned, old_style[:2])}
    return table(f"alpha {alpha}", ("style", "loss"), [(name, f"{loss:.4f}") for name, loss in losses.items()])


alphas = [0, RANK // 2, RANK, 2 * RANK, 3 * RANK, 4 * RANK, 8 * RANK]
tk.vary(loss_with, start={"alpha": 2 * RANK}, alpha=alphas, ahead=True)


# %% tags=["check"]
def losses_at(alpha):
    return [float(row[1]) for row in loss_with(alpha).rows]


at_zero, at_trained = losses_at(0), losses_at(2 * RANK)
assert abs(at_zero[0] - loss_on(opened(base, nf4()), new_style[:2])) < 1e-3
assert STEPS < 20 or at_trained[0] < at_zero[0]
over_four_bits = logits(tuned)

# %% [markdown]
# ## Home: merged, and in fewer bits
#
# **Merged**, W + B·A is one matrix again: a plain model without PEFT. In a shell: `toolkit export RUN -o merged
# --merge`. Then it can be quantized for use. What does each form weigh, and what is its loss on functions that were not trained on?

# %%
merged, half = fresh("merged"), fresh("merged-bf16")
tk.export(run.folder, merged, merge=True)
tk.export(run.folder, half, merge=True, dtype="bf16")
models = {"fp32": (opened(merged), merged), "bf16": (opened(half), half)}
configs = {"int8, activations too": BitsAndBytesConfig(load_in_8bit=True), "nf4": nf4()}
for name, bits in configs.items():
    folder, model = fresh(name.partition(",")[0]), opened(merged, bits)
    model.save_pretrained(folder)
    models[name] = (model, folder)

# %% [markdown]
# LLM.int8 computes with activations of 8 bits. To see what these cost alone, the same int8 weights also multiply
# activations of fp32:


# %% tags=["helper"]
def weights_alone(model, folder):
    """The model of the folder with the int8 model's weights, read back: activations stay in fp32."""
    plain = opened(folder)
    for name, module in model.named_modules():
        if hasattr(getattr(module, "weight", None), "SCB"):
            weight = module.weight.data.float() * module.weight.SCB[:, None] / 127
            plain.get_submodule(name).weight.data.copy_(weight)
    return plain


def stored_bytes(folder):
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


# %%
int8, folder = models["int8, activations too"]
models["int8, weights alone"] = (weights_alone(int8, merged), folder)
order = ("fp32", "bf16", "int8, weights alone", "int8, activations too", "nf4")
scores = {name: loss_on(models[name][0], new_style) for name in order}
rows = []
for name in order:
    change = f"{scores[name] / scores['fp32'] - 1:+.3%}"
    rows.append((name, format_bytes(stored_bytes(models[name][1])), f"{scores[name]:.4f}", change))
table("One model, five forms (measured)", ("form", "files", "loss", "change"), rows)

# %% [markdown]
# And a model of yours? Its linear layers take these forms; embedding and head stay in 16 bits:


# %%
def forms_of(billions, embedding_percent):
    share, rows = embedding_percent / 100, []
    for form, size in (("fp32", 4), ("bf16", 2), ("int8", 1), ("nf4", 0.516)):
        rest = 4 if form == "fp32" else 2
        rows.append((form, format_bytes(1e9 * billions * (share * rest + (1 - share) * size))))
    return table(f"{billions}B parameters (computed)", ("form", "files"), rows)


tk.vary(
    forms_of,
    billions=[1, 3, 8, 32, 70],
    embedding_percent=[1, 2, 5, 10, 20],
    start={"billions": 8, "embedding_percent": 10},
)

# %% tags=["check"]
sizes = [stored_bytes(models[name][1]) for name in ("fp32", "bf16", "int8, activations too", "nf4")]
assert sizes[0] > sizes[1]
assert sizes[0] > sizes[2] > sizes[3]
changes = {name: abs(score - scores["fp32"]) for name, score in scores.items()}
assert max(changes["bf16"], changes["int8, weights alone"], changes["int8, activations too"]) < 0.02  # nats
assert max(changes, key=changes.get) == "nf4"
assert changes["nf4"] < 0.1
assert error(logits(models["fp32"][0]), over_four_bits) < EQUAL
over_whole = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter_folder))
assert error(over_whole, over_four_bits) > error(logits(models["fp32"][0]), over_four_bits)

# %% [markdown]
# The adapter was trained over Ŵ, the weights as four bits hold them, and merged into Ŵ. Over the weights that the four
# bits were made from, it is another model. And the guess: four bits change the loss most, and activations of eight
# bits hardly, in a model without outliers. The embedding is not quantized in any form: of this small model it is a
# large share, of an 8B model little.
#
# ## The rule
#
# **Train all weights if they fit; else LoRA of rank 16 on all linear layers, at ten times the rate; else QLoRA.**
# Your number: 2 bytes a weight for LoRA's frozen base in bf16, 0.52 for QLoRA's, plus 16 for each trained number.
# Here is your card, and what each of the three needs:


# %%
def three_ways(card, model):
    rows = []
    for adapter in ("none", "lora", "qlora"):
        need = tk.forecast(MODELS[model], tk.Strategy(adapter=adapter), card, ONE_ROW, advice=False)
        rows.append((adapter, format_bytes(need.needed_bytes), "yes" if need.fits else "no"))
    return table(f"{model} on {card} (forecast)", ("adapter", "needs", "fits"), rows)


MODELS = {"this notebook's": tk.describe(config), "a Llama of 8B": LLAMA_8B}
cards, start = ["T4", "L4", "A100-40GB", "H100-80GB"], {"card": "L4", "model": "a Llama of 8B"}
tk.vary(three_ways, start=start, card=cards, model=list(MODELS), ahead=True)

# %% [markdown]
# ## When it goes wrong
#
# - **QLoRA is refused: most weights stay unquantized.** Large embeddings are not quantized. `--allow-unquantized`
#   overrides it.
# - **The adapter answers nonsense in another program**: its base must be there, in the same bits. Merge it.
# - **The loss does not fall**: a rate for all weights is too small for an adapter. Multiply by ten.
# - **An adapter's folder as `--model`** is refused, with the advice to merge it first:

# %%
refused = []
for words in ({"adapter": "qlora8", "sharding": "fsdp"}, {"lora_rank": 8}):
    try:
        tk.Strategy(**words)
    except tk.StrategyError as said:
        refused.append((" ".join(f"--{name} {value}" for name, value in words.items()), str(said)))
try:
    tk.describe(str(run.folder / "export"))
except tk.ToolkitError as said:
    refused.append(("an adapter's folder as --model", str(said)))
table("Refused", ("asked", "the sentence"), refused)

# %% [markdown]
# Try others:


# %%
def accepted(adapter, sharding, offload):
    tk.Strategy(adapter=adapter, sharding=sharding, offload=offload)  # a refusal is shown as its sentence
    return "Accepted."


WAYS = {"adapter": ["lora", "dora", "qlora", "qlora8"], "sharding": ["ddp", "zero2", "zero3", "fsdp"]}
tk.vary(accepted, **WAYS, offload=["none", "optimizer", "cpu"], start={"adapter": "qlora8", "sharding": "fsdp"})

# %% tags=["check"]
assert len(refused) == 3

# %% [markdown]
# ## Exercises
#
# 1. `lora_targets="q_proj,v_proj"` adapts two matrices of each layer, as the first paper did. How many weights does
#    that train at the same rank? Count before you run.
# 2. How much of a trained B·A lies in its first direction alone? Take the singular values.
# 3. `adapter="dora"` adds a length for each output (Liu et al. 2024). How many numbers more are trained?

# %% tags=["solution"]
print(f"{adapter_elements(spec, RANK, 'q_proj,v_proj'):,}, where all linear layers have {trained:,}.")

# %% tags=["solution"]
module = next(
    module for name, module in tuned.named_modules() if name.endswith("gate_proj") and hasattr(module, "lora_A")
)
product = module.lora_B["default"].weight @ module.lora_A["default"].weight
values = torch.linalg.svdvals(product.detach().float())[:RANK]
shares = (values**2 / (values**2).sum()).tolist()
rows = [(number, f"{share:.1%}") for number, share in enumerate(shares, start=1)]
table(f"{chosen}: the share of B·A in each direction", ("direction", "share"), rows)

# %% tags=["solution"]
shapes = {one.name.removesuffix(".weight"): one.shape for one in spec.parameters}
print(f"{sum(shapes[name][0] for name in spec.linears):,} lengths, one for each output of a linear layer.")

# %% [markdown]
# ## Next
#
# [08_beyond_data_parallel](08_beyond_data_parallel.ipynb): divide the layers, the matrices, a sequence or the experts.
