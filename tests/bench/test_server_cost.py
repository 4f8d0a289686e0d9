"""`jaxserve bench server`, with a small load: real processes, and numbers that add up."""

import re

import pytest

from jaxserve.bench import server_cost
from jaxserve.errors import RequestFailed

# Where an earlier test has loaded jax, it warns of the fork in which a process starts: what is started there is another
# program.
pytestmark = [
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <function _at_fork"),
]


def test_cost_of_a_token():
    load = server_cost.Load(num_streams=8, step_seconds=0.05, seconds=1, num_probes=5, is_chat=True, api_workers=2)
    result = server_cost.run(load)
    assert result.num_tokens == pytest.approx(8 * 20 * result.wall_seconds, rel=0.6)
    assert 0 < result.cpu_seconds < 2 * result.wall_seconds
    for probes in (result.idle, result.loaded):
        for times in (probes.first_token, probes.health, probes.metrics):
            assert len(times) == 5
            assert all(0 < seconds < 5 for seconds in times)
    report = server_cost.report(load, result)
    assert re.search(rf"CPU of the API side, us/token *\| *{result.microseconds_per_token:.1f} ", report)
    assert re.search(r"API workers *\| *2 ", report)


def test_a_stream_that_breaks_is_said(monkeypatch):
    monkeypatch.setattr(server_cost, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(server_cost, "STREAM_TOKENS", 2)
    load = server_cost.Load(num_streams=2, step_seconds=0.05, seconds=1, num_probes=1, is_chat=False, api_workers=1)
    with pytest.raises(RequestFailed, match="2 of 2 streams have ended early"):
        server_cost.run(load)
