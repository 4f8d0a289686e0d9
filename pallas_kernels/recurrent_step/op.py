"""The public operation: the step of the gated delta rule, or of Mamba-2, for rows of one token or a few."""

import dataclasses
import functools
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.implementation import Implementation, is_sm90
from pallas_kernels.recurrent_step.sm90 import OfMixed, recurrent_step_sm90


class Tokens(NamedTuple):
    """What the rule reads of each token, for H heads of keys with G heads of values each."""

    q: Float[Array, "T H K"]
    k: Float[Array, "T H K"]
    v: Float[Array, "T H G V"]
    log_decay: Float[Array, "T H G *K"]
    """The logarithms of decays, of a head or of each channel of its keys."""
    beta: Float[Array, "T H G"]

    @property
    def decays_by_channel(self) -> bool:
        """True if the channels of keys decay each in its own way."""
        return self.log_decay.ndim > self.beta.ndim


@no_type_check  # leaves may be of other kinds: jax makes one of shapes, too
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["heads", "rates", "a_log", "dt_bias"],
    meta_fields=["key_size", "max_beta"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed:
    """What the `Tokens` of Gated DeltaNet are made of, in float32; the kernel makes them itself.

    Attributes:
        heads: of each head of keys its query, its key and its G values, C = 2K + GV channels.
        rates: of each head of values a strength, then of each a decay: R = 2G.
        a_log: the logarithm of a factor of decays.
        dt_bias: added to decays.
        key_size: K.
        max_beta: the strength of an update is between 0 and this.
    """

    heads: Float[Array, "T H C"]
    rates: Float[Array, "T H R"]
    a_log: Float[Array, "H G"]
    dt_bias: Float[Array, "H G"]
    key_size: int
    max_beta: float

    def tokens(self) -> Tokens:
        """Return queries and keys of length 1, the former over the root of their size, the values, and the rates
        log_decay = -exp(a_log) softplus(decay + dt_bias) and beta = max_beta sigmoid(strength).
        """
        q, k, v = jnp.split(self.heads, [self.key_size, 2 * self.key_size], axis=-1)
        strength, decay = jnp.split(self.rates, 2, axis=-1)
        return Tokens(
            q=unit(q) * self.key_size**-0.5,
            k=unit(k),
            v=v.reshape(*strength.shape, -1),
            log_decay=-jnp.exp(self.a_log)[None] * jax.nn.softplus(decay + self.dt_bias[None]),
            beta=self.max_beta * jax.nn.sigmoid(strength),
        )


NORM_EPS = 1e-6
"""Added to the squared length of queries and keys."""


def unit(x: Float[Array, "T H K"]) -> Float[Array, "T H K"]:
    """Return vectors of length 1, or shorter if they are tiny."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)


def recurrent_step(
    tokens: Tokens | Mixed,
    states: Float[Array, "S H G K V"],
    slots: Int[Array, " B"],
    begins: Bool[Array, " B"],
    counts: Int[Array, " B"] | None = None,
    *,
    corrects: bool,
    changes: bool = True,
    implementation: Implementation = "xla",
) -> tuple[Float[Array, "T H G V"], Float[Array, "S H G K V"]]:
    """Return the outputs of T tokens, equally many of each of B rows, one row after the other, and the states of all
    slots after the first `counts` tokens of each row, or after all of them, all in float32. Without `changes` states
    stay as they are. The outputs of tokens that do not count mean nothing.

    A head's state decays by exp(log_decay), each of its rows by its own if channels of keys have their own; beta v is
    added to it under the key k, where `corrects` beta times what v differs from that which the state has there; the
    query reads the result. Rows that begin a sequence start from zeros, whatever their slot holds. Rows whose slot is S
    or more change nothing; their outputs are finite and mean nothing. The slots of others must differ. States are
    changed in place if the caller donates them.

    Heads are local: with a sharded axis, call it inside `jax.shard_map`. Raises ValueError for an unknown
    implementation; NotImplementedError with the reason of `why_not` for what "sm90", the kernel for Hopper GPUs, does
    not support.
    """
    if is_sm90(implementation):
        of_mixed = None
        if isinstance(tokens, Mixed):
            given = tokens.heads, tokens.rates, tokens.a_log, tokens.dt_bias
            of_mixed = OfMixed(tokens.max_beta, NORM_EPS)
        else:
            given = tokens._replace(log_decay=jnp.exp(tokens.log_decay))
        rows = slots, begins, counts
        return recurrent_step_sm90(given, states, *rows, corrects=corrects, changes=changes, of_mixed=of_mixed)
    if isinstance(tokens, Mixed):
        tokens = tokens.tokens()
    by_row = Tokens(*(x.reshape(len(slots), -1, *x.shape[1:]) for x in tokens))
    held = states.at[slots].get(mode="fill", fill_value=0)
    held = jnp.where(begins[:, None, None, None, None], 0, held)
    outs = []
    for column in range(by_row.q.shape[1]):
        out, after = one_token(held, Tokens(*(x[:, column] for x in by_row)), corrects=corrects)
        held = after if counts is None else jnp.where((column < counts)[:, None, None, None, None], after, held)
        outs.append(out)
    out = jnp.stack(outs, axis=1).reshape(tokens.v.shape)
    return out, states.at[slots].set(held, mode="drop") if changes else states


def one_token(states: Float[Array, "B H G K V"], tokens: Tokens, *, corrects: bool) -> tuple[Array, Array]:
    """Return the outputs [B, H, G, V] of one token a row, and the rows' states after them."""
    decay = jnp.exp(tokens.log_decay)[..., None]
    states = states * (decay if tokens.decays_by_channel else decay[..., None])
    delta = tokens.v - _einsum("bhk,bhgkv->bhgv", tokens.k, states) if corrects else tokens.v
    delta = delta * tokens.beta[..., None]
    states = states + tokens.k[:, :, None, :, None] * delta[:, :, :, None, :]
    return _einsum("bhk,bhgkv->bhgv", tokens.q, states), states


def _einsum(formula: str, *operands: Array) -> Array:
    return jnp.einsum(formula, *operands, precision=jax.lax.Precision.HIGHEST)
