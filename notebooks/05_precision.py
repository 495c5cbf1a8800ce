# %% [markdown]
# # Which precision should my run use?
#
# A number of 16 bits takes half the bytes of fp32, and tensor cores multiply it several times as fast. It is also a
# coarser number. Here you see how much coarser, meet a loss that is not finite, repair it, and read from real runs
# which tensors stay in 32 bits.

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
# **You know**: what parameters, gradients and optimizer states are
# ([02](02_where_the_memory_goes.ipynb)), and what a forward and a backward keep ([04](04_activations.ipynb)).
#
# **You can then**: choose a precision for a card, say what it costs in bytes and in accuracy, and find the layer that
# overflows.
#
# **Time**: 4 minutes on two CPU cores.
#
# **Hardware**: any. First, this machine:

# %%
import toolkit as tk

tk.environment()

# %% [markdown]
# These are the numbers to change. On a machine with several GPUs the runs use them.

# %% tags=["parameters"]
GPU = tk.hardware().device.kind == "cuda" and tk.hardware().count > 1  # sharding takes two ranks, and each its own GPU
STEPS = 20 if GPU else 6  # of each run
SHARDINGS = "ddp,zero3,fsdp"  # their dtypes are compared
STAGES = "zero3,fsdp"  # those that are looked into at each stage
SCALE = 2.0**24  # the first loss scale: so large that fp16 overflows
TOKENS = 1024 if GPU else 64  # of a batch in the loops of this process
BATCH = {} if GPU else {"micro_batch": 1, "seq_len": 128}  # of the runs on two processes

# %% tags=["helper"]
import os

import torch
import transformers
from IPython.display import HTML

from toolkit.core.charts import Bar, bars, curve, figure
from toolkit.core.display import Table
from toolkit.core.units import format_bytes, format_step_seconds

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
if not GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a single GPU cannot be shared by two ranks: they run on the processor
RANKS = tk.hardware().count if GPU else 2
DEVICE = "cuda" if GPU else "cpu"


def runs_need(*runs, one_document=True):
    """What a rank of the largest of these runs needs, forecast with the run's own settings for three machines.

    A row of so few steps is a piece of one document.
    """
    rows = []
    for machine in (f"{RANKS}x cpu", f"{RANKS}x T4", f"{RANKS}x L4"):
        try:
            options = {
                "ranks": RANKS,
                "save": False,
                "num_checkpoints": 0,
                "one_document": one_document,
                "advice": False,
            }
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


# %% [markdown]
# The largest of the runs on two ranks, which are in bf16, forecast for this processor and for two cards:

# %%
choices = {"precision": "bf16", "activation_checkpointing": "none", "loss": "chunked"}
STRATEGIES = {word: tk.Strategy(sharding=word, **choices) for word in SHARDINGS.split(",")}
needed = runs_need(*(("embedded", strategy, tk.TrainConfig(**BATCH)) for strategy in STRATEGIES.values()))
needed

# %% [markdown]
# **Your guess**, before you run on. A weight is 1. You subtract 0.001 from it, a thousand times, in bf16. Where does
# it end: near 0, near 0.5, or at 1?
#
# ## How fine is a number?
#
# A floating-point number is ±1.mantissa × 2^exponent. The **exponent** bits set the *range*: the largest and the
# smallest number. The **mantissa** bits set the *step* between two neighbours. You can compute any such format in
# fp64: round to the step, and beyond the range write infinity.


# %%
def stored(x, exponent_bits, mantissa_bits):
    """Return x, of fp64, as a format with so many bits stores it: the nearest number, ties to even."""
    highest = 2 ** (exponent_bits - 1) - 1
    exponent = (torch.frexp(x).exponent - 1).clamp(min=1 - highest)
    step = torch.exp2((exponent - mantissa_bits).double())
    rounded = torch.round(x / step) * step
    largest = (2 - 2.0**-mantissa_bits) * 2.0**highest
    return torch.where(rounded.abs() > largest, rounded.sign() * torch.inf, rounded)


# %% [markdown]
# The formats of today's cards. **TF32** is not a dtype of torch: it is how a tensor core reads fp32 inputs. fp64 has
# no tensor cores on most cards, and no training needs it.

# %%
FORMATS = {"fp64": (11, 52), "fp32": (8, 23), "TF32": (8, 10), "bf16": (8, 7), "fp16": (5, 10), "fp8 e5m2": (5, 2)}
rows = []
for name, (exponent, mantissa) in FORMATS.items():
    highest = 2 ** (exponent - 1) - 1
    sizes = ((2 - 2.0**-mantissa) * 2.0**highest, 2.0 ** (1 - highest), 2.0**-mantissa)
    rows.append((name, 1 + exponent + mantissa, exponent, mantissa, *(f"{size:.3g}" for size in sizes)))
