"""Which steps verify drafts: those of few rows, of which enough is accepted."""

import itertools

import pytest
from scheduling_simulation import make_limits, make_request

from jaxserve.request import Request
from jaxserve.scheduling.drafting import ALLOWED_LOSS, MAX_BALANCE, DraftPolicy
from jaxserve.scheduling.plan import Drafted, Row, StepPlan
from jaxserve.scheduling.scheduler import make_scheduler

TABLE = ((4, 4), (8, 2))


def drafting(*, proposed=4):
    request = Request(make_request("a", [1]), arrival=0, takes_drafts=True)
    request.proposed = [5] * proposed
    return request


@pytest.mark.parametrize(("num_rows", "expected"), [(1, 4), (4, 4), (5, 2), (8, 2), (9, 0)])
def test_fewer_drafts_with_more_rows(num_rows, expected):
    assert DraftPolicy(TABLE).num_drafts([], num_rows=num_rows) == expected
    requests = [drafting() for _ in range(num_rows)]
    assert DraftPolicy(TABLE, 0.01).num_drafts(requests, num_rows=num_rows) == expected


def test_nobody_drafts_or_too_few():
    policy = DraftPolicy(TABLE, 0.05)
    assert policy.num_drafts([drafting(proposed=0)], num_rows=1) == 0
    assert policy.num_drafts([drafting()], num_rows=1) == 4
    # One of four rows drafts: 0.94 tokens more, in a step that is longer by the time of 0.62 tokens, or of 2.67.
    assert DraftPolicy(TABLE, 0.01).num_drafts([drafting()], num_rows=4) == 4
    assert policy.num_drafts([drafting()], num_rows=4) == 0
    forced = drafting(proposed=0)
    forced.num_forced = 3
    assert DraftPolicy(TABLE, 0.1).num_drafts([forced], num_rows=2) == 4


def run_steps(policy, requests, num_steps, *, num_accepted, seconds=lambda width: None):
    """Run steps in which each row that verifies drafts accepts so many. Return the drafts of each."""
    verified = []
    for _ in range(num_steps):
        planned = policy.num_drafts(requests, num_rows=len(requests))
        verified.append(planned)
        new = [7] * (1 + min(planned, num_accepted))
        rows = [Row(request, 0, 0, 1, True, 0, planned) for request in requests]
        policy.observe_step(StepPlan(rows, len(rows), len(rows), []), [new] * len(rows), seconds(1 + planned))
        for request in requests:
            policy.observe(request, planned, Drafted(planned, []), new)
    return verified


@pytest.mark.parametrize("num_rows", [1, 4, 7])
def test_what_is_never_accepted_costs_a_hundredth(num_rows):
    """New requests are expected to accept as much as those before."""
    policy, lost, num_steps = DraftPolicy(TABLE, 0.05, is_late=True), 0.0, 0
    for _ in range(40):
        requests = [drafting(proposed=0) for _ in range(num_rows)]
        verified = run_steps(policy, requests, 50, num_accepted=0)
        lost += sum(num_rows * num_drafts * 0.05 / (1 + num_rows * 0.05) for num_drafts in verified)
        num_steps += len(verified)
    assert 0 < lost <= MAX_BALANCE + 1 + ALLOWED_LOSS * num_steps
    assert sum(map(bool, verified)) <= 4
    # They try again now and then, and go on when that succeeds.
    assert run_steps(policy, requests, 200, num_accepted=4)[-1] > 0


@pytest.mark.parametrize(("wide", "is_worth_it"), [(1.2, True), (3.5, False)])
def test_steps_are_as_long_as_they_were(wide, is_worth_it):
    """Half of the drafts are accepted: 2 tokens more a step."""
    policy, requests = DraftPolicy(TABLE, 0.05, is_late=True), [drafting(proposed=0)]
    seconds = {1: itertools.cycle([5.0, 1.0, 1.1]), 5: itertools.cycle([9.0 * wide, wide, 1.3 * wide])}
    verified = run_steps(policy, requests, 600, num_accepted=2, seconds=lambda width: next(seconds[width]))
    share = sum(map(bool, verified[300:])) / 300
    assert share > 0.95 if is_worth_it else share < 0.03


