"""Get the steps of a model as lowered programs, from other processes or from disk.

Lowering a step takes seconds of Python under the GIL, most of it for its kernels, and some 25 programs have kernels. So
it is done by processes without a device (`lowering_worker`), which start while weights load; their results are kept
next to XLA's cache of compiled programs, under a hash of everything that they depend on.
"""

import concurrent.futures
import contextlib
import enum
import functools
import hashlib
import importlib.metadata
import logging
import os
import pathlib
import queue
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh

from jaxserve.cpus import num_usable_cpus
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.execution.programs.kinds import Program
from jaxserve.execution.programs.spec import MeshSpec, StepSpec
from jaxserve.execution.programs.workers import Worker, WorkerFailed

logger = logging.getLogger(__name__)

MAX_WORKERS = 25
"""The number of programs with layers of a dense model at the default sizes, so that 16 processors lower all of them at
once and not in two rounds.
"""
MAX_KEPT_BYTES = 2 << 30
"""Most bytes of lowered steps on disk. Those that no start has used for longest are removed first."""

CODE = (
    "layers",
    "models",
    "execution",
    "sampling",
    "speculative",
    "speculation.py",
    "scheduling",
    "quantization",
    "loading/__init__.py",
    "loading/bounds.py",
    "loading/causality.py",
    "loading/model_types.py",
    "loading/multimodal.py",
    "request.py",
    "sampling_params.py",
    "unsupported.py",
    "values.py",
    "cpus.py",
    "errors.py",
    "../pallas_kernels",
)
"""Paths of a step's code and of what it imports, relative to the package's folder."""

JAX_OPTIONS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
)
"""The options of `jax.config` that affect how a step is lowered."""


class WorkerSettings(msgspec.Struct, frozen=True):
    """The first message to a worker."""

    spec: StepSpec
    mesh: MeshSpec
    jax_options: dict[str, Any]
    """`JAX_OPTIONS` as they are in the parent."""


class Job(msgspec.Struct, frozen=True):
    """A message to a worker: lower this program for a pool of `num_blocks` blocks."""

    program: Program
    num_blocks: int


class Lowering:
    """Lowers steps as `StepBuilder.lower` does, which it falls back to if a worker fails. From any thread.

    Attributes:
        num_workers: how many steps are lowered at a time.
        num_found: programs that were found on disk.
        num_shipped: those of them that were in the folder `shipped`.
        num_made: those that were not found.
    """

    def __init__(
        self,
        builder: StepBuilder,
        *,
        folder: pathlib.Path | None,
        num_workers: int | None = None,
        max_workers: int = MAX_WORKERS,
        early: Sequence[Worker] = (),
        shipped: pathlib.Path | None = None,
        is_background: bool = False,
    ):
        """Lowered steps are kept in `folder`, if there is one. `num_workers` is by default what processors allow, at
        most `max_workers`; those of `early` have been started, and get the first jobs. Without workers this process
        lowers; in the background they get what processor time others leave. Steps in the folder `shipped` are found
        too.
        """
        self.num_workers = (
            min(MAX_WORKERS, max_workers, num_usable_cpus() * 8 // 5) if num_workers is None else num_workers
        )
        self._is_background = is_background
        self.num_found = 0
        self.num_shipped = 0
        self.num_made = 0
        self._builder = builder
        self._settings = settings_of(builder)
        self._folder = folder
        self._shipped = shipped
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._early = list(early)
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        self._is_closed = False
        self._has_kept = False
        self._prepared: dict[Job, concurrent.futures.Future[bytes]] = {}

    def lower(self, program: Program, num_blocks: int) -> jax.stages.Lowered:
        """Return a lowered program for a pool of `num_blocks` blocks. Raises what `StepBuilder.lower` raises, and
        CancelledError after `close`.
        """
        if self.num_workers == 0 and self._folder is None and self._shipped is None:
            return self._builder.lower(program, num_blocks)
        job = Job(program, num_blocks)
        prepared = self._prepared.pop(job, None)
        try:
            exported = self._find_or_make(job) if prepared is None else prepared.result()
            return self._builder.lower_exported(program, num_blocks, exported)
        except WorkerFailed as error:
            if self._is_closed:
                raise concurrent.futures.CancelledError from error
            logger.warning("a step is lowered in this process: %s", error)
            return self._builder.lower(program, num_blocks)

    def prepare(self, program: Program, num_blocks: int) -> None:
        """Begin with this step, which `lower` waits for. If it is not on disk, workers start, for the others too."""
        job = Job(program, num_blocks)
        self._prepared[job] = future = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(self._find_or_make(job))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="lowering", daemon=True).start()

    @property
    def were_compiled(self) -> bool:
        """True if all programs so far were lowered by an earlier start, which has compiled them too."""
        return not self.num_made and not self.num_shipped

    def close(self) -> None:
        """End the workers, whose current jobs fail, and remove from disk what exceeds MAX_KEPT_BYTES."""
        with self._lock:
            self._is_closed = True
            workers = [*self._workers, *self._early]
        for worker in workers:
            worker.close()
        if self._has_kept and self._folder is not None:
            _prune(self._folder, MAX_KEPT_BYTES)

    def _start(self) -> None:
        with self._lock:
            if self._is_closed:
                raise WorkerFailed("the workers have ended")
            while len(self._workers) + len(self._early) < self.num_workers:
                try:
                    self._take(Worker(is_background=self._is_background))
                except OSError as error:
                    raise WorkerFailed(f"no worker can be started ({error})") from error
            while self._early:  # last: the one that is idle last gets the next job
                self._take(self._early.pop())

    def _take(self, worker: Worker) -> None:
        worker.prepare(self._settings)
        self._workers.append(worker)
        self._idle.put(worker)

    def _find_or_make(self, job: Job) -> bytes:
        return self._find(job) or self._make(job)

    def _make(self, job: Job) -> bytes:
        if self.num_workers:
            exported = self._make_elsewhere(job)
        else:
            exported = self._builder.export(job.program, job.num_blocks)
        with self._lock:
            self.num_made += 1
        self._keep(job, exported)
        return exported

    def _make_elsewhere(self, job: Job) -> bytes:
        self._start()
        worker = self._idle.get()
        try:
            return worker.run(job)
        finally:
            self._give_back(worker)

    def _give_back(self, worker: Worker) -> None:
        """Return a worker for the next job. If it has died and is not the last one it is dropped, and the next job
        starts a new one.
        """
        with self._lock:
            if worker.is_gone and len(self._workers) > 1 and not self._is_closed:
                self._workers.remove(worker)
                worker.close()
            else:
                self._idle.put(worker)

    def _find(self, job: Job) -> bytes | None:
        for folder in (self._folder, self._shipped):
            if folder is not None and (exported := read_lowered(folder, self._settings, job)) is not None:
                with self._lock:
                    self.num_found += 1
                    self.num_shipped += folder is self._shipped
                return exported
        return None

    def _keep(self, job: Job, exported: bytes) -> None:
        if self._folder is None:
            return
        try:
            self._has_kept |= write_lowered(self._folder, self._settings, job, exported)
        except OSError as error:
            logger.warning("a lowered step is not kept: %s", error)


