"""Compiles programs while the engine serves: all those for which it did not wait before the first request."""

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Sequence, Set

import jax
from jax.sharding import Mesh

from jaxserve.execution.programs.compile import CompiledSteps
from jaxserve.execution.programs.kinds import Program
from jaxserve.execution.programs.lowering import Lowering
from jaxserve.execution.programs.mosaic import MosaicKernel

logger = logging.getLogger(__name__)


class BackgroundWarmUp:
    """A thread that compiles programs phase by phase, with the processor time that others leave.

    Attributes:
        is_done: whether all of them are compiled.
    """

    def __init__(
        self,
        steps: CompiledSteps,
        phases: Sequence[Sequence[Program]],
        *,
        num_blocks: int,
        lowering: Lowering,
        kernels_of: Callable[[jax.stages.Lowered], Set[MosaicKernel]],
        mesh: Mesh,
        on_compiled: Callable[[Program], object],
        on_end: Callable[[], object],
    ):
        """`on_compiled` is called with each program, and `on_end` when the last one is compiled, by other threads."""
        self.is_done = False
        self._steps = steps
        self._phases = phases
        self._num_blocks = num_blocks
        self._lowering = lowering
        self._kernels_of = kernels_of
        self._mesh = mesh
        self._on_compiled = on_compiled
        self._on_end = on_end
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="jaxserve-background", daemon=True).start()

    def close(self) -> None:
        """End it. Waits for the program that is being compiled, since XLA cannot be interrupted."""
        self._steps.stop()
        self._lowering.close()
        self._ended.wait()

    def _run(self) -> None:
        start = time.perf_counter()
        try:
            programs = [program for phase in self._phases for program in phase]
            if self._lowering.num_workers:  # others lower those of later phases meanwhile
                for program in programs:
                    self._lowering.prepare(program, self._num_blocks)
            for phase in self._phases:
                self._steps.warm_up(
                    phase,
                    lower=lambda program: self._lowering.lower(program, self._num_blocks),
                    num_lowered_elsewhere=self._lowering.num_workers,
                    is_background=True,
                    on_compiled=self._on_compiled,
                    kernels_of=self._kernels_of,
                    mesh=self._mesh,
                    progress=False,
                )
            self.is_done = True
            seconds = time.perf_counter() - start
            logger.info("all programs are compiled: %d in %.1f s while serving", len(programs), seconds)
        except concurrent.futures.CancelledError:
            logger.debug("the engine is closed before all programs are compiled")
        except Exception:  # nobody waits for this thread: the engine goes on with the programs that it has
            logger.exception("a program does not compile: steps keep running in larger ones")
        finally:
            self._lowering.close()
            self._on_end()
            self._ended.set()
