"""Benchmark of a decode layer's kernels run for seconds without a pause, in which the GPU's power is the limit.

An H200 may draw 700 W and lowers its clock to stay below. `measure` of the other benchmarks takes a fraction of a
second.
"""

import ctypes
import functools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_linear_unit.op import gated_linear_unit
from pallas_kernels.paged_attention.op import paged_attention
from pallas_kernels.paging import Pages, Scores
from pallas_kernels.timing import Row, floor, num_rotations, on_gpu

_SECONDS = 2.0
_BATCH_SECONDS = 0.1
_BLOCK_SIZE = 16
_NVML_CLOCK_SM = 1


class _Meter:
    """Context manager that records the first GPU's mean power, and its clock every 20 ms, by NVML."""

    watts: float
    megahertz: float

    def __enter__(self) -> "_Meter":
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._nvml.nvmlInit_v2()
        self._device = ctypes.c_void_p()
        self._nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device))
        self._clocks: list[int] = []
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._watch_clock)
        self._start, self._energy = time.perf_counter(), self._millijoules()
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.watts = (self._millijoules() - self._energy) / (time.perf_counter() - self._start) / 1e3
        self._is_over.set()
        self._watch.join()
        self.megahertz = statistics.median(self._clocks)

    def _millijoules(self) -> int:
        value = ctypes.c_ulonglong()
        self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(value))
        return value.value

    def _watch_clock(self) -> None:
        value = ctypes.c_uint()
        while not self._is_over.wait(0.02) or not self._clocks:
            self._nvml.nvmlDeviceGetClockInfo(self._device, _NVML_CLOCK_SM, ctypes.byref(value))
            self._clocks.append(value.value)


def sustained_rows() -> Iterator[Row]:
    """Yield rows for attention and the matmuls of a Llama-3-8B layer with 256 rows of 1,024 tokens, apart and
    together.
    """
    rows, context, hidden, inner, heads, kv_heads, head_dim = (
        (256, 1024, 4096, 14_336, 32, 8, 128) if on_gpu() else (4, 64, 64, 128, 4, 2, 16)
    )
    dtype = jnp.bfloat16 if on_gpu() else jnp.float32
    implementation = "sm90" if on_gpu() else "xla"
    num_pages = rows * context // _BLOCK_SIZE
    kv_bytes = 2 * rows * context * kv_heads * head_dim * jnp.dtype(dtype).itemsize

    def random(shape: Sequence[int], seed: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, dtype)

    pool = num_pages, kv_heads, _BLOCK_SIZE, head_dim
    pools = [(random(pool, 2 * n), random(pool, 2 * n + 1)) for n in range(num_rotations(kv_bytes))]
    shapes = (hidden, hidden), (2, inner, hidden), (hidden, inner), (hidden + 2 * kv_heads * head_dim, hidden)
    layers = [[random(shape, n) * dtype(shape[-1] ** -0.5) for shape in shapes] for n in range(3)]
    weight_bytes = sum(weight.nbytes for weight in layers[0])
    tables = jnp.asarray(np.random.default_rng(0).permutation(num_pages).reshape(rows, -1), jnp.int32)
    lens = jnp.full(rows, context, jnp.int32)

    def attention(x: jax.Array, pages: tuple[jax.Array, jax.Array], _: list[jax.Array]) -> jax.Array:
        q, scores = x.reshape(rows, 1, heads, head_dim), Scores(scale=head_dim**-0.5)
        run = functools.partial(paged_attention, scores=scores, implementation=implementation)
        return run(q, Pages(*pages), block_tables=tables, seq_lens=lens)[0].reshape(x.shape)

    def reading(x: jax.Array, pages: tuple[jax.Array, jax.Array], _: list[jax.Array]) -> jax.Array:
        keys, values = (page.astype(jnp.float32).sum() for page in pages)
        return x + (keys + values).astype(x.dtype)

    def matmuls(x: jax.Array, _: tuple[jax.Array, jax.Array], weights: list[jax.Array]) -> jax.Array:
        o, gate_up, down, qkv = weights
        x = gated_linear_unit(x @ o.T, gate_up, activation=jax.nn.silu, implementation=implementation) @ down.T
        return _normed(x @ qkv.T)[:, :hidden]

    def layer(x: jax.Array, pages: tuple[jax.Array, jax.Array], weights: list[jax.Array]) -> jax.Array:
        return matmuls(attention(x, pages, weights), pages, weights)

    cases: dict[str, tuple[Callable[..., jax.Array], int]] = {
        "attention": (attention, kv_bytes),
        "keys and values read by XLA": (reading, kv_bytes),
        "matmuls": (matmuls, weight_bytes),
        "attention and matmuls": (layer, kv_bytes + weight_bytes),
    }
    inputs = [(pools[n % len(pools)], layers[n % 3]) for n in range(12)]
    for name, (function, num_bytes) in cases.items():
        took, note = _sustain(function, inputs, random((rows, hidden), 7))
        yield Row(f"{rows} x {context}: {name}", implementation, took, floor(num_bytes=num_bytes), note)


def _normed(x: jax.Array) -> jax.Array:
    """Else values would die out or grow, and what multiplies zeros draws less."""
    square = jnp.mean(x.astype(jnp.float32) ** 2, axis=1, keepdims=True)
    return (x * jax.lax.rsqrt(square + 1e-6)).astype(x.dtype)


def _sustain(function: Callable[..., jax.Array], inputs: Sequence[Any], x: jax.Array) -> tuple[float, str]:
    """Return the microseconds of a call, and on a GPU the power that it drew."""

    @functools.partial(jax.jit, donate_argnums=0)
    def run(x: jax.Array, inputs: Sequence[Any]) -> jax.Array:
        for args in inputs:
            x = function(x, *args)
        return x

    def go_on(x: jax.Array, seconds: float, batch: int) -> tuple[jax.Array, float]:
        """Seconds a program, `batch` of which are under way at a time."""
        start, programs = time.perf_counter(), 0
        while (passed := time.perf_counter() - start) < seconds or not programs:
            for _ in range(batch):
                x = run(x, inputs)
            x.block_until_ready()
            programs += batch
        return x, passed / programs

    x = run(x, inputs).block_until_ready()  # compiled
    if not on_gpu():
        return go_on(x, 0, 1)[1] / len(inputs) * 1e6, ""
    x, each = go_on(x, _SECONDS / 4, 1)
    batch = max(1, int(_BATCH_SECONDS / each))
    x, _ = go_on(x, _SECONDS / 2, batch)  # until clock and temperature are those of work
    with _Meter() as meter:
        x, each = go_on(x, _SECONDS, batch)
    each /= len(inputs)
    return each * 1e6, f"{meter.watts:.0f} W, {meter.megahertz:.0f} MHz, {meter.watts * each * 1e3:.0f} mJ"
