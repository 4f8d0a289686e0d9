"""Filters of logits. A sampling parameter that is a number and looks at nothing but a row's own logits is a row of
`LOGIT_FILTERS` with its function, besides a field of SamplingParams and a row of PARAMETERS.

Filters run after the processors and before the temperature, in the order of the table: masked tokens do not count. A
step in which no row has one does not run them.
"""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

LogitFilter = Callable[[Float[Array, "B V"], Float[Array, "B 1"]], Bool[Array, "B V"]]
"""From logits and each row's value of the parameter to the tokens to keep: the most likely one among them, and all
where the value asks for nothing.
"""


def top_n_sigma(logits: Float[Array, "B V"], n: Float[Array, "B 1"]) -> Bool[Array, "B V"]:
    """Keep logits of at least the largest minus n standard deviations (Tang et al. 2024, arXiv:2411.07641), all if n is
    not positive.

    The deviation is that of the tokens that are not masked. A temperature would scale both sides alike.
    """
    is_finite = logits > -jnp.inf
    count = jnp.sum(is_finite, axis=1, keepdims=True, dtype=jnp.float32)
    mean = jnp.sum(jnp.where(is_finite, logits, 0.0), axis=1, keepdims=True) / count
    variance = jnp.sum(jnp.where(is_finite, jnp.square(logits - mean), 0.0), axis=1, keepdims=True) / count
    return (n <= 0) | ~(logits < jnp.max(logits, axis=1, keepdims=True) - n * jnp.sqrt(variance))


LOGIT_FILTERS: Mapping[str, LogitFilter] = {"top_n_sigma": top_n_sigma}


def filter_logits(logits: Float[Array, "B V"], values: Mapping[str, Array]) -> Float[Array, "B V"]:
    """Mask the tokens that filters do not keep. `values` are the rows' parameters."""
    for name, kept in LOGIT_FILTERS.items():
        logits = jnp.where(kept(logits, values[name][:, None]), logits, -jnp.inf)
    return logits
