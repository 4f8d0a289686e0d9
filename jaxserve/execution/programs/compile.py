"""The table of compiled steps: every shape ahead of time, so that nothing is compiled while requests wait."""

import concurrent.futures
import contextlib
import functools
import itertools
import logging
import pathlib
import queue
import threading
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, Set
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from jaxserve.cpus import num_usable_cpus, yield_processors
from jaxserve.errors import ConfigError
from jaxserve.execution.programs.mosaic import MosaicKernel, compile_kernel
from pallas_kernels.jax_internals import load_compiled

logger = logging.getLogger(__name__)

MAX_KERNELS_AT_A_TIME = 64
"""More than there are processors. Mosaic's lock lets waiting threads in once all before them have left, so kernels are
compiled in rounds that take as long as their slowest kernel; the more kernels wait, the fewer rounds there are.
"""


_warm_ups = itertools.count()


class WarmUp(NamedTuple):
    """Seconds from the beginning of a warm-up until all programs were lowered, their kernels compiled, and they too."""

    lowered_after: float
    kernels_after: float
    compiled_after: float


class CompiledSteps:
    """Executables by key, compiled on first use or all at once by `warm_up`.

    `lower(key)` lowers the function for a key, and `compiler_options(key)` returns its options for XLA. The executables
    accept exactly the shapes, dtypes, shardings and tree structures that they were compiled for, so nothing is
    recompiled silently; keys that were not warmed up are counted.
    """

    def __init__(
        self,
        lower: Callable[[Any], jax.stages.Lowered],
        *,
        compiler_options: Callable[[Any], dict[str, Any]] = lambda _: {},
    ):
        self._lower = lower
        self._compiler_options = compiler_options
        self._executables: dict[Any, jax.stages.Compiled] = {}
        self._lock = threading.Lock()
        self._is_warm = False
        self._is_stopped = False
        self._pools: list[concurrent.futures.ThreadPoolExecutor] = []
        self.num_compiles = 0
        self.num_recompiles_after_warmup = 0

    def __getitem__(self, key: Any) -> jax.stages.Compiled:
        executable = self._executables.get(key)
        if executable is None:
            if self._is_warm:
                self.num_recompiles_after_warmup += 1
                logger.warning("compiling %s after warm-up: requests are waiting for it", key)
            executable = self._compile(key, self._lower(key))
        return executable

    def __contains__(self, key: Any) -> bool:
        return key in self._executables

    @property
    def is_warm(self) -> bool:
        """True if a warm-up has compiled what it was given."""
        return self._is_warm

    def put(self, key: Any, executable: jax.stages.Compiled) -> None:
        """Take an executable that was compiled elsewhere."""
        with self._lock:
            self._executables[key] = executable

    def clear(self) -> None:
        """Drop all executables."""
        self._executables.clear()
        self._is_warm = False

    def stop(self) -> None:
        """End the warm-ups that run in other threads, once their current programs are compiled."""
        with self._lock:
            self._is_stopped = True
            for pool in self._pools:
                pool.shutdown(wait=False, cancel_futures=True)

    def items(self) -> ItemsView[Any, jax.stages.Compiled]:
        """All that are compiled by now."""
        return self._executables.items()

    def _compile(
        self, key: Any, lowered: jax.stages.Lowered, on_compiled: Callable[[Any], object] = lambda _: None
    ) -> jax.stages.Compiled:
        start = time.perf_counter()
        executable = lowered.compile(self._compiler_options(key))
        logger.debug("compiled %s in %.1f s", key, time.perf_counter() - start)
        self._add(key, executable, on_compiled)
        return executable

    def _load(self, key: Any, lowered: jax.stages.Lowered, on_compiled: Callable[[Any], object]) -> bool:
        """Load an executable from the compilation cache. Returns false if it is not there."""
        executable = load_compiled(lowered, self._compiler_options(key))
        if executable is None:
            return False
        self._add(key, executable, on_compiled)
        return True

    def _add(self, key: Any, executable: jax.stages.Compiled, on_compiled: Callable[[Any], object]) -> None:
        with self._lock:
            self._executables[key] = executable
            self.num_compiles += 1
        on_compiled(key)

    def warm_up(
        self,
        keys: Iterable[Any],
        *,
        lower: Callable[[Any], jax.stages.Lowered] | None = None,
        num_lowered_elsewhere: int = 0,
        is_background: bool = False,
        on_compiled: Callable[[Any], object] = lambda _: None,
        kernels_of: Callable[[jax.stages.Lowered], Set[MosaicKernel]] = lambda _: frozenset(),
        mesh: Mesh | None = None,
        progress: bool,
    ) -> WarmUp:
        """Compile every key in parallel: XLA compiles outside the GIL.

        `lower`, by default the function with which missing keys are lowered, is called by one thread, or by as many as
        wait for other processes that do the work. The kernels that `kernels_of` finds in a program are compiled before
        it, for the devices of `mesh`, when all programs are lowered. From the first program with kernels on, those
        without wait too: they would take turns with kernels. In the background one program is compiled at a time, in
        the order of `keys`, by a thread that gets only the processor time that others leave; those in the compilation
        cache do not wait for it, but are loaded, one at a time, once they are lowered. `on_compiled` is called by the
        thread that has compiled or loaded a key. Raises CancelledError after `stop`.
        """
        start = time.perf_counter()
        missing = [key for key in keys if key not in self._executables]
        name = f"jaxserve-warm-up-{next(_warm_ups)}"
        # Lowering holds the GIL: at a low priority it would keep others waiting for that.
        lowering = concurrent.futures.ThreadPoolExecutor(max(1, num_lowered_elsewhere), thread_name_prefix=f"{name}-")
        compiling_kernels, compiling = (
            concurrent.futures.ThreadPoolExecutor(
                max_workers, thread_name_prefix=f"{name}-", initializer=yield_processors if is_background else None
            )
            for max_workers in (MAX_KERNELS_AT_A_TIME, 1 if is_background else min(16, num_usable_cpus()))
        )
        pools = [lowering, compiling_kernels, compiling]
        with self._lock:
            if self._is_stopped:
                raise concurrent.futures.CancelledError
            self._pools.extend(pools)
        submitted: list[concurrent.futures.Future[Any]] = []
        lower, loading = lower or self._lower, threading.Lock()

        def lower_unless_loaded(key: Any) -> jax.stages.Lowered | None:
            lowered = lower(key)
            with loading if is_background else contextlib.nullcontext():
                return None if is_background and self._load(key, lowered, on_compiled) else lowered

        def submit[T](
            pool: concurrent.futures.ThreadPoolExecutor, function: Callable[..., T], *args: Any
        ) -> concurrent.futures.Future[T]:
            try:
                submitted.append(future := pool.submit(function, *args))
            except RuntimeError:  # the pool was shut down
                raise concurrent.futures.CancelledError from None
            return future

        # One that is disabled starts tqdm's thread all the same, which fails if the interpreter ends meanwhile.
        new_bar = functools.partial(tqdm, total=len(missing), desc="compiling", unit="program")
        with new_bar() if progress else contextlib.nullcontext() as bar:

            def advance() -> None:
                if bar is not None:
                    bar.update()

            def compile_later(key: Any, lowered: jax.stages.Lowered) -> concurrent.futures.Future[Any]:
                future = submit(compiling, self._compile, key, lowered, on_compiled)
                future.add_done_callback(lambda _: advance())
                return future

            try:
                kernels: dict[MosaicKernel, concurrent.futures.Future[None]] = {}
                waiting: dict[Any, jax.stages.Lowered] = {}
                compiled: list[concurrent.futures.Future[Any]] = []
                futures = {submit(lowering, lower_unless_loaded, key): key for key in missing}
                for future in _as_completed(futures):
                    key, lowered = futures[future], future.result()
                    if lowered is None:
                        advance()
                        continue
                    for kernel in kernels_of(lowered) - kernels.keys():
                        assert mesh is not None
                        kernels[kernel] = submit(compiling_kernels, compile_kernel, kernel, mesh)
                    if kernels:
                        waiting[key] = lowered
                    else:
                        compiled.append(compile_later(key, lowered))
                lowered_after = time.perf_counter() - start
                _wait(kernels.values())
                kernels_after = time.perf_counter() - start
                _wait(compiled + [compile_later(key, waiting[key]) for key in missing if key in waiting])
            finally:  # Ctrl-C, or a shape that does not compile: those not begun are not waited for
                for pool in pools:
                    pool.shutdown(wait=False, cancel_futures=True)
                # Before their threads: interrupted in Thread.join, Python 3.12 takes one for ended that is at work.
                concurrent.futures.wait([future for future in submitted if not future.cancelled()])
                for pool in pools:
                    pool.shutdown()
                # An executor that was interrupted while it started a thread, which is running or about to, does not
                # know of that thread; and a thread that has not begun cannot be joined.
                while any(thread.name.startswith(f"{name}-") for thread in threading.enumerate()):
                    time.sleep(0.01)
                with self._lock:
                    self._pools = [pool for pool in self._pools if pool not in pools]
        self._is_warm = True
        return WarmUp(lowered_after, kernels_after, compiled_after=time.perf_counter() - start)


