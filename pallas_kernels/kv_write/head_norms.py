"""The parameters of norms over the heads of queries and keys in `rope_and_write_kv`."""

import dataclasses
from typing import no_type_check

import jax
from jaxtyping import Array, Float


@no_type_check  # jax rebuilds a pytree with leaves of other kinds too
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadNorms:
    """RMS norms (Zhang and Sennrich 2019, arXiv:1910.07467) of each head separately, with the same gains for all
    heads.
    """

    q_gain: Float[Array, " D"]
    k_gain: Float[Array, " D"]
    eps: float = dataclasses.field(kw_only=True, metadata={"static": True})
    """Added to the mean square."""
