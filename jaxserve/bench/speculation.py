"""`jaxserve bench speculation`: what speculative decoding gains, on the prompts of a workload or with drafts that are
accepted by chance, and what it costs where nothing is accepted.

Two engines in one process, without and with speculation, take turns, so that whatever else slows a machine down slows
both.
"""

import collections
import contextlib
import dataclasses
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from jaxserve.bench.engine_run import NUM_WARMUPS, complete, engine_of
from jaxserve.bench.report import table
from jaxserve.bench.workloads import BatchShape, Job
from jaxserve.config import EngineConfig
from jaxserve.errors import InvalidRequest
from jaxserve.request import EngineOutput
from jaxserve.speculation import parse_speculation, with_acceptance

if TYPE_CHECKING:
    from jaxserve.engine.local import LocalEngineClient

PIECE = 1000
"""Characters of a text that are a prompt: some 250 tokens."""

HEADER = (
    *("requests at once", "tokens a step", "steps, off", "on", "ms a step, off", "on"),
    *("tokens/s, off", "on", "faster", "from", "to", "drafts accepted"),
)


class _Line(msgspec.Struct):
    turns: list[str]
    category: str | None = None


class _Run(NamedTuple):
    token_ids: dict[str, list[int]]
    """The tokens of each request, by its id."""
    seconds: float
    num_steps: int
    step_time: float
    """Median seconds from the tokens of a step to those of the next one."""
    num_drafts: int
    """Rows that verified drafts."""
    num_draft_tokens: int
    accepted: tuple[int, ...]
    """Drafts accepted at each position."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(map(len, self.token_ids.values())) / self.seconds


class _Pairs(NamedTuple):
    """Runs without and with speculation, which took turns."""

    off: list[_Run]
    on: list[_Run]

    def row(self, *labels: str) -> list[str]:
        """Return the line of the table."""
        ratios = sorted(on.rate / off.rate for off, on in zip(self.off, self.on, strict=True))
        steps = [f"{each[0].num_steps}" for each in self]
        times = [f"{1e3 * statistics.median(run.step_time for run in each):.3f}" for each in self]
        rates = [f"{statistics.median(run.rate for run in each):.1f}" for each in self]
        faster = [f"{ratio:.3f}" for ratio in (statistics.median(ratios), ratios[0], ratios[-1])]
        accepted = f"{sum(self.on[0].accepted)} of {self.on[0].num_draft_tokens}"
        return [*labels, *steps, *times, *rates, *faster, accepted]

    def summary(self) -> str:
        """Return what the drafts of a workload were worth."""
        on, off = self.on[0], self.off[0]
        num_drafts = max(on.num_drafts, 1)
        num_same = sum(off.token_ids[name] == token_ids for name, token_ids in on.token_ids.items())
        by_position = ", ".join(f"{count / num_drafts:.2f}" for count in on.accepted)
        return (
            f"{1 + sum(on.accepted) / num_drafts:.2f} tokens a step that had drafts; accepted by position: "
            f"{by_position}; {num_same} of {len(on.token_ids)} texts are the same"
        )


@contextlib.contextmanager
def _engines(config: EngineConfig) -> "Iterator[tuple[LocalEngineClient, LocalEngineClient]]":
    """Start two engines of the same weights, without and with speculation."""
    if config.speculative_config is None:
        raise InvalidRequest("there is nothing to compare without --speculative-config", param="speculative_config")
    plain = dataclasses.replace(config, speculative_config=None)
    with engine_of(plain) as off, engine_of(config) as on:
        yield off, on


def by_chance(
    config: EngineConfig,
    *,
    input_len: int,
    output_len: int,
    at_once: Sequence[int],
    lengths: Sequence[float],
    num_pairs: int,
) -> str:
    """Generate with and without `speculative_config` from random prompts, as many at once as `at_once` says, and return
    the report.

    A step that verifies drafts draws each of `lengths` tokens on average, by chance, 1 if none is ever accepted. The
    engine decides which steps verify any, as it always does. Raises StartupError, ConfigError, InvalidRequest.
    """
    fields = config.speculative_config
    lengths = sorted(lengths, reverse=True)  # an engine hesitates for a while where nothing has been accepted
    rates = [_rates(fields, length) for length in lengths]
    config = dataclasses.replace(config, speculative_config=with_acceptance(fields, lengths[0]))
    rows = []
    with _engines(config) as engines:
        _, on = engines
        for size, (length, of_length) in itertools.product(at_once, zip(lengths, rates, strict=True)):
            on.engine.runner.set_acceptance(of_length)
            jobs = BatchShape(size, input_len, output_len).jobs(seed=1, vocab_size=on.info.vocab_size)
            pairs = _take_turns(engines, jobs, at_once=size, num_pairs=num_pairs)
            rows.append(pairs.row(str(size), f"{length:g}"))
            print(" ".join(rows[-1]), file=sys.stderr)
    return f"{input_len} tokens in, {output_len} out\n\n" + table(HEADER, rows)


def _rates(fields: dict[str, Any] | None, length: float) -> tuple[float, ...]:
    speculation = parse_speculation(with_acceptance(fields, length))
    if speculation is None or not speculation.acceptance_rates:
        raise InvalidRequest("num_speculative_tokens is missing", param="speculative_config")
    return speculation.acceptance_rates


def of_workload(
    config: EngineConfig,
    *,
    workload: pathlib.Path,
    category: str | None,
    num_prompts: int,
    output_len: int,
    temperature: float,
    at_once: Sequence[int],
    num_pairs: int,
) -> str:
    """Generate with and without `speculative_config` from the prompts of a workload, and return the report.

    `workload` is a file of JSON lines with the fields `turns`, of which the first is the prompt, and `category`, as
    Spec-Bench has them, or a text (.txt), of which pieces are continued. Prompts that are too long lose their
    beginning. Raises StartupError, and InvalidRequest if the file cannot be read or has no such prompts.
    """
    texts = _texts(workload, category, num_prompts)
    from jaxserve.loading.builtin import resolve_names  # imported late: a tokenizer is too heavy for `--help`
    from jaxserve.tokenizer import Tokenizer

    config = resolve_names(config)
    tokenizer = Tokenizer.load(config.tokenizer or config.model)
    rows, summaries = [], []
    with _engines(config) as engines:
        longest = engines[0].info.max_model_len - output_len
        if longest < 1:
            raise InvalidRequest(f"output_len leaves no room for a prompt in {engines[0].info.max_model_len} tokens")
        jobs = [Job(tokenizer.encode(text)[-longest:], output_len, temperature) for text in texts]
        for size in at_once:
            pairs = _take_turns(engines, jobs, at_once=size, num_pairs=num_pairs)
            rows.append(pairs.row(str(size), "as drawn"))
            summaries.append(f"{size} at once: {pairs.summary()}")
    title = f"{workload.name}, {category or 'all categories'}: {len(texts)} prompts, {output_len} tokens each"
    title += f", {config.speculative_config}"
    return "\n".join([title, "", table(HEADER, rows), "", *summaries])


def _texts(workload: pathlib.Path, category: str | None, count: int) -> list[str]:
    try:
        content = workload.read_text(encoding="utf-8")
        if workload.suffix == ".txt" and (stride := len(content) // count):
            return [content[first : first + PIECE] for first in range(0, count * stride, stride)]
        lines = (
            []
            if workload.suffix == ".txt"
            else [msgspec.json.decode(line, type=_Line) for line in content.splitlines() if line.strip()]
        )
        texts = [line.turns[0] for line in lines if category in (None, line.category)]
    except (OSError, ValueError, IndexError) as error:
        raise InvalidRequest(f"cannot read {workload}: {error!r}", param="workload") from error
    if not lines:
        raise InvalidRequest(f"{workload} is too short for {count} prompts", param="workload")
    if not texts:
        categories = ", ".join(sorted({line.category for line in lines if line.category is not None}))
        raise InvalidRequest(f"{workload} has no prompts of {category!r}; there is {categories}", param="category")
    return texts[:count]


def _take_turns(
    engines: "tuple[LocalEngineClient, LocalEngineClient]", jobs: list[Job], *, at_once: int, num_pairs: int
) -> _Pairs:
    for engine in engines:
        for _ in range(NUM_WARMUPS):
            _generate(engine, jobs[:at_once], at_once=at_once)
    runs = _Pairs([], [])
    for number in range(num_pairs):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            runs[side].append(_generate(engines[side], jobs, at_once=at_once))
    return runs


def _generate(client: "LocalEngineClient", jobs: list[Job], *, at_once: int) -> _Run:
    """Run jobs, so many at once, each group until all have ended."""
    drawn: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
    steps: list[float] = []
    last: float | None = None

    def hear(outputs: list[EngineOutput]) -> None:
        nonlocal last
        now = time.perf_counter()
        if last is not None:
            steps.append(now - last)
        last = now
        for output in outputs:
            drawn[output.request_id] += output.new_token_ids

    before = client.stats()
    start = time.perf_counter()
    for number, group in enumerate(itertools.batched(jobs, at_once)):
        last = None
        complete(client, list(group), prefix=f"group-{number}", heard=hear)
    seconds = time.perf_counter() - start
    after = client.stats()
    accepted = zip(
        after.spec_decode_num_accepted_tokens_per_pos, before.spec_decode_num_accepted_tokens_per_pos, strict=True
    )
    return _Run(
        token_ids=dict(drawn),
        seconds=seconds,
        num_steps=after.num_steps - before.num_steps,
        step_time=statistics.median(steps or [seconds]),
        num_drafts=after.spec_decode_num_drafts - before.spec_decode_num_drafts,
        num_draft_tokens=after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens,
        accepted=tuple(a - b for a, b in accepted),
    )
