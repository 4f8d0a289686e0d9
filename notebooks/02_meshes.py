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
# # A model on a mesh of devices
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/)
#
# A model that is too large or too slow for one device is spread over several. Who holds which part? What do they have to
# tell each other? We give the same model 1, 2, 4 and 8 devices and look. Without eight GPUs, the CPU is made to look like
# eight devices: then bytes and messages are real, and only the times are not.

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

# Eight devices to play with: GPUs if there are that many, otherwise those of the CPU.
DEVICES = jax.devices() if len(jax.devices()) >= 8 else jax.devices("cpu")
print(len(DEVICES), "devices:", DEVICES[0].device_kind)

# %% [markdown]
# ## A model to spread
#
# `load_format="dummy"` fills a model with random numbers. That is enough here: where a number lives does not depend on
# its value. Eight query heads and four KV heads let eight devices share the work. A random model talks nonsense, but
# the same nonsense each time.

# %%
SHAPE = dict(hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
             intermediate_size=512)
OPTIONS = dict(load_format="dummy", hf_overrides=SHAPE, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=16,
               kv_cache_memory=2**22, warmup="none", progress=False)
PROMPT = list(range(3, 19))
PARAMS = SamplingParams(temperature=1, seed=7, max_tokens=8, ignore_eos=True)  # random, but the same each time


def start(shape, axes=("tensor",), **more):
    """Start the model on the first devices, as a mesh of this shape with these axes."""
    count = 1
    for size in shape:
        count *= size
    return LLM("scribe-2m", mesh=jax.make_mesh(shape, axes, devices=DEVICES[:count]), **OPTIONS | more)


# %% [markdown]
# ## One device
#
# `inspect.weights` lists every weight: its shape, and on which devices its parts are. Weights of several layers that
# look alike share a line. Which one is the largest?

# %%
one = start((1,))
tokens = {1: one.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids}
weights = {1: inspect.weights(one)}
weights[1]

# %% [markdown]
# ## Two devices
#
# A mesh is an array of devices whose axes have names. This one has two devices along the axis `tensor`. Before you run
# the cell: which weights would you cut in two, and along which of their axes?

# %%
two = start((2,))
tokens[2] = two.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids
weights[2] = inspect.weights(two)
weights[2]

# %% [markdown]
# Each device has half of the heads, half of the feed-forward width, and half of the vocabulary. Only the norms are on
# both: a few hundred numbers are not worth a message. Colors are devices; two stripes mean that two devices have a copy.

# %%
weights[2]["qkv"].draw()

# %% [markdown]
# The axes of `qkv` are KV heads, members (the queries of a head, its key and its value), values of a head, and inputs.
# JAX draws the same; it knows arrays of at most two axes.

# %%
weights[2]["down"].visualize()

# %% [markdown]
# ## What do they tell each other?
#
# Each device multiplies by its own half of the heads. The output projection then adds up over heads, so each device has
# only a part of each sum. How many times per layer must the devices add up their parts? `inspect.step` compiles a step
# and reads the answer off the program.

# %%
speed = inspect.Speed.of("h200")
step = inspect.step(two, rows=8, context=32, speed=speed)
for collective in step.collectives:
    print(collective)

# %% [markdown]
# Twice a layer: behind attention and behind the feed-forward. One more all-reduce is for the embedding, whose rows are
# spread over the devices, and an all-gather collects the logits. The bytes do not depend on the size of the weights,
# only on the tokens of the step. This is why tensor parallelism works.
#
# In a ring, a device of n sends `2 (n - 1) / n` of an all-reduce's bytes. With more devices that hardly grows. What
# shrinks is the work of each device, so messages take a larger and larger part of the time.

# %% [markdown]
# ## Four and eight
#
# There are four KV heads. What happens with eight devices?

# %%
steps = {1: inspect.step(one, rows=8, context=32, speed=speed), 2: inspect.step(two, rows=8, context=32, speed=speed)}
caches = {1: inspect.kv_cache(one), 2: inspect.kv_cache(two)}
one.close()
two.close()
for count in (4, 8):
    with start((count,)) as llm:
        tokens[count] = llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids
        weights[count], caches[count] = inspect.weights(llm), inspect.kv_cache(llm)
        steps[count] = inspect.step(llm, rows=8, context=32, speed=speed)

print("devices  weights on each  KV of a token on each  collectives  a device sends  floor on H200s")
for count in (1, 2, 4, 8):
    kv = caches[count].bytes_per_device / caches[count].groups[0].shape[0] / 16
    number = sum(each.count for each in steps[count].collectives)
    print(f"{count:7} {weights[count].bytes_per_device / 2**20:12.2f} MiB {kv:16.0f} bytes {number:12} "
          f"{steps[count].sent_bytes / 1024:11.1f} KiB {steps[count].roofline.floor * 1e6:10.2f} us")

# %% [markdown]
# The floor is counted: what a device reads, at the speed of an H200. `measure=True` times steps, which says little where
# devices share the cores of a CPU. With eight devices the weights of a device are halved once
# more, but not the KV: two devices hold a copy of each KV head, each with half of its queries.

# %%
weights[8]["qkv"].draw()

# %% [markdown]
# And the text? Splitting a sum changes the order of its additions, so the last bits may differ. The tokens do not.

# %%
for count, ids in tokens.items():
    print(count, ids)
assert len({tuple(ids) for ids in tokens.values()}) == 1

# %% [markdown]
# ## Change a rule
#
# Which axis is split over which axis of the mesh is one table. A weight declares names for its axes, such as "heads";
# the table maps them to the mesh.

# %%
from unittest.mock import patch

