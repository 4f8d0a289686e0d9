"""How the weights of a softmax come from dot products of queries and keys."""

import dataclasses
from typing import Any, no_type_check

import jax
from jaxtyping import Array, Float


def _static(default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"static": True})


@no_type_check  # jax rebuilds a pytree with leaves of other kinds too
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """How a score, q times k, is changed before and in the softmax. Everything but the arrays is static.

    Attributes:
        scale: factor of the scores.
        sliding_window: number of keys, its own included, that a query attends to; None for all up to its own.
        soft_cap: the cap c of scaled scores, which become c * tanh(score / c).
        sinks: logits that join the softmax's denominator and nothing else (Xiao et al. 2023, arXiv:2309.17453, as in
            gpt-oss).
        alibi_slopes: slopes that are multiplied by (key's position - query's position) and added to scores after the
            cap (ALiBi, Press et al. 2021, arXiv:2108.12409).
    """

    scale: float = _static()
    sliding_window: int | None = _static(None)
    soft_cap: float | None = _static(None)
    sinks: Float[Array, " H"] | None = None
    alibi_slopes: Float[Array, " H"] | None = None

    def check(self, *, num_heads: int, num_kv_heads: int) -> None:
        """Raise ValueError for a window or cap that is not positive, and arrays or kv heads that heads do not fit."""
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, got {self.sliding_window}")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"soft_cap must be positive, got {self.soft_cap}")
        for name, what in (("sinks", "logit"), ("alibi_slopes", "slope")):
            array = getattr(self, name)
            if array is not None and array.shape != (num_heads,):
                raise ValueError(
                    f"{name} must have one {what} for each of {num_heads} query heads, got shape {array.shape}"
                )