@pytest.mark.parametrize(("wide", "tries"), [(2.5, True), (3.5, True), (4.5, True), (5.5, False)])
def test_long_steps_are_tried_again_if_they_can_pay(wide, tries):
    """With all drafts accepted, a step draws 5 tokens."""
    policy, requests = DraftPolicy(TABLE, 0.05, is_late=True), [drafting(proposed=0)]
    times = {1: 1.0, 5: wide}
    run_steps(policy, requests, 300, num_accepted=0, seconds=times.get)
    verified = run_steps(policy, requests, 3000, num_accepted=0, seconds=times.get)
    lost = sum(wide - 1 for num_drafts in verified if num_drafts)
    assert lost <= MAX_BALANCE + wide + ALLOWED_LOSS * len(verified)
    assert any(verified) == tries
    verified = run_steps(policy, [drafting(proposed=0)], 6000, num_accepted=4, seconds=times.get)
    assert all(verified[-100:]) == tries


def test_a_step_that_seems_short_does_not_stop_drafts():
    """The host came late to the step before, and the device had begun with this one long ago."""
    policy, request = DraftPolicy(TABLE, 0.05), drafting()

    def observe(planned, seconds):
        row = Row(request, 0, 0, 1, True, 0, planned)
        policy.observe_step(StepPlan([row], 1, 1, []), [[7] * (1 + min(planned, 3))], seconds)

    for _ in range(40):
        observe(0, 10.0)
        observe(4, 13.0)
    observe(0, 0.1)
    observe(4, 13.0)  # was in flight
    for _ in range(40):
        observe(0, 10.0)
    assert policy.num_drafts([request], num_rows=1) == 4


def test_steps_of_prompts_do_not_count():
    policy, row = DraftPolicy(TABLE, 0.05), Row(drafting(), 0, 0, 1, True, 0, 4)
    for _ in range(100):
        policy.observe_step(StepPlan([row, row._replace(num_tokens=2)], 1, 3, []), [[7], [7]], 1.0)
    assert policy.num_drafts([row.request], num_rows=1) == 4


def test_a_request_stops_drafting_and_tries_again():
    policy, request = DraftPolicy(TABLE, 0.05), drafting()
    num_rejected = 0
    while planned := policy.num_drafts([request], num_rows=1):
        policy.observe(request, planned, Drafted(4, [5] * 4), [7])
        num_rejected += 1
    assert num_rejected == 5
    for _ in range(20):  # its drafts are still compared with what is drawn
        policy.observe(request, 0, Drafted(0, [5] * 4), [7])
    num_right = 0
    while not policy.num_drafts([request], num_rows=1):
        policy.observe(request, 0, Drafted(0, [5] * 4), [5])
        num_right += 1
    assert 1 <= num_right <= 4
    policy.observe(request, 4, Drafted(0, []), [7])  # the device had no drafts: a step was long for nothing
    assert not policy.num_drafts([request], num_rows=1)


def test_a_row_beside_too_many_costs_as_much_as_without_drafts(monkeypatch):
    """Nothing is done for its drafts, but for those proposed before, which are compared with what is drawn."""
    scheduler = make_scheduler(
        "continuous", make_limits(drafts=((1, 4),)), model_domain=b"", enable_prefix_caching=True
    )
    requests = scheduler.add([make_request(name, [1], max_tokens=9) for name in "ab"])
    plan = scheduler.schedule()
    scheduler.update(plan, [[2], [2]], drafted=[Drafted(0, [5, 5]), Drafted(0, [])])
    monkeypatch.setattr(type(scheduler), "_extend", None)
    for _ in range(2):
        plan = scheduler.schedule()
        assert [row.num_drafts for row in plan.rows] == [0, 0]
        scheduler.update(plan, [[5], [5]])
    assert [request.num_judged_drafts for request in requests] == [1, 0]
    assert [request.proposed for request in requests] == [[], []]
