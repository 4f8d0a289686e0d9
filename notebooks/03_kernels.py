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
# # Write a kernel, without a GPU
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/)
#
# Most of a GPU's speed is decided by where numbers are: in registers, in shared memory, or far away. A kernel says so by
# hand. This notebook writes two small kernels in Pallas, JAX's language for kernels, for a Hopper GPU (H100, H200). No GPU
# is needed: they are interpreted, searched for races, and compiled by NVIDIA's compiler for an H200 that is not there.

# %%
# On Colab, upload this notebook and the source as jaxserve.zip, or let SOURCE be "jaxserve[cuda12] @ git+https://..." with
# the address of a repository. Where the package is installed already, this cell does nothing.
import importlib.util

SOURCE = "./jaxserve.zip[cuda12]"
if importlib.util.find_spec("jaxserve") is None:
    get_ipython().run_line_magic("pip", f"install -q '{SOURCE}'")

# %%
import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"  # kernels are interpreted here, on whatever there is
sys.path.append(str(pathlib.Path(sys.prefix) / "deviceless"))  # where `make deviceless` puts the compiler

import contextlib
import functools
import io

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.deviceless import H200, compile_for_h200, is_available

WARPGROUP = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)

# %% [markdown]
# ## A softmax that reads each number once
#
# A softmax needs the maximum of a row, then the sum of exponentials, then a division. Written with arrays that is three
# passes over the row. In a kernel the row can stay in registers: one read, one write. Here a warpgroup (128 threads)
# takes a row. How many numbers does each thread hold if a row has 2,048?

# %%
def softmax(x):
    rows, size = x.shape
    in_registers = plgpu.Layout.WG_STRIDED((size,), vec_size=min(4, size // 128))

    def body(x_ref, out_ref):
        row = lax.axis_index("row")
        values = plgpu.load(x_ref.at[row], layout=in_registers)  # the only read
        powers = jnp.exp(values - jnp.max(values))
        out_ref[row] = powers / jnp.sum(powers)  # the only write

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=shape, grid=(rows,), grid_names=("row",), kernel_name="softmax",
                        compiler_params=WARPGROUP)(x)


# %% [markdown]
# ## Is it right?
#
# The interpreter runs each thread block of the kernel on the CPU and keeps a clock for every thread. If two threads use
# the same memory, one of them writes, and no barrier puts them in order, it prints that there is a race. We compare with
# plain JAX, the reference.

# %%
def interpret(function, *args):
    """Return the result of a kernel, and what the race detector has printed."""
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=H200)),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
    ):
        result = jax.block_until_ready(function(*args))
    return result, printed.getvalue()


x = jax.random.normal(jax.random.key(0), (2, 256))
got, races = interpret(softmax, x)
print("largest difference from jax.nn.softmax:", float(abs(got - jax.nn.softmax(x)).max()))
print("races:", races or "none")
assert not races

# %% [markdown]
# ## A handover, and a race
#
# Kernels are fast when different threads do different things: some fetch the next tile while others multiply. They hand
# over through shared memory. Here warpgroup 0 doubles numbers and leaves them in shared memory, and warpgroup 1 adds
# one. What could go wrong without the barrier?

# %%
def handover(x, waits):
    [size] = x.shape
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=size // 128)

    def body(x_ref, out_ref, shared, ready):
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            shared[...] = plgpu.load(x_ref, layout=layout) * 2
            if waits:
                plgpu.barrier_arrive(ready)

        @pl.when(warpgroup == 1)
        def _():
            if waits:
                plgpu.barrier_wait(ready)
            out_ref[...] = plgpu.load(shared, layout=layout) + 1

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), num_threads=2, thread_name="warpgroup",
                        scratch_types=[plgpu.SMEM((size,), x.dtype), plgpu.Barrier()], kernel_name="handover",
                        compiler_params=WARPGROUP)(x)


numbers = jnp.arange(128, dtype=jnp.float32)
for waits in (True, False):
    got, races = interpret(functools.partial(handover, waits=waits), numbers)
    is_right = bool((got == numbers * 2 + 1).all())
    print(f"with a barrier: {waits}; right: {is_right}; {races.splitlines()[0] if races else 'no race'}")
assert races

# %% [markdown]
# Without the barrier the second warpgroup may read before the first has written. On a GPU this may work a thousand times
# and then fail. The detector does not wait for bad luck: it reports that nothing orders the two.
#
# ## What does the compiler say?
#
# NVIDIA's compiler runs without a GPU. It says how many registers a thread needs, and how many bytes it spills: what
# does not fit into registers goes to memory and back, which is what we wanted to avoid. A thread has at most 255
# registers. Make rows longer until they do not fit.

# %%
if is_available():
    for size in (512, 2048, 8192, 16384, 32768):
        program = compile_for_h200(softmax, jax.ShapeDtypeStruct((64, size), jnp.float32))
        [kernel] = program.kernels
        print(f"rows of {size:6}: {size // 128:4} numbers a thread, {kernel.num_registers:4} registers, "
              f"{kernel.spill_bytes:6} bytes spilled, {program.num_launches} launch")
else:
    print("the compiler is not here: in a clone, `make deviceless` installs it")

# %% [markdown]
# Up to the limit a longer row costs registers only. Beyond it, numbers are spilled, and a kernel should keep the row in
# shared memory, or split it over several warpgroups.
#
# ## The kernels of this package
#
# They are made in the same way: `pallas_kernels/<operation>/` has a reference in plain JAX, a kernel, and notes on what
# was measured. The tests interpret each kernel with race detection, and compile it for an H200 to look for spills, in CI,
# without a GPU. One of them, for example:

# %%
from pallas_kernels.add_rms_norm.sm90 import add_rms_norm_sm90

norm = functools.partial(add_rms_norm_sm90, update_gain=None, eps=1e-6, update_scale=1.0)
rows = jax.random.normal(jax.random.key(1), (2, 256), jnp.bfloat16)
gain = jnp.ones((256,), jnp.bfloat16)
(total, normed), races = interpret(norm, rows, rows, gain)
print("sum:", bool((total == rows + rows).all()), "- races:", races or "none")
if is_available():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 4096), (64, 4096), (4096,))]
    print(compile_for_h200(norm, *shapes).kernels)

# %% [markdown]
# Try it: let each warpgroup of `softmax` take two rows (`num_threads=2`), or move the barrier before the write.
