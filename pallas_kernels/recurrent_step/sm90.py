"""`recurrent_step` for Hopper (sm_90a), in Mosaic GPU: each state is read and written once, where it is.

A CTA has some columns of a head's matrix in registers. The rule treats columns, which are values, apart from each
other; a warp has some for itself, so that what is read under keys and queries is summed over its lanes alone.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

_MAX_VALUES = 8192  # of a CTA: 64 registers of each thread
DECAYS_BY_CHANNEL = "no kernel lets channels of keys decay each in its own way"


def why_not(key_size: int, value_size: int, *, decays_by_channel: bool = False) -> str | None:
    """Return why the kernel cannot have heads of these sizes, or None if it can."""
    if decays_by_channel:
        return DECAYS_BY_CHANNEL
    if _columns(key_size, value_size) is not None:
        return None
    return f"keys must be a multiple of 32 up to 512 and values of 16, got {key_size} and {value_size}"


def _columns(key_size: int, value_size: int) -> int | None:
    """Return the columns of a CTA: as many as fit, so that loads are as wide as possible."""
    for columns in (64, 32, 16):
        is_whole = key_size % _rows_of_warp(columns) == 0 and value_size % columns == 0
        if is_whole and key_size * columns <= _MAX_VALUES:
            return columns
    return None


def _rows_of_warp(columns: int) -> int:
    """Return the number of rows of which the lanes of a warp have four columns each."""
    return 32 // (columns // 16)


def _layout(columns: int) -> Any:
    rows, of_warp = _rows_of_warp(columns), columns // 4
    if of_warp == 4:  # a lane has all of them
        return plgpu.Layout.TILED(
            plgpu.Tiling(((rows, columns), (rows, 4))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
        )
    tiling = plgpu.Tiling(((rows, columns), (rows, of_warp), (4,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)


class OfMixed(NamedTuple):
    """The constants of `tokens_of`, where the kernel computes it."""

    max_beta: float
    norm_eps: float


def recurrent_step_sm90(
    tokens: tuple[Array, ...],
    states: Float[Array, "S H G K V"],
    slots: Int[Array, " B"],
    begins: Bool[Array, " B"],
    counts: Int[Array, " B"] | None = None,
    *,
    corrects: bool,
    changes: bool = True,
    of_mixed: OfMixed | None = None,
) -> tuple[Float[Array, "T H G V"], Float[Array, "S H G K V"]]:
    """See `recurrent_step`; decays of `Tokens` are given as factors."""
    by_channel = of_mixed is None and tokens[3].ndim > tokens[4].ndim
    if (reason := why_not(*states.shape[3:], decays_by_channel=by_channel)) is not None:
        raise NotImplementedError(reason)
    if any(x.dtype != jnp.float32 for x in (*tokens, states)):
        raise NotImplementedError("states and what changes them must all be float32")
    # A slice of a step's inputs would be read where it is; kernels refuse what begins at no multiple of 256 bytes.
    slots = jnp.minimum(slots, len(states))
    rows = (slots, begins.astype(jnp.int32)) if counts is None else (slots, begins.astype(jnp.int32), counts)
    return _call(states, tuple(tokens), rows, corrects=corrects, changes=changes, of_mixed=of_mixed)


# So that a step's layers use one compiled kernel.
@functools.partial(jax.jit, static_argnames=("corrects", "changes", "of_mixed"))
def _call(
    states: Array,
    tokens: tuple[Array, ...],
    rows: tuple[Array, ...],
    *,
    corrects: bool,
    changes: bool,
    of_mixed: OfMixed | None,
) -> tuple[Array, Array]:
    _, H, G, K, V = states.shape
    num_tokens, num_rows = len(tokens[0]), len(rows[0])
    columns = _columns(K, V)
    assert columns is not None
    ref: Any = jax.new_ref(states) if changes else states  # changed in place by the kernel
    static = {"corrects": corrects, "changes": changes, "of_mixed": of_mixed}
    out = plgpu.kernel(
        functools.partial(_kernel, columns=columns, num_tokens=num_tokens // num_rows, **static),
        kernel_name="recurrent_step",
        out_type=jax.ShapeDtypeStruct((num_tokens, H, G, V), states.dtype),
        grid=(num_rows, H * G, V // columns),
        grid_names=("row", "head", "part"),
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(*tokens, *rows, ref)
    return out, jax.freeze(ref) if changes else states


def _kernel(*refs, columns, num_tokens, corrects, changes, of_mixed):
    num_parts = 5 if of_mixed is None else 4
    tensors, (slots, begins, *counts), states, out = refs[:num_parts], refs[num_parts:-2], *refs[-2:]
    num_slots, _, group_size, key_size, value_size = states.shape
    layout = _layout(columns)
    row, head = lax.axis_index("row"), lax.axis_index("head")
    h, g = lax.div(head, jnp.int32(group_size)), lax.rem(head, jnp.int32(group_size))
    first_column = lax.axis_index("part") * columns
    part = pl.ds(first_column, columns)
    load = functools.partial(plgpu.load, optimized=False)

    def spread(x, axis):
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (key_size, columns), (axis,)), layout)

    def token(index):
        """Return query, key, value, decay, strength, and factors of query and key for each column."""
        if of_mixed is None:
            q, k, v, decay, beta = tensors
            query, key = (spread(load(x.at[index, h], layout=layout.reduce(1)), 0) for x in (q, k))
            value = load(v.at[index, h, g, part], layout=layout.reduce(0))
            return query, key, value, decay[index, h, g], beta[index, h, g], None, None
        heads, rates, a_log, dt_bias = tensors
        query, key = (
            spread(load(heads.at[index, h, pl.ds(start, key_size)], layout=layout.reduce(1)), 0)
            for start in (0, key_size)
        )
        place = pl.ds(2 * key_size + g * value_size + first_column, columns)
        value = load(heads.at[index, h, place], layout=layout.reduce(0))
        of_query, of_key = (lax.rsqrt(jnp.sum(x * x, axis=0) + of_mixed.norm_eps) for x in (query, key))
        step = _softplus(rates[index, h, group_size + g] + dt_bias[h, g])
        beta = of_mixed.max_beta / (1 + jnp.exp(-rates[index, h, g]))
        return query, key, value, jnp.exp(-jnp.exp(a_log[h, g]) * step), beta, of_query * key_size**-0.5, of_key

    # Asked for before it is known where the state is.
    slot, tokens = slots[row], [row * num_tokens + index for index in range(num_tokens)]
    begin, first = begins[row], token(tokens[0])

    @pl.when(slot < num_slots)
    def _():
        place = states.at[slot, h, g, :, part]
        state = load(place, layout=layout)
        state = jnp.where(begin != 0, jnp.zeros_like(state), state)  # an old state may have anything
        for number, index in enumerate(tokens):
            query, key, value, factor, strength, of_query, of_key = first if number == 0 else token(index)
            after = state * factor
            delta = value - _scaled(jnp.sum(key * after, axis=0), of_key) if corrects else value
            after += key * spread(_scaled(delta * strength, of_key), 1)
            state = jnp.where(number < counts[0][row], after, state) if counts else after
            if changes and index is tokens[-1]:
                place[...] = state
            out.at[index, h, g, part][...] = _scaled(jnp.sum(query * after, axis=0), of_query)

    @pl.when(slot >= num_slots)
    def _():
        for index in tokens:
            out.at[index, h, g, part][...] = plgpu.layout_cast(jnp.zeros_like(first[2]), layout.reduce(0))


def _scaled(x, factor):
    return x if factor is None else x * factor


def _softplus(x):
    """log(1 + e^x) of a number, exact also where 1 + e^-|x| is rounded."""
    small = jnp.exp(-jnp.abs(x))
    near_one = 1 + small
    rest = jnp.where(near_one == 1, small, jnp.log(near_one) * small / jnp.where(near_one == 1, 1.0, near_one - 1))
    return jnp.maximum(x, 0) + rest
