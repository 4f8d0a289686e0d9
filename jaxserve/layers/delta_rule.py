"""Linear recurrences of matrices over the ragged rows of a step, in plain XLA and float32: the gated delta rule (Yang
et al. 2024, arXiv:2412.06464), and that of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), which corrects nothing.

A head has a matrix S that maps keys to values. Token t decays it, corrects what it has under the token's key, and reads
it by the token's query:

    S_t = exp(g_t) S_(t-1) + k_t (beta_t (v_t - exp(g_t) S_(t-1)^T k_t))^T,    o_t = S_t^T q_t

Mamba-2 adds beta_t v_t instead of the difference. Rows with one token take this step as it is. Others go through chunks
of their tokens (section 3.3): within a chunk the corrections solve a triangular system (the UT transform), for many
chunks at once; only what passes the state on goes from one to the next. The cost is linear in tokens.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import Implementation
from pallas_kernels.recurrent_chunks import recurrent_chunks
from pallas_kernels.recurrent_step import Mixed, Tokens, recurrent_step

MAX_ROWS_AT_ONCE = 16
"""Number of rows of one token whose states are gathered at once in a step that has longer rows, too."""


class Rows(NamedTuple):
    """The rows of a step, as in a `Batch`."""

    slots: Int[Array, " B"]
    query_starts: Int[Array, " B+1"]
    seq_lens: Int[Array, " B"]
    num_decode_rows: Int[Array, ""]
    num_rows: Int[Array, ""]

    @property
    def begins(self) -> Array:
        """True for each row that begins a sequence, whatever its slot still holds."""
        return self.seq_lens == jnp.diff(self.query_starts)

    def of_tokens(self, num_tokens: int) -> Int[Array, " T"]:
        """Return the row of each token; padding has the number of rows."""
        tokens = jnp.arange(num_tokens, dtype=jnp.int32)
        row = jnp.searchsorted(self.query_starts[1:], tokens, side="right", method="compare_all")
        return row.astype(jnp.int32)


def recurrence(
    tokens: Tokens | Mixed,
    states: Float[Array, "S H G K V"],
    rows: Rows,
    *,
    corrects: bool,
    is_decode_only: bool,
    implementation: Implementation = "xla",
    chunks: Implementation = "xla",
) -> tuple[Float[Array, "T H G V"], Float[Array, "S H G K V"]]:
    """Return each token's output, and the states of all slots after the step.

    `corrects` is true for the delta rule. `is_decode_only` means that row b is token b; `implementation` is that of
    rows of one token, `chunks` that of longer ones. The outputs of padding are finite and mean nothing.
    """
    step = functools.partial(recurrent_step, corrects=corrects, implementation=implementation)
    if is_decode_only:
        return step(tokens, states, rows.slots, rows.begins)
    assert isinstance(tokens, Tokens), "only kernels of a step make them"
    of_rows = rows.slots, rows.query_starts, rows.begins, rows.num_decode_rows, rows.num_rows
    out, states = recurrent_chunks(tokens, states, *of_rows, corrects=corrects, implementation=chunks)
    # The kernel reads the states of rows that there are, XLA gathers one for each.
    num_at_once = len(rows.slots) if implementation == "sm90" else min(MAX_ROWS_AT_ONCE, len(rows.slots))

    def turn(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, states = carry
        here = index * num_at_once + jnp.arange(num_at_once, dtype=jnp.int32)
        here = jnp.where(here < rows.num_decode_rows, here, len(tokens.q))  # row b is token b
        some = Tokens(*(each.at[here].get(mode="fill", fill_value=0) for each in tokens))
        slots = rows.slots.at[here].get(mode="fill", fill_value=len(states))
        begins = rows.begins.at[here].get(mode="fill", fill_value=True)
        new, states = step(some, states, slots, begins)
        return out.at[here].set(new, mode="drop"), states

    if implementation == "sm90":
        return turn(jnp.int32(0), (out, states))
    num_turns = (rows.num_decode_rows + num_at_once - 1) // num_at_once
    return jax.lax.fori_loop(0, num_turns, turn, (out, states))


def behind_windows(
    x: Float[Array, " T *channels"], windows: Float[Array, " S L *channels"], rows: Rows
) -> Float[Array, " B M *channels"]:
    """Return the inputs of a convolution, of rows with equally many tokens, each row's behind the last ones before."""
    return jnp.concatenate([_before(windows, rows), x.reshape(len(rows.slots), -1, *x.shape[1:])], axis=1)


