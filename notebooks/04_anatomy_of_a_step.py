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
# # Anatomy of a step
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/)
#
# A step takes the next token of every running request. It is one function of arrays. We follow it from Python to the
# compiled program, count what it has to read and to multiply, and compare that with the clock.

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

jax.config.update("jax_pprint_use_color", False)
llm = LLM("scribe-2m", max_model_len=256, max_num_seqs=16, max_num_batched_tokens=64, kv_cache_memory=2**24,
          warmup="none", progress=False)
print(llm.info.device, "-", llm.info.num_blocks, "KV blocks")

# %% [markdown]
# ## What goes in
#
# A step has four arguments that stay on the device: weights, KV cache, slots (a row for each running request: block
# table, last token, sampling parameters), and buffers for other devices if there are any. The fifth is the plan, packed
# into one array of integers. How large is it?

# %%
engine = llm.client.engine  # for looking only: it belongs to its own thread
model = engine.runner.model
for bucket in model.buckets:
    print(f"{bucket.num_tokens:4} tokens, {bucket.num_rows:3} rows: {bucket.packed_size * 4:6} bytes are uploaded")

# %% [markdown]
# These are all sizes of steps that will ever be compiled. A step with 5 tokens runs in the smallest that holds it. XLA
# compiles for fixed shapes, so a few sizes compiled early are better than the right size compiled while somebody waits.

# %% [markdown]
# ## What jax sees
#
# `inspect.step` takes the program of a step apart. The jaxpr is the Python function after tracing: no loops over
# requests, no Python left, only operations on arrays of known shapes.

# %%
speed = inspect.Speed.measure(num_bytes=llm.info.weight_bytes)
step = inspect.step(llm, rows=8, context=64, speed=speed)
lines = str(step.jaxpr).splitlines()
print(len(lines), "lines of jaxpr, for example")
print("\n".join(line[:110] for line in lines if "dot_general" in line)[:1000])

# %% [markdown]
# Count them: how many kinds of matrix products does a layer have? (The query, key and value projections are one
# weight; so are gate and up.)

# %%
import collections
import re

operations = collections.Counter(re.findall(r"= ([a-z_]+)\[", str(step.jaxpr)))
operations.most_common(12)

# %% [markdown]
# ## What XLA makes of it
#
# XLA fuses operations, chooses layouts and plans memory. Names of the model survive as metadata, which is how profiles
# and `inspect` know where an instruction comes from.

# %%
instructions = collections.Counter(re.findall(r"= \S+ ([a-z-]+)\(", step.hlo))
print(instructions.most_common(8))
print(next(line.strip()[:200] for line in step.hlo.splitlines() if "mlp" in line and "dot" in line))

# %% [markdown]
# The whole report: memory and cost of each program, collectives (none on one device), which kernels run, and why no
# faster ones do.

# %%
step

# %% [markdown]
# "Updated in place" are the KV cache and the slots. They are donated: the output takes the memory of the input. Without
# that, each step would copy the whole cache.

# %% [markdown]
# ## How long must it take?
#
# A step reads every weight once, whether it computes one token or sixty-four. So for few rows the memory is the limit,
# and more rows are almost free. At how many rows do the products take as long as the reading? The speeds were measured on
# this device, on a matrix as large as the weights: a CPU keeps small ones in its caches.

# %%
print("rows   read weights   read KV   multiply   bound")
for rows in (1, 2, 4, 8, 16):
    floor = inspect.step(llm, rows=rows, context=64, speed=speed).roofline
    print(f"{rows:4} {floor.weight_bytes / speed.bytes_per_second * 1e3:11.3f} ms {floor.kv_bytes / speed.bytes_per_second * 1e3:6.3f} ms "
          f"{floor.compute_seconds * 1e3:7.3f} ms   {floor.bound}")

balance = speed.flops_per_second / speed.bytes_per_second
print(f"\nthis device computes {balance:.1f} operations in the time in which it reads a byte;")
print(f"a row needs 2 for each weight of {model.dtype.itemsize} bytes: even at about {balance * model.dtype.itemsize / 2:.0f} rows")

# %% [markdown]
# An H200 computes about 200 operations a byte. There, in 16 bits, the crossing is near 200 rows.
#
# ## How long does it take?
#
# `measure=True` runs eight requests and takes the median time of a step.

# %%
measured = inspect.step(llm, rows=8, context=64, speed=speed, measure=True).roofline
measured

# %% [markdown]
# How close it comes depends on the machine. Each operation has a fixed cost too, and in a model of two million parameters
# the operations are tiny. The more there is to read, the less that matters: on a GPU, large models come close.

# %% [markdown]
# ## Where does the rest go?
#
# The engine keeps the seconds that it spends on the host: planning, packing, launching, waiting for the device, handling
# tokens. A step is started before the last one is read, so these overlap with the device's work.

# %%
before = engine.seconds | engine.runner.seconds
greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
llm.generate(["Once upon a time"] * 8, greedy, use_tqdm=False)
after = engine.seconds | engine.runner.seconds
for name in ("schedule", "build", "dispatch", "wait", "update", "total"):
    print(f"{name:10} {(after[name] - before[name]) * 1e3:7.1f} ms")

# %% [markdown]
# For a look inside the device, record a profile. It opens in Perfetto (ui.perfetto.dev) or TensorBoard. On a GPU it
# shows each kernel, under the names of the model's parts.

# %%
import pathlib
import tempfile

folder = tempfile.mkdtemp()
llm.client.start_profile(folder)
llm.generate(["Once upon a time"] * 8, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
llm.client.stop_profile()
for path in pathlib.Path(folder).rglob("*.pb"):
    print(path.name.split(".", 1)[-1], "recorded:", path.stat().st_size > 0)

# %%
from jax.profiler import ProfileData

[path] = pathlib.Path(folder).rglob("*.xplane.pb")
events = collections.Counter()
for plane in ProfileData.from_file(str(path)).planes:
    for line in plane.lines:
        for event in line.events:
            events[re.sub(r"[.\d]+$", "", event.name)] += event.duration_ns
for name, nanoseconds in [each for each in events.most_common(60) if re.search("dot|fusion|gemm|mosaic|reduce", each[0])][:8]:
    print(f"{nanoseconds / 1e6:8.2f} ms  {name[:80]}")

# %% [markdown]
# Try it: 64 rows, a context of 200, or a prompt's step (`inspect.step(llm, tokens=64)`). Which part of the roofline
# moves?

# %%
llm.close()
