"""Dispatcher: the asyncio side of the front end, from the engine's outputs to those who wait for them in an event loop.

The engine calls the sink once per step. Its outputs wait until it is their prompt's turn; then everything that has
arrived for the prompt becomes text, and is passed on at once, without waking a task.
"""

import asyncio
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from jaxserve.engine.client import EngineClient
from jaxserve.engine.output import RequestGroup
from jaxserve.errors import EngineDead, JaxserveError, RequestFailed
from jaxserve.request import EngineOutput, RequestOutput, TokenLogprobs

type Take = Callable[[int, RequestOutput], None]
"""Function called with the index of a prompt and its new output."""

PROMPTS_A_TURN = 16
"""Number of prompts advanced before the event loop handles its connections.

A step has outputs for hundreds of prompts at once. New prompts go first: their first token must not wait for all
others' next one.
"""

LOGPROBS_A_TURN = 64
"""Number of logprobs handled in one turn.

Those of a prompt of 8,000 tokens, with 20 candidates each, may arrive in one output and take 70 ms; 64 take half a
millisecond. Those of new tokens accumulate while a prompt waits for its turn; including the writing, 64 take 3 ms.
"""

_ALIVE_CHECK_SECONDS = 1.0


@dataclasses.dataclass(slots=True, eq=False)
class _Run:
    """Prompts that are awaited together. `ended` is done when all have finished, one has failed, or nobody waits any
    more.
    """

    take: Take
    num_running: int
    ended: asyncio.Future[None]

    def prompt_finished(self) -> None:
        self.num_running -= 1
        if self.num_running == 0 and not self.ended.done():
            self.ended.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


@dataclasses.dataclass(slots=True, eq=False)
class _Prompt:
    """One prompt of a run, and the outputs that wait for its turn."""

    index: int
    group: RequestGroup
    run: _Run
    pending: list[EngineOutput] = dataclasses.field(default_factory=list)
    has_begun: bool = False


