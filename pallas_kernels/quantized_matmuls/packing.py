"""Codes of 4 bits as the kernel reads them: each thread's 64 of a block of 64 outputs by 128 of K lie in two runs of 16
bytes, and the block's scales lie behind its codes, so that one bulk copy brings them all.

A block is int32 [32 + R, 32]. In its first 32 rows thread (warp, i, q) of a warpgroup, with 4 warps of 8 x 4 threads,
has words [r, warp, i, q, e], r of 2 and e of 4, whose nibble n + 2 j + 4 c is the code of output 16 warp + 8 n + i and
of column 64 r + 16 e + 8 j + 2 q + c. A row of scales has for each warp and i one word, the bfloat16 scales of both of
its outputs; there is a row for each quantization group of the 128 columns.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

BLOCK_OUTPUTS = 64
BLOCK_COLUMNS = 128
CODE_ROWS = 32
"""Rows of a block's words that hold codes."""


def pack_codes(codes: UInt8[Array, "N K"]) -> Int[Array, "N_64 K_128 32 32"]:
    """Pack codes of 0 to 15 into the words of blocks. N is a multiple of 64, K of 128."""
    num_outputs, depth = codes.shape
    # output: block, warp, n, i; column: block, r, e, j, q, c
    parts = codes.reshape(num_outputs // BLOCK_OUTPUTS, 4, 2, 8, depth // BLOCK_COLUMNS, 2, 4, 2, 4, 2)
    parts = parts.transpose(0, 4, 5, 1, 3, 8, 6, 9, 7, 2)  # block, block, r, warp, i, q, e, c, j, n
    nibbles = parts.reshape(*parts.shape[:7], 8).astype(jnp.uint32)
    nibbles <<= (4 * jnp.arange(8, dtype=jnp.uint32)).reshape((1,) * 7 + (8,))
    words = lax.bitcast_convert_type(jnp.sum(nibbles, axis=-1, dtype=jnp.uint32), jnp.int32)
    return words.reshape(*words.shape[:2], CODE_ROWS, 32)


def unpack_codes(words: Int[Array, "N_64 K_128 rows 32"]) -> UInt8[Array, "N K"]:
    """Return the codes of blocks: the inverse of `pack_codes`; rows behind those of codes are left out."""
    outputs, columns = words.shape[:2]
    words = words[:, :, :CODE_ROWS].reshape(outputs, columns, 2, 4, 8, 4, 4)
    nibbles = (words[..., None] >> (4 * jnp.arange(8, dtype=jnp.int32)).reshape((1,) * 7 + (8,))) & 15
    parts = nibbles.astype(jnp.uint8).reshape(outputs, columns, 2, 4, 8, 4, 4, 2, 2, 2)
    parts = parts.transpose(0, 3, 9, 4, 1, 2, 6, 8, 5, 7)
    return parts.reshape(outputs * BLOCK_OUTPUTS, columns * BLOCK_COLUMNS)


def pack_values(values: Float[Array, "N groups"], group: int) -> Int[Array, "N_64 K_128 R 32"]:
    """Pack a value of bfloat16 for each output and quantization group, of `group` columns, as rows of words."""
    rows = BLOCK_COLUMNS // group
    num_outputs, num_groups = values.shape
    bits = lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
    bits = bits.reshape(
        num_outputs // BLOCK_OUTPUTS, 4, 2, 8, num_groups // rows, rows
    )  # block, warp, n, i, block, row
    words = lax.bitcast_convert_type(bits[:, :, 0] | bits[:, :, 1] << 16, jnp.int32)
    return words.transpose(0, 3, 4, 1, 2).reshape(len(words), num_groups // rows, rows, 32)


def unpack_values(words: Int[Array, "N_64 K_128 R 32"]) -> Float[Array, "N groups"]:
    """Return the values of `pack_values` in float32."""
    outputs, columns, rows = words.shape[:3]
    words = words.reshape(outputs, columns, rows, 4, 8)
    halves = jnp.stack([words << 16, words & jnp.int32(-65536)], axis=4)
    values = lax.bitcast_convert_type(halves, jnp.float32)  # block, block, row, warp, n, i
    return values.transpose(0, 3, 4, 5, 1, 2).reshape(outputs * BLOCK_OUTPUTS, columns * rows)


def interleave(gate: Array, up: Array) -> Array:
    """Return rows of gate and up in turns of eight, so that one thread has both of the products of an output."""
    parts = jnp.stack([x.reshape(len(x) // 8, 8, *x.shape[1:]) for x in (gate, up)], axis=1)
    return parts.reshape(2 * len(gate), *gate.shape[1:])


def separate(x: Array) -> tuple[Array, Array]:
    """Return gate and up of rows in turns: the inverse of `interleave`."""
    parts = x.reshape(len(x) // 16, 2, 8, *x.shape[1:])
    gate, up = (parts[:, i].reshape(len(x) // 2, *x.shape[1:]) for i in range(2))
    return gate, up
