"""The public operations: write a step's keys and values to their pages, before the attentions read them.

`rope_and_write_kv` takes the fused projection of a layer and does everything between it and the attention; `write_kv`
takes finished keys and values.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import Implementation, check_implementation
from pallas_kernels.kv_write.head_norms import HeadNorms
from pallas_kernels.kv_write.sm90 import rope_and_write_kv_sm90, why_not_scaled
from pallas_kernels.kv_write.xla import rope_and_write_kv_xla
from pallas_kernels.paging import Pages
from pallas_kernels.row_quantization import UnscaledProduct


def rope_and_write_kv(
    qkv: Float[Array, "T K members D"] | UnscaledProduct,
    pages: Pages,
    write_index: Int[Array, " T"],
    *,
    rotation: tuple[Float[Array, "T half"], Float[Array, "T half"]] | None,
    head_norms: HeadNorms | None = None,
    scales: Float[Array, "K 2"] | None = None,
    implementation: Implementation = "xla",
) -> tuple[Float[Array, "T H D"], Pages]:
    """Rotate T tokens' queries and keys, and write keys and values to their pages; return the queries and the changed
    pages.

    `qkv` has for each of K heads its queries, then its key, then its value: H = K * (members - 2). A product that is
    not yet scaled is scaled first; then `head_norms`, if given, are applied to each query and each key separately.
    `rotation` is the cosine and the sine of each token's angles, float32: the pairs (i, i + half) of queries and keys
    are rotated by them (Su et al. 2021, arXiv:2104.09864), and the dimensions of a head from 2 * half on are unchanged;
    None rotates nothing. All of it is computed in float32, and the result is rounded once, unlike in transformers'
    models, which also round in between.

    `write_index` is page * S + offset. The indices must all differ, and those of padding tokens be P * S or more: these
    are dropped. Values are cast to the dtype of the pages; in 8 bits each key and value is rounded with a
    scale of its own, or with those of `scales` for keys and values of each head, which no kernel takes. Pages are
    changed in place if the caller donates them.

    Heads are local: with a sharded head axis, call it inside `jax.shard_map`. Raises ValueError for an unknown
    implementation, a head without queries or gains that differ from a head in size; NotImplementedError for dtypes and
    shapes that "sm90", the kernel for Hopper GPUs, does not support.
    """
    check_implementation(implementation)
    if qkv.shape[2] < 3:
        raise ValueError(f"qkv must have a query, a key and a value for each head, got {qkv.shape[2]} vectors")
    gains = () if head_norms is None else (head_norms.q_gain, head_norms.k_gain)
    if any(gain.shape != qkv.shape[3:] for gain in gains):
        raise ValueError(f"gains must have the size of a head, {qkv.shape[3]}, got {[gain.shape for gain in gains]}")
    if isinstance(qkv, UnscaledProduct) and why_not_scaled(qkv) is not None:
        qkv = qkv.values()
    if implementation == "xla":
        return rope_and_write_kv_xla(qkv, pages, write_index, rotation=rotation, head_norms=head_norms, scales=scales)
    if scales is not None:
        raise NotImplementedError("no kernel writes keys and values with given scales")
    return rope_and_write_kv_sm90(qkv, pages, write_index, rotation=rotation, head_norms=head_norms)
