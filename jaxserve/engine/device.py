"""The devices of an engine, and what follows from their kind: the mesh, kernels, sizes of steps, and free memory."""

import logging
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.engine.early import limit_memory
from jaxserve.errors import ConfigError
from jaxserve.execution.programs.spec import ON_CPU, ON_GPU, Traits
from jaxserve.gpus import HOPPER, PEAK_BANDWIDTH
from jaxserve.layers.context import Kernels
from jaxserve.layers.sharding import mesh_axes, with_explicit_axes
from jaxserve.layers.stages import PIPE
from pallas_kernels.peers import can_reach_each_other

logger = logging.getLogger(__name__)

FIRST_WITH_BFLOAT16 = 8.0
"""Compute capability of Ampere GPUs. On those before, such as T4, XLA computes bfloat16 in float32."""

MAX_DRAFTING_TOKENS = 64
"""Tokens of a step up to which drafts are verified on a GPU, unless the options say so: up to some 64 tokens a step is
bound by reading the weights.
"""

MAX_DRAFTING_TOKENS_ON_CPU = 24
"""Tokens of a step up to which drafts are verified on a CPU, which is bound by arithmetic with fewer tokens."""

TOKEN_COST = 0.02
"""Time that a further token adds to a step of few rows on a GPU, as a fraction of that of reading the weights. Not
measured: an estimate on the high side, with which too few drafts are verified rather than too many.
"""

TOKEN_COST_ON_CPU = 0.25
"""`TOKEN_COST` of a CPU: a step of the built-in model that verifies 4 drafts of one row takes 1.8 to 1.9 times as
long as one of one token, see docs/speculation.md.
"""

MEMINFO = pathlib.Path("/proc/meminfo")


class Devices(NamedTuple):
    """The mesh that an engine runs on, and the defaults for devices of its kind."""

    mesh: Mesh
    first: Any
    """One of the devices, which are all of a kind."""
    platform: str
    traits: Traits
    max_num_seqs: int
    max_num_batched_tokens: int
    reach_peers: Callable[[Mesh], bool]
    """Tells whether the devices of a mesh reach each other's memory; asked where kernels need that."""

    @property
    def is_cpu(self) -> bool:
        """True if the devices are the host itself."""
        return self.platform == "cpu"

    @property
    def max_drafting_tokens(self) -> int:
        """Tokens of a step up to which it verifies drafts, unless the options say so."""
        return MAX_DRAFTING_TOKENS_ON_CPU if self.is_cpu else MAX_DRAFTING_TOKENS

    @property
    def token_cost(self) -> float:
        """Time that each token adds to a step, as a fraction of that of a step of no tokens."""
        return TOKEN_COST_ON_CPU if self.is_cpu else TOKEN_COST

    @property
    def description(self) -> str:
        """The kind of the devices and, of several, how many."""
        kind = self.first.device_kind
        return kind if self.mesh.size == 1 else f"{self.mesh.size} x {kind}"

    @property
    def peak_bandwidth(self) -> float | None:
        """Bytes a second that all devices read from their memory at most, None if their kind is not known."""
        peak = PEAK_BANDWIDTH.get(self.first.device_kind)
        return None if peak is None else peak * self.mesh.size


def choose_devices(config: EngineConfig, mesh: Mesh | None) -> Devices:
    """Return the devices of `mesh`, or as many as the options say of those that there are."""
    limit_memory(config)
    mesh = with_explicit_axes(mesh or _make_mesh(split_axes(config)))
    return describe_devices(config, mesh, mesh.devices.flat[0], reach_peers=reaches_peers)


def split_axes(config: EngineConfig) -> dict[str, int]:
    """Return the axes of an engine's mesh and their sizes, as the options say."""
    axes = {"expert" if config.enable_expert_parallel else "tensor": config.tensor_parallel_size}
    return axes if config.pipeline_parallel_size == 1 else {PIPE: config.pipeline_parallel_size} | axes