from jaxserve.layers.sharding import MESH_AXES_OF

MESH_AXES_OF

# %% [markdown]
# Suppose that each device kept the whole vocabulary. What gets larger? Which messages disappear?

# %%
with patch.dict(MESH_AXES_OF, vocab=()), start((2,)) as llm:
    whole = inspect.weights(llm)
    same = llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids == tokens[1]
    messages = inspect.step(llm, rows=8, context=32, speed=speed)

print(f"weights on each device: {weights[2].bytes_per_device / 2**20:.2f} -> {whole.bytes_per_device / 2**20:.2f} MiB")
print(f"a device sends: {steps[2].sent_bytes / 1024:.1f} -> {messages.sent_bytes / 1024:.1f} KiB a step")
print("same tokens:", same)
for collective in messages.collectives:
    print(collective)

# %% [markdown]
# The gather of the logits was most of what devices sent, since a row of logits is much longer than a row of hidden
# values. But each device now reads the whole LM head in every step. On a GPU reading it would cost more than sending.

# %% [markdown]
# ## What does not fit
#
# Three devices cannot share eight heads, an axis whose name no rule has would repeat all work, and two layers are not
# enough for four stages. Nothing is rounded or padded in silence: the error says what would fit.

# %%
from jaxserve.errors import ConfigError

for shape, axes in (((3,), ("tensor",)), ((2,), ("model",)), ((4,), ("pipe",))):
    try:
        start(shape, axes)
    except ConfigError as error:
        print(f"{axes} {shape}: {error}\n")

# %% [markdown]
# ## Whole experts
#
# A mixture of experts has many feed-forwards, of which each token uses a few. On an axis named `expert` each device has
# whole experts instead of a shard of each. With both axes, an expert is on one row of the mesh and split over it, and
# everything else is split over all devices. Where are the experts, and where is attention?

# %%
EXPERTS = dict(hf_overrides=SHAPE | dict(model_type="qwen3_moe", num_hidden_layers=1, num_experts=8, num_experts_per_tok=2,
                                         moe_intermediate_size=128, norm_topk_prob=True, mlp_only_layers=[]))
texts = {}
for shape, axes in (((4,), ("tensor",)), ((4,), ("expert",)), ((2, 2), ("expert", "tensor"))):
    with start(shape, axes, **EXPERTS) as llm:
        texts[shape, axes] = llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids
        spread = inspect.weights(llm)
        print(f"{axes} {shape}: {spread.bytes_per_device / 2**20:.2f} MiB on each device")
assert len({tuple(ids) for ids in texts.values()}) == 1
spread["experts.down"].draw()

# %% [markdown]
# The text is the same each time. What devices send does not change either: each has a partial sum for each token,
# of whole experts or of shards. What changes is who has work: if a token's two experts are on one device, the others
# have nothing to do for it.

# %% [markdown]
# ## Tokens split over devices
#
# So far each device had all tokens. Along an axis named `data` each has a part of them: it normalizes and projects its
# own tokens only, and each expert is on one device. An expert's device then needs tokens of the others. Before you run the
# cell: what has to be sent so that it gets them, and what afterwards?

# %%
with start((2, 2), ("data", "expert"), **EXPERTS) as llm:
    assert llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids == texts[(4,), ("expert",)]
    spread = inspect.weights(llm)
    divided = inspect.step(llm, rows=8, context=32, speed=speed)

for collective in divided.collectives:
    print(collective)
print("copies of attention's weights:", spread["qkv"].num_copies, "- of experts:", spread["experts.down"].num_copies)

# %% [markdown]
# Dispatch gathers the tokens where the experts are, combine scatters the sums back. Attention does not divide by tokens,
# because a token attends to others: two all-to-alls pass from tokens to heads and back. The price is in the last
# line: weights of attention are whole along `data`, so there are two copies of them.

# %% [markdown]
# ## Stages
#
# Along an axis named `pipe` each device has whole layers: a stage. Between stages only the vectors of tokens are
# sent. But one request's next token needs all stages, one after the other. What do the others do meanwhile? The engine
# has as many steps in flight as there are stages, each with a part of the requests. How long do stages wait
# all the same? A stage takes about as long as it reads its weights, except the embedding, of which it reads a row a token.

# %%
from jaxserve.inspect.bubble import simulate

with start((2,), ("pipe",)) as llm:
    assert llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids == tokens[1]
    first, last = inspect.weights(llm), inspect.weights(llm, stage=1)
    print(first)

read = first.bytes_per_device - first["embed"].bytes_per_device, last.bytes_per_device
print(f"\nstages read {read[0] / 2**20:.2f} and {read[1] / 2**20:.2f} MiB a step")
for count in (1, 2):
    print(f"{count} in flight: stages wait {simulate(read, num_in_flight=count):.0%} of the time")

# %% [markdown]
# The weights are those of the first stage; the other has a copy of the embedding as its LM head. With two steps in flight
# the faster stage waits for the slower one, with one in flight each waits for the other. On real devices
# `inspect.bubble(llm, rows=8)` times the stages, and measures how long they wait.

# %% [markdown]
# ## A mesh of your own
#
# Any devices in any order will do. Here are the last two.

# %%
mesh = jax.make_mesh((2,), ("tensor",), devices=DEVICES[-2:][::-1])
with LLM("scribe-2m", mesh=mesh, **OPTIONS) as llm:
    print([device.id for device in inspect.weights(llm).mesh.devices.flat])
    assert llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids == tokens[1]

# %% [markdown]
# Try it: make the table's "ffn" whole, and predict which of the all-reduces goes away. Then look.
