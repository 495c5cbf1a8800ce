# %% [markdown]
# # Where the memory goes
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/accelerate-toolkit/blob/main/notebooks/02_where_the_memory_goes.ipynb)

# %%
# Installs the toolkit where it is missing, as on Colab; elsewhere it does nothing.
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("toolkit") is None:
    wanted = "accelerate-toolkit[all] @ git+https://github.com/OWNER/accelerate-toolkit"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", wanted], check=True)

# %%
import toolkit as tk

tk.here()

# %% tags=["parameters"]
GPU = tk.hardware().device.kind == "cuda"
STEPS = 20 if GPU else 4  # more where a GPU is found

# %%
assert STEPS > 0

# %% [markdown]
# ## Exercises
#
# 1. One.
# 2. Two.
# 3. Three.
