"""What `jaxserve serve` would do on this machine: the start of an engine up to where it would load weights."""

import dataclasses
import pathlib
import shutil

from jaxserve.config import EngineConfig
from jaxserve.cpus import num_usable_cpus
from jaxserve.engine.checkpoint import read_checkpoint
from jaxserve.engine.device import choose_devices, free_memory
from jaxserve.engine.report import make_info
from jaxserve.engine.startup import count_blocks, make_plan, size
from jaxserve.errors import ConfigError, OutOfMemory
from jaxserve.tables import size_text


def uses_gpu(platforms: str) -> bool:
    """Return true if an engine would use a GPU: there is a driver of NVIDIA's, and `platforms`, the user's
    JAX_PLATFORMS, does not choose the CPU.
    """
    return platforms.split(",")[0] != "cpu" and _has_gpu()


def _has_gpu() -> bool:
    return pathlib.Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def rows_here(config: EngineConfig) -> list[list[str]]:
    """Return what an engine would do on the CPU of this machine, as titles and texts."""
    cpus = f"{num_usable_cpus()} CPU cores, {'the GPU is not used' if _has_gpu() else 'no GPU'}"
    try:
        config, checkpoint = read_checkpoint(dataclasses.replace(config, load_format="dummy"), progress=False)
        devices = choose_devices(config, None)
        plan = make_plan(config, checkpoint, devices)
        sizings, free = size(plan), free_memory(devices.mesh)
        info = make_info(plan, num_blocks=count_blocks(plan, sizings, free=free), needs=sizings[0].needs)
    except (ConfigError, OutOfMemory) as error:
        return [["this machine", f"{cpus}: the model cannot be served here: {error}"]]
    return [
        ["this machine", f"{cpus}: the model runs in plain XLA, in {plan.builder.spec.dtype}"],
        ["  weights", f"{size_text(info.total_weight_bytes)} of {size_text(free * devices.mesh.size)} free memory"],
        [
            "  KV cache",
            f"{size_text(info.kv_cache_bytes)} (--kv-cache-memory): {info.num_full_requests:,} requests of "
            f"{info.max_model_len:,} tokens; at most {info.max_num_seqs:,} run at once",
        ],
    ]
