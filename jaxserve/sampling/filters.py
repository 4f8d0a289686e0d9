"""Filters of logits. A sampling parameter that is a number and looks at nothing but a row's own logits is a row of
`LOGIT_FILTERS` with its function, besides a field of SamplingParams and a row of PARAMETERS.

Filters run after the processors and before the temperature, in the order of the table: masked tokens do not count. A
step in which no row has one does not run them.
"""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

LogitFilter = Callable[[Float[Array, "B V"], Float[Array, "B 1"]], Bool[Array, "B V"]]
"""From logits and each row's value of the parameter to the tokens to keep, the most likely one among them."""

LOGIT_FILTERS: Mapping[str, LogitFilter] = {}


def filter_logits(
    logits: Float[Array, "B V"], values: Mapping[str, Array], off: Mapping[str, float]
) -> Float[Array, "B V"]:
    """Mask the tokens that filters do not keep. A row with the value of `off` keeps all."""
    for name, kept in LOGIT_FILTERS.items():
        value = values[name][:, None]
        logits = jnp.where((value == off[name]) | kept(logits, value), logits, -jnp.inf)
    return logits
