"""ContinuousScheduler when a request has to give way: preemption, priorities, aborts, failures."""

import msgspec
import pytest
from scheduling_simulation import (
    STOP,
    Simulation,
    make_limits,
    make_request,
    naive_generation,
    never_stops,
    prompt,
    shape,
)

from jaxserve.request import RequestStatus
from jaxserve.scheduling.scheduler import RowOutcome


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_latest_arrival_gives_way_and_comes_back(num_in_flight):
    simulation = Simulation(make_limits(num_blocks=8))
    first, second = simulation.add(never_stops("a", 13, 16), never_stops("b", 12, 16))
    while second.status is not RequestStatus.PREEMPTED:
        plan = simulation.step(num_in_flight)
    assert [row.request for row in plan.rows] == [first]
    assert second.block_tables[0] == []
    assert second.num_tokens > second.num_prompt_tokens  # tokens are kept
    simulation.drain(num_in_flight)
    assert simulation.scheduler.stats().num_preemptions >= 1
    assert first.num_preemptions == 0
    assert [first.finish_reason, second.finish_reason] == ["length", "length"]


def test_victim_stays_out_for_the_rest_of_the_step():
    """Even if it would fit: of two equal generations the second has copies of its own, and would find the first's."""
    simulation = Simulation(make_limits(num_blocks=8))
    request = never_stops("a", 6, 16)
    first, second = simulation.add(request, msgspec.structs.replace(request, request_id="b", group_id="b"))
    while second.status is not RequestStatus.PREEMPTED:
        plan = simulation.step(0)
    assert [row.request for row in plan.rows] == [first]
    assert [row.request for row in simulation.step(0).admitted] == [second]
    simulation.drain()
    assert first.token_ids == second.token_ids


def test_request_may_finish_while_it_is_preempted():
    simulation = Simulation(make_limits(num_blocks=8, max_num_batched_tokens=64))
    first, second = simulation.add(never_stops("a", 16, 9), make_request("b", [9] * 15, 9))
    plan = simulation.scheduler.schedule()
    simulation.scheduler.schedule()  # the first one needs a fifth block
    assert second.status is RequestStatus.PREEMPTED
    assert second.num_pending == 1
    assert simulation.scheduler.update(plan, [[1], [STOP]]) == [RowOutcome.TOKEN, RowOutcome.LAST_TOKEN]
    assert second.finish_reason == "stop"
    assert first.status is RequestStatus.RUNNING
    assert simulation.scheduler.stats().num_waiting == 0
    simulation.scheduler.check_integrity()


@pytest.mark.parametrize("lack", ["slots", "blocks"])
def test_better_priority_preempts_the_worst(lack):
    limits = make_limits(policy="priority", max_num_seqs=2 if lack == "slots" else 4, num_blocks=10)
    simulation = Simulation(limits)
    low, mid = simulation.add(never_stops("low", 15, 5, priority=2), never_stops("mid", 14, 5, priority=1))
    for _ in range(3):
        simulation.step(1)
    (high,) = simulation.add(never_stops("high", 13, 2, priority=0))
    plan = simulation.step(1)
    assert [row.request for row in plan.rows] == [mid, high]
    assert low.status is RequestStatus.PREEMPTED
    simulation.drain(1)
    assert high.num_preemptions == mid.num_preemptions == 0


@pytest.mark.parametrize("best", [0, 1])
def test_better_priority_preempts_nobody_in_vain(best):
    simulation = Simulation(make_limits(policy="priority", num_blocks=10))
    simulation.add(never_stops("best", 15, 9, priority=best), never_stops("low", 1, 9, priority=2))
    simulation.step(0)
    simulation.add(never_stops("mid", 30, 2, priority=1))
    plan = simulation.step(0)
    assert [row.request.request_id for row in plan.rows] == ["best", "low"]
    simulation.drain()


def test_shared_blocks_are_not_won_by_preempting_one_of_their_holders():
    simulation = Simulation(make_limits(policy="priority", num_blocks=8, max_num_batched_tokens=32))
    simulation.add(never_stops("a0", 17, 3, priority=0), never_stops("a1", 17, 3, priority=2))  # 4 shared, 2 own
    simulation.step(0)
    simulation.add(never_stops("b", 16, 2, priority=1))  # 2 are free, 3 without a1
    plan = simulation.step(0)
    assert [row.request.request_id for row in plan.rows] == ["a0", "a1"]
    simulation.drain()


def test_prefix_shared_with_a_victim_alone_counts_once():
    simulation = Simulation(make_limits(policy="priority", num_blocks=9, max_num_batched_tokens=32))
    simulation.add(never_stops("best", 1, 3, priority=0), never_stops("w0", 17, 3, priority=2))  # 1 block and 5
    simulation.step(0)
    simulation.add(never_stops("w1", 33, 1, priority=1))  # 9 blocks, 4 of them cached; 8 are available
    plan = simulation.step(0)
    assert [row.request.request_id for row in plan.rows] == ["best", "w0"]
    simulation.drain()


