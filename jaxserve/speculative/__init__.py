"""Speculative decoding: proposers, a file each, draft tokens that the next step verifies.

A step draws at each position exactly as it would without drafts, so a proposer decides how fast text comes, and never
which text.
"""

from collections.abc import Callable, Mapping

from jaxserve.speculation import Speculation
from jaxserve.speculative.ngram import NGram
from jaxserve.speculative.proposer import NewTokens, Proposer

__all__ = ["PROPOSERS", "NewTokens", "Proposer", "make_proposer"]

PROPOSERS: Mapping[str, Callable[[Speculation], Proposer]] = {
    "ngram": NGram.of,
}
"""What makes the proposer of each method."""


def make_proposer(speculation: Speculation) -> Proposer:
    """Return the proposer that an engine's options name."""
    return PROPOSERS[speculation.method](speculation)
