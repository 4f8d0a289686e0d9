"""`jaxserve bench throughput`: mixed requests under continuous and static batching, and under transformers.

The contenders run one after another in one run, each alone in a process of its own, so that their times can be
compared.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from jaxserve.bench import peers
from jaxserve.bench.engine_run import EngineRun, RunSpec
from jaxserve.bench.report import table
from jaxserve.bench.shapes import write_config
from jaxserve.bench.workloads import Job
from jaxserve.config import EngineConfig
from jaxserve.cpus import num_usable_cpus
from jaxserve.errors import JaxserveError


class Contender(NamedTuple):
    """One row of the table. `cpu_seconds` shows how much of `seconds` was lost to other work on the machine."""

    name: str
    seconds: float
    cpu_seconds: float
    kv_use: float | None


def run(jobs: list[Job], *, model_config: Mapping[str, Any], engine: EngineConfig, peer_python: str | None) -> str:
    """Measure every contender on these jobs and return the report.

    `model_config` is the config.json of the model, which gets random weights; `engine` has the options common to all
    contenders. `peer_python` is an interpreter with torch and transformers, or None to leave the peer out. Raises
    JaxserveError if a contender fails.
    """
    max_model_len = max(len(job.prompt_token_ids) + job.output_len for job in jobs)
    contenders = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(pathlib.Path(folder), model_config)
        engine = dataclasses.replace(engine, model=str(model), load_format="dummy", max_model_len=max_model_len)
        for scheduler in ("continuous", "static"):
            engine = dataclasses.replace(engine, scheduler=scheduler)
            spec = RunSpec(engine=engine, jobs=jobs, num_threads=num_usable_cpus())
            line = _run_process([sys.executable, "-m", "jaxserve.bench.engine_run"], spec)
            result = msgspec.json.decode(line, type=EngineRun)
            name = f"jaxserve, {scheduler} batching"
            contenders.append(Contender(name, result.seconds, result.cpu_seconds, result.kv_use))
            print(f"{name}: {result}", file=sys.stderr)
        if peer_python is not None:
            script = str(pathlib.Path(peers.__file__).with_name("hf_generate.py"))
            peer = json.loads(_run_process([peer_python, script], spec))
            contenders.append(Contender("transformers generate", peer["seconds"], peer["cpu_seconds"], None))
            print(f"transformers generate: {peer}", file=sys.stderr)
    return report(contenders, jobs)


def report(contenders: list[Contender], jobs: list[Job]) -> str:
    """Format the workload in one sentence, and the table; all contenders are compared with the first."""
    num_output = sum(job.output_len for job in jobs)
    num_input = sum(len(job.prompt_token_ids) for job in jobs)
    rows = [
        [
            contender.name,
            f"{contender.seconds:.1f}",
            f"{contender.cpu_seconds:.1f}",
            f"{num_output / contender.seconds:.1f}",
            f"{contenders[0].seconds / contender.seconds:.2f}",
            "-" if contender.kv_use is None else f"{contender.kv_use:.1%}",
        ]
        for contender in contenders
    ]
    longest = max(job.output_len for job in jobs)
    return (
        f"{len(jobs)} requests, {num_input} prompt and {num_output} output tokens (longest output {longest}), "
        f"{num_usable_cpus()} CPU cores\n\n"
        + table(["", "seconds", "CPU seconds", "output tokens/s", "relative", "KV positions in use"], rows)
    )


def _run_process(command: list[str], spec: RunSpec) -> bytes:
    """Run a contender on the spec and return the JSON line it prints last."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(msgspec.json.encode(spec))
        file.flush()
        result = subprocess.run([*command, file.name], stdout=subprocess.PIPE, check=False)
    if result.returncode != 0:
        raise JaxserveError(f"{' '.join(command)} failed with exit code {result.returncode}")
    return result.stdout.splitlines()[-1]