def _path(folder: pathlib.Path, settings: WorkerSettings, job: Job) -> pathlib.Path | None:
    """Return the file of a lowered step, None if there is no telling what decides how it is lowered."""
    if (known := versions()) is None:
        return None
    made_from = msgspec.msgpack.encode([known, settings, job], order="sorted")
    return folder / hashlib.sha256(made_from).hexdigest()


def read_lowered(folder: pathlib.Path, settings: WorkerSettings, job: Job) -> bytes | None:
    """Return a lowered step of a folder, None if it is not there or damaged."""
    path = _path(folder, settings, job)
    if path is None:
        return None
    try:
        digest, exported = path.read_bytes().split(b"\n", 1)
    except (OSError, ValueError):
        return None
    if digest.decode(errors="replace") != hashlib.sha256(exported).hexdigest():
        return None
    with contextlib.suppress(OSError):  # a folder that is only read
        os.utime(path)
    return exported


def write_lowered(folder: pathlib.Path, settings: WorkerSettings, job: Job, exported: bytes) -> bool:
    """Write a lowered step to a folder. Returns false if it could not be found there again. Raises OSError."""
    path = _path(folder, settings, job)
    if path is None:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete_on_close=False) as file:
        file.write(hashlib.sha256(exported).hexdigest().encode() + b"\n" + exported)
        file.close()
        os.replace(file.name, path)
    return True


def _prune(folder: pathlib.Path, max_bytes: int) -> None:
    """Remove the files that were made or touched first, until no more than `max_bytes` are left."""
    try:
        files = [(entry.stat(), entry.path) for entry in os.scandir(folder) if entry.is_file()]
        excess = sum(stat.st_size for stat, _ in files) - max_bytes
        for stat, path in sorted(files, key=lambda file: file[0].st_mtime_ns):
            if excess <= 0:
                break
            os.unlink(path)
            excess -= stat.st_size
    except OSError as error:  # another process may be at it
        logger.warning("lowered steps that are too many are left on disk: %s", error)


def settings_of(builder: StepBuilder) -> WorkerSettings:
    """Return what decides how the steps of a builder are lowered, besides the versions."""
    mesh = builder.mesh
    assert isinstance(mesh, Mesh)
    return WorkerSettings(builder.spec, MeshSpec.of(mesh), _jax_options())


def _jax_options() -> dict[str, Any]:
    values = {name: getattr(jax.config, name) for name in JAX_OPTIONS}
    return {name: value.value if isinstance(value, enum.Enum) else value for name, value in values.items()}


@functools.cache
def versions() -> dict[str, Any] | None:
    """Return what decides how a step is lowered, besides the settings and its sizes: versions of packages, and a hash
    of our own code. None if the code is not in files of its own (in a zip, for example).
    """
    package = pathlib.Path(__file__).parents[2]
    code = hashlib.sha256()
    for name in CODE:
        root = package / name
        paths = [root] if root.suffix else sorted(root.rglob("*.py"))
        if not paths or not all(path.is_file() for path in paths):
            return None
        for path in paths:
            code.update(path.relative_to(root.parent).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")} | {"code": code.hexdigest()}
