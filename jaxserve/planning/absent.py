"""GPUs that are not there, as the start of an engine sees devices."""

import os
import re
from typing import Any, NamedTuple

from jaxserve.config import EngineConfig
from jaxserve.engine.device import Devices, describe_devices, split_axes
from jaxserve.execution.programs.spec import MeshSpec
from jaxserve.gpus import Gpu
from jaxserve.layers.sharding import with_explicit_axes
from pallas_kernels.deviceless import TARGET_CONFIG, absent_mesh, is_available

RESERVED_SHARED_MEMORY = 1024
"""Bytes of a multiprocessor's shared memory that no block gets."""

PART_OF_MEMORY = 0.8
"""The part of the memory that XLA plans with for devices that are not there."""

_TARGET = """gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory}
  threads_per_core_limit: {threads}
  core_count: {num_cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {shared_memory_of_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  device_address_bits: 64
  ecc_enabled: true
  name: "{kind}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.19.0"
  cub_version: "3.2.0"
}}
platform_name: "CUDA"
device_description_str: "{kind}"
"""


class _StandIn(NamedTuple):
    """A device without any compiler for it: what the start of an engine asks of one."""

    device_kind: str
    compute_capability: str
    platform: str = "gpu"


def can_compile() -> bool:
    """Return true if programs can be compiled for GPUs that are not there: jax's CUDA plugin is installed."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return is_available()


def absent_devices(config: EngineConfig, gpu: Gpu, *, to_compile: bool) -> Devices:
    """Return as many GPUs of a kind as the options say. Programs can be compiled for them if so chosen, and else only
    be traced. They reach each other's memory.
    """
    sizes = split_axes(config)
    shape, axes = tuple(sizes.values()), tuple(sizes)
    if to_compile:
        mesh: Any = with_explicit_axes(absent_mesh(target_config(gpu, usable=usable_memory(config, gpu)), shape, axes))
        first = mesh.devices.flat[0]
    else:
        mesh = MeshSpec(axes, shape, gpu.kind, "gpu", gpu.num_cores).mesh()
        first = _StandIn(gpu.kind, gpu.capability)
    return describe_devices(config, mesh, first, reach_peers=_always)


def _always(_: Any) -> bool:
    return True


def usable_memory(config: EngineConfig, gpu: Gpu) -> int:
    """Return the bytes of a GPU that an engine may use."""
    return int(gpu.memory * config.gpu_memory_utilization)


def target_config(gpu: Gpu, *, usable: int) -> str:
    """Return XLA's description of a GPU. Those of Hopper are alike but for their memory and L2 cache.

    XLA changes a program that needs more than a part of the memory. With a device, that is all that the process may
    use; the description says so much memory that the part is `usable` without one, too.
    """
    memory = round(usable / PART_OF_MEMORY)
    if gpu.has_kernels:
        text = TARGET_CONFIG.read_text()
        for name, value in (
            ("memory_bandwidth", int(gpu.peak_bandwidth)),
            ("l2_cache_size", gpu.l2),
            ("device_memory_size", memory),
        ):
            text = re.sub(rf"{name}: \d+", f"{name}: {value}", text)
        return text.replace("NVIDIA H200", gpu.kind)
    major, minor = gpu.capability.split(".")
    return _TARGET.format(
        kind=gpu.kind,
        shared_memory=gpu.shared_memory,
        shared_memory_of_block=gpu.shared_memory - RESERVED_SHARED_MEMORY,
        threads=gpu.threads,
        num_cores=gpu.num_cores,
        fpus=gpu.fpus,
        bandwidth=int(gpu.peak_bandwidth),
        l2=gpu.l2,
        clock=gpu.clock,
        memory=memory,
        major=major,
        minor=minor,
    )
