"""What routing is told and what it answers, whichever implementation runs."""

import dataclasses
from typing import Literal, NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """How a token's experts follow from the router's logits."""

    num_experts: int
    num_experts_per_token: int
    scores: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax"
    """What becomes of the logits before the best are chosen; "softmax_of_chosen" chooses by logit, then weighs."""
    is_normalized: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """A factor of all weights, after that."""
    num_groups: int = 1
    """Experts come in so many groups of equal size (Liu et al. 2024, arXiv:2405.04434) ..."""
    num_chosen_groups: int = 1
    """... and a token's are all in so many of them."""
    group_score: Literal["best", "best_two"] = "best"
    """A group is as good as its best expert, or as its best two together."""


class Routed(NamedTuple):
    """The M = T * k choices of T tokens, and in which order a grouped matmul takes them.

    A row is a choice of one of the local experts by a token that is not padding. Rows are sorted by expert, those of an
    expert by token.
    """

    weights: Float[Array, "T k"]
    """In float32."""
    experts: Int[Array, "T k"]
    """The best first, of equals the first."""
    row: Int[Array, "T k"]
    """Of each choice; M where it has none."""
    token: Int[Array, " M"]
    """Of each row; 0 behind the last one."""
    group_sizes: Int[Array, " L"]
    """Rows of each local expert."""
    tiles: Plan
    """Of the grouped matmul of such rows."""
