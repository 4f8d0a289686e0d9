"""What can begin before the engine is imported: the processes that lower steps, and looking for the devices."""

import contextlib
import os
import pathlib
import threading

from jaxserve.config import EngineConfig
from jaxserve.execution.programs.workers import Worker

NUM_EARLY = 4
"""Workers that start with the engine's process: as many as there are programs with layers for which requests wait, and
two for the others.
"""


def start_early(config: EngineConfig) -> list[Worker]:
    """Start workers, which import jax meanwhile, if there seem to be kernels to lower for this configuration."""
    is_on_gpu = os.environ.get("JAX_PLATFORMS", "").split(",")[0] in ("", "cuda", "gpu")
    has_gpu = is_on_gpu and any(pathlib.Path("/dev").glob("nvidia[0-9]*"))
    if not has_gpu or config.kernels == "xla" or config.warmup == "none":
        return []
    try:
        return [Worker() for _ in range(NUM_EARLY)]
    except OSError:  # Lowering says why when it needs them
        return []


def limit_memory(config: EngineConfig) -> None:
    """Tell jax which fraction of a GPU's memory it may take, unless the environment does; before it looks for one."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(config.gpu_memory_utilization))


def wake_devices(config: EngineConfig) -> None:
    """Begin to look for the devices, in a thread. Whoever asks for them waits, and hears of errors."""
    limit_memory(config)
    import jax

    def look() -> None:
        with contextlib.suppress(Exception):
            jax.devices()

    threading.Thread(target=look, name="devices", daemon=True).start()
