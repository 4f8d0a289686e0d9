"""`rope_and_write_kv` for Hopper (sm_90a), in Mosaic GPU: one kernel instead of XLA's three to seven.

A CTA processes some tokens of one or more vectors of `qkv`, which are queries, keys or values: it copies them into
shared memory as two halves, scales and rotates these, and copies them out, queries all at once, keys and values token
by token to their pages. So threads hold cosines and vectors at the same indices, and nothing is broadcast over heads.
Norms are reduced over the lanes of a warp, which then holds whole tokens.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper import NUM_SMS, SHARED_MEMORY
from pallas_kernels.kv_write.head_norms import HeadNorms
from pallas_kernels.paging import Pages
from pallas_kernels.paging.pages import codes_of, scale_of
from pallas_kernels.paging.tiles import MAX_COPIED
from pallas_kernels.row_quantization import UnscaledProduct

_WARPGROUP = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The work of a CTA; `heuristic` picks one."""

    tokens: int
    """Tokens: 4, 8 or 16. Times half of the rotated dimensions, and times the others, it must be a multiple of 128."""
    vectors: int
    """Vectors of the members of `qkv`: a divisor of their number."""


def why_not_written(head_dim: int, half: int, *, has_scales: bool) -> str | None:
    """Return why the kernel does not write heads of which `half` pairs are rotated, in 8 bits with scales; None if it
    does.
    """
    if has_scales and (half % 16 or head_dim % 16):
        return f"the write of 8 bits needs multiples of 16, got head_dim {head_dim} and {half} rotated pairs"
    if max(half, head_dim - 2 * half) > MAX_COPIED:
        return f"the write copies parts of up to {MAX_COPIED}, got head_dim {head_dim} and {half} rotated pairs"
    return None


def why_not_scaled(qkv: UnscaledProduct) -> str | None:
    """Return why the kernel does not take a product with its scales; None if it does."""
    if qkv.sums.dtype != qkv.dtype:
        return f"the write scales sums of the product's own dtype, {qkv.dtype}, got {qkv.sums.dtype}"
    if qkv.shape[-1] % 32:
        return f"the write scales heads of multiples of 32, got head_dim {qkv.shape[-1]}"
    return None


