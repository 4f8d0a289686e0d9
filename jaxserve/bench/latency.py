"""`jaxserve bench latency`: a batch of equal requests, submitted together, on any model and any engine options."""

import time

from jaxserve.bench.engine_run import complete
from jaxserve.bench.report import table
from jaxserve.bench.workloads import equal_jobs
from jaxserve.config import EngineConfig


def run(config: EngineConfig, *, batch_size: int, input_len: int, output_len: int) -> str:
    """Time `batch_size` requests of random tokens: once with one token of output (prefill), once with `output_len`.

    Each is run before it is timed, so that nothing is compiled meanwhile. The prefix cache should be off. Time per
    output token is (total - prefill) / (output_len - 1), as in vLLM's benchmarks. Raises StartupError, InvalidRequest.
    """
    from jaxserve.engine.local import LocalEngineClient

    start = time.perf_counter()
    client = LocalEngineClient.start(config, progress=True)
    started = time.perf_counter() - start
    try:

        def seconds(length: int, name: str) -> float:
            shape = {"input_len": input_len, "output_len": length, "vocab_size": client.info.vocab_size}
            complete(client, equal_jobs(batch_size, seed=0, **shape), prefix=f"{name}-warmup")
            jobs = equal_jobs(batch_size, seed=1, **shape)
            start = time.perf_counter()
            complete(client, jobs, prefix=name)
            return time.perf_counter() - start

        prefill = seconds(1, "prefill")
        total = seconds(output_len, "total") if output_len > 1 else prefill
    finally:
        client.close()
    per_token = f"{(total - prefill) / (output_len - 1) * 1e3:.2f}" if output_len > 1 else "-"
    row = [
        f"{batch_size} x {input_len} in, {output_len} out",
        f"{started:.1f}",
        f"{batch_size * input_len / prefill:.0f}",
        f"{total:.3f}",
        f"{batch_size * output_len / total:.1f}",
        per_token,
    ]
    return table(["requests", "start-up s", "prefill tok/s", "total s", "output tok/s", "ms a token"], [row])
