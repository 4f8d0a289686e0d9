"""The public operations: a layer of a decode step, and its part after the attention."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.device.products import Weights
from pallas_kernels.implementation import Implementation, check_implementation
from pallas_kernels.kv_write import rope_and_write_kv
from pallas_kernels.layer_matmuls import sm90
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paging import Pages, Scores
from pallas_kernels.small_matmul import matmul, matmul_then_norm


def layer_matmuls(
    heads: Float[Array, "M A"],
    residual: Float[Array, "..."],
    weights: Weights,
    gains: tuple[Float[Array, "..."], Float[Array, "..."]],
    *,
    activation: Callable[[Array], Array],
    eps: float,
    implementation: Implementation = "xla",
) -> tuple[Float[Array, "M E"], Float[Array, "M N"]]:
    """Compute x1 = residual + heads @ o^T, x2 = x1 + gated linear unit of norm(x1), and norm(x2) @ qkv^T.

    The residual stream x2 comes first, then that product, or norm(x2) itself if there is no qkv. `gains` are those of
    the two RMS norms, `eps` is added to their mean squares. `activation` is the gate's; "sm90" calls it in the kernel,
    with float32, and jits it as a static argument: pass the same function for each layer.

    "sm90" is one Mosaic kernel for Hopper GPUs, which occupies all multiprocessors, because its CTAs wait for each
    other: each call in a program should depend on the one before, as layers do. "xla" runs anywhere. Raises ValueError
    for an unknown implementation or shapes that do not match, NotImplementedError for what "sm90" does not support: no
    rows or more than 64, dtypes other than bfloat16, K that is not a multiple of 64, outputs that are not a multiple of
    8, less than 64 or so many that a CTA has more than 16 tiles, GPUs with fewer than 132 multiprocessors.
    """
    check_implementation(implementation)
    _check_shapes(heads.shape, residual, weights, gains)
    if implementation == "xla":
        x, normed = matmul_then_norm(heads, weights.o, residual=residual, gain=gains[0], eps=eps)
        inner = matmul(normed, weights.gate_up, activation=activation)
        x, normed = matmul_then_norm(inner, weights.down, residual=x, gain=gains[1], eps=eps)
        return x, normed.rows() if weights.qkv is None else matmul(normed, weights.qkv)
    return sm90.layer_matmuls_sm90(heads, residual, weights, gains, activation=activation, eps=eps)


def why_not_attention(
    qkv: Float[Array | jax.ShapeDtypeStruct, "M K members D"],
    pages: Pages,
    weights: Weights,
    *,
    half: int,
) -> str | None:
    """Return why `decode_layer` has no "sm90" for them, arrays or their shapes, or None if it has one.

    Rotations turn `half` pairs of a head.
    """
    return sm90.why_not(_heads_of(qkv), weights) or sm90.why_not_attention(qkv, pages, half)


def decode_layer(
    qkv: Float[Array, "M K members D"],
    pages: Pages,
    residual: Float[Array, "..."],
    weights: Weights,
    gains: tuple[Float[Array, "..."], Float[Array, "..."]],
    *,
    rotation: tuple[Float[Array, "M half"], Float[Array, "M half"]],
    write_index: Int[Array, " M"],
    block_tables: Int[Array, "M N"],
    seq_lens: Int[Array, " M"],
    scale: float,
    activation: Callable[[Array], Array],
    eps: float,
    implementation: Implementation = "xla",
) -> tuple[Float[Array, "M E"], Float[Array, "M outputs"], Pages]:
    """Compute a whole layer of one token per row: `rope_and_write_kv`, `paged_attention`, then `layer_matmuls`.

    The residual stream comes first, then the next layer's qkv or the rows after the last norm, then the changed pages.
    `seq_lens` include the tokens of this step, whose keys and values go to `write_index`; rows of length 0 are padding,
    whose results are undefined. No row may attend to a position that another one writes.

    "sm90" is one kernel, with the restrictions of `layer_matmuls`. Raises ValueError and NotImplementedError as that
    does, and NotImplementedError for more than 16 rows, heads that are not 64 or 128 wide or are partly rotated, more
    than 64 queries per KV head, and pages of another dtype or of other than 8, 16, 32 or 64 tokens.
    """
    check_implementation(implementation)
    _check_shapes(_heads_of(qkv).shape, residual, weights, gains)
    if pages.v.shape != pages.k.shape or pages.v.dtype != pages.k.dtype:
        raise ValueError(f"v must be in pages as k, {_describe(pages.k)}, got {_describe(pages.v)}")
    if implementation == "xla":
        q, pages = rope_and_write_kv(qkv, pages, write_index, rotation=rotation)
        scores = Scores(scale=scale)
        heads, _ = paged_attention(q[:, None], pages, block_tables=block_tables, seq_lens=seq_lens, scores=scores)
        heads = heads.reshape(len(q), -1)
        x, y = layer_matmuls(heads, residual, weights, gains, activation=activation, eps=eps)
        return x, y, pages
    if (reason := why_not_attention(qkv, pages, weights, half=rotation[0].shape[1])) is not None:
        raise NotImplementedError(reason)
    return sm90.decode_layer_sm90(
        qkv,
        pages,
        residual,
        weights,
        gains,
        rotation=rotation,
        write_index=write_index,
        block_tables=block_tables,
        seq_lens=seq_lens,
        scale=scale,
        activation=activation,
        eps=eps,
    )


def _heads_of(qkv: Float[Array | jax.ShapeDtypeStruct, "M K members D"]) -> jax.ShapeDtypeStruct:
    """Return the shape of the attention's result."""
    num_rows, num_kv_heads, members, head_dim = qkv.shape
    return jax.ShapeDtypeStruct((num_rows, num_kv_heads * (members - 2) * head_dim), qkv.dtype)


def _describe(x: Array) -> str:
    return f"{x.dtype} of shape {x.shape}"


def _check_shapes(heads: tuple[int, ...], residual: Array, weights: Weights, gains: tuple[Array, Array]) -> None:
    (num_rows, depth), hidden = heads, residual.shape[-1]
    inner = weights.down.shape[-1]
    wanted = {
        "residual": (residual, (num_rows, hidden)),
        "o": (weights.o, (hidden, depth)),
        "gate_up": (weights.gate_up, (2, inner, hidden)),
        "down": (weights.down, (hidden, inner)),
        "gains[0]": (gains[0], (hidden,)),
        "gains[1]": (gains[1], (hidden,)),
    }
    if weights.qkv is not None:
        wanted["qkv"] = weights.qkv, (weights.qkv.shape[0], hidden)
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
