"""Linear recurrences of matrices over the ragged rows of a step, in plain XLA and float32: the gated delta rule (Yang
et al. 2024, arXiv:2412.06464), and that of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), which corrects nothing.

A head has a matrix S that maps keys to values. Token t decays it, corrects what it has under the token's key, and reads
it by the token's query:

    S_t = exp(g_t) S_(t-1) + k_t (beta_t (v_t - exp(g_t) S_(t-1)^T k_t))^T,    o_t = S_t^T q_t

Mamba-2 adds beta_t v_t instead of the difference. Rows with one token take this step as it is. Others go through chunks
of the step's tokens, whatever row these are of (section 3.3): within a chunk the corrections solve a triangular system
(the UT transform), for all chunks at once; then a loop over segments, a row's tokens in one chunk, passes the state on.
The cost is linear in tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNK_SIZE = 64
"""Number of tokens in a chunk. Work within a chunk grows with it, the number of turns of the loop falls."""
MAX_ROWS_AT_ONCE = 16
"""Number of rows of one token whose states are gathered at once in a step that has longer rows, too."""
NORM_EPS = 1e-6
"""Added to the squared length of queries and keys."""


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


class Tokens(NamedTuple):
    """What the rule reads of each token, for H heads of keys with G heads of values each."""

    q: Float[Array, "T H K"]
    k: Float[Array, "T H K"]
    v: Float[Array, "T H G V"]
    log_decay: Float[Array, "T H G"]
    beta: Float[Array, "T H G"]


def unit(x: Float[Array, "T H K"]) -> Float[Array, "T H K"]:
    """Return vectors of length 1, or shorter if they are tiny."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)


def one_token(states: Float[Array, "B H G K V"], tokens: Tokens, *, corrects: bool) -> tuple[Array, Array]:
    """Return the outputs [B, H, G, V] of one token a row, and the states after them."""
    states = states * jnp.exp(tokens.log_decay)[..., None, None]
    delta = tokens.v - _einsum("bhk,bhgkv->bhgv", tokens.k, states) if corrects else tokens.v
    delta = delta * tokens.beta[..., None]
    states = states + tokens.k[:, :, None, :, None] * delta[:, :, :, None, :]
    return _einsum("bhk,bhgkv->bhgv", tokens.q, states), states


