"""Facts about GPUs by kind: memory, rates, and what a compiler asks for. Plain data, for whatever must know a GPU that
may not be there.
"""

import dataclasses
from collections.abc import Mapping

from jaxserve.errors import ConfigError

GIB = 2**30
SUSTAINED_BANDWIDTH = 0.9
"""Fraction of the peak bandwidth that programs reach, where it was not measured: that of an H200 and an H100."""
SUSTAINED_FLOPS = 0.8
"""Fraction of the peak rate of matrix products that large ones reach: that of an H200 and an H100."""
HOPPER = "9.0"
"""Compute capability of the GPUs for which there are kernels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        kind: its name in jax (`device_kind`).
        memory: bytes that CUDA reports.
        peak_bandwidth: bytes a second of its memory, by the data sheet.
        bandwidth: bytes a second that programs reach; None: `SUSTAINED_BANDWIDTH` of the peak.
        peak_flops: dense products of 16-bit floats a second that are added up in float32, by the data sheet.
        peak_flops_8: those of 8-bit values: FP8, or integers on GPUs without it.
        peer_bandwidth: bytes a second to other GPUs of the host, in one direction.
        capability: CUDA's compute capability.
        num_cores: multiprocessors, each with `fpus` units for float32.
        shared_memory: bytes of shared memory of a multiprocessor.
        l2: bytes of the L2 cache.
        clock: GHz.
        threads: threads that a multiprocessor holds.
    """

    kind: str
    memory: int
    peak_bandwidth: float
    bandwidth: float | None = None
    peak_flops: float
    peak_flops_8: float
    peer_bandwidth: float
    capability: str
    num_cores: int
    fpus: int
    shared_memory: int
    l2: int
    clock: float
    threads: int

    @property
    def has_kernels(self) -> bool:
        """True if there are kernels for it; otherwise models run in plain XLA."""
        return self.capability == HOPPER

    @property
    def sustained_bandwidth(self) -> float:
        """Bytes a second of its memory that programs reach."""
        return self.bandwidth or SUSTAINED_BANDWIDTH * self.peak_bandwidth

    def sustained_flops(self, *, in_8_bits: bool = False) -> float:
        """Products a second that large matrix products reach."""
        return SUSTAINED_FLOPS * (self.peak_flops_8 if in_8_bits else self.peak_flops)


def _hopper(kind: str, *, memory: int, peak: float, bandwidth: float, l2: int) -> Gpu:
    return Gpu(
        kind=kind,
        memory=memory,
        peak_bandwidth=peak,
        bandwidth=bandwidth,
        peak_flops=989.4e12,
        peak_flops_8=1978.9e12,
        peer_bandwidth=450e9,
        capability=HOPPER,
        num_cores=132,
        fpus=128,
        shared_memory=233472,
        l2=l2,
        clock=1.98,
        threads=2048,
    )


def _ampere(kind: str, *, memory: int, peak: float) -> Gpu:
    return Gpu(
        kind=kind,
        memory=memory,
        peak_bandwidth=peak,
        peak_flops=312e12,
        peak_flops_8=624e12,
        peer_bandwidth=300e9,
        capability="8.0",
        num_cores=108,
        fpus=64,
        shared_memory=167936,
        l2=41943040,
        clock=1.41,
        threads=2048,
    )


def _on_pcie(
    kind: str, *, gib: float, peak: float, flops: float, capability: str, num_cores: int, l2: int, clock: float
) -> Gpu:
    """Return a GPU that reaches others over PCI Express only."""
    is_turing = capability == "7.5"
    return Gpu(
        kind=kind,
        memory=int(gib * GIB),
        peak_bandwidth=peak,
        peak_flops=flops,
        peak_flops_8=2 * flops,
        peer_bandwidth=16e9 if is_turing else 32e9,
        capability=capability,
        num_cores=num_cores,
        fpus=64 if is_turing else 128,
        shared_memory=65536 if is_turing else 102400,
        l2=l2,
        clock=clock,
        threads=1024 if is_turing else 1536,
    )


# fmt: off
GPUS: Mapping[str, Gpu] = {
    "h200": _hopper("NVIDIA H200", memory=150_109_880_320, peak=4.8e12, bandwidth=4.3e12, l2=62_914_560),
    "h100": _hopper("NVIDIA H100 80GB HBM3", memory=85_018_542_080, peak=3.35e12, bandwidth=3.0e12, l2=52_428_800),
    "a100": _ampere("NVIDIA A100-SXM4-80GB", memory=85_100_068_864, peak=2.039e12),
    "a100-40gb": _ampere("NVIDIA A100-SXM4-40GB", memory=42_331_013_120, peak=1.555e12),
    "l40s": _on_pcie("NVIDIA L40S", gib=44.4, peak=0.864e12, flops=362e12, capability="8.9", num_cores=142,
                     l2=100_663_296, clock=2.52),
    "l4": _on_pcie("NVIDIA L4", gib=22.05, peak=0.3e12, flops=121e12, capability="8.9", num_cores=58,
                   l2=50_331_648, clock=2.04),
    "4090": _on_pcie("NVIDIA GeForce RTX 4090", gib=23.64, peak=1.008e12, flops=165.2e12, capability="8.9",
                     num_cores=128, l2=75_497_472, clock=2.52),
    "a10g": _on_pcie("NVIDIA A10G", gib=22.18, peak=0.6e12, flops=70e12, capability="8.6", num_cores=80,
                     l2=6_291_456, clock=1.71),
    "t4": _on_pcie("Tesla T4", gib=14.75, peak=0.32e12, flops=65e12, capability="7.5", num_cores=40,
                   l2=4_194_304, clock=1.59),
}
# fmt: on
"""GPUs by the names that `--device` takes. Memory is what CUDA reports on such a machine; rates are of data sheets, and
as measured with `bench latency` and a copy on an H200 and an H100.
"""

PEAK_BANDWIDTH: Mapping[str, float] = {gpu.kind: gpu.peak_bandwidth for gpu in GPUS.values()} | {
    "NVIDIA H100 PCIe": 2.0e12
}
"""Peak bandwidth in bytes a second, by jax's name of the device's kind."""


def find_gpu(name: str) -> Gpu:
    """Return a GPU by the name that `--device` takes, or by jax's. Raises ConfigError."""
    wanted = name.lower().removeprefix("nvidia").strip(" -_")
    by_kind = {gpu.kind.lower().removeprefix("nvidia").strip(): gpu for gpu in GPUS.values()}
    found = GPUS.get(wanted) or by_kind.get(wanted)
    if found is None:
        raise ConfigError(f"device {name!r} is not known; known are {', '.join(GPUS)}")
    return found
