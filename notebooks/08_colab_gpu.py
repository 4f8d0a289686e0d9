# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A real model on a Colab GPU
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/)
#
# Colab lends a T4, an L4 or an A100. What runs there? This notebook looks at the device, chooses a model that fits, loads
# it by its name on the Hugging Face hub, and measures. Without a GPU, or without the hub, it takes a small built-in model,
# so that every cell runs anywhere. In Colab's menu, Runtime > Change runtime type chooses the GPU.

# %%
# On Colab, upload this notebook and the source as jaxserve.zip, or let SOURCE be "jaxserve[cuda12] @ git+https://..." with
# the address of a repository. Where the package is installed already, this cell does nothing.
import importlib.util

SOURCE = "./jaxserve.zip[cuda12]"
if importlib.util.find_spec("jaxserve") is None:
    get_ipython().run_line_magic("pip", f"install -q '{SOURCE}'")

# %%
import os
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # before jax looks for a GPU, of which it takes 3/4 else

import jax
from jaxserve import LLM, SamplingParams, inspect
from jaxserve.errors import StartupError

device = jax.devices()[0]
IS_GPU = device.platform == "gpu"
memory = device.memory_stats()["bytes_limit"] if IS_GPU else 2**30
print(device.device_kind, f"- {memory / 2**30:.1f} GiB", "" if IS_GPU else "assumed")

# %% [markdown]
# ## What can this device do?
#
# | GPU | memory | reads | 16-bit type | kernels |
# |---|---|---|---|---|
# | T4 | 15 GiB | 0.32 TB/s | float16 (bfloat16 is slow) | plain XLA |
# | L4 | 22 GiB | 0.30 TB/s | bfloat16 | plain XLA |
# | A100 | 40 or 80 GiB | 1.6 or 2.0 TB/s | bfloat16 | plain XLA |
# | H100, H200 | 80, 141 GiB | 3.4, 4.8 TB/s | bfloat16 | those of this package |
#
# The type is chosen by itself. Only Hopper GPUs have kernels of their own here; on others the same programs run in plain
# XLA, which is slower, and quantized weights become 16-bit numbers when they are loaded. So on a T4 count two bytes a
# parameter.
#
# The time to download counts, too: 8 billion parameters are 16 GB. To try a smaller model, or another one, put its name
# first.

# %%
CANDIDATES = {  # parameters in billions
    "Qwen/Qwen3-8B": 8.2,
    "Qwen/Qwen3-4B": 4.0,
    "Qwen/Qwen3-1.7B": 1.7,
    "Qwen/Qwen3-0.6B": 0.6,
}
share = 0.7  # of the memory for weights; the rest is for KV and for steps
fits = [name for name, billions in CANDIDATES.items() if 2e9 * billions < share * memory]
BUILT_IN = "scribe-2m"  # needs no download
print("would fit:", ", ".join(fits) or f"none of them, {BUILT_IN} is taken")

# %% [markdown]
# ## Load
#
# A name of the hub is downloaded once. `max_model_len` bounds a request; KV blocks take what memory is left. On a GPU,
# `warmup="background"` compiles the first programs, takes requests, and compiles the others meanwhile.

# %%
start = time.perf_counter()
for MODEL in [*fits[:1], BUILT_IN]:
    IS_LARGE = MODEL != BUILT_IN
    sizes = {"max_model_len": 4096, "max_num_seqs": 32, "max_num_batched_tokens": 1024}
    small = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory": 2**23}
    try:
        llm = LLM(MODEL, **(sizes if IS_LARGE else small), warmup="background" if IS_GPU else "none", progress=False)
        break
    except StartupError as error:
        if not IS_LARGE:
            raise
        print(f"{MODEL} does not start, {BUILT_IN} is taken instead: {error}")
print(f"{MODEL} is ready after {time.perf_counter() - start:.0f} s")

# %% [markdown]
# ## Where did the memory go?

# %%
print(f"weights   {llm.info.total_weight_bytes / 2**20:9.1f} MiB")
print(f"KV cache  {llm.info.kv_cache_bytes / 2**20:9.1f} MiB: {llm.info.num_blocks} blocks of {llm.info.block_size} tokens")
print(f"a token   {llm.info.kv_bytes(1) / 2**10:9.1f} KiB of KV")
print(f"at once   {llm.info.num_full_requests:6} requests of {llm.info.max_model_len} tokens")
inspect.weights(llm)

# %% [markdown]
# ## Ask
#
# A chat goes through the model's own template; Qwen3's can leave out the thoughts. Without SamplingParams, those that the
# model's authors recommend apply; with them, their own defaults do.

# %%
[answer] = llm.chat([{"role": "user", "content": "Why is the sky blue? One sentence."}],
                    SamplingParams(max_tokens=200 if IS_LARGE else 24, temperature=0),
                    chat_template_kwargs={"enable_thinking": False}, use_tqdm=False)
print(answer.outputs[0].text)

# %% [markdown]
# ## How fast, alone and together?
#
# One request gets a token a step. Eight requests get eight, and the step takes hardly longer, because it reads the same
# weights. How much faster will eight be in all?

# %%
def tokens_per_second(count, length):
    """Measure so many requests at once, after a run that compiles."""
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    for _ in range(2):
        start = time.perf_counter()
        llm.generate(["The history of the sea is"] * count, params, use_tqdm=False)
    return count * length / (time.perf_counter() - start)


for count in (1, 8):
    print(f"{count} at once: {tokens_per_second(count, 64 if IS_GPU else 16):8.1f} tokens/s")

# %% [markdown]
# ## How fast could it be?
#
# The roofline compares with what this very device reads and multiplies, measured here.

# %%
roofline = inspect.step(llm, rows=8, context=64, measure=True).roofline
print(f"at least {1e3 * roofline.floor:.2f} ms a step, {1e3 * roofline.measured:.2f} ms measured")
roofline

# %% [markdown]
# ## Which kernels ran?

# %%
for line in inspect.step(llm, rows=8).paths[:4]:
    print(line)

# %%
llm.close()

# %% [markdown]
# If memory runs out: a smaller model, a smaller `max_model_len`, or fewer `max_num_seqs`. If a model is refused, the
# error names what is missing; `jaxserve models NAME` says before the download what a model needs.