def recurrence(
    tokens: Tokens, states: Float[Array, "S H G K V"], rows: Rows, *, corrects: bool, is_decode_only: bool
) -> tuple[Float[Array, "T H G V"], Float[Array, "S H G K V"]]:
    """Return each token's output, and the states of all slots after the step.

    `corrects` is true for the delta rule. `is_decode_only` means that row b is token b. The outputs of padding are
    finite and mean nothing.
    """
    if is_decode_only:
        return _decode(tokens, states, rows, jnp.arange(len(rows.slots), dtype=jnp.int32), corrects=corrects)
    out, states = _chunks(tokens, states, rows, corrects=corrects)
    num_at_once = min(MAX_ROWS_AT_ONCE, len(rows.slots))

    def turn(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, states = carry
        here = index * num_at_once + jnp.arange(num_at_once, dtype=jnp.int32)
        here = jnp.where(here < rows.num_decode_rows, here, len(tokens.q))  # row b is token b
        some = Tokens(*(each.at[here].get(mode="fill", fill_value=0) for each in tokens))
        new, states = _decode(some, states, rows, here, corrects=corrects)
        return out.at[here].set(new, mode="drop"), states

    num_turns = (rows.num_decode_rows + num_at_once - 1) // num_at_once
    return jax.lax.fori_loop(0, num_turns, turn, (out, states))


def _decode(
    tokens: Tokens, states: Array, rows: Rows, here: Int[Array, " N"], *, corrects: bool
) -> tuple[Array, Array]:
    """Return the outputs of `tokens`, one for each row of `here`, and the states of all slots."""
    slots = rows.slots.at[here].get(mode="fill", fill_value=len(states))
    begins = rows.begins.at[here].get(mode="fill", fill_value=True)
    before = states.at[slots].get(mode="fill", fill_value=0)
    out, after = one_token(jnp.where(begins[:, None, None, None, None], 0, before), tokens, corrects=corrects)
    return out, states.at[slots].set(after, mode="drop")


def _chunks(tokens: Tokens, states: Array, rows: Rows, *, corrects: bool) -> tuple[Array, Array]:
    """Return the outputs of rows with several tokens, zeros for others, and the states after them."""
    T = len(tokens.q)
    C = min(CHUNK_SIZE, T)
    N = -(-T // C)
    padding = N * C - T

    def chunked(x: Array) -> Array:
        """Return [T, H, ...] as [N, H, C, ...]."""
        x = jnp.pad(x, ((0, padding), *[(0, 0)] * (x.ndim - 1)))
        return jnp.moveaxis(x.reshape(N, C, *x.shape[1:]), 1, 2)

    q, k = chunked(tokens.q), chunked(tokens.k)
    v, log_decay, beta = (jnp.moveaxis(chunked(x), 3, 2) for x in tokens[2:])  # [N, H, G, C, ...]

    row = rows.of_tokens(N * C).reshape(N, C)
    first, last = _segment_ends(row)
    is_causal = jnp.tril(jnp.ones((C, C), bool))
    same = (row[:, :, None] == row[:, None, :]) & is_causal[None]
    same = same[:, None, None]
    decayed = jnp.cumsum(log_decay, axis=-1)  # logarithms: of products over a chunk
    since = decayed - _take(decayed - log_decay, first)  # over a segment, up to the token
    until = _take(decayed, last) - decayed  # over the tokens of the segment behind
    # Where tokens are not of one row, or the later one comes first, the difference may be large and positive.
    between = decayed[..., :, None] - decayed[..., None, :]
    between = jnp.exp(jnp.where(same, between, -jnp.inf))
    values, corrections = beta[..., None] * v, None
    if corrects:
        keys = _einsum("nhik,nhjk->nhij", k, k)[:, :, None]
        strictly = jnp.where(jnp.eye(C, dtype=bool)[None, None, None], 0, between)
        system = jnp.eye(C, dtype=k.dtype)[None, None, None] + beta[..., None] * keys * strictly
        weighted_keys = (beta * jnp.exp(since))[..., None] * k[:, :, None]
        known = jnp.concatenate([values, weighted_keys], axis=-1)
        # Not by a product of powers, which are as large as binomial coefficients where keys are alike.
        solved = jax.lax.linalg.triangular_solve(system, known, left_side=True, lower=True, unit_diagonal=True)
        values, corrections = jnp.split(solved, [v.shape[-1]], axis=-1)
    scores = _einsum("nhik,nhjk->nhij", q, k)[:, :, None] * between
    reading = jnp.exp(since)[..., None] * q[:, :, None]
    writing = jnp.exp(until)[..., None] * k[:, :, None]
    kept = jnp.exp(since)

    starts, ends = rows.query_starts[:-1], rows.query_starts[1:]
    index = jnp.arange(len(rows.slots), dtype=jnp.int32)
    is_long = (index >= rows.num_decode_rows) & (index < rows.num_rows)
    counts = jnp.where(is_long, (ends - 1) // C - starts // C + 1, 0)
    counted = jnp.cumsum(counts)

    def segment(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, states = carry
        b = jnp.searchsorted(counted, number, side="right", method="compare_all")
        turn = number - (counted[b] - counts[b])
        n, slot = starts[b] // C + turn, rows.slots[b]
        mine = (row[n] == b)[None, None, :, None]
        state = jnp.where((turn == 0) & rows.begins[b], 0, states[slot])
        new = values[n]
        if corrections is not None:
            new = new - _einsum("hgck,hgkv->hgcv", corrections[n], state)
        new = jnp.where(mine, new, 0)
        read = _einsum("hgck,hgkv->hgcv", reading[n], state) + _einsum("hgij,hgjv->hgiv", scores[n], new)
        end = jnp.minimum(ends[b] - n * C, C) - 1
        total = kept[n, :, :, end]
        state = total[..., None, None] * state + _einsum("hgck,hgcv->hgkv", writing[n], new)
        return out.at[n].add(jnp.where(mine, read, 0)), states.at[slot].set(state)

    out, states = jax.lax.fori_loop(0, counted[-1], segment, (jnp.zeros_like(values), states))
    out = jnp.moveaxis(out, 3, 1)  # [N, C, H, G, V]
    return out.reshape(N * C, *out.shape[2:])[:T], states


def _segment_ends(row: Int[Array, "N C"]) -> tuple[Int[Array, "N C"], Int[Array, "N C"]]:
    """Return for each token the first and the last token of its row in its chunk."""
    same = row[:, :, None] == row[:, None, :]
    first = jnp.argmax(same, axis=-1)
    return first, row.shape[1] - 1 - jnp.argmax(same[:, :, ::-1], axis=-1)


def _take(x: Float[Array, "N H G C"], index: Int[Array, "N C"]) -> Float[Array, "N H G C"]:
    return jnp.take_along_axis(x, index[:, None, None], axis=-1)


def _einsum(formula: str, *operands: Array) -> Array:
    return jnp.einsum(formula, *operands, precision=jax.lax.Precision.HIGHEST)


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
    width, num_tokens = weight.shape[-1], len(x)
    flags = (slice(None), *[None] * (x.ndim - 1))  # one for each token or row, whatever its channels
    before = windows.at[rows.slots].get(mode="fill", fill_value=0)
    before = jnp.where(rows.begins[flags][:, None], 0, before)
    starts, counts = rows.query_starts[:-1], jnp.diff(rows.query_starts)
    if is_decode_only:
        inputs = jnp.concatenate([before, x[:, None]], axis=1)
        y = jnp.sum(inputs * jnp.moveaxis(weight, -1, 0)[None], axis=1)
        return y, windows.at[rows.slots].set(inputs[:, 1:], mode="drop")

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
