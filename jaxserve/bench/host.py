"""`jaxserve bench host`: host time of a decode step, phase by phase, with many requests running.

The model has as many layers as a large one but next to no width. Steps do not overlap: when the device is the CPU, its
threads would otherwise compete for the cores on which the host is timed.
"""

import pathlib
import statistics
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxserve.bench.engine_run import engine_request
from jaxserve.bench.report import table
from jaxserve.bench.shapes import write_config
from jaxserve.bench.workloads import Job
from jaxserve.config import EngineConfig

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine

PHASES = ("schedule", "build", "dispatch", "update")

_WARMUP_STEPS = 20


def run(config: Mapping[str, Any], *, num_requests: int, input_len: int, num_steps: int) -> str:
    """Time `num_steps` steps in which `num_requests` requests of about `input_len` tokens decode one token each.

    `config` is the config.json of the model, which gets random weights. Returns the report. Raises StartupError.
    """
    from jaxserve.engine.startup import start_engine

    max_model_len = input_len + _WARMUP_STEPS + num_steps + 8
    with tempfile.TemporaryDirectory() as folder:
        engine_config = EngineConfig(
            model=str(write_config(pathlib.Path(folder), config)),
            load_format="dummy",
            dtype="float32",
            max_model_len=max_model_len,
            max_num_seqs=num_requests,
            max_num_batched_tokens=max(2048, num_requests),
            kernels="xla",
            overlap=False,
            warmup="none",
        )
        engine, _ = start_engine(engine_config, mesh=None, progress=False)
    try:
        seconds = measure(engine, num_requests=num_requests, input_len=input_len, num_steps=num_steps)
    finally:
        engine.runner.close()
    return f"{config['num_hidden_layers']} layers; " + report(seconds, num_requests=num_requests, input_len=input_len)


def measure(engine: "Engine", *, num_requests: int, input_len: int, num_steps: int) -> list[dict[str, float]]:
    """Return the seconds of each phase in each of `num_steps` steps, counted from when every request decodes."""
    output_len = _WARMUP_STEPS + num_steps + 4
    prompts = [[(number + position) % 499 for position in range(input_len)] for number in range(num_requests)]
    engine.add([engine_request(f"host-{number}", Job(ids, output_len)) for number, ids in enumerate(prompts)])
    started: set[str] = set()
    while len(started) < num_requests:
        started.update(output.request_id for output in engine.step() if output.new_token_ids)
    for _ in range(_WARMUP_STEPS):
        engine.step()
    steps = []
    for _ in range(num_steps):
        before = _phase_seconds(engine)
        engine.step()
        after = _phase_seconds(engine)
        steps.append({phase: after[phase] - before[phase] for phase in PHASES})
    return steps


def _phase_seconds(engine: "Engine") -> dict[str, float]:
    return engine.seconds | engine.runner.seconds


def report(steps: list[dict[str, float]], *, num_requests: int, input_len: int) -> str:
    """Format deciles 1, 5 and 9 of each phase and of their sum, in microseconds."""
    columns = {phase: [step[phase] for step in steps] for phase in PHASES}
    columns["all"] = [sum(step[phase] for phase in PHASES) for step in steps]
    rows = []
    for name, column in columns.items():
        deciles = statistics.quantiles(column, n=10)
        rows.append([name, *(f"{deciles[index] * 1e6:.0f}" for index in (0, 4, 8))])
    return f"{len(steps)} decode steps with {num_requests} requests running, prompts of {input_len} tokens\n\n" + table(
        ["phase on the host", "p10 us", "median us", "p90 us"], rows
    )
