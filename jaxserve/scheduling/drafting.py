"""DraftPolicy: decides how many drafts the rows of a step verify, from what has been accepted of earlier ones.

A step that verifies drafts is as wide as its widest row, and takes longer, whoever brings drafts. So the decision is
one for all rows: such a step is taken if the tokens that it is expected to gain are worth its time. Without drafts a
step runs the program of steps with one token a row.

What is expected of a request follows from its acceptance rate, an exponential average. The rate goes on being measured
while the request verifies nothing: its drafts are compared with the tokens that steps of one token draw. So a request
whose text begins to repeat itself gets drafts again, and one whose text does not costs nothing.
"""

import dataclasses
from collections.abc import Sequence

from jaxserve.request import INITIAL_ACCEPTANCE_RATE, Request
from jaxserve.scheduling.plan import Drafted

RATE_WEIGHT = 0.125
"""Weight of the latest draft in a request's acceptance rate, at least: the first ones weigh more."""

PRIOR_WEIGHT = 2
"""Number of drafts that the rate before the first one counts for."""


RETRY_TOKENS = 256
"""Output tokens between two attempts of a request whose drafts are not known before they are verified."""


@dataclasses.dataclass(frozen=True)
class DraftPolicy:
    """The most drafts of a row, and what they cost.

    Attributes:
        by_rows: pairs of a largest number of rows, ascending, and a number of drafts. Steps of more rows verify none.
        token_cost: time that each token adds to a step, as a fraction of that of a step of no tokens. If it is 0,
            drafts are verified whatever is expected of them.
        is_late: drafts are made by the step that verifies them. Then nobody can compare them before, and a request that
            has stopped drafting tries again after some tokens.
    """

    by_rows: tuple[tuple[int, int], ...] = ()
    token_cost: float = 0.0
    is_late: bool = False

    def num_drafts(self, requests: Sequence[Request], *, num_rows: int) -> int:
        """Return how many drafts each of these requests may verify in a step of so many rows."""
        limit = next((num_drafts for rows, num_drafts in self.by_rows if num_rows <= rows), 0)
        if not limit or not self.token_cost:
            return limit
        gain = sum(self._expected(request, limit) for request in requests)
        # In units of a step of one token a row, in which each row gains one.
        longer = num_rows * limit * self.token_cost / (1 + num_rows * self.token_cost)
        return limit if gain > num_rows * longer else 0

    def observe(self, request: Request, planned: int, drafted: Drafted, new: Sequence[int]) -> None:
        """Take in the result of a row for which `planned` drafts were planned, and that drew the tokens `new`."""
        if not new:
            return
        if drafted.num_verified:
            for position in range(min(len(new), drafted.num_verified)):
                _count(request, is_accepted=position < len(new) - 1)
        elif planned:
            _count(request, is_accepted=False)
        elif self.is_late:
            if (len(request.token_ids) - request.num_prompt_tokens) % RETRY_TOKENS == RETRY_TOKENS - 1:
                request.acceptance_rate, request.num_judged_drafts = INITIAL_ACCEPTANCE_RATE, 0
        elif request.proposed:
            _count(request, is_accepted=request.proposed[0] == new[0])
        request.proposed = drafted.proposed

    def _expected(self, request: Request, limit: int) -> float:
        """Return how many of a request's drafts the next step is expected to accept."""
        if request.num_forced:
            return min(request.num_forced, limit)
        num_drafts = len(request.proposed)
        if self.is_late and not request.request.grammar:  # masks need drafts that the host knows
            num_drafts = limit
        return sum(request.acceptance_rate ** (position + 1) for position in range(min(limit, num_drafts)))


NO_DRAFTS = DraftPolicy()


def _count(request: Request, *, is_accepted: bool) -> None:
    request.num_judged_drafts += 1
    weight = max(RATE_WEIGHT, 1 / (PRIOR_WEIGHT + request.num_judged_drafts))
    request.acceptance_rate += weight * (is_accepted - request.acceptance_rate)
