"""The two pytrees that a model's forward pass reads besides its weights: the Batch of one step and the KVCache.

Both are made in `execution` and live here because models and layers, below it, take them as arguments. Their fields
are not checked at run time: jax rebuilds a pytree with leaves of other kinds too (shapes, shardings, placeholders).
"""

from typing import no_type_check

import flax.struct
from jaxtyping import Array, Float, Int


@no_type_check
@flax.struct.dataclass
class Batch:
    """The device arrays of one step: T tokens of B requests, ragged, padded to the step's bucket.

    Row b owns the tokens [query_starts[b], query_starts[b + 1]); the rows with one token come first and are
    `num_decode_rows` many, then the others, up to `num_rows`; rows from there on are padding, with no tokens and
    sequence length 0. Tokens past query_starts[num_rows] are padding with position 0 and `write_index` out of range.
    """

    token_ids: Int[Array, " T"]
    positions: Int[Array, " T"]
    write_index: Int[Array, " T"]
    """Where a token's K and V go: block * block_size + offset; unique, and >= num_blocks * block_size for padding."""
    query_starts: Int[Array, " B+1"]
    seq_lens: Int[Array, " B"]
    """Context length of each row, the tokens of this step included."""
    block_tables: Int[Array, "B N"]
    """Block ids of each row; entries past its length are 0 and never attended to."""
    num_decode_rows: Int[Array, ""]
    num_rows: Int[Array, ""]


@no_type_check
@flax.struct.dataclass
class KVCache:
    """Paged keys and values, one pool a layer, [P blocks, K kv heads, S block size, D head dim] each; donated.

    One (block, head) tile is contiguous, so a kernel fetches it with one bulk copy.
    """

    k: tuple[Float[Array, "P K S D"], ...]
    v: tuple[Float[Array, "P K S D"], ...]
