"""DraftPolicy: decides how many drafts the rows of a step verify, from what has been accepted of earlier ones.

A step that verifies drafts is as wide as its widest row, and takes longer, whoever brings drafts. So the decision is
one for all rows: such a step is taken if the tokens that it is expected to gain are worth its time. Without drafts a
step runs the program of steps with one token a row.

What is expected of a request follows from its acceptance rate, an exponential average, which begins with that of all
requests. The rate goes on being measured while the request verifies nothing: its drafts are compared with the tokens
that steps of one token draw. So a request whose text begins to repeat itself gets drafts again, and one whose text does
not costs nothing.

How long a step of several tokens a row takes follows from those that there have been, before that from a constant.

Whatever is expected may be wrong, so there is a balance of what drafts have gained, in steps of one token a row: they
may lose a hundredth of all steps, and at once MAX_BALANCE of them, or what a single attempt takes if that is more.
"""

import collections
import dataclasses
from collections.abc import Sequence

from jaxserve.request import Request
from jaxserve.scheduling.plan import Drafted, StepPlan

RATE_WEIGHT = 0.125
"""Weight of the latest draft in a request's acceptance rate, at least: the first ones weigh more."""

COMMON_RATE_WEIGHT = 1 / 32
"""Weight of the latest draft in the rate of all requests, with which new ones begin."""

PRIOR_WEIGHT = 2
"""Number of drafts that the rate before the first one counts for."""


ALLOWED_LOSS = 0.01
"""Fraction of all steps by which drafts may make an engine slower in the long run."""

MAX_BALANCE = 2.0
"""Steps that drafts may lose beyond what they have gained lately, and gains that count for later losses."""

NUM_FIRST_TIMES = 4
"""Times of a kind of step of which the shortest counts: a GPU takes longer for the first three runs of a program."""

RISE = 1.02
"""Factor by which the time of a kind of step rises at most from one to the next. Whatever else makes a step longer,
hardly any time comes to count.
"""

FALL = 2.0
"""Factor by which it falls at most, once it is known: if the host comes late to a step, the next one seems short."""

type _Kind = tuple[int, int]
"""The number of rows of a step, rounded up to a power of two, and the tokens of each."""

INITIAL_ACCEPTANCE_RATE = 0.5
"""Fraction of drafts that are expected to be accepted before any has been verified."""


class _Record:
    """What an engine has seen of its steps: the times of each kind, and what drafts have gained."""

    def __init__(self) -> None:
        self.seconds: dict[_Kind, float] = {}
        self.counts: collections.Counter[_Kind] = collections.Counter()
        self.balance = 0.0
        self.rate = INITIAL_ACCEPTANCE_RATE

    def time(self, kind: _Kind, seconds: float) -> None:
        last = self.known(kind)
        self.counts[kind] += 1
        least = last / FALL if last else 0.0
        self.seconds[kind] = max(min(seconds, RISE * self.seconds.get(kind, seconds)), least)

    def known(self, kind: _Kind) -> float | None:
        return self.seconds[kind] if self.counts[kind] >= NUM_FIRST_TIMES else None

    def gain(self, steps: float) -> None:
        self.balance = min(self.balance + steps, MAX_BALANCE)


