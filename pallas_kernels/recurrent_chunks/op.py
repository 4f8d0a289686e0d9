"""The public operation: the gated delta rule, or the recurrence of Mamba-2, for rows of several tokens."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.implementation import Implementation, is_sm90
from pallas_kernels.recurrent_chunks.sm90 import recurrent_chunks_sm90
from pallas_kernels.recurrent_chunks.xla import recurrent_chunks_xla
from pallas_kernels.recurrent_step import Tokens


def recurrent_chunks(
    tokens: Tokens,
    states: Float[Array, "S H G K V"],
    slots: Int[Array, " B"],
    query_starts: Int[Array, " B+1"],
    begins: Bool[Array, " B"],
    first_row: Int[Array, ""],
    num_rows: Int[Array, ""],
    *,
    corrects: bool,
    implementation: Implementation = "xla",
) -> tuple[Float[Array, "T H G V"], Float[Array, "S H G K V"]]:
    """Return the outputs of the tokens of rows from `first_row` to `num_rows`, zeros for other tokens, and the states
    of all slots after them, all in float32.

    Row b has the tokens from query_starts[b] to query_starts[b + 1], which take the step of `recurrent_step` one after
    the other; they do so in chunks of 64, whose results differ by rounding. Rows that begin a sequence start from
    zeros, whatever their slot holds. Rows whose slot is S or more change nothing; their outputs are finite and mean
    nothing. The slots of others must differ. States are changed in place if the caller donates them.

    Heads are local: with a sharded axis, call it inside `jax.shard_map`. Raises ValueError for an unknown
    implementation; NotImplementedError with the reason of `why_not` for what "sm90", the kernels for Hopper GPUs, do
    not support.
    """
    run = recurrent_chunks_sm90 if is_sm90(implementation) else recurrent_chunks_xla
    return run(tokens, states, slots, query_starts, begins, first_row, num_rows, corrects=corrects)
