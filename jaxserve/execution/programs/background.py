"""Compiles programs while the engine serves: all those for which it did not wait before the first request."""

import concurrent.futures
import contextlib
import itertools
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
from jaxserve.execution.programs.shapes import Phase

logger = logging.getLogger(__name__)


class BackgroundWarmUp:
    """A thread that compiles programs phase by phase: urgent ones as fast as requests run, others with the processor
    time that is left. What a request waits for is compiled by a second thread, at once.

    Attributes:
        is_done: whether all of them are compiled.
    """

    def __init__(
        self,
        steps: CompiledSteps,
        phases: Sequence[Phase],
        *,
        num_blocks: int,
        lowering: Lowering,
        lowering_here: Lowering,
        kernels_of: Callable[[jax.stages.Lowered], Set[MosaicKernel]],
        mesh: Mesh,
        on_compiled: Callable[[Program], object],
        on_failed: Callable[[Program], object],
        on_end: Callable[[], object],
    ):
        """`on_compiled` is called with each program, `on_failed` with each that does not compile, and `on_end` after
        the last one, by other threads. `lowering_here` lowers in this process what is urgent: others have yet to start.
        """
        self.is_done = False
        self._steps = steps
        self._phases = phases
        self._num_blocks = num_blocks
        self._lowering = lowering
        self._lowering_here = lowering_here
        self._kernels_of = kernels_of
        self._mesh = mesh
        self._on_compiled = on_compiled
        self._on_failed = on_failed
        self._on_end = on_end
        self._wanted: dict[Program, threading.Thread] = {}
        self._has_failed = False
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="jaxserve-background", daemon=True).start()

    def close(self) -> None:
        """End it. Waits for the program that is being compiled, since XLA cannot be interrupted."""
        self._steps.stop()
        self._lowering.close()
        self.wait()

    def wait(self) -> None:
        """Wait until all programs are compiled, or have failed."""
        self._ended.wait()
        for thread in list(self._wanted.values()):
            thread.join()

    def want(self, programs: Sequence[Program]) -> None:
        """Compile these now, unless that has begun: a request waits for them. To be called by one thread."""
        new = [program for program in programs if program not in self._wanted]
        if new and not self._ended.is_set():
            thread = threading.Thread(target=self._compile_wanted, args=(new,), name="jaxserve-wanted", daemon=True)
            thread.start()  # first, so that `wait` joins no thread that has not begun
            self._wanted |= dict.fromkeys(new, thread)

    def _run(self) -> None:
        start = time.perf_counter()
        try:
            urgent = [phase.programs for phase in self._phases if phase.is_urgent]
            others = [phase.programs for phase in self._phases if not phase.is_urgent]
            for phase in urgent:
                self._compile(phase, is_urgent=True)
            if self._lowering.num_workers:  # others lower those of later phases meanwhile
                for program in itertools.chain(*others):
                    self._lowering.prepare(program, self._num_blocks)
            for phase in others:
                self._compile(phase)
            if not self._has_failed:
                self.is_done = True
                number = sum(map(len, urgent + others))
                seconds = time.perf_counter() - start
                logger.info("all programs are compiled: %d in %.1f s while serving", number, seconds)
        except concurrent.futures.CancelledError:
            logger.debug("the engine is closed before all programs are compiled")
        finally:
            self._lowering.close()
            self._on_end()
            self._ended.set()

    def _compile_wanted(self, programs: Sequence[Program]) -> None:
        with contextlib.suppress(concurrent.futures.CancelledError):
            self._compile(programs, is_urgent=True)

    def _compile(self, programs: Sequence[Program], *, is_urgent: bool = False) -> None:
        """Compile programs, those without the ones that fail, for which nobody waits here. Raises CancelledError."""
        lowering = self._lowering_here if is_urgent else self._lowering
        try:
            self._steps.warm_up(
                programs,
                lower=lambda program: lowering.lower(program, self._num_blocks),
                num_lowered_elsewhere=lowering.num_workers,
                is_background=not is_urgent,
                on_compiled=self._on_compiled,
                kernels_of=self._kernels_of,
                mesh=self._mesh,
                progress=False,
            )
        except Exception as error:
            if isinstance(error, concurrent.futures.CancelledError):
                raise
            if len(programs) > 1:  # some of them may compile
                for program in programs:
                    self._compile([program], is_urgent=is_urgent)
                return
            self._has_failed = True
            logger.exception("%s does not compile: steps run in others, and requests that need it fail", programs[0])
            self._on_failed(programs[0])
