"""The Retry-After of a full queue: the number of waiting requests over the recent rate, within bounds."""

import pytest

from jaxserve.engine.departures import Departures


def departed(times):
    departures = Departures()
    for time in times:
        departures.count(1, now=time)
    return departures


def test_before_anyone_has_left():
    departures = Departures()
    departures.count(0, now=5.0)
    assert departures.wait(1000, now=5.0) == 1
    departures.count(1, now=0.0)
    assert departures.wait(1000, now=0.0) == 1


@pytest.mark.parametrize("seconds", [10, 60, 3600])
@pytest.mark.parametrize("rate", [1, 4])
def test_a_steady_rate(seconds, rate):
    departures = departed([i / rate for i in range(1, seconds * rate + 1)])
    assert departures.wait(20, now=seconds) == pytest.approx(20 / rate, rel=0.05)


def test_the_first():
    assert departed([10.0]).wait(3, now=10.0) == pytest.approx(30, rel=0.1)


def test_bursts():
    departures = Departures()
    for time in range(10, 601, 10):
        departures.count(40, now=time)  # 4 a second
    assert departures.wait(40, now=600) == pytest.approx(10, rel=0.1)
    assert departures.wait(40, now=609) == pytest.approx(10, rel=0.1)


def test_bounds():
    departures = departed([i / 100 for i in range(1, 1001)])
    assert departures.wait(5, now=10) == 1
    assert departures.wait(0, now=10) == 1
    assert departures.wait(10**6, now=10) == 60
    assert departures.wait(1, now=1e9) == 60, "nobody has left for ages"


def test_what_is_long_past_counts_little():
    times = [i / 10 for i in range(1, 1001)]  # 10 a second for 100 s, then 1
    assert departed([*times, *range(101, 401)]).wait(20, now=400) == pytest.approx(20, rel=0.1)
