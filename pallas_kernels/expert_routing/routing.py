"""The parameters and results of routing, common to all implementations."""

import dataclasses
from typing import Literal, NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """How a token's experts follow from the router's logits."""

    num_experts: int
    num_experts_per_token: int
    scores: Literal["softmax", "softmax_of_chosen", "sigmoid", "sparse_mixer"] = "softmax"
    """Function of the logits before the best are chosen; "softmax_of_chosen" chooses by logit, then weighs;
    "sparse_mixer" weighs each choice among the logits near it (Liu et al. 2024, arXiv:2409.12136).
    """
    jitter: float = 0.0
    """SparseMixer weighs a choice among logits that differ from it by at most twice this part of their size."""
    is_normalized: bool = False
    """True if the weights of a token's experts are divided by their sum."""
    eps: float = 1e-20
    """Is added to that sum: a sigmoid may be 0 for all of them."""
    scale: float = 1.0
    """A factor of all weights, after that."""
    num_groups: int = 1
    """Number of equal groups of experts (Liu et al. 2024, arXiv:2405.04434)."""
    num_chosen_groups: int = 1
    """Number of groups that a token's experts are chosen from."""
    group_score: Literal["best", "best_two"] = "best"
    """A group is as good as its best expert, or as its best two together."""


class Routed(NamedTuple):
    """The M = T * k choices of T tokens, and in which order a grouped matmul takes them.

    A row is a choice of one of the local experts by a token that is not padding. Rows are sorted by expert, those of an
    expert by token.
    """

    weights: Float[Array, "T k"]
    """Weights of a token's experts, in float32."""
    experts: Int[Array, "T k"]
    """The best first, of equals the first."""
    row: Int[Array, "T k"]
    """Row of each choice; M if it has none."""
    token: Int[Array, " M"]
    """Token of each row; 0 after the last one."""
    group_sizes: Int[Array, " L"]
    """Number of rows of each local expert."""
    tiles: Plan
    """Tiles of the grouped matmul over these rows."""
