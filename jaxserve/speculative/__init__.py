"""Speculative decoding: proposers, a file each, draft tokens that the next step verifies.

A step draws at each position exactly as it would without drafts, so a proposer decides how fast text comes, and never
which text.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.speculation import Speculation
from jaxserve.speculative.draft_model import DraftModel
from jaxserve.speculative.drafter import Drafter, Features, Later
from jaxserve.speculative.eagle3 import Eagle3
from jaxserve.speculative.mtp import MTP
from jaxserve.speculative.ngram import NGram
from jaxserve.speculative.proposer import NewTokens, Proposer

__all__ = ["DRAFTERS", "PROPOSERS", "Drafter", "Features", "NewTokens", "Proposer", "make_drafter", "make_proposer"]

PROPOSERS: Mapping[str, Callable[[Speculation], Proposer]] = {
    "ngram": NGram.of,
}
"""What makes the proposer of each method without weights."""

DRAFTERS: Mapping[str, Callable[[Speculation, dict[str, Any], dict[str, Any] | None, int], Drafter]] = {
    "draft_model": DraftModel.of,
    "eagle3": Eagle3.of,
    "mtp": MTP.of,
}
"""What makes the drafter of each method with weights: from the options, the config.json of the target and that of the
drafter, if it has one, and the context. Raises CheckpointError or ConfigError.
"""


def make_proposer(speculation: Speculation) -> Proposer:
    """Return the proposer that an engine's options name."""
    if speculation.method in DRAFTERS:
        return Later(speculation.num_drafts)
    return PROPOSERS[speculation.method](speculation)


def make_drafter(
    speculation: Speculation | None, target: dict[str, Any], fields: dict[str, Any] | None, *, context: int
) -> Drafter | None:
    """Return the drafter that an engine's options name; None if its method has no weights."""
    if speculation is None or speculation.method not in DRAFTERS:
        return None
    return DRAFTERS[speculation.method](speculation, target, fields, context)