class Dispatcher:
    """The sink of all prompts of one event loop."""

    def __init__(self, client: EngineClient, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._thread = threading.get_ident()
        self._client = client
        self._prompts: dict[str, _Prompt] = {}  # by the id of each of its requests
        self._due: deque[_Prompt] = deque()  # those with pending outputs, in turn
        self._alive_check: asyncio.TimerHandle | None = None

    async def run(self, groups: Sequence[RequestGroup], take: Take) -> None:
        """Do what `Frontend.run` does."""
        if not groups:
            return
        run = _Run(take, num_running=len(groups), ended=self.loop.create_future())
        submitted: list[RequestGroup] = []
        try:
            for index, group in enumerate(groups):
                if index and index % PROMPTS_A_TURN == 0:
                    await asyncio.sleep(0)
                    if run.ended.done():
                        break
                prompt = _Prompt(index, group, run)
                for request in group.requests:  # before submitting: the first output may arrive at once
                    self._prompts[request.request_id] = prompt
                self._client.submit(group.requests, self.sink)
                submitted.append(group)
            if self._alive_check is None:
                self._alive_check = self.loop.call_later(_ALIVE_CHECK_SECONDS, self._check_alive)
            await run.ended
        finally:
            run.ended.cancel()
            for group in groups:
                for request in group.requests:
                    self._prompts.pop(request.request_id, None)
            if unfinished := [request_id for group in submitted for request_id in group.unfinished_ids]:
                self._client.abort(unfinished)

    def sink(self, outputs: list[EngineOutput]) -> None:
        """Take a step's outputs, on the engine's thread, or in the event loop if the engine is in another process."""
        if threading.get_ident() == self._thread:
            self._deliver(outputs)
            return
        try:
            self.loop.call_soon_threadsafe(self._deliver, outputs)
        except RuntimeError:  # the loop is closed, and nobody waits any more
            self._client.abort([output.request_id for output in outputs])

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        """Queue the prompts of these outputs for their turn."""
        prompts, due = self._prompts, self._due
        were_due = bool(due)
        for output in outputs:
            prompt = prompts.get(output.request_id)
            if prompt is None:
                continue
            if not prompt.pending:
                if prompt.has_begun:
                    due.append(prompt)
                else:
                    prompt.has_begun = True
                    due.appendleft(prompt)
            if output.prompt_logprobs:
                prompt.pending += _in_pieces(output, output.prompt_logprobs)
            else:
                prompt.pending.append(output)
        if due and not were_due:
            self.loop.call_soon(self._take_turns)

    def _take_turns(self) -> None:
        due = self._due
        try:
            for _ in range(min(PROMPTS_A_TURN, len(due))):
                self._advance(due.popleft())
        finally:  # whatever happens to one prompt, the others have their turn
            if due:
                self.loop.call_soon(self._take_turns)

    def _advance(self, prompt: _Prompt) -> None:
        """Pass on what has arrived for a prompt; the outputs before a failure come first."""
        outputs, prompt.pending = prompt.pending, []
        group, run = prompt.group, prompt.run
        if run.ended.done():
            return
        if len(outputs) > 1:
            outputs, prompt.pending = _turn(outputs)
            if prompt.pending:
                self._due.append(prompt)
        failure = None
        if outputs[-1].finish_reason is not None or len(outputs) > 1:
            outputs, failure = _until_failure(outputs)
        try:
            if stopped := group.push(outputs):
                self._client.abort(stopped)
            delta = group.take_delta()
            if delta is not None:
                run.take(prompt.index, delta)
        except Exception as error:  # only the waiter for this prompt gets it
            run.fail(error)
            return
        if failure is not None:
            group.push([failure])
            run.fail(self._error(group))
        elif delta is not None and delta.finished:
            run.prompt_finished()

    def _error(self, group: RequestGroup) -> JaxserveError:
        if group.refusal is not None:
            return group.refusal.error()
        assert group.error is not None
        return RequestFailed(group.error) if self._client.is_alive() else EngineDead(group.error)

    def _check_alive(self) -> None:
        """Check periodically, while someone waits, if an engine in another process has died silently."""
        self._alive_check = None
        if not self._prompts:
            return
        if self._client.is_alive():
            self._alive_check = self.loop.call_later(_ALIVE_CHECK_SECONDS, self._check_alive)
            return
        for prompt in self._prompts.values():
            prompt.run.fail(EngineDead("the engine has died"))


def _until_failure(outputs: list[EngineOutput]) -> tuple[list[EngineOutput], EngineOutput | None]:
    """Return the outputs before the first one that reports its sequence's failure, and that one."""
    for index, output in enumerate(outputs):
        if output.finish_reason == "error":
            return outputs[:index], output
    return outputs, None


def _turn(outputs: list[EngineOutput]) -> tuple[list[EngineOutput], list[EngineOutput]]:
    """Split outputs into those pushed now and those pushed later.

    Log probabilities of the prompt go one output at a time, before any token; those of tokens a limited number at a
    time. No output overtakes another of its own sequence, whose tokens come after its part of the prompt.
    """
    for index, output in enumerate(outputs):
        if output.prompt_logprobs:
            return [output], [*outputs[:index], *outputs[index + 1 :]]
    num_logprobs = 0
    for index, output in enumerate(outputs):
        num_logprobs += len(output.logprobs or ())
        if num_logprobs > LOGPROBS_A_TURN and index:
            return outputs[:index], outputs[index:]
    return outputs, []


def _in_pieces(output: EngineOutput, prompt_logprobs: list[TokenLogprobs]) -> Iterator[EngineOutput]:
    """Split an output into several with some of its `prompt_logprobs` each; the last one has the rest of the output."""
    starts = range(0, len(prompt_logprobs), LOGPROBS_A_TURN)
    for start in starts[:-1]:
        piece = prompt_logprobs[start : start + LOGPROBS_A_TURN]
        yield EngineOutput(request_id=output.request_id, prompt_logprobs=piece)
    yield msgspec.structs.replace(output, prompt_logprobs=prompt_logprobs[starts[-1] :])