@dataclasses.dataclass(frozen=True)
class DraftPolicy:
    """The most drafts of a row, and what they cost.

    Attributes:
        by_rows: pairs of a largest number of rows, ascending, and a number of drafts. Steps of more rows verify none.
        token_cost: time that each token adds to a step, as a fraction of that of a step of no tokens, before it is
            known. If it is 0, drafts are verified whatever is expected of them.
        is_late: drafts are made by the step that verifies them. Then nobody can compare them before, and requests that
            have stopped drafting try again when the balance allows.
    """

    by_rows: tuple[tuple[int, int], ...] = ()
    token_cost: float = 0.0
    is_late: bool = False
    _record: _Record = dataclasses.field(default_factory=_Record, compare=False, repr=False)

    def most(self, num_rows: int) -> int:
        """Return the most drafts of a row in a step of so many rows."""
        return next((num_drafts for rows, num_drafts in self.by_rows if num_rows <= rows), 0)

    def num_drafts(self, requests: Sequence[Request], *, num_rows: int) -> int:
        """Return how many drafts each of these requests may verify in a step of so many rows."""
        limit = self.most(num_rows)
        if not limit or not self.token_cost:
            return limit
        one, wide = self._times(num_rows, limit)
        if wide and not one:
            return 0  # or nobody would know whether it is worth it
        # In units of a step of one token a row, in which each row gains one.
        gain = sum(self._expected(request, limit) for request in requests) / num_rows
        longer, balance = self._longer(num_rows, limit), self._record.balance
        if gain > longer:
            return limit if balance > -MAX_BALANCE else 0
        can_pay = self.is_late and gain and limit > longer
        return limit if can_pay and balance >= min(longer, MAX_BALANCE) else 0

    def observe_step(self, plan: StepPlan, new: Sequence[list[int]], seconds: float | None) -> None:
        """Take in the tokens that the rows of a step drew, and its time, if that is known."""
        num_rows = len(plan.rows)
        if plan.num_decode_rows < num_rows or not self.token_cost:
            return
        num_drafts = self.most(num_rows) and max(row.num_drafts for row in plan.rows)
        if seconds is not None:
            self._record.time(_kind(num_rows, num_drafts), seconds)
        gained = ALLOWED_LOSS
        if num_drafts:
            num_accepted = sum(len(tokens) - 1 for tokens in new if tokens)
            gained += num_accepted / num_rows - self._longer(num_rows, num_drafts)
        self._record.gain(gained)

    def observe(self, request: Request, planned: int, drafted: Drafted, new: Sequence[int]) -> None:
        """Take in the result of a row for which `planned` drafts were planned, and that drew the tokens `new`."""
        if not new:
            return
        if drafted.num_verified:
            for position in range(min(len(new), drafted.num_verified)):
                self._count(request, is_accepted=position < len(new) - 1)
        elif planned:
            self._count(request, is_accepted=False)
        elif request.proposed and not self.is_late:
            self._count(request, is_accepted=request.proposed[0] == new[0])
        request.proposed = drafted.proposed

    def _times(self, num_rows: int, num_drafts: int) -> tuple[float | None, ...]:
        """Return the times of steps without drafts and with so many, as far as they are known."""
        return tuple(self._record.known(_kind(num_rows, each)) for each in (0, num_drafts))

    def _longer(self, num_rows: int, num_drafts: int) -> float:
        """Return by how many steps of one token a row a step with drafts takes longer than one."""
        one, wide = self._times(num_rows, num_drafts)
        if one and wide:
            return max(wide / one - 1, 0.0)
        return num_rows * num_drafts * self.token_cost / (1 + num_rows * self.token_cost)

    def _expected(self, request: Request, limit: int) -> float:
        """Return how many of a request's drafts the next step is expected to accept."""
        if request.num_forced:
            return min(request.num_forced, limit)
        num_drafts = len(request.proposed)
        if self.is_late and not request.asked.grammar:  # masks need drafts that the host knows
            num_drafts = limit
        rate = request.acceptance_rate if request.num_judged_drafts else self._record.rate
        return sum(rate ** (position + 1) for position in range(min(limit, num_drafts)))

    def _count(self, request: Request, *, is_accepted: bool) -> None:
        if not request.num_judged_drafts:
            request.acceptance_rate = self._record.rate
        request.num_judged_drafts += 1
        weight = max(RATE_WEIGHT, 1 / (PRIOR_WEIGHT + request.num_judged_drafts))
        request.acceptance_rate += weight * (is_accepted - request.acceptance_rate)
        self._record.rate += COMMON_RATE_WEIGHT * (is_accepted - self._record.rate)


NO_DRAFTS = DraftPolicy()


def _kind(num_rows: int, num_drafts: int) -> _Kind:
    return 1 << (num_rows - 1).bit_length(), 1 + num_drafts