columns = ("format", "bits used", "exponent", "mantissa", "largest", "smallest full", "step after 1")
table("bf16 is fp32's range with few digits; fp16 has more digits in a short range", columns, rows)

# %% tags=["check"]
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8 e5m2": torch.float8_e5m2}
draw = torch.Generator().manual_seed(0)
wide = torch.randn(100_000, generator=draw, dtype=torch.float64) * torch.exp2(
    torch.randint(-30, 14, (100_000,), generator=draw).double()
)
for name, dtype in TORCH.items():
    info = torch.finfo(dtype)
    assert info.max == float(stored(torch.tensor(info.max, dtype=torch.float64), *FORMATS[name]))
    single = wide.float()  # torch rounds fp64 to 16 bits through fp32
    assert torch.equal(stored(single.double(), *FORMATS[name]), single.to(dtype).double()), name
assert stored(torch.tensor(70_000.0).double(), *FORMATS["fp16"]).isinf()

# %% [markdown]
# Move the bits. Which of these four numbers survive in fp16 (5 and 10), which in bf16 (8 and 7)?


# %%
def four_numbers(exponent_bits, mantissa_bits):
    rows = []
    for value in (70_000.0, 1e-8, 1.001, 1 / 3):
        kept = float(stored(torch.tensor(value, dtype=torch.float64), exponent_bits, mantissa_bits))
        rows.append(
            (f"{value:.9g}", f"{kept:.9g}", "infinite" if kept == torch.inf else f"{abs(kept - value) / value:.2%}")
        )
    return table("The same numbers, stored", ("number", "stored as", "error"), rows)


tk.vary(
    four_numbers, start={"exponent_bits": 5, "mantissa_bits": 10}, exponent_bits=range(2, 9), mantissa_bits=range(1, 24)
)

# %% [markdown]
# ## Small updates vanish
#
# Training adds small numbers to a larger one. Here is the weight of your guess. Between 1/2 and 1 the neighbours of
# bf16 are 2^-8 apart: a smaller change than half of that is rounded away. That is why mixed precision keeps **fp32
# masters**. The optimizer steps in fp32, and the forward takes a rounded copy. A thousand steps in each format:

# %%
BITS, UPDATES = range(2, 24), [1e-4, 1e-3, 1e-2]
update = torch.tensor(UPDATES, dtype=torch.float64)[:, None]
steps = [torch.ones(len(UPDATES), len(BITS), dtype=torch.float64)]  # a weight for each update and format
for _ in range(1000):
    steps.append(stored(steps[-1] - update, 8, torch.tensor(BITS)))

# %% [markdown]
# Move the bits of the mantissa, and the size of an update:


# %%
def a_thousand_updates(mantissa_bits, update):
    of_bits = dict(zip(BITS, torch.stack(steps[1:])[:, UPDATES.index(update)].T, strict=True))
    alone, master = of_bits[mantissa_bits], of_bits[23]
    found = {"kept in this format": alone, "copy of an fp32 master": stored(master, 8, mantissa_bits)}
    lines = {name: list(enumerate(line.tolist(), start=1)) for name, line in found.items()}
    ends = [(name, f"{line[-1][1]:.4g}") for name, line in lines.items()]
    return show(curve(lines, title="A weight, lowered", x="updates", y="weight"), "", ("weight", "ends at"), ends)


STARTS = {"mantissa_bits": 7, "update": 0.001}
tk.vary(a_thousand_updates, start=STARTS, mantissa_bits=BITS, update=UPDATES)

# %% tags=["check"]
weight = torch.tensor(1.0, dtype=torch.bfloat16)
for _ in range(1000):
    weight -= 0.001
assert weight == 1.0  # torch's bf16: a thousand updates, and nothing happened

# %% [markdown]
# The guess: at 7 mantissa bits the weight **stays at 1**. Its copy of an fp32 master ends near 0.
#
# ## Small gradients vanish, and a scale saves them
#
# How large are real gradients? Here are those of the embedded Llama of 5M parameters on Python's own sources.

# %% tags=["helper"]
from toolkit.data import embedded_files
from toolkit.data.embedded import embedded_model

FOLDER = embedded_model()

# %%
from transformers import AutoModelForCausalLM, AutoTokenizer


def fresh():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).to(DEVICE).train()


