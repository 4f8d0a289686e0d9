"""Which steps verify drafts: those of few rows, of which enough is accepted."""

import pytest
from scheduling_simulation import make_request

from jaxserve.request import Request
from jaxserve.scheduling.drafting import DraftPolicy
from jaxserve.scheduling.plan import Drafted

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


def test_drafts_that_nobody_knows_before():
    policy, request = DraftPolicy(TABLE, 0.05, is_late=True), drafting(proposed=0)
    verified = []
    for _ in range(600):
        planned = policy.num_drafts([request], num_rows=1)
        verified.append(planned)
        policy.observe(request, planned, Drafted(planned, []), [7])
        request.token_ids.append(7)
    steps = [index for index, planned in enumerate(verified) if planned]
    assert steps == [*range(5), *range(256, 261), *range(512, 517)]


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