def convolution(
    inputs: Float[Array, " B M *channels"], weight: Float[Array, "*channels W"]
) -> Float[Array, " T *channels"]:
    """Return for each channel a weighted sum of the W inputs up to each of a row's tokens."""
    width = weight.shape[-1]
    num_columns = inputs.shape[1] - width + 1
    seen = jnp.stack([inputs[:, column : column + width] for column in range(num_columns)], axis=1)
    y = jnp.sum(seen * jnp.moveaxis(weight, -1, 0)[None, None], axis=2)
    return y.reshape(-1, *y.shape[2:])


def last_inputs(
    inputs: Float[Array, " B M *channels"],
    windows: Float[Array, " S L *channels"],
    slots: Int[Array, " B"],
    counts: Int[Array, " B"],
) -> Float[Array, " S L *channels"]:
    """Return the last inputs of all slots behind the first `counts` tokens of each row."""
    place = counts[:, None] + jnp.arange(windows.shape[1], dtype=jnp.int32)[None]
    place = place.reshape(*place.shape, *[1] * (inputs.ndim - 2))
    return windows.at[slots].set(jnp.take_along_axis(inputs, place, axis=1), mode="drop")


def _before(windows: Float[Array, " S L *channels"], rows: Rows) -> Float[Array, " B L *channels"]:
    before = windows.at[rows.slots].get(mode="fill", fill_value=0)
    return jnp.where(rows.begins.reshape(-1, *[1] * (before.ndim - 1)), 0, before)


def causal_convolution(
    x: Float[Array, " T *channels"],
    weight: Float[Array, "*channels W"],
    windows: Float[Array, " S W-1 *channels"],
    rows: Rows,
    *,
    is_decode_only: bool,
) -> tuple[Float[Array, " T *channels"], Float[Array, " S W-1 *channels"]]:
    """Return for each channel a weighted sum of its last W inputs in the row, and the last W - 1 inputs of all slots.

    Before a sequence there are zeros.
    """
    if is_decode_only:
        inputs = behind_windows(x, windows, rows)
        return convolution(inputs, weight), windows.at[rows.slots].set(inputs[:, 1:], mode="drop")

    width, num_tokens = weight.shape[-1], len(x)
    flags = (slice(None), *[None] * (x.ndim - 1))  # one for each token or row, whatever its channels
    before = _before(windows, rows)
    starts, counts = rows.query_starts[:-1], jnp.diff(rows.query_starts)
    row = jnp.minimum(rows.of_tokens(num_tokens), len(rows.slots) - 1)
    offset = jnp.arange(num_tokens, dtype=jnp.int32) - starts[row]
    y = x * weight[None, ..., -1]
    for lag in range(1, width):
        earlier = before[row, jnp.clip(width - 1 + offset - lag, 0, width - 2)]
        lagged = jnp.where((offset >= lag)[flags], jnp.roll(x, lag, axis=0), earlier)
        y = y + lagged * weight[None, ..., width - 1 - lag]
    # The window and the row's tokens, one after the other: the last width - 1 of them.
    place = counts[:, None] + jnp.arange(width - 1, dtype=jnp.int32)[None]
    of_window = (slice(None), *flags)
    old = jnp.take_along_axis(before, jnp.minimum(place, width - 2)[of_window], axis=1)
    token = jnp.clip(starts[:, None] + place - (width - 1), 0, num_tokens - 1)
    after = jnp.where((place < width - 1)[of_window], old, x[token])
    return y, windows.at[rows.slots].set(after, mode="drop")
