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
# # A first request
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/)
#
# One prompt through the engine, what it leaves in the KV cache, and the same on another device mesh. Everything runs
# on the CPU, which we ask to look like eight devices. That has to be said before jax starts.

# %%
# On Colab, upload this notebook and the source as jaxserve.zip, or let SOURCE be "jaxserve[cuda12] @ git+https://..." with
# the address of a repository. Where the package is installed already, this cell does nothing.
import importlib.util

SOURCE = "./jaxserve.zip[cuda12]"
if importlib.util.find_spec("jaxserve") is None:
    get_ipython().run_line_magic("pip", f"install -q '{SOURCE}'")

# %%
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
from jaxserve import LLM, SamplingParams

MODEL = "scribe-2m"  # a built-in model of two million parameters
OPTIONS = dict(max_model_len=256, max_num_batched_tokens=64, kv_cache_memory=2**24, warmup="none", progress=False)

# %% [markdown]
# ## Generate
#
# `warmup="none"` compiles a step's shape when it is first needed: right for a notebook that uses few of them. By
# default the first ones are compiled at the start, and the others while requests run.

# %%
llm = LLM(MODEL, **OPTIONS)
greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
(story,) = llm.generate("It was a dark and stormy night", greedy, use_tqdm=False)
print(story.prompt, story.outputs[0].text)

# %% [markdown]
# ## Blocks
#
# Keys and values live in blocks of `block_size` positions, handed out as a sequence grows: the share of handed-out
# positions that hold a token stays close to one, however long the longest possible sequence is.

# %%
print(f"{llm.info.num_blocks} blocks of {llm.info.block_size} positions")
longer = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
snapshots = [llm.stats() for _ in llm.stream("It was a dark and stormy night", longer)]
fullest = max(snapshots, key=lambda stats: stats.kv_tokens_held)
print(f"at its fullest: {fullest.kv_tokens_held} tokens in {fullest.kv_positions_allocated} positions")

# %% [markdown]
# ## Prefix hits
#
# A full block of a prompt is kept under a hash of all tokens up to its end. A second prompt with the same beginning
# takes these blocks instead of computing them.

# %%
beginning = "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, "
for ending in ("I went to sea.", "I stayed at home.", "I bought a ship."):
    (output,) = llm.generate(beginning + ending, greedy, use_tqdm=False)
    print(f"{output.num_cached_tokens:3} of {len(output.prompt_token_ids)} prompt tokens were cached: {ending}")

block_size = llm.info.block_size
assert output.num_cached_tokens >= block_size and output.num_cached_tokens % block_size == 0

# %% [markdown]
# ## Another mesh
#
# A mesh names groups of devices; `layers/sharding.py` says which logical axes of the weights are split over which of
# its axes. Here the heads, the feed-forward width and the vocabulary are halved over `tensor`, and with the heads the
# KV cache. The text is the same.

# %%
llm.close()
mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
with LLM(MODEL, mesh=mesh, **OPTIONS) as split:
    (again,) = split.generate(story.prompt, greedy, use_tqdm=False)
    layouts = {(array.shape, str(array.sharding.spec)) for array in jax.live_arrays()}
    print(again.prompt, again.outputs[0].text)

for shape, spec in sorted(layouts):
    if "tensor" in spec:
        print(f"{shape!s:>24} {spec}")

assert again.outputs[0].token_ids == story.outputs[0].token_ids
