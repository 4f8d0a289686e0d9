"""`jaxserve bench latency`: batches of equal requests, compared with a lower bound and with another engine (the
peer).
"""

import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from jaxserve.bench.engine_run import complete, engine_of, traced, warm_up
from jaxserve.bench.report import table
from jaxserve.bench.shapes import SHAPES
from jaxserve.bench.workloads import BatchShape
from jaxserve.config import EngineConfig, Quantization
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.engine.local import LocalEngineClient

HEADER = (
    *("requests", "prefill tok/s", "peer's", "output tok/s", "peer's", "x peer"),
    *("ms a token", "peer's", "floor", "x floor", "device busy"),
)

LONG_ENOUGH, MAX_RUNS = 1.0, 9
"""A measurement is repeated until its runs total LONG_ENOUGH seconds or there are MAX_RUNS of them; the median
counts.
"""

MIN_TRACED = 64
"""Minimum output length of a traced run, if the context allows: some tokens pass before the trace begins, and its first
half is discarded.
"""


class PeerRun(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a peer's file: B requests with i input and o output tokens. Figures that the peer did not measure are
    None.
    """

    B: int
    i: int
    o: int
    prefill_tok_s: float | None = None
    out_tok_s: float | None = None
    tpot_ms: float | None = None


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """The timing of one batch, in seconds. `per_token` is None if only one token is generated."""

    prefill: float
    total: float
    per_token: float | None
    busy: float | None
    """Fraction of the second half of decoding during which the device was busy; None if it was not traced."""
    tokens_per_step: float = 1.0
    """Tokens of a request in a step of decoding: more than one where drafts are accepted."""


class TimedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch and its times in seconds."""

    num_requests: Annotated[int, msgspec.Meta(ge=1)]
    input_len: Annotated[int, msgspec.Meta(ge=1)]
    output_len: Annotated[int, msgspec.Meta(ge=1)]
    prefill: Annotated[float, msgspec.Meta(gt=0)]
    per_token: Annotated[float, msgspec.Meta(gt=0)] | None


class LatencyRun(msgspec.Struct, frozen=True, kw_only=True):
    """What `--save-json` writes and `jaxserve plan --measured` reads: an engine, what it reported, and its batches."""

    shape: str | None
    """The shape of its random weights, in place of `engine.model`."""
    engine: EngineConfig
    device: str
    num_blocks: int
    kv_cache_bytes: int
    weight_bytes: int
    """Both on all devices together."""
    bytes_in_use: int | None
    """Those of one device, before the first request."""
    batches: list[TimedBatch]


def read_run(path: pathlib.Path) -> LatencyRun:
    """Read what `--save-json` wrote. Raises ConfigError."""
    try:
        run = msgspec.json.decode(path.read_bytes(), type=LatencyRun)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"no run of `jaxserve bench latency` in {path}: {error}") from error
    if run.shape is not None and run.shape not in SHAPES:
        raise ConfigError(f"{path}: shape {run.shape!r} is not one of {', '.join(sorted(SHAPES))}")
    return run


def read_peer(path: pathlib.Path, entry: str | None) -> list[PeerRun]:
    """Return the runs of one entry of a peer's file, by default the first. Raises ConfigError if there is none."""
    try:
        entries: dict[str, Any] = json.loads(path.read_text())
        entry = entry or next(name for name, value in entries.items() if isinstance(value, dict))
        return msgspec.convert(entries[entry]["runs"], list[PeerRun])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ConfigError(f"no runs of {entry!r} in {path}: {error}") from error


def run(
    config: EngineConfig,
    shapes: list[BatchShape],
    *,
    peer: list[PeerRun],
    bandwidth: float | None,
    profile: bool,
    shape_name: str | None = None,
    save_json: pathlib.Path | None = None,
) -> str:
    """Time each shape twice: with one token of output (prefill), and in full. Return the report, and write the times to
    `save_json`; `shape_name` is what they are of, if that is no checkpoint.

    Each is run `NUM_WARMUPS` times before it is timed, so that nothing is compiled meanwhile, and short runs are
    repeated. The prefix cache should be off. Time per output token is (total - prefill) / (output_len - 1), as in
    vLLM's benchmarks. Its floor is the time in which the devices' memories, at `bandwidth` bytes per second each, can
    deliver the weights and the KV of the contexts, divided by the tokens that a request gets in a step where drafts are
    accepted. With `profile`, one more run is traced from when all its requests decode, to see for what fraction of its
    second half the device is busy.

    Raises StartupError, InvalidRequest.
    """
    from jaxserve.engine.device import bytes_in_use

    start = time.perf_counter()
    engine = engine_of(config)
    started = time.perf_counter() - start
    bandwidth = bandwidth and bandwidth * config.tensor_parallel_size
    theirs = {BatchShape(row.B, row.i, row.o): row for row in peer}
    rows, batches = [], []
    with engine as client:
        in_use = bytes_in_use()
        for shape in shapes:
            measured = _measure(client, shape, profile=profile)
            size = {"num_requests": shape.batch_size, "input_len": shape.input_len, "output_len": shape.output_len}
            batches.append(TimedBatch(**size, prefill=measured.prefill, per_token=measured.per_token))
            floor = None
            if bandwidth and measured.per_token:
                floor = _floor(client, shape, bandwidth) / measured.tokens_per_step
            rows.append(_row(shape, measured, theirs.get(shape), floor))
            print(" ".join(rows[-1]), file=sys.stderr)  # progress; the table is printed at the end
        if save_json is not None:
            found = LatencyRun(
                shape=shape_name,
                engine=config,
                device=client.info.device,
                num_blocks=client.info.num_blocks,
                kv_cache_bytes=client.info.kv_cache_bytes,
                weight_bytes=client.info.total_weight_bytes,
                bytes_in_use=in_use,
                batches=batches,
            )
            save_json.write_bytes(msgspec.json.encode(found))
    return f"ready after {started:.1f} s\n\n" + table(HEADER, rows)


