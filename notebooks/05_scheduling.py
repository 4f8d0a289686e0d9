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
# # Who runs next
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/)
#
# A server gets requests of all lengths at all times, and one device to run them on. In each step the scheduler decides
# who computes how many tokens. `inspect.timeline` records these decisions and draws them: a row is a request, a column is
# a step.

# %%
# On Colab, upload this notebook and the source as jaxserve.zip, or let SOURCE be "jaxserve[cuda12] @ git+https://..." with
# the address of a repository. Where the package is installed already, this cell does nothing.
import importlib.util

SOURCE = "./jaxserve.zip[cuda12]"
if importlib.util.find_spec("jaxserve") is None:
    get_ipython().run_line_magic("pip", f"install -q '{SOURCE}'")

# %%
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before jax starts

import jax
from jaxserve import LLM, SamplingParams, inspect

OPTIONS = dict(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=32, warmup="none", progress=False)
STORY = "It was a dark and stormy night, and the rain fell in torrents upon the roofs of the old town. "


def greedy(*lengths):
    """For each request, so many tokens."""
    return [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]


# %% [markdown]
# ## A static batch
#
# The simplest way: take four requests, run them together until the last one is done, take the next four. Six requests
# want 4 to 24 tokens each. Where is time wasted?

# %%
LENGTHS = (4, 24, 8, 6, 20, 5)
PROMPTS = [f"{name} went into the garden" for name in ("Alice", "Bob", "Carol", "Dan", "Eve", "Fay")]

with LLM("scribe-2m", scheduler="static", kv_cache_memory=2**21, **OPTIONS) as llm:
    with inspect.timeline(llm) as static:
        llm.generate(PROMPTS, greedy(*LENGTHS), use_tqdm=False)
static

# %% [markdown]
# The requests at the bottom wait although rows are free: the batch is not over. Red in the lower part is padding, that
# is, tokens which are computed for nobody. The seconds say little here: each program is compiled in the step that first
# needs it.

# %% [markdown]
# ## Continuous batching
#
# Now decide anew in each step. Who has finished leaves at once, and who waits takes the place.

# %%
llm = LLM("scribe-2m", kv_cache_memory=2**20, **OPTIONS)
with inspect.timeline(llm) as continuous:
    llm.generate(PROMPTS, greedy(*LENGTHS), use_tqdm=False)
continuous

# %%
print(f"steps: {len(static.steps)} static, {len(continuous.steps)} continuous")
assert len(continuous.steps) < len(static.steps)

# %% [markdown]
# ## Prompts in chunks
#
# A step may compute at most `max_num_batched_tokens` tokens, here 32. A long prompt would keep everybody else waiting
# if it had to be computed at once. So it is cut into chunks, and requests that are already talking get their token
# first. First a short request, then one with a prompt of about a hundred tokens:

# %%
llm.reset_prefix_cache()
with inspect.timeline(llm) as chunked:
    llm.generate(["Hello", STORY * 4], greedy(12, 8), use_tqdm=False)
chunked

# %%
for row in chunked.steps[1].rows:
    print(f"tokens {row.start} to {row.start + row.num_tokens - 1}")

# %% [markdown]
# The first row of that step is one token of the short request. The chunk takes what is left of the 32.

# %% [markdown]
# ## Prefixes in common
#
# Keys and values of a token depend only on the tokens before it. If two prompts begin alike, their first blocks are the
# same. The first request computes them. What do the others have to compute?

# %%
llm.reset_prefix_cache()
shared = [STORY + ending for ending in ("Then a dog barked.", "Nobody slept.", "The mayor was pleased.")]
with inspect.timeline(llm) as prefixes:
    llm.generate(shared, greedy(8, 8, 8), use_tqdm=False)
prefixes

# %%
for number, request in enumerate(prefixes.requests):
    print(f"request {number}: {request.num_computed_tokens} tokens computed, {request.num_cached_tokens} taken")
assert prefixes.num_cached_tokens > 0

# %% [markdown]
# Only full blocks (16 positions) are shared. Blocks stay in the cache after their request is gone, until someone needs
# the room: run the last cell but one again without the reset, and the first request takes its prefix too.

# %% [markdown]
# ## Not enough room
#
# KV blocks are handed out as sequences grow. Nobody reserves room for the longest possible answer, so blocks may run
# out. Then the request that came last gives its blocks back and is computed again later: it is preempted. Four requests
# grow to about 90 tokens, that is six blocks each, but there are only 16 blocks.

# %%
llm.close()
with LLM("scribe-2m", kv_cache_memory=16 * 16 * 3072, enable_prefix_caching=False, **OPTIONS) as llm:
    print(llm.info.num_blocks, "blocks")
    with inspect.timeline(llm) as crowded:
        outputs = llm.generate(PROMPTS[:4], greedy(80, 80, 80, 80), use_tqdm=False)
crowded

# %%
print(crowded)
assert crowded.num_preemptions > 0
assert [len(output.outputs[0].token_ids) for output in outputs] == [80] * 4

# %% [markdown]
# No text is lost: a preempted request keeps its tokens, and its KV is computed again in one go, prompt and answer
# together. That costs some steps of many tokens. Look at the lower part of the figure for them.
#
# Try it: `scheduling_policy="priority"`, or a larger `max_num_batched_tokens`.
