"""Run one workload on one engine, in a process of its own: `python -m jaxserve.bench.engine_run SPEC.json`.

Prints one JSON line: an EngineRun.
"""

import contextlib
import math
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from jaxserve.bench.workloads import BatchShape, Job
from jaxserve.config import EngineConfig
from jaxserve.request import EngineOutput, EngineRequest
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.engine.client import EngineClient, EngineStats
    from jaxserve.engine.local import LocalEngineClient
    from jaxserve.engine.profile import Work

NUM_WARMUPS = 3
"""Untimed runs of a batch before the timed one: on a GPU, XLA compiles in the first and records CUDA graphs in the next
two.
"""

_SAMPLING_INTERVAL = 0.02


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs to run and the engine to run them on. Only runtimes that cannot find it out (torch) read
    `num_threads`.
    """

    engine: EngineConfig
    jobs: list[Job]
    num_threads: int


class EngineRun(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one run.

    `kv_use` is the fraction of allocated block positions that hold a token, averaged over the snapshots at full load:
    those with at least nine tenths of the highest number of requests running at once. None if there was no snapshot.
    """

    seconds: float
    cpu_seconds: float
    num_steps: int
    num_running_peak: int
    num_preemptions: int
    num_recompiles: int
    kv_use: float | None


def engine_of(config: EngineConfig, *, progress: bool = True) -> "contextlib.closing[LocalEngineClient]":
    """Start an engine, which runs until the end of the `with`. Raises StartupError."""
    from jaxserve.engine.local import LocalEngineClient

    return contextlib.closing(LocalEngineClient.start(config, progress=progress, owns_process=True))


def run(spec: RunSpec) -> EngineRun:
    """Start an engine, submit all jobs at once and wait until the last one has finished."""
    with engine_of(spec.engine, progress=False) as client:
        complete(client, spec.jobs[:1], prefix="warmup")
        before = client.stats()
        start, cpu_start = time.perf_counter(), time.process_time()
        snapshots = complete(client, spec.jobs, prefix="job")
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        after = client.stats()
    return EngineRun(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        num_steps=after.num_steps - before.num_steps,
        num_running_peak=max((snapshot.num_running for snapshot in snapshots), default=0),
        num_preemptions=after.num_preemptions,
        num_recompiles=after.num_recompiles_after_warmup,
        kv_use=kv_use_at_full_load(snapshots),
    )


def complete(
    client: "EngineClient",
    jobs: list[Job],
    *,
    prefix: str,
    heard: Callable[[list[EngineOutput]], object] = lambda _: None,
    watch: Callable[[bool], object] = lambda _: None,
) -> "list[EngineStats]":
    """Run these jobs to completion and return the snapshots taken meanwhile.

    `heard` is called with the outputs of each step, and `watch` before each snapshot, with whether every job has its
    first token. Raises RuntimeError if a job ends early.
    """
    unfinished = {f"{prefix}-{number}": job.output_len for number, job in enumerate(jobs)}
    in_prefill = set(unfinished)
    failures: list[str] = []
    done = threading.Event()

    def receive(outputs: list[EngineOutput]) -> None:
        heard(outputs)
        for output in outputs:
            unfinished[output.request_id] -= len(output.new_token_ids)
            if output.new_token_ids:
                in_prefill.discard(output.request_id)
            if output.finish_reason is not None:
                if unfinished.pop(output.request_id) or output.finish_reason != "length":
                    failures.append(f"{output.request_id} ended with {output.finish_reason}: {output.error}")
                if not unfinished:
                    done.set()

    client.submit([engine_request(name, job) for name, job in zip(list(unfinished), jobs, strict=True)], receive)
    snapshots = []
    while not done.wait(_SAMPLING_INTERVAL):
        watch(not in_prefill)
        snapshots.append(client.stats())
        if not client.is_alive():
            raise RuntimeError("the engine has stopped")
    if failures:
        raise RuntimeError("; ".join(failures))
    return snapshots


class Step(NamedTuple):
    """The time from the tokens of one step to those of the next. A step without tokens counts towards the next."""

    num_tokens: int
    num_first: int
    """Number of tokens that are the first of their request, whose prompt was in this step."""
    seconds: float


def timed_steps(client: "EngineClient", jobs: list[Job], *, prefix: str) -> "tuple[list[Step], list[EngineStats]]":
    """Run these jobs to completion. Return their steps, and the snapshots taken meanwhile."""
    steps: list[Step] = []
    known: set[str] = set()
    before = time.perf_counter()

    def hear(outputs: list[EngineOutput]) -> None:
        nonlocal before
        now = time.perf_counter()
        ids = {output.request_id for output in outputs if output.new_token_ids}
        steps.append(Step(sum(len(output.new_token_ids) for output in outputs), len(ids - known), now - before))
        known.update(ids)
        before = now

    return steps, complete(client, jobs, prefix=prefix, heard=hear)


def warm_up(client: "EngineClient", shape: BatchShape, *, prefix: str) -> list[Job]:
    """Run batches of this shape until nothing is left to compile. Return another batch of this shape, to be
    measured.
    """
    for run in range(NUM_WARMUPS):
        jobs = shape.jobs(seed=10 + run, vocab_size=client.info.vocab_size)
        complete(client, jobs, prefix=f"{prefix}-warmup-{run}")
    return shape.jobs(seed=1, vocab_size=client.info.vocab_size)


def traced(
    client: "EngineClient",
    jobs: list[Job],
    *,
    prefix: str,
    is_decode_only: bool = False,
    window: tuple[float, float] = (0.0, math.inf),
) -> "list[Work]":
    """Run the jobs and return the GPU work traced between two times after their start, in seconds; with
    `is_decode_only`, only from when each has its first token.
    """
    from jaxserve.engine.profile import read_profile

    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        has_started = has_stopped = False

        def watch(all_decode: bool) -> None:
            nonlocal has_started, has_stopped
            seconds = time.perf_counter() - begin
            if not has_started and seconds >= window[0] and (all_decode or not is_decode_only):
                client.start_profile(folder)
                has_started = True
            elif has_started and not has_stopped and seconds >= window[1]:
                client.stop_profile()
                has_stopped = True

        try:
            watch(False)
            complete(client, jobs, prefix=prefix, watch=watch)
        finally:
            if has_started and not has_stopped:
                client.stop_profile()
        return read_profile(pathlib.Path(folder)) if has_started else []


def engine_request(request_id: str, job: Job) -> EngineRequest:
    """Return the engine request for a job, with exactly the job's output length."""
    params = SamplingParams(temperature=job.temperature, seed=0, max_tokens=job.output_len, ignore_eos=True)
    return EngineRequest(
        request_id=request_id,
        group_id=request_id,
        prompt_token_ids=job.prompt_token_ids,
        params=params,
        max_tokens=job.output_len,
    )


def kv_use_at_full_load(snapshots: "list[EngineStats]") -> float | None:
    """Return the mean fraction of allocated positions that hold a token (`EngineRun.kv_use`)."""
    peak = max((snapshot.num_running for snapshot in snapshots), default=0)
    shares = [
        snapshot.kv_tokens_held / snapshot.kv_positions_allocated
        for snapshot in snapshots
        if snapshot.num_running >= 0.9 * peak and snapshot.kv_positions_allocated
    ]
    return sum(shares) / len(shares) if shares else None


if __name__ == "__main__":
    spec = msgspec.json.decode(pathlib.Path(sys.argv[1]).read_bytes(), type=RunSpec)
    print(msgspec.json.encode(run(spec)).decode())
