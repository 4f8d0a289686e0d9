"""The roofline of a step: the time in which its bytes can be read and its products computed, and the time it takes."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.gpus import find_gpu
from jaxserve.inspect.picture import Drawing, Picture, duration, html_table, size
from jaxserve.tables import aligned

MAX_BYTES = 2**28
"""Most bytes that a measurement reads: more than caches hold, and less than an engine leaves free on a GPU."""

_NUM_TRIALS = 5
_HEADER = ("", "amount a device", "at", "takes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a device reads its memory and multiplies: bytes and floating-point operations a second."""

    bytes_per_second: float
    flops_per_second: float
    name: str = ""

    @classmethod
    def of(cls, gpu: str) -> "Speed":
        """Return what a kind of GPU reaches, which need not be there, by a name that `jaxserve plan --device` takes.
        Raises ConfigError.
        """
        found = find_gpu(gpu)
        return cls(
            bytes_per_second=found.sustained_bandwidth, flops_per_second=found.sustained_flops(), name=found.kind
        )

    @classmethod
    def measure(cls, device: Any = None, *, num_bytes: float = MAX_BYTES) -> "Speed":
        """Measure a device, by default the first one, by products of matrices. Takes about a second.

        What is read is a matrix of `num_bytes` bytes, at most MAX_BYTES: give the bytes of a model's weights, which may
        be in a CPU's caches. The device must be idle. The devices that a CPU seems to have share its memory and its
        cores: what is measured is what one of them reaches alone.
        """
        device = jax.devices()[0] if device is None else device
        is_cpu = device.platform == "cpu"
        dtype = jnp.dtype("float32" if is_cpu else "bfloat16")
        width = 1024 if is_cpu else 4096
        num_rows = max(1, round(min(num_bytes, MAX_BYTES) / (width * dtype.itemsize)))
        read, square, vector = (
            jax.device_put(jnp.ones(shape, dtype), device) for shape in ((num_rows, width), (width, width), (width, 1))
        )
        product = jax.jit(jnp.matmul)
        return cls(
            bytes_per_second=read.nbytes / _best(product, read, vector),
            flops_per_second=2 * width**3 / _best(product, square, square),
            name=f"{device.device_kind}, measured",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """The bytes and operations of a step on each device, and the least time that they take.

    Attributes:
        weight_bytes: of the weights that the step reads once.
        kv_bytes: of keys and values that it reads.
        flops: of products with weights; those of attention are left out.
        speed: of a device.
        measured: seconds that the step takes; None if it was not measured.
    """

    weight_bytes: float
    kv_bytes: float
    flops: float
    speed: Speed
    measured: float | None = None

    @property
    def memory_seconds(self) -> float:
        """Time to read weights, keys and values."""
        return (self.weight_bytes + self.kv_bytes) / self.speed.bytes_per_second

    @property
    def compute_seconds(self) -> float:
        """Time to compute the products."""
        return self.flops / self.speed.flops_per_second

    @property
    def floor(self) -> float:
        """The least time of the step: that of memory or of the products, whichever is longer."""
        return max(self.memory_seconds, self.compute_seconds)

    @property
    def bound(self) -> str:
        """The cause of the floor: "memory" or "compute"."""
        return "memory" if self.memory_seconds >= self.compute_seconds else "compute"

    @property
    def fraction(self) -> float | None:
        """The floor divided by the measured time: 1 is the best possible."""
        return None if self.measured is None else self.floor / self.measured

    def draw(self) -> Picture:
        """Draw the times as bars."""
        bars = [("read weights", self.weight_bytes / self.speed.bytes_per_second, "#4e79a7")]
        bars += [("read KV", self.kv_bytes / self.speed.bytes_per_second, "#76b7b2")]
        bars += [("multiply", self.compute_seconds, "#f28e2b"), ("floor", self.floor, "#59a14f")]
        bars += [] if self.measured is None else [("measured", self.measured, "#e15759")]
        longest = max(seconds for _, seconds, _ in bars) or 1.0
        drawing = Drawing(520, 22 * len(bars) + 6)
        for number, (name, seconds, color) in enumerate(bars):
            y, width = 4 + 22 * number, max(1.0, 340 * seconds / longest)
            drawing.text(86, y + 13, name, anchor="end")
            drawing.rect(92, y, width, 18, fill=color)
            drawing.text(98 + width, y + 13, duration(seconds))
        return drawing.picture()

    def __repr__(self) -> str:
        return f"{self._summary()}\n{aligned([_HEADER, *self._rows()])}"

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self._rows(), title=self._summary()) + self.draw().svg

    def _summary(self) -> str:
        text = f"at least {duration(self.floor)} ({self.bound}-bound) on {self.speed.name or 'such a device'}"
        if self.measured is None or self.fraction is None:
            return text
        return f"{text}; measured {duration(self.measured)}, {self.fraction:.0%} of what is possible"

    def _rows(self) -> list[list[str]]:
        bandwidth = f"{self.speed.bytes_per_second / 1e9:,.4g} GB/s"
        reading = [
            [name, size(amount), bandwidth, duration(amount / self.speed.bytes_per_second)]
            for name, amount in (("read weights", self.weight_bytes), ("read KV", self.kv_bytes))
        ]
        rate = f"{self.speed.flops_per_second / 1e9:,.4g} GFLOP/s"
        return [*reading, ["multiply", f"{self.flops / 1e6:,.4g} MFLOP", rate, duration(self.compute_seconds)]]


def _best(function: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    """Return the seconds of the shortest of some calls, after one that compiles."""
    jax.block_until_ready(function(*arguments))
    times: list[float] = []
    for _ in range(_NUM_TRIALS):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)
