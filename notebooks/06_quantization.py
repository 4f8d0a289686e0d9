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
# # Fewer bits a weight
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/)
#
# A decode step reads all weights, so half the bytes are nearly half the time. What does it cost in quality? We give the
# same model its weights in 16, 8 and 4 bits, and measure bytes, how well it predicts a text, and tokens a second.

# %%
# On Colab, upload this notebook and the source as jaxserve.zip, or let SOURCE be "jaxserve[cuda12] @ git+https://..." with
# the address of a repository. Where the package is installed already, this cell does nothing.
import importlib.util

SOURCE = "./jaxserve.zip[cuda12]"
if importlib.util.find_spec("jaxserve") is None:
    get_ipython().run_line_magic("pip", f"install -q '{SOURCE}'")

# %%
import math
import time

import jax
from jaxserve import LLM, SamplingParams, inspect

# The largest built-in model: 15 million parameters, trained on old books and dialogues.
OPTIONS = dict(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64, kv_cache_memory=2**25, warmup="none",
               progress=False)
print(jax.devices()[0].device_kind)

# %% [markdown]
# ## How is a number rounded?
#
# Four bits are 16 values. One scale for a whole matrix would waste them: the largest number decides, and all small ones
# become zero. So a few numbers share a scale. Try both on random numbers before you look at the result.

# %%
import numpy as np

weights = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
weights[3, 5] = 12  # one outlier


def rounded(values, group):
    """Round to 4-bit integers, with a scale for each `group` values."""
    groups = values.reshape(-1, group)
    scale = np.maximum(abs(groups).max(axis=1, keepdims=True), 1e-9) / 7
    return (np.round(groups / scale) * scale).reshape(values.shape)


for group in (64 * 128, 128, 32):
    error = np.sqrt(np.mean((weights - rounded(weights, group)) ** 2))
    print(f"a scale for {group:5} values: error {error:.3f}, {4 + 16 / group:.2f} bits a value")

# %% [markdown]
# ## A yardstick
#
# How good is a model? Let it predict a text it has not seen, and add up the surprise, in bits. Divided by the bytes of
# the text that is a number that does not depend on the tokenizer: bits a byte. Lower is better; a compressor such as xz
# needs more than 2 for English.

# %%
TEXT = """The ferry left the harbour an hour late. A man in a grey coat stood by the rail and counted the lamps along the
shore, as he had done every evening since the spring. His sister had asked him to bring flour, candles and a letter from
the office, and he had forgotten the letter. When the boat turned into the wind he heard a dog bark somewhere below the
deck, and then a child laughing. He thought of the house, of the two chairs beside the stove, and of the long field
behind it where nothing would grow. Perhaps, he said to nobody, we should sell it and go to the city."""


def bits_per_byte(llm):
    """Measure how many bits a byte of TEXT costs."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate([TEXT], params, use_tqdm=False)
    chosen = zip(output.prompt_token_ids, output.prompt_logprobs)
    nats = -sum(entry[token].logprob for token, entry in chosen if entry is not None)
    return nats / math.log(2) / len(TEXT.encode())


def tokens_per_second(llm):
    """Measure the speed of four requests at once, after a first run that compiles."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for _ in range(2):
        start = time.perf_counter()
        outputs = llm.generate(["Once upon a time there was"] * 4, params, use_tqdm=False)
    return 4 * 16 / (time.perf_counter() - start), outputs[0].outputs[0].text


# %% [markdown]
# ## Four times the same model
#
# `quantization` rounds the matrices while they are loaded, and memory holds the codes. Which one do you expect to be the
# smallest, which the worst, and which the fastest? Kernels for Hopper GPUs multiply by the codes themselves. On a CPU, XLA
# multiplies 8-bit integers, but makes floats of FP8 and of 4 bits in every step: there the speeds say little.

# %%
results = {}
for name, more in {
    "bfloat16": dict(dtype="bfloat16"),
    "fp8": dict(dtype="bfloat16", quantization="fp8"),
    "int8": dict(dtype="bfloat16", quantization="int8"),
    "int4": dict(dtype="bfloat16", quantization="int4"),
}.items():
    with LLM("scribe-15m", **OPTIONS | more) as llm:
        held = inspect.weights(llm)
        results[name] = held, bits_per_byte(llm), *tokens_per_second(llm)

print("weights       bytes   bits a byte of text   tokens/s   continuation")
for name, (held, bits, speed, text) in results.items():
    print(f"{name:8} {held.total_bytes / 2**20:6.1f} MiB {bits:15.3f} {speed:15.0f}     {text[:44]!r}")

# %% [markdown]
# Eight bits cost almost nothing. Four bits cost more in a model this small: large ones have more redundancy. The embedding
# and the norms are not rounded, and here the embedding is a large part: the whole does not shrink to a quarter.

# %%
results["int4"][0]

# %% [markdown]
# The codes of a weight are an array with two values a byte; the scales are another one.
#
# ## What would it bring on a GPU?
#
# A step of few rows takes as long as reading the weights does. Take 8 billion parameters on an H200, which need not be
# here:

# %%
h200 = inspect.Speed.of("h200")
print(f"{h200.name} reads {h200.bytes_per_second / 1e12:.1f} TB a second")
for name, bits in (("bfloat16", 16), ("8 bits", 8), ("4 bits, a scale for 128", 4 + 16 / 128)):
    num_bytes = 8e9 * bits / 8
    print(f"{name:24} {num_bytes / 1e9:5.1f} GB, at least {num_bytes / h200.bytes_per_second * 1e3:.2f} ms a step")

# %% [markdown]
# The tables of `docs/quantization.md` have measured times, and all formats of checkpoints that can be read: GPTQ, AWQ,
# GGUF, NVFP4 and others.
#
# Try it: a text of your own, or a longer one. Which of the four does it hurt most?
