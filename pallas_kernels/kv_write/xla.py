"""`write_kv` and `rope_and_write_kv` in plain XLA."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.kv_write.head_norms import HeadNorms
from pallas_kernels.paging import Pages, round_vectors
from pallas_kernels.row_quantization import UnscaledProduct


def write_kv(
    pages: Pages,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    write_index: Int[Array, " T"],
    scales: Float[Array, "K 2"] | None = None,
) -> Pages:
    """Write T tokens' keys and values to their pages, in place if the caller donates them.

    `write_index` is page * S + offset. The indices must all differ, and those of padding tokens be P * S or more: these
    are dropped. Values are cast to the dtype of the pages, those of 8 bits by `round_vectors`, each head by itself
    or with the scales of its key and value.
    """
    if pages.scales is None:
        return Pages(write_pages(pages.k, k, write_index), write_pages(pages.v, v, write_index))
    (k, k_scales), (v, v_scales) = (
        _rounded(x, pages, None if scales is None else scales[None, :, kind]) for kind, x in enumerate((k, v))
    )
    return pages._replace(
        k=write_pages(pages.k, k, write_index),
        v=write_pages(pages.v, v, write_index),
        scales=_write_scales(pages.scales, jnp.stack([k_scales, v_scales], axis=-1), write_index),
    )


def write_latents(
    pages: Pages,
    latents: Float[Array, "T D"],
    write_index: Int[Array, " T"],
    scale: Float[Array, ""] | None = None,
) -> Pages:
    """Write T tokens' vectors, which are keys and values of one head, as `write_kv` does."""
    if pages.scales is None:
        written = write_pages(pages.k, latents[:, None], write_index)
        return Pages(written, written)
    latents, scales = _rounded(latents, pages, None if scale is None else scale[None])
    written = write_pages(pages.k, latents[:, None], write_index)
    return pages._replace(k=written, v=written, scales=_write_scales(pages.scales, scales[:, None, None], write_index))


def write_pages(
    pages: Num[Array, "P K S D"], values: Num[Array, "T K D"], write_index: Int[Array, " T"]
) -> Num[Array, "P K S D"]:
    """Write values to one pool of pages, as `write_kv` does."""
    page, offset = write_index // pages.shape[2], write_index % pages.shape[2]
    # unique_indices: else XLA orders the writes (on a GPU by compare-and-swap loops).
    return pages.at[page, :, offset].set(values.astype(pages.dtype), mode="drop", unique_indices=True)


def _rounded(
    x: Float[Array, "... D"], pages: Pages, scales: Float[Array, "..."] | None
) -> tuple[Num[Array, "... D"], Float[Array, "..."]]:
    """Return vectors as such pages store them, and their scales."""
    codes, scales = round_vectors(x, pages.dtype, scales)
    return codes if pages.stored is None else pages.stored.of(codes), scales


def _write_scales(
    scales: Float[Array, "P K kinds S"], of_tokens: Float[Array, "T K kinds"], write_index: Int[Array, " T"]
) -> Float[Array, "P K kinds S"]:
    page, offset = write_index // scales.shape[3], write_index % scales.shape[3]
    return scales.at[page, :, :, offset].set(of_tokens, mode="drop", unique_indices=True)


def rope_and_write_kv_xla(
    qkv: Float[Array, "T K members D"] | UnscaledProduct,
    pages: Pages,
    write_index: Int[Array, " T"],
    *,
    rotation: tuple[Float[Array, "T half"], Float[Array, "T half"]] | None,
    head_norms: HeadNorms | None = None,
    scales: Float[Array, "K 2"] | None = None,
) -> tuple[Float[Array, "T H D"], Pages]:
    """See `rope_and_write_kv`."""
    dtype = qkv.dtype
    qkv = qkv.in_float32() if isinstance(qkv, UnscaledProduct) else qkv
    q, k = norm_and_rotate(qkv, rotation=rotation, head_norms=head_norms)
    return q.astype(dtype), write_kv(pages, k.astype(dtype), qkv[:, :, -1].astype(dtype), write_index, scales)


def norm_and_rotate(
    qkv: Float[Array, "T K members D"],
    *,
    rotation: tuple[Float[Array, "T half"], Float[Array, "T half"]] | None,
    head_norms: HeadNorms | None,
) -> tuple[Float[Array, "T H D"], Float[Array, "T K D"]]:
    """Return the queries and the keys of `rope_and_write_kv`, computed in float32 and rounded once."""
    num_tokens, num_kv_heads, members, head_dim = qkv.shape
    q = qkv[:, :, :-2].reshape(num_tokens, num_kv_heads * (members - 2), head_dim).astype(jnp.float32)
    k = qkv[:, :, -2].astype(jnp.float32)
    if head_norms is not None:
        q, k = _norm(q, head_norms.q_gain, head_norms.eps), _norm(k, head_norms.k_gain, head_norms.eps)
    if rotation is not None:
        q, k = rotate(q, *rotation), rotate(k, *rotation)
    return q.astype(qkv.dtype), k.astype(qkv.dtype)


def _norm(x: Float[Array, "T H D"], gain: Float[Array, " D"], eps: float) -> Float[Array, "T H D"]:
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * gain.astype(jnp.float32)[None, None]


def rotate(x: Float[Array, "T H D"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]) -> Float[Array, "T H D"]:
    """Rotate the pairs (i, i + half) of every head by its token's angles, in float32; the rest of the head stays."""
    half = cos.shape[-1]
    first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)