def _as_completed[T](futures: Iterable[concurrent.futures.Future[T]]) -> Iterator[concurrent.futures.Future[T]]:
    """Return the futures as they end, also those that a pool's shutdown cancels, of which `concurrent.futures` tells
    nobody who waits.
    """
    ended: queue.SimpleQueue[concurrent.futures.Future[T]] = queue.SimpleQueue()
    futures = list(futures)
    for future in futures:
        future.add_done_callback(ended.put)
    return (ended.get() for _ in futures)


def _wait(futures: Iterable[concurrent.futures.Future[Any]]) -> None:
    """Wait until all are done. Raises the exception of the first one that fails or is cancelled."""
    for future in _as_completed(futures):
        future.result()


def enable_persistent_cache(directory: str | None) -> pathlib.Path | None:
    """Keep compiled steps on disk, so that the next start finds them. '' turns this off, None selects the default
    directory. Returns the directory, None if there is none.

    A cache that the process has configured already is left alone. Raises ConfigError if `directory` cannot be created;
    if the default directory cannot, there is no cache.
    """
    if directory == "":
        return None
    configured: str | None = jax.config.jax_compilation_cache_dir
    if directory is None and configured is not None:
        return None if "://" in configured else pathlib.Path(configured)  # jax knows stores of objects too
    try:
        path = pathlib.Path(directory or "~/.cache/jaxserve/xla").expanduser()
        path.mkdir(parents=True, exist_ok=True)
    # RuntimeError: no home directory, ValueError: a null character
    except (OSError, RuntimeError, ValueError) as error:
        if directory:
            raise ConfigError(f"compilation_cache_dir: {error}") from error
        logger.warning("steps are compiled at every start, there is no place to keep them: %s", error)
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
