"""`jaxserve bench server`, with a small load: real processes, and numbers that add up."""

import asyncio
import re
import types

import pytest
from waiting import PATIENCE, until

from jaxserve.bench import server_cost
from jaxserve.errors import RequestFailed

# Where an earlier test has loaded jax, it warns of the fork in which a process starts: what is started there is another
# program.
pytestmark = [
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <function _at_fork"),
]


@pytest.mark.slow
def test_cost_of_a_token(monkeypatch):
    """The time that is measured lasts for 160 tokens, however long the machine takes for them."""
    num_events, at_ends = 0, []
    data_received = server_cost._Stream.data_received

    def counted(stream, data):
        nonlocal num_events
        before = stream.num_events
        data_received(stream, data)
        num_events += stream.num_events - before

    async def sleep(_seconds):
        begin = num_events
        await until(lambda: num_events >= begin + 160)
        at_ends.append(num_events)

    monkeypatch.setattr(server_cost._Stream, "data_received", counted)
    monkeypatch.setattr(server_cost, "asyncio", types.SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
    load = server_cost.Load(num_streams=8, step_seconds=0.05, seconds=1, num_probes=5, is_chat=True, api_workers=2)
    result = server_cost.run(load)
    settled, measured = at_ends
    assert result.num_tokens == measured - settled
    assert 0 < result.cpu_seconds < 2 * result.wall_seconds
    for probes in (result.idle, result.loaded):
        for times in (probes.first_token, probes.health, probes.metrics):
            assert len(times) == 5
            assert all(0 < seconds < PATIENCE for seconds in times)
    report = server_cost.report(load, result)
    assert re.search(rf"CPU of the API side, us/token *\| *{result.microseconds_per_token:.1f} ", report)
    assert re.search(r"API workers *\| *2 ", report)


@pytest.mark.slow
def test_a_stream_that_breaks_is_said(monkeypatch):
    monkeypatch.setattr(server_cost, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(server_cost, "STREAM_TOKENS", 2)
    load = server_cost.Load(num_streams=2, step_seconds=0.05, seconds=1, num_probes=1, is_chat=False, api_workers=1)
    with pytest.raises(RequestFailed, match="2 of 2 streams have ended early"):
        server_cost.run(load)
