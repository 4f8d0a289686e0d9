"""A recording of an engine: what each step computed for which request, and what the KV blocks were used for."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Literal, NamedTuple

from jaxserve.engine.engine import Engine
from jaxserve.inspect.engine import engine_of, plans_passed_to
from jaxserve.inspect.picture import Drawing, Picture
from jaxserve.local_model import LocalModel
from jaxserve.scheduling.plan import StepPlan
from jaxserve.tables import aligned

MAX_WAITING = 256
"""Waiting requests that a recording sees."""

MAX_DRAWN = 48
"""Requests that a figure has rows for."""

Kind = Literal["prompt", "decode", "waiting", "preempted", "running"]
_COLORS: dict[Kind, str] = {
    "prompt": "#4e79a7",
    "decode": "#59a14f",
    "waiting": "#d9d9d9",
    "preempted": "#e15759",
    "running": "#eef3ee",
}
_CACHED = "#f28e2b"
_MEANINGS = (
    ("prompt", _COLORS["prompt"]),
    ("cached prefix taken", _CACHED),
    ("one token", _COLORS["decode"]),
    ("waiting", _COLORS["waiting"]),
    ("preempted", _COLORS["preempted"]),
)


class TimelineRow(NamedTuple):
    """One request's part of a step: its tokens [start, start + num_tokens)."""

    request_id: str
    start: int
    num_tokens: int
    samples: bool
    num_cached_tokens: int
    """Tokens whose KV came from the prefix cache: when the request is admitted, otherwise 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimelineStep:
    """One step.

    Attributes:
        seconds: when it was started, since the recording began.
        rows: what it computes.
        running: requests that hold a slot.
        waiting: requests that have not run yet.
        preempted: requests that have lost their blocks and wait to run again.
        padded_tokens: tokens that a static batch is filled up to, 0 if it is not.
        num_held_blocks: blocks that requests hold.
        num_cached_blocks: blocks that only the prefix cache holds.
        num_free_blocks: all others.
    """

    seconds: float
    rows: tuple[TimelineRow, ...]
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    preempted: tuple[str, ...]
    padded_tokens: int
    num_held_blocks: int
    num_cached_blocks: int
    num_free_blocks: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, without padding."""
        return sum(row.num_tokens for row in self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestSummary:
    """What a recording has of one request: steps are numbers of `Timeline.steps`. A step that verifies drafts counts as
    one output token, however many it accepts.
    """

    request_id: str
    first_step: int
    last_step: int
    num_steps: int
    num_computed_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int


class Timeline:
    """A recording, as long as the `with` block lasts. In a notebook it is a figure.

    Attributes:
        steps: the recorded steps, in order.
    """

    def __init__(self, engine: Engine):
        self.steps: list[TimelineStep] = []
        self._engine = engine
        self._began = 0.0
        self._until_exit = contextlib.ExitStack()

    def __enter__(self) -> "Timeline":
        self.steps.clear()
        self._began = time.perf_counter()
        self._until_exit.enter_context(plans_passed_to(self._record, self._engine))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._until_exit.close()

    def _record(self, plan: StepPlan) -> None:
        """Add a step; the engine's thread calls this."""
        now = time.perf_counter()
        admitted = {row.slot for row in plan.admitted}
        scheduler = self._engine.scheduler
        running, waiting, _ = scheduler.snapshot(max_waiting=MAX_WAITING)
        stats = scheduler.stats()
        preempted = tuple(request.request_id for request in waiting if request.num_preemptions)
        self.steps.append(
            TimelineStep(
                seconds=now - self._began,
                rows=tuple(
                    TimelineRow(
                        row.request.request_id,
                        row.start,
                        row.num_tokens,
                        row.samples,
                        row.start if row.slot in admitted else 0,
                    )
                    for row in plan.rows
                ),
                running=tuple(request.request_id for request in running),
                waiting=tuple(request.request_id for request in waiting if not request.num_preemptions),
                preempted=preempted,
                padded_tokens=plan.padded_tokens,
                num_held_blocks=self._engine.runner.num_blocks - stats.num_free_blocks - stats.num_cached_blocks,
                num_cached_blocks=stats.num_cached_blocks,
                num_free_blocks=stats.num_free_blocks,
            )
        )

    @property
    def request_ids(self) -> list[str]:
        """The requests, in the order in which they first ran, or waited."""
        seen = (
            request_id
            for step in self.steps
            for request_id in (*(row.request_id for row in step.rows), *step.waiting, *step.preempted)
        )
        return list(dict.fromkeys(seen))

    @property
    def requests(self) -> list[RequestSummary]:
        """A summary of each request that has run, in the order of `request_ids`."""
        return [found for request_id in self.request_ids if (found := self._summary(request_id)) is not None]

    @property
    def num_preemptions(self) -> int:
        """How often a request lost its blocks to another one."""
        return sum(request.num_preemptions for request in self.requests)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that were not computed because the prefix cache had their KV."""
        return sum(request.num_cached_tokens for request in self.requests)

    @property
    def seconds(self) -> float:
        """Time from the start of the first step to that of the last."""
        return self.steps[-1].seconds - self.steps[0].seconds if self.steps else 0.0

    def _summary(self, request_id: str) -> RequestSummary | None:
        rows = [
            (number, row) for number, step in enumerate(self.steps) for row in step.rows if row.request_id == request_id
        ]
        if not rows:
            return None
        lost = [request_id in step.preempted for step in self.steps]
        return RequestSummary(
            request_id=request_id,
            first_step=rows[0][0],
            last_step=rows[-1][0],
            num_steps=len(rows),
            num_computed_tokens=sum(row.num_tokens for _, row in rows),
            num_output_tokens=sum(row.samples for _, row in rows),
            num_cached_tokens=sum(row.num_cached_tokens for _, row in rows),
            num_preemptions=sum(now and not before for before, now in zip([False, *lost], lost, strict=False)),
        )

    def _states(self, request_id: str) -> Iterator[tuple[Kind | None, TimelineRow | None]]:
        """Yield what a request does in each step, and its row if it has one."""
        for step in self.steps:
            row = next((row for row in step.rows if row.request_id == request_id), None)
            if row is not None:
                yield ("decode" if row.num_tokens == 1 and row.samples else "prompt"), row
            elif request_id in step.preempted:
                yield "preempted", None
            elif request_id in step.waiting:
                yield "waiting", None
            else:
                yield ("running" if request_id in step.running else None), None

    def draw(self, *, width: float = 900) -> Picture:
        """Draw a row for each request and a column for each step; below them, the tokens of steps and the blocks."""
        ids = self.request_ids[:MAX_DRAWN]
        left, row_height, plot = 92.0, 18.0, 56.0
        column = max(1.0, min(22.0, (width - left - 60) / max(1, len(self.steps))))
        top = 26.0
        bottom = top + row_height * len(ids) + 22
        drawing = Drawing(width, bottom + 2 * plot + 34)
        x = left
        for name, color in _MEANINGS:
            drawing.rect(x, 6, 10, 10, fill=color)
            drawing.text(x + 14, 15, name)
            x += 30 + 6.2 * len(name)
        for number, request_id in enumerate(ids):
            y = top + row_height * number
            drawing.text(left - 6, y + 12, f"request {number}", anchor="end")
            self._draw_request(drawing, request_id, left, y, column, row_height - 3)
        self._draw_tokens(drawing, left, bottom, column, plot)
        self._draw_blocks(drawing, left, bottom + plot + 22, column, plot)
        return drawing.picture()

    def _draw_request(
        self, drawing: Drawing, request_id: str, left: float, y: float, column: float, height: float
    ) -> None:
        """Draw a request's row: a cell for each step of its prompt, one bar for steps of the same kind."""
        begin, current = 0, None
        states = [*self._states(request_id), (None, None)]
        for number, (kind, row) in enumerate(states):
            if kind != current or kind == "prompt":
                if current is not None and current != "prompt":
                    extent = (number - begin) * column
                    steps = f"steps {begin} to {number - 1}"
                    drawing.rect(left + begin * column, y, extent, height, fill=_COLORS[current], title=steps)
                begin, current = number, kind
            if row is None:
                continue
            x = left + number * column
            if kind == "prompt":
                title = f"step {number}: tokens {row.start} to {row.start + row.num_tokens - 1}"
                drawing.rect(x, y, max(0.8, column - 0.8), height, fill=_COLORS["prompt"], title=title)
                if column >= 18:
                    drawing.text(x + column / 2, y + 11, str(row.num_tokens), anchor="middle", fill="#ffffff")
            if row.num_cached_tokens:
                title = f"{row.num_cached_tokens} tokens of the prefix cache"
                drawing.rect(x - 1.5, y - 1, 4, height + 2, fill=_CACHED, title=title)

    def _draw_tokens(self, drawing: Drawing, left: float, y: float, column: float, height: float) -> None:
        """Draw how many tokens each step computes, and the padding of static batches."""
        most = max((max(step.num_tokens, step.padded_tokens) for step in self.steps), default=1)
        drawing.text(left - 6, y + 12, "tokens", anchor="end")
        drawing.text(left - 6, y + 26, f"up to {most}", anchor="end", fill="#777777")
        for number, step in enumerate(self.steps):
            x, extent = left + number * column, max(0.8, column - 0.8)
            padded, used = (height * count / most for count in (step.padded_tokens, step.num_tokens))
            if padded > used:
                title = f"padded to {step.padded_tokens}"
                drawing.rect(x, y + height - padded, extent, padded - used, fill="#f4c7c3", title=title)
            title = f"step {number}: {step.num_tokens} tokens"
            drawing.rect(x, y + height - used, extent, used, fill="#777777", title=title)
        drawing.line(left, y + height, left + column * len(self.steps), y + height)

    def _draw_blocks(self, drawing: Drawing, left: float, y: float, column: float, height: float) -> None:
        """Draw what share of the blocks requests hold, and the prefix cache; steps that are equal are one bar."""
        drawing.text(left - 6, y + 12, "KV blocks", anchor="end")
        if not self.steps:
            return
        total = sum(_uses(self.steps[0]))
        drawing.text(left - 6, y + 26, f"of {total}", anchor="end", fill="#777777")
        right = left + column * len(self.steps)
        drawing.rect(left, y, right - left, height, fill="#f7f7f7")
        begin = 0
        for number in range(1, len(self.steps) + 1):
            if number < len(self.steps) and _uses(self.steps[number]) == _uses(self.steps[begin]):
                continue
            held, cached, _ = (height * count / total for count in _uses(self.steps[begin]))
            x, extent = left + begin * column, (number - begin) * column
            drawing.rect(x, y + height - held, extent, held, fill=_COLORS["decode"])
            drawing.rect(x, y + height - held - cached, extent, cached, fill=_CACHED)
            begin = number
        drawing.line(left, y + height, right, y + height)
        drawing.text(right + 4, y + 12, "held", fill=_COLORS["decode"])
        drawing.text(right + 4, y + 26, "cached", fill=_CACHED)
        drawing.text(right + 4, y + 40, "free", fill="#777777")

    def __repr__(self) -> str:
        header = ("request", "steps", "tokens computed", "from the cache", "tokens drawn", "preemptions")
        rows = [
            [
                str(number),
                f"{each.first_step} to {each.last_step}",
                str(each.num_computed_tokens),
                str(each.num_cached_tokens),
                str(each.num_output_tokens),
                str(each.num_preemptions),
            ]
            for number, each in enumerate(self.requests)
        ]
        return f"{len(self.steps)} steps in {self.seconds:.3f} s\n{aligned([header, *rows])}"

    def _repr_svg_(self) -> str:
        return self.draw().svg


def _uses(step: TimelineStep) -> tuple[int, int, int]:
    """Return how many blocks are held, cached and free."""
    return step.num_held_blocks, step.num_cached_blocks, step.num_free_blocks


def timeline(llm: LocalModel) -> Timeline:
    """Return what records the steps of a model while it is used in a `with` statement. One records at a time.

    Raises ConfigError for a `with` inside another one, or around a measurement.
    """
    return Timeline(engine_of(llm))