def heuristic(
    num_tokens: int, num_kv_heads: int, members: int, head_dim: int, half: int, *, has_scales: bool = False
) -> Config:
    """Return the configuration for a number of tokens.

    For few tokens, use as many CTAs as possible, up to 3 per multiprocessor, because a CTA writes its tokens one after
    another. For many, use the same cosines and sines for all vectors of a head, if they and the head fit into shared
    memory.
    """
    tokens = 16
    if num_tokens > 512:
        # A third byte is that of a code.
        room = SHARED_MEMORY - 2 * tokens * (head_dim // 2) * 4
        bytes_per_vector = tokens * (head_dim + 8) * 3 + 4 * head_dim  # with the scales of outputs
        return Config(tokens=tokens, vectors=members if members * bytes_per_vector <= room else 1)
    for fewer in () if has_scales else (8, 4):  # codes of fewer tokens were not measured
        is_whole = fewer * half % 128 == 0 and fewer * (head_dim - 2 * half) % 128 == 0
        if is_whole and num_kv_heads * members * pl.cdiv(num_tokens, fewer) <= 3 * NUM_SMS:
            tokens = fewer
    return Config(tokens=tokens, vectors=1)


def _kernel(qkv, cos, sin, write_index, k_pages, v_pages, *refs, is_turned, eps, has_scales, is_scaled):
    """Run one CTA. `refs` are the scales of pages of 8 bits, if they are, those of the rows and outputs of `qkv` if it
    is not scaled, the gains of queries and keys, if there are any, and `q` in global memory, then arrays in shared
    memory, of which `halves` is [vectors, 2, tokens, half].
    """
    codes: Any = None
    code_rests = of_tokens = scales = row_scales = output_scales = of_rows = of_outputs = codes
    if has_scales:
        scales, *refs, codes, code_rests, of_tokens = refs
    if is_scaled:
        row_scales, output_scales, *refs, of_rows, of_outputs = refs
    *gains, q = refs[:-6]
    halves, rests, cosines, sines, write_indices, full = refs[-6:]
    num_tokens, _, members, head_dim = qkv.shape
    num_pages, _, block_size, _ = k_pages.shape
    num_vectors, _, tile_size, half = halves.shape
    int32 = jnp.int32
    first = lax.axis_index("tile") * tile_size
    tokens = pl.ds(first, tile_size)
    parts = [pl.ds(0, half), pl.ds(half, half)]
    if head_dim > 2 * half:
        parts.append(pl.ds(2 * half, head_dim - 2 * half))

    vectors = []
    for i in range(num_vectors):
        vector = lax.axis_index("vector") * num_vectors + i
        kv_head, member = lax.div(vector, int32(members)), lax.rem(vector, int32(members))
        smem = [halves.at[i, 0], halves.at[i, 1], rests.at[i]][: len(parts)]
        vectors.append((kv_head, member, smem))
        for part, ref in zip(parts, smem, strict=True):
            plgpu.copy_gmem_to_smem(qkv.at[tokens, kv_head, member, part], ref, full)
        if is_scaled:
            plgpu.copy_gmem_to_smem(output_scales.at[kv_head, member], of_outputs.at[i], full)
    if is_scaled:
        plgpu.copy_gmem_to_smem(row_scales.at[pl.ds(first, of_rows.shape[0])], of_rows, full)
    plgpu.copy_gmem_to_smem(write_index.at[pl.ds(first, write_indices.shape[0])], write_indices, full)
    if is_turned:
        plgpu.copy_gmem_to_smem(cos.at[tokens], cosines, full)
        plgpu.copy_gmem_to_smem(sin.at[tokens], sines, full)
    layout = functools.partial(_layout_in_warps if gains or is_scaled else _layout_in_order, tile_size)
    # Read while the copies are under way.
    gains = [[_load(gain.at[part], layout(part.size).reduce(0)) for part in parts] for gain in gains]
    plgpu.barrier_wait(full)
    angles = [_load(ref, layout(half)) for ref in (cosines, sines)] if is_turned else []

    def change(i, member, smem, *, is_value=False):
        smem = smem if gains or is_scaled else smem[:2]
        layouts = [layout(ref.shape[1]) for ref in smem]
        values = list(map(_load, smem, layouts))
        if is_scaled:
            values = [
                value
                * _spread(_load(of_rows.at[pl.ds(0, tile_size)], its_layout.reduce(1)), value, its_layout, 0)
                * _spread(_load(of_outputs.at[i, part], its_layout.reduce(0)), value, its_layout, 1)
                for value, part, its_layout in zip(values, parts, layouts, strict=True)
            ]
        if gains and not is_value:
            of_member = [jnp.where(member < members - 2, *of_part) for of_part in zip(*gains, strict=True)]
            values = _norm(values, of_member, layouts, eps)
        if angles and not is_value:
            (x, y), (c, s) = values[:2], angles
            values[:2] = x * c - y * s, y * c + x * s
        for ref, value in zip(smem, values, strict=True):
            ref[...] = value.astype(qkv.dtype)

    if angles or gains or is_scaled:
        for i, (_, member, smem) in enumerate(vectors):
            pl.when(member < members - 1)(functools.partial(change, i, member, smem))
            if is_scaled:
                pl.when(member == members - 1)(functools.partial(change, i, member, smem, is_value=True))
        plgpu.commit_smem()

    def copy_queries(kv_head, member, smem):
        head = kv_head * (members - 2) + member
        for part, ref in zip(parts, smem, strict=True):
            plgpu.copy_smem_to_gmem(ref, q.at[tokens, head, part])

    def round_to_codes(i, smem):
        """Round the keys or values of a vector; return where they are now."""
        layouts = [_layout_in_warps(tile_size, ref.shape[1]) for ref in smem]
        values = list(map(_load, smem, layouts))
        first, second, *rest = (jnp.max(jnp.abs(value), axis=1) for value in values)
        scale = scale_of(functools.reduce(jnp.maximum, rest, jnp.maximum(first, second)), k_pages.dtype)
        of_tokens.at[i, pl.ds(0, tile_size)][...] = scale
        held = [codes.at[i, 0], codes.at[i, 1], code_rests.at[i]][: len(parts)]
        for ref, value, its_layout in zip(held, values, layouts, strict=True):
            ref[...] = codes_of(value, _spread(scale, value, its_layout, 0), k_pages.dtype)
        plgpu.commit_smem()
        return held

    def write(pages, kind, vector, kv_head, smem):
        if has_scales:
            smem = round_to_codes(vector, smem)

        def one_token(i, _):
            index = write_indices[i]

            @pl.when(index < num_pages * block_size)
            def _():
                page, offset = lax.div(index, int32(block_size)), lax.rem(index, int32(block_size))
                for part, ref in zip(parts, smem, strict=True):
                    plgpu.copy_smem_to_gmem(ref.at[i], pages.at[page, kv_head, offset, part])
                if has_scales:
                    scales[page, kv_head, kind, offset] = of_tokens[vector, i]

        lax.fori_loop(int32(0), lax.min(num_tokens - first, int32(tile_size)), one_token, None)

    for i, (kv_head, member, smem) in enumerate(vectors):
        pl.when(member < members - 2)(functools.partial(copy_queries, kv_head, member, smem))
        pl.when(member == members - 2)(functools.partial(write, k_pages, 0, i, kv_head, smem))
        pl.when(member == members - 1)(functools.partial(write, v_pages, 1, i, kv_head, smem))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory must stay valid until then


def _load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _layout_in_order(tokens: int, size: int):
    """Return the layout of [tokens, size] in which neighbouring threads hold neighbours in memory."""
    return plgpu.Layout.WG_STRIDED((tokens, size), vec_size=math.gcd(tokens * size // _WARPGROUP, 4))


def _layout_in_warps(tokens: int, size: int):
    """Return the layout of [tokens, size] in which a token is spread over 8 to 32 lanes of one warp."""
    lanes = max(8, _WARPGROUP // tokens)
    vector = math.gcd(size // lanes, 4)
    rows = _WARPGROUP // lanes
    if rows == 4:
        tiling, warps, of_lanes = plgpu.Tiling(((4, lanes * vector), (vector,))), -3, (-2,)
    else:
        tiling, warps, of_lanes = plgpu.Tiling(((rows, lanes * vector), (rows // 4, vector))), -4, (-2, -3)
    return plgpu.Layout.TILED(tiling, warp_dims=(warps,), lane_dims=of_lanes, vector_dim=-1)


def _norm(parts, gains, layouts, eps):
    """Return the RMS norm of vectors split into parts, [tokens, size] each in float32: two of equal size, and the
    rest.
    """
    size = sum(part.shape[1] for part in parts)
    first, second, *rest = (part * part for part in parts)
    mean = sum((jnp.sum(squares, axis=1) for squares in rest), jnp.sum(first + second, axis=1)) * (1 / size)
    scale = lax.rsqrt(mean + eps)
    return [
        part * _spread(scale, part, layout, 0) * _spread(gain, part, layout, 1)
        for part, gain, layout in zip(parts, gains, layouts, strict=True)
    ]


def _spread(x, part, layout, axis):
    """Return a vector along an axis of a part, as large as the part."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, part.shape, (axis,)), layout)


# Jitted, so that the layers of a model use one trace and one compilation.
@functools.partial(jax.jit, static_argnames="config")
def rope_and_write_kv_sm90(
    qkv: Float[Array, "T K members D"] | UnscaledProduct,
    pages: Pages,
    write_index: Int[Array, " T"],
    *,
    rotation: tuple[Float[Array, "T half"], Float[Array, "T half"]] | None,
    head_norms: HeadNorms | None = None,
    config: Config | None = None,
) -> tuple[Float[Array, "T H D"], Pages]:
    """See `rope_and_write_kv`."""
    of_product: tuple[Array, ...] = ()
    if isinstance(qkv, UnscaledProduct):
        if (reason := why_not_scaled(qkv)) is not None:
            raise NotImplementedError(reason)
        of_product, qkv = (qkv.row_scales, qkv.output_scales), qkv.sums
    held = (qkv.dtype, qkv.dtype) if pages.scales is not None else (pages.k.dtype, pages.v.dtype)
    if qkv.dtype not in (jnp.bfloat16, jnp.float16) or not qkv.dtype == held[0] == held[1]:
        raise NotImplementedError(
            f"qkv and pages must all be bfloat16 or all float16, got {qkv.dtype}, {pages.k.dtype} and {pages.v.dtype}"
        )
    num_tokens, num_kv_heads, members, head_dim = qkv.shape
    half = head_dim // 2 if rotation is None else rotation[0].shape[1]
    if (reason := why_not_written(head_dim, half, has_scales=pages.scales is not None)) is not None:
        raise NotImplementedError(reason)
    if half % 8 or head_dim % 8:
        raise NotImplementedError(f"head_dim and half must be multiples of 8, got {head_dim} and {half}")
    has_scales = pages.scales is not None
    config = config or heuristic(num_tokens, num_kv_heads, members, head_dim, half, has_scales=has_scales)
    is_turned = rotation is not None
    cos, sin = rotation or [jnp.zeros((num_tokens, half), jnp.float32)] * 2
    k_ref, v_ref = jax.new_ref(pages.k), jax.new_ref(pages.v)  # changed in index by the kernel
    scales = (jax.new_ref(pages.scales),) if has_scales else ()
    gains = () if head_norms is None else (head_norms.q_gain, head_norms.k_gain)
    num_rest = head_dim - 2 * half
    shape = (config.vectors, 2, config.tokens, half)
    angles = plgpu.SMEM((config.tokens, half), jnp.float32)
    indices = (pl.cdiv(config.tokens, 32) * 32,)  # a copy is 128 bytes or more
    of_codes = of_scales = ()
    if of_product:
        of_scales = (plgpu.SMEM(indices, jnp.float32), plgpu.SMEM((config.vectors, head_dim), jnp.float32))
    if has_scales:
        of_codes = (
            plgpu.SMEM(shape, pages.k.dtype),
            plgpu.SMEM((config.vectors, config.tokens, num_rest or 16), pages.k.dtype),
            plgpu.SMEM((config.vectors, 32), jnp.float32),
        )
    num_copies = (2 + (num_rest > 0)) * config.vectors + 1 + 2 * is_turned
    if of_product:
        num_copies += config.vectors + 1
    q = plgpu.kernel(
        functools.partial(
            _kernel,
            is_turned=is_turned,
            eps=None if head_norms is None else head_norms.eps,
            has_scales=has_scales,
            is_scaled=bool(of_product),
        ),
        kernel_name="rope_and_write_kv",
        out_type=jax.ShapeDtypeStruct((num_tokens, num_kv_heads * (members - 2), head_dim), qkv.dtype),
        scratch_types=(
            plgpu.SMEM(shape, qkv.dtype),
            plgpu.SMEM((config.vectors, config.tokens, num_rest or 8), qkv.dtype),
            angles,
            angles,
            plgpu.SMEM(indices, jnp.int32),
            plgpu.Barrier(num_arrivals=num_copies),
            *of_scales,
            *of_codes,
        ),
        grid=(num_kv_heads * members // config.vectors, pl.cdiv(num_tokens, config.tokens)),
        grid_names=("vector", "tile"),
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(qkv, cos, sin, write_index, k_ref, v_ref, *scales, *of_product, *gains)
    k, v, *of_pages = map(jax.freeze, (k_ref, v_ref, *scales))
    return q, Pages(k, v, of_pages[0] if of_pages else None)