text = "\n".join(path.read_text(encoding="utf-8") for path in embedded_files()[:12])
ids = torch.tensor(AutoTokenizer.from_pretrained(FOLDER)(text, verbose=False)["input_ids"])
BATCHES = ids[: len(ids) // TOKENS * TOKENS].view(-1, 2, TOKENS // 2).to(DEVICE)  # two sequences each
model = fresh()
model(input_ids=BATCHES[0], labels=BATCHES[0]).loss.backward()
gradients = torch.cat([p.grad.flatten() for p in model.parameters()]).cpu().double()
gradients = gradients[gradients != 0]  # without the rows of tokens that the batch lacks

# %% [markdown]
# Multiply the *loss* by a scale, and by the chain rule every gradient grows by it. Before the step they are divided
# again. That is **loss scaling**. Move the scale until nothing vanishes, and on, until something overflows.

# %% tags=["helper"]
SAMPLE = gradients[torch.randperm(len(gradients), generator=torch.Generator().manual_seed(0))[:50_000]]


def lost(scale, name):
    """The share of the scaled gradients that a format turns to zero, stores with fewer digits, and turns to infinity."""
    exponent, mantissa = FORMATS[name]
    scaled = SAMPLE * scale
    half, normal = stored(scaled, exponent, mantissa), 2.0 ** (2 - 2 ** (exponent - 1))
    return [float(one.double().mean()) for one in (half == 0, (half != 0) & (half.abs() < normal), half.isinf())]


def histogram(format, log2_of_the_scale):
    """The sizes of the scaled gradients, and where the format begins and ends."""
    exponent, mantissa = FORMATS[format]
    sizes = torch.log2(SAMPLE.abs()) + log2_of_the_scale
    counts = torch.histc(sizes, bins=80, min=-45, max=35) / len(SAMPLE) * 100
    highest = 2 ** (exponent - 1)
    edges = [(2 - highest - mantissa, "smallest"), (highest, "largest")]
    lines = {"gradients": [(place - 44.5, value) for place, value in enumerate(counts.tolist())]}
    lines |= {f"{format}'s {edge}": [(at, 0.0), (at, float(counts.max()))] for at, edge in edges if -45 < at < 35}
    return curve(lines, title="Sizes of a real model's gradients", x="log2 of the size", y="% of all")


# %%
def gradients_in(format, log2_of_the_scale):
    shares = [f"{share:.2%}" for share in lost(2.0**log2_of_the_scale, format)]
    return show(histogram(format, log2_of_the_scale), f"In {format}", ("zero", "fewer digits", "infinite"), [shares])


tk.vary(
    gradients_in,
    start={"format": "fp16", "log2_of_the_scale": 0},
    format=["fp16", "bf16", "fp8 e5m2"],
    log2_of_the_scale=range(0, 33, 2),
)

# %% tags=["check"]
zero, fewer, infinite = zip(*(lost(scale, "fp16") for scale in (1, 2**8, 2**16, 2**32)), strict=True)
assert zero[0] > 10 * zero[2]
assert fewer[0] > 0.1 > 0.001 > fewer[2]
assert infinite[0] == infinite[2] == 0 < infinite[3]
assert lost(1, "bf16")[2] == 0
assert lost(1, "bf16")[0] < 1e-3

# %% [markdown]
# Which scale is right? Nobody knows, so a *dynamic* scaler tries. Where a gradient overflows, the step is skipped and
# the scale is halved. After some good steps it is doubled. torch's `GradScaler` does that in three calls.


# %%
def one_step(model, batch, precision, optimizer, scaler):
    half = precision in ("fp16", "bf16")
    with torch.autocast(DEVICE, dtype=TORCH[precision] if half else None, enabled=half):
        loss = model(input_ids=batch, labels=batch).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # divides by the scale, and steps where all gradients are finite
    scaler.update()  # halves or doubles the scale
    skipped = not all(bool(p.grad.isfinite().all()) for p in model.parameters())
    optimizer.zero_grad()
    return loss.item(), skipped


# %% [markdown]
# A skipped batch is tried again. `bf16_pure` keeps the weights themselves in bf16: no autocast, no masters.


# %%
def train(precision, scale=None, growth=4):
    model = fresh().bfloat16() if precision == "bf16_pure" else fresh()
    optimizer, tries, done = torch.optim.AdamW(model.parameters(), lr=1e-3), [], 0
    scaler = torch.amp.GradScaler(DEVICE, enabled=scale is not None, init_scale=scale or 1.0, growth_interval=growth)
    while done < STEPS:
        used = scaler.get_scale()
        loss, skipped = one_step(model, BATCHES[done % len(BATCHES)], precision, optimizer, scaler)
        tries.append((loss, used, skipped))
        done += not skipped
    return model, tries


# %% [markdown]
# The first scale is far too large on purpose. Watch it fall, and grow again:

# %%
trained = {"fp16": train("fp16", SCALE)}
tries = trained["fp16"][1]
scales = [(number, torch.log2(torch.tensor(scale)).item()) for number, (_, scale, _) in enumerate(tries, start=1)]
rows = [
    (number, f"{loss:.4f}", f"2^{at:.0f}", "skipped" if skipped else "taken")
    for (number, at), (loss, _, skipped) in zip(scales, tries, strict=True)
]
chart = curve({"scale": scales}, title="The scale finds its place", x="try", y="log2 of the scale")
show(chart, "Every try in fp16", ("try", "loss", "scale", "step"), rows)

# %% tags=["check"]
import itertools
import math

assert any(skipped for *_, skipped in tries), "the scale was meant to be too large"
assert all(math.isfinite(loss) for loss, *_ in tries)
for (_, scale, skipped), (_, later, _) in itertools.pairwise(tries):
    assert later == scale / 2 if skipped else later in (scale, 2 * scale)

# %% [markdown]
# ## A loss that is not finite
#
# A scale helps gradients. It does not help the **forward**: an activation above 65,504 is infinity in fp16, and the
# loss becomes NaN. Models that were trained in bf16 have such activations. To meet one, multiply `up_proj` by 2^k and
# divide `down_proj` by it. In exact arithmetic that is the *same* model.


# %%
def widened(k):
    model = fresh().eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.mul_(2.0**k)
            layer.mlp.down_proj.weight.div_(2.0**k)
    return model


def loss_in(model, precision, batch=BATCHES[0]):
    with torch.no_grad(), torch.autocast(DEVICE, dtype=TORCH[precision], enabled=precision != "fp32"):
        return model(input_ids=batch, labels=batch).loss.item()


# %% [markdown]
# Move k. The loss of fp32 and bf16 does not change in any digit; that of fp16 breaks.


# %%
def three_losses(k):
    model = widened(k)
    rows = [(precision, f"{loss_in(model, precision):.4f}") for precision in ("fp32", "bf16", "fp16")]
    return table(f"up_proj × 2^{k}, down_proj ÷ 2^{k}", ("precision", "loss"), rows)


tk.vary(three_losses, start={"k": 18}, k=range(0, 25, 2), ahead=True)

# %% [markdown]
# **Find it.** A hook on every linear layer names the first output that is not finite:


# %%
def first_overflow(model, precision="fp16"):
    bad = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(
                lambda _, __, out, name=name: None if out.isfinite().all() else bad.append(name)
            )
    loss_in(model, precision)
    return bad[0] if bad else "nothing"


broken = widened(18)
print(f"loss {loss_in(broken, 'fp16')}; the first output that is not finite: {first_overflow(broken)}")

# %% [markdown]
# **Repair it**, in one of three ways: compute in bf16, keep the named module in fp32, or bring its weights back into
# the range. Here are all three.


# %%
def in_fp32(module, inputs):
    with torch.autocast(DEVICE, enabled=False):
        return torch.nn.functional.linear(inputs.float(), module.weight)


repairs = {"as it is, fp16": loss_in(broken, "fp16"), "bf16": loss_in(broken, "bf16")}
kept = widened(18)
for layer in kept.model.layers:
    for module in (layer.mlp.up_proj, layer.mlp.down_proj):
        module.forward = lambda inputs, module=module: in_fp32(module, inputs)
repairs["fp16, these layers in fp32"] = loss_in(kept, "fp16")
repairs["fp16, weights in range"] = loss_in(widened(0), "fp16")
table("One model, four losses", ("", "loss"), [(name, f"{loss:.4f}") for name, loss in repairs.items()])

# %% tags=["check"]
exact = loss_in(widened(0), "fp32")
assert loss_in(broken, "fp32") == exact
assert "up_proj" in first_overflow(broken)
assert first_overflow(widened(0)) == "nothing"
lost_loss, *repaired = repairs.values()
assert not math.isfinite(lost_loss)
assert all(abs(loss / exact - 1) < 0.01 for loss in repaired)

# %% [markdown]
# In a run of the toolkit no such step is ever taken: it stops at the first loss that is not finite, with the weights
# of the step before, on every engine.
#
# ## One model: memory, accuracy and speed
#
# The same five million weights in each precision. Bytes of a weight: its value, master, gradient and Adam's two
# moments. **Accuracy** is the loss on text that was not trained on, after the loop above. **Memory and speed** are
# measured on this machine where it computes the format, and forecast for an L4 with 16 rows of 1,024 tokens.

# %%
here_config = tk.TrainConfig(steps=max(5, STEPS), **({"micro_batch": 2, "seq_len": 128} | BATCH))
l4_config = tk.TrainConfig(micro_batch=16, seq_len=1024)
strategies = {precision: tk.Strategy(precision=precision) for precision in ("fp32", "fp16", "bf16", "bf16_pure")}
trained |= {precision: train(precision) for precision in strategies if precision not in trained}
accuracy = {precision: loss_in(trained[precision][0].float(), "fp32", BATCHES[-1]) for precision in strategies}
l4 = {precision: tk.forecast("embedded", strategy, "L4", l4_config) for precision, strategy in strategies.items()}
able = [precision for precision in strategies if precision != "fp16" or GPU]
profiles = {precision: tk.profile_steps(strategies[precision], here_config) for precision in able}

# %% [markdown]
# Each in one row. «–»: this machine has no loss scaling in fp16, so there is no run of the recipe.

# %%
rows = []
for precision, need in l4.items():
    (column,) = tk.dtype_report("embedded", [strategies[precision]], "L4").columns
    here = profiles.get(precision)
    measured = (format_bytes(here.peak_bytes), format_step_seconds(here.seconds)) if here else ("–", "–")
    cells = (format_bytes(need.peak_bytes), format_step_seconds(need.step_seconds))
    each = f"{sum(column.element_bytes.values()):g}"
    rows.append((precision, each, f"{accuracy[precision]:.4f}", *measured, *cells))
columns = ("precision", "bytes a weight", "loss", "peak, here", "a step, here", "peak, L4", "a step, L4")
table("One model (here: measured, L4: forecast)", columns, rows)

# %% tags=["check"]
assert all(abs(loss / accuracy["fp32"] - 1) < 0.02 for loss in accuracy.values())
assert all(0.9 < profile.ratio < 1.1 for profile in profiles.values())
assert l4["bf16_pure"].peak_bytes < l4["bf16"].peak_bytes < l4["fp32"].peak_bytes
assert l4["bf16"].step_seconds < l4["fp32"].step_seconds

# %% tags=["helper"]
from transformers import LlamaConfig

LLAMA_1B = tk.describe(
    LlamaConfig(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                num_key_value_heads=8, vocab_size=128_256, max_position_embeddings=8192, tie_word_embeddings=True)
)  # fmt: skip

# %% [markdown]
# How much faster? A processor gains where it has instructions for the format. On a GPU a small model waits for
# memory, and a larger one for its tensor cores:


# %%
def faster(fast, slow):
    return f"{slow / fast:.1f} times as fast" if fast <= slow else f"{fast / slow:.1f} times as slow"


times = {"the embedded model here": (profiles["bf16"].seconds, profiles["fp32"].seconds)}
times["the embedded model on an L4"] = (l4["bf16"].step_seconds, l4["fp32"].step_seconds)
longer = tk.TrainConfig(micro_batch=1, seq_len=1024)
needs = [tk.forecast(LLAMA_1B, strategies[precision], "A100-80GB", longer) for precision in ("bf16", "fp32")]
times["a Llama of 1.2B on an A100"] = tuple(need.step_seconds for need in needs)
table("A step in bf16 beside one in fp32", ("", "bf16 is"), [(name, faster(*pair)) for name, pair in times.items()])

# %% [markdown]
# And for a model of yours: move the precision and the card. `fp16` and `bf16` keep fp32 masters on every engine, so
# they save activations and time, not states. `bf16_pure` halves the states, at the price that you met above.

# %%
tk.explore(
    "memory",
    LLAMA_1B,
    "A100-40GB",
    tk.Strategy(precision="bf16"),
    tk.TrainConfig(micro_batch=1, seq_len=4096),
    controls=["precision", "device"],
)

# %% [markdown]
# ## Who keeps what in which dtype
#
# Engines agree on the meaning of `bf16` and differ in what lies in memory between two steps. These runs use real
# processes. After the first step every rank is **audited**: which tensors it holds, how many bytes, in which dtype.

# %%
runs = {}
for word, strategy in STRATEGIES.items():
    run = tk.launch("toolkit.finetune", strategy, processes=RANKS, steps=STEPS, save=False, save_seconds=0, **BATCH)
    runs[word] = run.wait(progress=False)

audits = {word: run.memory["audits"][0]["measured"] for word, run in runs.items()}
kept = ("trainable", "master", "gradients", "reduce", "optimizer")
rows = [(word, *(audit["dtypes"].get(part, "none apart") for part in kept)) for word, audit in audits.items()]
columns = ("sharding", "parameters", "masters", "gradients", "reduced in", "optimizer")
table("Dtypes, as audited on rank 0 after the first step", columns, rows)

# %% [markdown]
# - **DDP** keeps fp32 parameters and computes under autocast. The parameters *are* the masters.
# - **DeepSpeed** keeps bf16 parameters, and beside them fp32 masters, of which each rank has its part.
# - **FSDP** keeps fp32 shards, which are the masters. It casts a layer's shard to bf16, gathers it, computes, and
#   frees the gathered copy.

# %%
parts = {"trainable": "parameters", "master": "master", "optimizer": "optimizer"}
sizes = {word: {part: held[name] for name, part in parts.items()} for word, held in audits.items()}
chart = bars(
    [Bar(label=word, parts=each) for word, each in sizes.items()],
    title=f"Held by rank 0 between two steps, bf16, {RANKS} ranks (measured)",
)
rows = [(word, *map(format_bytes, each.values())) for word, each in sizes.items()]
show(chart, "Bytes", ("sharding", "parameters", "masters", "optimizer"), rows)

# %% tags=["check"]
most_needed = max(run.memory["forecast"]["device"]["needed_bytes"] for run in runs.values())
requests = [("embedded", strategy, tk.TrainConfig(**BATCH)) for strategy in STRATEGIES.values()]
# Whether a row holds several documents, which take a mask, the data and the steps decide.
either = {runs_need(*requests, one_document=each).rows[0][2] for each in (True, False)}
assert GPU or format_bytes(most_needed) in either
elements = tk.describe("embedded").elements
for word, held in audits.items():
    kinds, shard = held["dtypes"], elements / RANKS
    assert kinds["optimizer"] == kinds["gradients"] == kinds["reduce"] == "float32"
    assert kinds["trainable"] == ("bfloat16" if word.startswith("zero") else "float32")
    assert kinds.get("master") == ("float32" if word.startswith("zero") else None)
    expected = {
        "ddp": (4 * elements, 0, 8 * elements),
        "zero1": (2 * elements, 4 * shard, 8 * shard),
        "zero2": (2 * elements, 4 * shard, 8 * shard),
        "zero3": (2 * shard, 4 * shard, 8 * shard),
    }.get(word, (4 * shard, 0, 8 * shard))
    found = (held["trainable"], held["master"], held["optimizer"])
    # Padding, and small parameters that ZeRO-3 holds whole.
    assert all(abs(is_ - should) <= 0.01 * elements for is_, should in zip(found, expected, strict=True))
assert set(audits) == set(SHARDINGS.split(","))

# %% [markdown]
# The panel says the same without a run, for any precision and adapter. Beside the last run it shows what its audit
# found.

# %%
tk.explore("precision", run=run, controls=["precision", "adapter"])

# %% [markdown]
# ## Are the masters the checkpoint's weights?
#
# A model changes dtype on its way: when it is loaded, prepared, computed with and stepped. DeepSpeed reads the
# checkpoint in bf16 and makes its masters from what it read. Without help they begin as **rounded** weights, and two
# engines train from different points. `tk.prepare` writes the checkpoint's values into the masters again. The folded
# function looks at each stage, in two processes.


# %% tags=["helper"]
def look(folder, out):
    """Runs in every rank: two steps, and what the tensors are at each stage. Rank 0 writes it down."""
    import json

    import torch
    from safetensors.torch import load_file

    import toolkit as tk
    from toolkit.engines.shards import overlaps, parts, whole_box
    from toolkit.training.given_weights import GivenWeights
    from toolkit.training.optimizers import make_optimizer, make_schedule
    from toolkit.training.preparation import audit, restore_masters

    spec = tk.describe(folder)
    accelerator = tk.accelerator(train_config=tk.TrainConfig(steps=2, micro_batch=2, seq_len=64, lr=1e-3), spec=spec)
    model, _ = tk.load(accelerator)
    kind = lambda tensor: str(tensor.dtype).removeprefix("torch.")  # noqa: E731
    seen = {"loading": kind(getattr(model.lm_head.weight, "ds_tensor", model.lm_head.weight))}

    train_config = tk.job(accelerator).train_config
    optimizer = make_optimizer(model, train_config)
    schedule = make_schedule(optimizer, train_config)
    given = GivenWeights(tk.job(accelerator), model, hashed=False)
    accelerator.from_checkpoint.clear()  # so that prepare leaves the masters as upstream makes them
    model, optimizer = accelerator.prepare(model, optimizer)
    ours = tk.prepared(accelerator, (model, optimizer))

    whole = load_file(f"{folder}/model.safetensors")

    def rounded():
        """The largest distance of a master of this rank from the checkpoint, relative to the weight."""
        shards = list(ours.job.engine.shards(ours))
        kept = "master" if any(shard.kind == "master" for shard in shards) else "parameter"
        worst = 0.0
        for shard in shards:
            if shard.kind == kept:
                there = whole[shard.name]
                for exact, held in overlaps([(whole_box(there.shape), there)], parts(shard)):
                    worst = max(worst, ((held.cpu() - exact).abs() / exact.abs().clamp(min=1e-30)).max().item())
        return worst

    seen["masters off, upstream"] = rounded()
    restore_masters(ours, given, from_checkpoint=True)  # what prepare adds
    seen["masters off, toolkit"] = rounded()
    held = audit(ours).measured.dtypes
    seen["preparation"] = held["trainable"] + (f", masters {held['master']}" if "master" in held else "")

    head = accelerator.unwrap_model(model).lm_head

    def inside(module, inputs):
        seen["compute"] = f"{kind(module.weight)} weights, {kind(inputs[0])} inputs"

    head.register_forward_pre_hook(inside)
    ids = torch.randint(3, spec.vocab, (2, 64), generator=torch.Generator().manual_seed(0))
    for step in tk.train(ours, [{"input_ids": ids, "labels": ids}] * 2, schedule):
        seen["gradients"] = step.gradients
    seen["optimizer"] = audit(ours, gradients=step.gradients).measured.dtypes["optimizer"]
    if accelerator.is_main_process:
        with open(out, "w") as file:
            json.dump(seen, file)


# %%
import json
from pathlib import Path

stages = {}
for word in STAGES.split(","):
    out = Path(f"runs/stages-{word}.json").resolve()
    strategy = tk.Strategy(sharding=word, precision="bf16")
    tk.launch(look, strategy, processes=RANKS, args=(str(FOLDER), str(out))).wait(progress=False)
    stages[word] = json.loads(out.read_text())
names = ("loading", "preparation", "compute", "gradients", "optimizer")
rows = [(name, *(seen[name] for seen in stages.values())) for name in names]
for name, label in (("masters off, upstream", "accelerator.prepare"), ("masters off, toolkit", "tk.prepare")):
    rows.append((f"a master is off by, {label}", *(f"{seen[name]:.2g}" for seen in stages.values())))
table("Each stage under bf16", ("stage", *stages), rows)

# %% [markdown]
# How far is a rounded master off? Move the weight. bf16 has 7 bits of mantissa: the error is up to 2^-8 of the weight,
# and a step of the optimizer is often smaller.


# %%
def rounded_master(weight, stored_in):
    master = float(stored(torch.tensor(weight, dtype=torch.float64), *FORMATS[stored_in]))
    off = abs(master - weight) / weight
    return (
        f"A weight of {weight:g} begins at {master:.9g}: off by {off:.2g}. The toolkit's master begins at {weight:g}."
    )


weights = [0.001, 0.01, 1 / 3, 0.5, 1.001, 3.1416]
tk.vary(rounded_master, weight=weights, stored_in=["bf16", "fp16"], start={"weight": 1.001, "stored_in": "bf16"})

# %% tags=["check"]
if "fsdp" in stages:
    assert stages["fsdp"]["loading"] == stages["fsdp"]["preparation"] == "float32"
    assert stages["fsdp"]["masters off, upstream"] == 0
if "zero3" in stages:
    assert stages["zero3"]["loading"] == "bfloat16"
    assert 2**-10 < stages["zero3"]["masters off, upstream"] <= 2**-8
for seen in stages.values():
    assert seen["masters off, toolkit"] == 0
    assert seen["compute"].startswith("bfloat16 weights")
    assert seen["optimizer"] == seen["gradients"] == "float32"

# %% [markdown]
# ## The rule
#
# **Use `bf16` where the card has it (Ampere and later), `fp16` on a T4 or V100, `fp32` on a processor. Keep the fp32
# masters unless memory forces you.** `--precision auto` does that. The number for your own run: which share of the
# weights would AdamW's first step not move, if they were kept in bf16 alone? Move your learning rate.


# %%
weights = torch.cat([p.detach().flatten() for p in fresh().parameters() if p.dim() > 1]).cpu()[::97].double()


def updates_lost(learning_rate):
    rows = []
    for name in ("bf16", "fp16", "fp32"):
        before = stored(weights, *FORMATS[name])
        after = stored(before - learning_rate, *FORMATS[name])  # Adam's first step is the rate, or less
        rows.append((name, f"{(after == before).double().mean().item():.1%}"))
    return table(f"A step of {learning_rate:g} leaves unchanged", ("weights kept in", "of them"), rows)


RATES = [1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3]
tk.vary(updates_lost, start={"learning_rate": 2e-5}, learning_rate=RATES)

# %% [markdown]
# ## When it goes wrong
#
# - **The loss is NaN in the first steps of fp16**: an activation overflows. `first_overflow` names it. Use bf16.
# - **Every step is skipped**: the scale falls to its smallest value. The gradients themselves are not finite. The
#   toolkit stops after 20 skipped steps in a row.
# - **The loss of `bf16_pure` stops falling**: updates are rounded away. Use `bf16`.
# - **The precision is refused**: the sentence says who can. For fp16 on this machine:

# %%
machine, rows = tk.hardware(None if GPU else f"{RANKS}x cpu"), []
for word in ("ddp", "zero3", "fsdp"):
    try:
        tk.forecast("embedded", tk.Strategy(sharding=word, precision="fp16"), machine, ranks=RANKS)
        rows.append((word, "runs"))
    except tk.StrategyError as error:
        rows.append((word, str(error)))
table(f"precision fp16 on {machine.device.name}", ("sharding", "here"), rows)


# %% tags=["helper"]
def check(strategy, machine):
    """Refuse what the engine cannot train there."""
    tk.resolve("embedded", strategy, machine)


# %% [markdown]
# And elsewhere: move the card, the sharding and the precision.


# %%
def does_it_run(card, sharding, precision):
    check(tk.Strategy(sharding=sharding, precision=precision), f"2x {card}")  # a refusal is shown
    return f"{precision} runs under {sharding} on {card}."


CARDS, WORDS = ["cpu", "T4", "V100-32GB", "L4", "H100-80GB"], ["fp32", "fp16", "bf16", "bf16_pure", "fp8"]
start = {"card": "T4", "sharding": "fsdp", "precision": "bf16"}
tk.vary(does_it_run, card=CARDS, sharding=["ddp", "zero3", "fsdp"], precision=WORDS, start=start)

# %% tags=["check"]
able = [word for word, said in rows if said == "runs"]
assert ("zero3" in able) == ("fp16" in machine.device.dtypes)
assert ("fsdp" in able) == GPU

# %% [markdown]
# ## Exercises
#
# 1. Set the scale to 2^4 and train in fp16 again. How many steps are skipped, and what does the scale do?
# 2. Which power k is the first at which fp16 breaks in `widened(k)`? Guess from the largest activation first.
# 3. On eight ranks, which of ZeRO-2, ZeRO-3 and FSDP holds the fewest bytes of states in bf16? Work it out from the
#    bytes above, then ask the forecast.

# %% tags=["solution"]
_, again = train("fp16", 2.0**4)
skipped = sum(skip for *_, skip in again)
print(f"{skipped} of {len(again)} tries are skipped; the scale goes from 2^4 to 2^{math.log2(again[-1][1]):.0f}.")

# %% tags=["solution"]
largest = {}
probe = fresh().eval()
for layer in probe.model.layers:
    layer.mlp.up_proj.register_forward_hook(
        lambda _, __, out: largest.update(up=max(largest.get("up", 0), out.abs().max().item()))
    )
loss_in(probe, "fp32")
breaks = next((k for k in range(0, 40) if not math.isfinite(loss_in(widened(k), "fp16"))), None)
print(
    f"The largest output of up_proj is {largest['up']:.2g}: it reaches 65,504 at k = {math.log2(65_504 / largest['up']):.1f}."
)
print(f"The loss breaks at k = {breaks}.")

# %% tags=["solution"]
rows = []
for word in ("zero2", "zero3", "fsdp"):
    need = tk.forecast("embedded", tk.Strategy(sharding=word, precision="bf16"), "8x L4")
    states = sum(need.parts.get(part, 0) for part in ("parameters", "master", "optimizer"))
    rows.append((word, format_bytes(states)))
table("States of a rank, 8 ranks, bf16 (forecast)", ("sharding", "bytes"), rows)

# %% [markdown]
# ## Next
#
# [06_zero_and_fsdp](06_zero_and_fsdp.ipynb): which sharding fits your model, and what it costs.
