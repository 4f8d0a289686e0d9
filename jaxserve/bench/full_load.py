"""`jaxserve bench full-load`: tokens a second when all requests are there at the start, beside a peer's table."""

import json
import pathlib
import statistics
import sys
from typing import TYPE_CHECKING, Any

from jaxserve.bench.engine_run import complete, engine_of, timed_steps, traced
from jaxserve.bench.report import table
from jaxserve.bench.steps import kernels_table
from jaxserve.bench.workloads import BatchShape
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from jaxserve.engine.local import LocalEngineClient

HEADER = (
    *("requests", "output tok/s", "peer's", "x peer", "at once", "preempted"),
    *("steps with first tokens", "of the time", "other steps", "tokens in one", "ms", "floor", "waits for device"),
)


def read_peer(path: pathlib.Path, entry: str | None) -> dict[tuple[int, int], float]:
    """Return a peer's tokens a second by (prompt, output) length: the first figures of the rows of an entry.

    By default it is the first entry that has rows. Raises ConfigError if there is none.
    """
    try:
        entries: dict[str, Any] = json.loads(path.read_text())
        named = entries.items() if entry is None else [(entry, entries[entry])]
        rows = next((rows for _, rows in named if rows and isinstance(rows, list)), None)
        if rows is None:
            raise ValueError("no list of rows")
        return {(int(row[0]), int(row[1])): float(row[2]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        of = "" if entry is None else f" of {entry!r}"
        raise ConfigError(f"no table{of} in {path}: {error!r}") from error


def run(
    config: EngineConfig,
    settings: list[BatchShape],
    *,
    peer: dict[tuple[int, int], float],
    bandwidth: float | None,
    profile: bool = False,
) -> str:
    """Run each setting, after a few of its requests to warm up. Return the report.

    The last column is the fraction of the time in which the engine waited for the device: near 0 the host is the bound;
    otherwise it is memory where other steps take little more than their floor, and arithmetic in steps of prompts.

    The floor is the time in which the devices' memories, at `bandwidth` bytes a second each, can deliver the weights
    and the KV of the mean context for the mean number of tokens of a step without first tokens.

    With `profile` each setting runs once more, and a table of the GPU's kernels in a second of its middle follows.
    Raises StartupError, InvalidRequest.
    """
    bandwidth = bandwidth and bandwidth * config.tensor_parallel_size
    with engine_of(config) as client:
        rows, profiles, longest = [], [], client.info.max_model_len
        if too_long := [str(setting) for setting in settings if setting.input_len + setting.output_len > longest]:
            raise InvalidRequest(f"max_model_len is {longest}: no room for {', '.join(too_long)}", param="settings")
        for setting in settings:
            row, seconds = _measure(client, setting, peer=peer, bandwidth=bandwidth)
            rows.append(row)
            print(" ".join(row), file=sys.stderr, flush=True)
            if profile:
                jobs = setting.jobs(seed=2, vocab_size=client.info.vocab_size)
                middle = (seconds / 2 - 1, seconds / 2 + 1)
                work = traced(client, jobs, prefix=f"{setting}-traced", window=middle)
                profiles.append(f"{setting}\n\n{kernels_table(work)}")
        cache = f"KV in {client.info.kv_dtype}, {client.info.kv_cache_bytes / 2**30:.1f} GiB"
        return "\n\n".join((cache, table(HEADER, rows), *profiles))


def _measure(
    client: "LocalEngineClient", setting: BatchShape, *, peer: dict[tuple[int, int], float], bandwidth: float | None
) -> tuple[list[str], float]:
    """Return the row of a setting, and how many seconds it took."""
    num_at_once = min(setting.batch_size, client.info.max_num_seqs)
    short = BatchShape(num_at_once, setting.input_len, min(setting.output_len, 8))
    complete(client, short.jobs(seed=1, vocab_size=client.info.vocab_size), prefix=f"{setting}-warmup")
    jobs = setting.jobs(seed=0, vocab_size=client.info.vocab_size)
    before = client.stats()
    steps, snapshots = timed_steps(client, jobs, prefix=str(setting))
    after, seconds = client.stats(), sum(step.seconds for step in steps)
    speed = setting.batch_size * setting.output_len / seconds
    theirs = peer.get((setting.input_len, setting.output_len))
    first = [step.seconds for step in steps if step.num_first]
    other = [step for step in steps if not step.num_first]
    took = statistics.median(step.seconds for step in other) if other else None
    num_tokens = statistics.median(step.num_tokens for step in other) if other else 0
    context = setting.input_len + setting.output_len / 2
    floor = client.info.step_bytes(round(num_tokens), context=context) / bandwidth if bandwidth and other else None
    row = [
        str(setting),
        f"{speed:.0f}",
        "-" if theirs is None else f"{theirs:.0f}",
        "-" if theirs is None else f"{speed / theirs:.2f}",
        str(max((snapshot.num_running for snapshot in snapshots), default=0)),
        str(after.num_preemptions - before.num_preemptions),
        str(len(first)),
        f"{sum(first) / seconds:.0%}",
        str(len(other)),
        f"{num_tokens:.0f}",
        "-" if took is None else f"{took * 1e3:.2f}",
        "-" if floor is None else f"{floor * 1e3:.2f}",
        f"{(after.wait_seconds - before.wait_seconds) / seconds:.0%}",
    ]
    return row, seconds
