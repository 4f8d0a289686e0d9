"""The table of compiled steps: every shape ahead of time, so that nothing is compiled while requests wait."""

import concurrent.futures
import logging
import pathlib
import threading
import time
from collections.abc import Callable, ItemsView, Iterable
from typing import Any

import jax
from tqdm import tqdm

from jaxserve.cpus import num_usable_cpus
from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)


class CompiledSteps:
    """Executables by key, compiled on first use or all at once by `warm_up`.

    `lower(key)` lowers the function for a key. The executables accept exactly the shapes, dtypes, shardings and tree
    structures that they were compiled for, so a silent recompile cannot happen; a key that was not warmed up counts.
    """

    def __init__(self, lower: Callable[[Any], jax.stages.Lowered]):
        self._lower = lower
        self._executables: dict[Any, jax.stages.Compiled] = {}
        self._lock = threading.Lock()
        self._last_lowered = 0.0
        self._is_warm = False
        self.num_compiles = 0
        self.num_recompiles_after_warmup = 0
        self.lowered_after = 0.0
        """Seconds from the beginning of `warm_up` until all was lowered, and only XLA had work left."""

    def __getitem__(self, key: Any) -> jax.stages.Compiled:
        executable = self._executables.get(key)
        if executable is None:
            if self._is_warm:
                self.num_recompiles_after_warmup += 1
                logger.warning("compiling %s after warm-up: requests are waiting for it", key)
            executable = self._compile(key)
        return executable

    def items(self) -> ItemsView[Any, jax.stages.Compiled]:
        """All that are compiled by now."""
        return self._executables.items()

    def _compile(self, key: Any) -> jax.stages.Compiled:
        lowered = self._lower(key)
        self._last_lowered = time.perf_counter()
        executable = lowered.compile()
        with self._lock:
            self._executables[key] = executable
            self.num_compiles += 1
        return executable

    def warm_up(self, keys: Iterable[Any], *, num_lowered_elsewhere: int = 0, progress: bool) -> float:
        """Compile every key in parallel (XLA compiles outside the GIL), while in up to `num_lowered_elsewhere` threads
        `lower` waits for other processes. Returns the seconds it took.
        """
        start = self._last_lowered = time.perf_counter()
        missing = [key for key in keys if key not in self._executables]
        with (
            concurrent.futures.ThreadPoolExecutor(min(16, num_usable_cpus()) + num_lowered_elsewhere) as pool,
            tqdm(total=len(missing), desc="compiling steps", unit="shape", disable=not progress) as bar,
        ):
            try:
                for future in concurrent.futures.as_completed([pool.submit(self._compile, key) for key in missing]):
                    future.result()
                    bar.update()
            except BaseException:  # Ctrl-C, or a shape that does not compile: those not begun are not waited for
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        self._is_warm = True
        self.lowered_after = self._last_lowered - start
        return time.perf_counter() - start


def enable_persistent_cache(directory: str | None) -> pathlib.Path | None:
    """Keep compiled steps on disk, so that the next start finds them. '' turns it off, None takes the default place.
    Returns the place, if there is one on this machine.

    A cache that the process has configured already is left alone. Raises ConfigError if `directory` cannot be made;
    without the default place there is no cache.
    """
    if directory == "":
        return None
    configured: str | None = jax.config.jax_compilation_cache_dir
    if directory is None and configured is not None:
        return None if "://" in configured else pathlib.Path(configured)  # jax knows stores of objects too
    try:
        path = pathlib.Path(directory or "~/.cache/jaxserve/xla").expanduser()
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody's home
        if directory:
            raise ConfigError(f"compilation_cache_dir: {error}") from error
        logger.warning("steps are compiled at every start, there is no place to keep them: %s", error)
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