def test_equal_priority_does_not_preempt_for_admission():
    simulation = Simulation(make_limits(policy="priority", max_num_seqs=1))
    simulation.add(never_stops("a", 3, 5))
    simulation.step(0)
    simulation.add(never_stops("b", 3, 5))
    for _ in range(4):
        assert [row.request.request_id for row in simulation.step(0).rows] == ["a"]
    simulation.drain()


def test_fcfs_ignores_priority():
    simulation = Simulation(make_limits(max_num_seqs=1))
    simulation.add(never_stops("a", 3, 2, priority=5), never_stops("b", 3, 2, priority=-5))
    assert simulation.step(0).rows[0].request.request_id == "a"


@pytest.mark.parametrize("stage", ["waiting", "running", "in flight", "preempted", "finished"])
def test_abort_at_any_moment(stage):
    simulation = Simulation(make_limits(num_blocks=8))
    first, second = simulation.add(never_stops("a", 13, 16), never_stops("b", 12, 16))
    if stage == "running":
        simulation.step(0)
    elif stage == "in flight":
        simulation.schedule()
        simulation.schedule()
    elif stage == "preempted":
        while second.status is not RequestStatus.PREEMPTED:
            simulation.step(1)
    elif stage == "finished":
        simulation.drain()
    simulation.abort(second)
    assert second.finish_reason == ("length" if stage == "finished" else "abort")
    assert simulation.scheduler.abort(["b", "unknown"]) == []
    simulation.drain(1)
    assert first.finish_reason == "length"


@pytest.mark.parametrize("end", ["row", "abort first"])
def test_nothing_of_a_failed_request_stays_cached(end):
    simulation = Simulation(make_limits())
    (request,) = simulation.add(make_request("a", prompt(12), 5))
    simulation.poisoned_requests.add(request)
    simulation.schedule()
    assert len(simulation.scheduler._cache) == 3
    if end == "abort first":
        simulation.abort(request)
    outcomes = simulation.update()
    assert outcomes == [RowOutcome.FAILED if end == "row" else RowOutcome.DROPPED]
    assert request.finish_reason == ("abort" if end == "abort first" else "error")
    assert len(simulation.scheduler._cache) == 0
    (again,) = simulation.add(make_request("b", prompt(12), 5))
    simulation.drain()
    assert again.num_cached_tokens == 0
    assert again.finish_reason in ("stop", "length")


def test_block_that_fills_with_the_failing_row_is_not_cached():
    simulation = Simulation(make_limits())
    (request,) = simulation.add(never_stops("a", 3, 5))
    simulation.schedule()
    simulation.poisoned_requests.add(request)
    simulation.schedule()  # fills the first block with a token that is not known yet
    assert simulation.update() == [RowOutcome.TOKEN]
    assert simulation.update() == [RowOutcome.FAILED]
    assert len(simulation.scheduler._cache) == 0


def test_waiting_request_profits_from_a_prefix_that_comes_meanwhile():
    simulation = Simulation(make_limits(policy="priority", num_blocks=12, max_num_batched_tokens=64))
    (first,) = simulation.add(never_stops("a", 17, 3, priority=0))
    simulation.step(0)
    simulation.add(never_stops("w0", 33, 2, priority=2))  # 9 blocks, 7 are free
    assert [row[0] for row in shape(simulation.step(0))] == ["a"]
    simulation.add(never_stops("w1", 25, 4, priority=1))  # takes these 7, and 6 of them are w0's too
    assert [row[0] for row in shape(simulation.step(0))] == ["a", "w1"]
    assert first.is_finished
    assert ("w0", 24, 9, True) in shape(simulation.step(0))
    simulation.drain()


def test_prefix_that_comes_meanwhile_spares_the_better_ones():
    """The blocks that a waiting request lacks are computed anew before anyone is preempted for it."""
    simulation = Simulation(make_limits(policy="priority", num_blocks=8, max_num_batched_tokens=64))
    best = never_stops("best", 7, 9, priority=0)
    simulation.add(best, never_stops("d", 2, 2, priority=0), never_stops("low", 1, 9, priority=2))
    simulation.step(0)
    simulation.add(make_request("mid", [*naive_generation(best)[0][:8], *[7] * 19], 2, priority=1))
    assert [row[0] for row in shape(simulation.step(0))] == ["best", "d", "low"]  # mid lacks 6 blocks, 5 are available
    # d has given back one block and best has taken it, but for a second block that mid can share.
    assert [row[0] for row in shape(simulation.step(0))] == ["best", "mid"]
    simulation.drain()