def describe_devices(config: EngineConfig, mesh: Any, first: Any, *, reach_peers: Callable[[Mesh], bool]) -> Devices:
    """Return the devices of `mesh`, which may be abstract; `first` is one of them."""
    is_cpu = first.platform == "cpu"
    return Devices(
        mesh=mesh,
        first=first,
        platform=first.platform,
        traits=ON_CPU if is_cpu else ON_GPU,
        max_num_seqs=config.max_num_seqs or (64 if is_cpu else 256),
        max_num_batched_tokens=config.max_num_batched_tokens or (512 if is_cpu else 8192),
        reach_peers=reach_peers,
    )


def choose_kernels(requested: Literal["auto", "xla", "sm90"], device: Any, dtype: np.dtype) -> Kernels:
    """Choose the kernels for a device. Nothing falls back silently: plain XLA on a GPU is slow, which is logged unless
    it was requested. Raises ConfigError for kernels that the device does not have.
    """
    if requested == "xla" or (requested == "auto" and device.platform == "cpu"):
        return "xla"
    if device.platform == "cpu":
        raise ConfigError(f"kernels is {requested}, but the model runs on a CPU: leave it out, or --kernels xla")
    if device.compute_capability != HOPPER:
        if requested == "auto":
            logger.warning(
                "there are no kernels for %s, only for Hopper GPUs: the model runs in plain XLA, which is slower",
                device.device_kind,
            )
            return "xla"
        raise ConfigError(f"there are no kernels for {device.device_kind}: leave --kernels out, for slower, plain XLA")
    if dtype.itemsize != 2:
        raise ConfigError(
            f"dtype is {dtype}, but there are kernels for bfloat16 and float16 only: choose one of these by --dtype, "
            "or slow, plain XLA by --kernels xla"
        )
    return "sm90"


def has_bfloat16(device: Any) -> bool:
    """Return true if a device multiplies bfloat16 as fast as other types of 16 bits: all but GPUs before Ampere."""
    return device.platform == "cpu" or float(device.compute_capability) >= FIRST_WITH_BFLOAT16


def reaches_peers(mesh: Mesh) -> bool:
    """Return true if the devices of a mesh reach each other's memory, or do not add up partial sums. Warns if they
    cannot.
    """
    if not isinstance(mesh_axes("ffn", mesh), str) or can_reach_each_other(list(mesh.devices.flat)):
        return True
    logger.warning("these devices do not reach each other's memory: XLA adds up partial sums, which takes longer")
    return False


def free_memory(mesh: Mesh) -> int:
    """Return the bytes that are free on the fullest device of the mesh."""
    if mesh.devices.flat[0].platform == "cpu":  # all "devices" are the host
        return _host_memory() // mesh.size
    stats = [device.memory_stats() for device in mesh.devices.flat]
    return min(stat["bytes_limit"] - stat["bytes_in_use"] for stat in stats)


def bytes_in_use() -> int | None:
    """Return the bytes in use on the device of this process that has most, None if devices do not say."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    return max((stat["bytes_in_use"] for stat in stats if stat), default=None)


def _host_memory() -> int:
    """Return the bytes that a process can still get, page cache included: the kernel gives it up. All there are, if not
    on Linux.
    """
    if not MEMINFO.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
    return int(fields["MemAvailable"].removesuffix("kB")) * 1024


def _make_mesh(axes: dict[str, int]) -> Mesh:
    devices, needed = jax.devices(), math.prod(axes.values())
    if needed > len(devices):
        there_are = "there is 1 device" if len(devices) == 1 else f"there are {len(devices)} devices"
        more = f": for so many on a CPU, set JAX_NUM_CPU_DEVICES={needed} in the environment"
        sizes = f"tensor_parallel_size is {needed // axes.get(PIPE, 1)}"
        if PIPE in axes:
            sizes = f"pipeline_parallel_size is {axes[PIPE]} and {sizes}, {needed} devices"
        raise ConfigError(f"{sizes}, but {there_are}" + (more if devices[0].platform == "cpu" else ""))
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices[:needed])