def beside(config: EngineConfig, shapes: list[BatchShape], *, quantizations: Sequence[Quantization]) -> str:
    """Time each shape with the weights as `config` has them, and then rounded, as `run` does. Return the report.

    Its factors are those of the rates over the rates of the weights as they are.
    """
    rows, first = [], {}
    for name in (None, *quantizations):
        chosen = config if name is None else dataclasses.replace(config, quantization=name)
        for shape, rates, num_bytes in _rates(chosen, shapes):
            first.setdefault(shape, rates)
            prefill, output = (f"{rate:.1f} (x {rate / of:.2f})" for rate, of in zip(rates, first[shape], strict=True))
            label = name or f"as it is, {config.dtype}"
            rows.append([str(shape), label, prefill, output, f"{num_bytes / 2**20:.0f}"])
            print(" ".join(rows[-1]), file=sys.stderr)
    return table(("requests", "weights", "prefill tok/s", "output tok/s", "MiB of weights"), sorted(rows, key=_first))


def _first(row: list[str]) -> str:
    return row[0]


def _rates(config: EngineConfig, shapes: list[BatchShape]) -> Iterator[tuple[BatchShape, tuple[float, float], int]]:
    """Yield tokens a second of prompts and of output for each shape, and the bytes of all weights."""
    with engine_of(config) as client:
        for shape in shapes:
            measured = _measure(client, shape, profile=False)
            prefill = shape.batch_size * shape.input_len / measured.prefill
            output = shape.batch_size / (measured.per_token or measured.total)
            yield shape, (prefill, output), client.info.total_weight_bytes


def _measure(client: "LocalEngineClient", shape: BatchShape, *, profile: bool) -> Measurement:
    from jaxserve.engine.profile import busy_fraction

    def seconds(length: int, name: str) -> float:
        batch = BatchShape(shape.batch_size, shape.input_len, length)
        warm_up(client, batch, prefix=name)
        runs: list[float] = []
        while not runs or (sum(runs) < LONG_ENOUGH and len(runs) < MAX_RUNS):
            jobs = batch.jobs(seed=len(runs), vocab_size=client.info.vocab_size)
            start = time.perf_counter()
            complete(client, jobs, prefix=f"{name}-{len(runs)}")
            runs.append(time.perf_counter() - start)
        return statistics.median(runs)

    name = f"{shape.batch_size}-{shape.input_len}-{shape.output_len}"
    prefill = seconds(1, f"{name}-prefill")
    if shape.output_len == 1:
        return Measurement(prefill=prefill, total=prefill, per_token=None, busy=None)
    before = client.snapshot()
    total = seconds(shape.output_len, f"{name}-total")
    after = client.snapshot()
    num_decoded = (after.num_output_tokens - before.num_output_tokens) * (shape.output_len - 1) / shape.output_len
    num_accepted = after.stats.spec_decode_num_accepted_tokens - before.stats.spec_decode_num_accepted_tokens
    busy = None
    if profile:
        room = client.info.max_model_len - shape.input_len
        longer = BatchShape(shape.batch_size, shape.input_len, min(max(shape.output_len, MIN_TRACED), room))
        jobs = longer.jobs(seed=2, vocab_size=client.info.vocab_size)
        busy = busy_fraction(traced(client, jobs, prefix=f"{name}-traced", is_decode_only=True))
    per_token = (total - prefill) / (shape.output_len - 1)
    return Measurement(
        prefill=prefill,
        total=total,
        per_token=per_token,
        busy=busy,
        tokens_per_step=num_decoded / (num_decoded - num_accepted),
    )


def _floor(client: "LocalEngineClient", shape: BatchShape, bandwidth: float) -> float:
    """Return the lower bound in seconds per step of decoding: the time to read the weights once (of the experts, the
    expected number that the batch's tokens choose at random, without drafts) and the KV of the mean context (the input
    and half of the output).
    """
    context = shape.input_len + shape.output_len / 2
    return client.info.step_bytes(shape.batch_size, context=context) / bandwidth


def _row(shape: BatchShape, measured: Measurement, peer: PeerRun | None, floor: float | None) -> list[str]:
    def number(value: float | None, digits: int = 0) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    per_token = measured.per_token
    speed = shape.batch_size * shape.output_len / measured.total
    return [
        str(shape),
        number(shape.batch_size * shape.input_len / measured.prefill),
        number(peer and peer.prefill_tok_s),
        number(speed),
        number(peer and peer.out_tok_s),
        number(speed / peer.out_tok_s if peer and peer.out_tok_s else None, 2),
        number(per_token and per_token * 1e3, 2),
        number(peer and peer.tpot_ms, 2),
        number(floor and floor * 1e3, 2),
        number(per_token / floor if per_token and floor else None, 2),
        number(measured.busy, 3),
    ]
