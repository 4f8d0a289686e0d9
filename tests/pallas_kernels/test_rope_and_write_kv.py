"""Each implementation of rope and the KV write against its definition in float64, with NaN all over the pools."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first, quick_only
from interpreting import interpret

from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.kv_write import HeadNorms, rope_and_write_kv
from pallas_kernels.kv_write.sm90 import Config, heuristic, rope_and_write_kv_sm90
from pallas_kernels.paging import Pages
from pallas_kernels.row_quantization import UnscaledProduct

# Relative to the largest number: half a unit in the last place of 8 bits, of 11 bits, and float32's error in two
# products.
TOLERANCE = {jnp.bfloat16: 2**-8, jnp.float16: 2**-11, jnp.float32: 1e-6}


EPS = 0.25  # large, so that it is missed


def make_case(*, num_tokens, heads=(4, 2, 64), half=None, block_size=16, dtype=jnp.bfloat16, gains=None, scaled=True):
    """Return the arguments of `rope_and_write_kv`, positional and by name, and the expected results.

    A third of the tokens is padding. `half` None: a whole head is rotated, 0: nothing is. `gains` is the dtype of
    norms, None if there are none. `scaled` false: `qkv` is a product without its scales.
    """
    rng = np.random.default_rng(num_tokens)
    num_heads, num_kv_heads, head_dim = heads
    members = num_heads // num_kv_heads + 2
    half = head_dim // 2 if half is None else half
    num_pages = 2 * num_tokens // block_size + 3
    qkv = jnp.asarray(rng.standard_normal((num_tokens, num_kv_heads, members, head_dim))).astype(dtype)
    pages = jnp.full((2, num_pages, num_kv_heads, block_size, head_dim), jnp.nan, dtype)
    index = rng.permutation(num_pages * block_size)[:num_tokens]
    is_padding = np.arange(num_tokens) >= num_tokens - num_tokens // 3
    index[is_padding] = num_pages * block_size + np.flatnonzero(is_padding)
    angle = 100 * rng.standard_normal((num_tokens, half))
    rotation = (jnp.cos(angle).astype(jnp.float32), jnp.sin(angle).astype(jnp.float32)) if half else None

    turned = np.asarray(qkv.astype(jnp.float32)).astype(np.float64)
    if not scaled:
        row_scales, output_scales = (
            rng.uniform(0.5, 2, shape).astype(np.float32) for shape in (num_tokens, qkv.shape[1:])
        )
        turned *= row_scales[:, None, None, None].astype(np.float64) * output_scales
        qkv = UnscaledProduct(sums=qkv, row_scales=row_scales, output_scales=output_scales, dtype=jnp.dtype(dtype))
    head_norms = None
    if gains is not None:
        of_q, of_k = (jnp.asarray(1 + 0.3 * rng.standard_normal(head_dim)).astype(gains) for _ in range(2))
        head_norms = HeadNorms(of_q, of_k, eps=EPS)
        for members_of, gain in ((slice(None, -2), of_q), (slice(-2, -1), of_k)):
            x = turned[:, :, members_of]
            size = np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS)
            turned[:, :, members_of] = x / size * np.asarray(gain.astype(jnp.float32)).astype(np.float64)
    if rotation is not None:
        cos, sin = (np.asarray(x).astype(np.float64)[:, None, None] for x in rotation)
        x, y = turned[:, :, :-1, :half].copy(), turned[:, :, :-1, half : 2 * half].copy()
        turned[:, :, :-1, :half], turned[:, :, :-1, half : 2 * half] = x * cos - y * sin, y * cos + x * sin
    want_pages = np.full(pages.shape, np.nan)
    for token in np.flatnonzero(~is_padding):
        page, offset = divmod(int(index[token]), block_size)
        want_pages[0, page, :, offset], want_pages[1, page, :, offset] = turned[token, :, -2], turned[token, :, -1]
    want_q = turned[:, :, :-2].reshape(num_tokens, num_heads, head_dim)
    arrays = (qkv, Pages(*pages), jnp.asarray(index, jnp.int32))
    return arrays, {"rotation": rotation, "head_norms": head_norms}, (want_q, Pages(*want_pages))


def check(got, want):
    dtype = got[0].dtype.type
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert a.shape == b.shape
        largest = np.nanmax(np.abs(b), initial=0.0)
        a = np.asarray(a.astype(jnp.float32))
        np.testing.assert_allclose(a, b, rtol=0, atol=largest * TOLERANCE[dtype], equal_nan=True)


CASES = {
    "llama": {"num_tokens": 40, "heads": (32, 8, 128)},
    "one token": {"num_tokens": 1},
    "part of a head": {"num_tokens": 17, "heads": (6, 2, 80), "half": 16},
    "no rotation": {"num_tokens": 33, "half": 0},
    "one head, pages of 1": {"num_tokens": 20, "heads": (1, 1, 16), "block_size": 1},
    "float16, large pages": {"num_tokens": 70, "heads": (3, 1, 96), "block_size": 256, "dtype": jnp.float16},
    "norms": {"num_tokens": 40, "heads": (32, 8, 128), "gains": jnp.bfloat16},
    "norms, one token": {"num_tokens": 1, "gains": jnp.bfloat16},
    "norms, part of a head": {"num_tokens": 17, "heads": (6, 2, 80), "half": 16, "gains": jnp.float32},
    "norms, no rotation": {"num_tokens": 33, "half": 0, "gains": jnp.float32},
    "norms, float16, one head": {"num_tokens": 70, "heads": (1, 1, 96), "dtype": jnp.float16, "gains": jnp.float16},
    "norms, large heads": {"num_tokens": 9, "heads": (8, 4, 256), "gains": jnp.float32},
    "norms, larger heads": {"num_tokens": 9, "heads": (8, 2, 512), "gains": jnp.float32},
    "unscaled": {"num_tokens": 40, "heads": (32, 8, 128), "scaled": False},
    "unscaled, one token": {"num_tokens": 1, "scaled": False},
    "unscaled, part of a head": {"num_tokens": 17, "heads": (6, 2, 96), "half": 16, "scaled": False},
    "unscaled, no rotation": {"num_tokens": 33, "half": 0, "scaled": False},
    "unscaled, norms": {"num_tokens": 17, "heads": (6, 2, 96), "half": 16, "gains": jnp.float32, "scaled": False},
}


@pytest.mark.parametrize("case", CASES)
def test_xla(case):
    arrays, options, want = make_case(**CASES[case])
    check(jax.jit(rope_and_write_kv)(*arrays, **options), want)


@pytest.mark.parametrize("gains", [None, jnp.float32])
def test_xla_in_float32(gains):
    arrays, options, want = make_case(num_tokens=12, heads=(3, 1, 6), half=2, dtype=jnp.float32, gains=gains)
    check(jax.jit(rope_and_write_kv)(*arrays, **options), want)


SMALL = [
    f"{kind}{case}" for kind in ("", "norms, ", "unscaled, ") for case in ("one token", "part of a head", "no rotation")
]
INTERPRETED = [*SMALL, "norms, larger heads", "unscaled, norms"]


@pytest.mark.parametrize("case", quick_only(INTERPRETED, "one token", "unscaled, part of a head"))
def test_interpreted(capsys, case):
    arrays, options, want = make_case(**CASES[case] | {"heads": (2, 1, CASES[case].get("heads", (4, 2, 64))[2])})
    check(interpret(capsys, rope_and_write_kv, *arrays, **options, implementation="sm90"), want)


@pytest.mark.slow
def test_a_product_that_the_kernel_does_not_scale_is_scaled_before(capsys):
    (product, *arrays), options, _ = make_case(num_tokens=3, heads=(2, 1, 80), scaled=False)
    run = functools.partial(interpret, capsys, rope_and_write_kv, **options, implementation="sm90")
    got, want = (jax.tree.leaves(run(qkv, *arrays)) for qkv in (product, product.values()))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.astype(jnp.float32), b.astype(jnp.float32))


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("case", [*CASES, "many tokens", "norms, many tokens"])
def test_on_a_gpu(case):
    many = {"num_tokens": 3001, "gains": jnp.bfloat16 if "norms" in case else None}
    arrays, options, want = make_case(**CASES.get(case, many))
    run = jax.jit(rope_and_write_kv, static_argnames="implementation", donate_argnums=1)
    check(run(*arrays, **options, implementation="sm90"), want)


@pytest.mark.parametrize("is_normed", quick_first([False, True]))
@pytest.mark.parametrize("implementation", ["xla", "sm90"])
def test_changes_the_pools_in_place(implementation, is_normed):
    """Two layers for an H200: no copy of a donated pool, and no memory that grows with it."""
    pool = (5000, 8, 16, 128)

    def layers(pools, qkv, rotation, norms, index):
        outs = []
        for pages in pools:
            q, pages = rope_and_write_kv(
                qkv, pages, index, rotation=rotation, head_norms=norms, implementation=implementation
            )
            qkv = qkv + q.reshape(64, 8, 4, 128)[:, :, :1]
            outs.append(pages)
        return outs, qkv

    pages = jax.ShapeDtypeStruct(pool, jnp.bfloat16)
    qkv = jax.ShapeDtypeStruct((64, 8, 6, 128), jnp.bfloat16)
    angles = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    index = jax.ShapeDtypeStruct((64,), jnp.int32)
    norms = abstract_norms(128, jnp.bfloat16) if is_normed else None
    program = compile_for_h200(
        layers, [Pages(pages, pages)] * 2, qkv, (angles, angles), norms, index, donate_argnums=(0,)
    )
    assert program.copies_of(pool) == []
    assert program.temp_bytes < 4 * 2**20
    assert program.spill_bytes == 0
    if implementation == "sm90":
        assert program.num_launches == 4  # a kernel and an addition each


def abstract_norms(head_dim, dtype):
    gain = jnp.ones(head_dim, dtype)
    return jax.eval_shape(lambda: HeadNorms(gain, gain, eps=EPS))


# With many tokens, whose large blocks take most registers, and sometimes with few.
@pytest.mark.parametrize(
    ("num_tokens", "head_dim", "half"),
    quick_first(
        [
            (600, 256, 128),
            (600, 64, 32),
            (600, 80, 40),
            (600, 80, 16),
            (600, 96, 48),
            (600, 128, 64),
            (1, 64, 32),
            (17, 80, 40),
            (1, 256, 128),
        ]
    ),
)
def test_norms_spill_nothing(num_tokens, head_dim, half):
    pages = jax.ShapeDtypeStruct((100, 4, 16, head_dim), jnp.bfloat16)
    qkv = jax.ShapeDtypeStruct((num_tokens, 4, 10, head_dim), jnp.bfloat16)
    angles = jax.ShapeDtypeStruct((num_tokens, half), jnp.float32)
    index = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    run = functools.partial(rope_and_write_kv, implementation="sm90")
    program = compile_for_h200(
        lambda qkv, pages, index, angles, norms: run(qkv, pages, index, rotation=angles, head_norms=norms),
        *(qkv, Pages(pages, pages), index, (angles,) * 2, abstract_norms(head_dim, jnp.float32)),
    )
    [kernel] = program.kernels
    assert kernel.spill_bytes == 0


@pytest.mark.parametrize(("members", "fits"), [(6, True), (66, False)])
def test_heads_that_share_much_are_taken_apart(members, fits):
    """Using the same cosines for all vectors of a head pays only if the head fits into shared memory."""
    assert heuristic(513, 1, members, 128, 64) == Config(tokens=16, vectors=members if fits else 1)
    pages = jax.ShapeDtypeStruct((100, 1, 16, 128), jnp.bfloat16)
    qkv = jax.ShapeDtypeStruct((600, 1, members, 128), jnp.bfloat16)
    angles = jax.ShapeDtypeStruct((600, 64), jnp.float32)
    index = jax.ShapeDtypeStruct((600,), jnp.int32)
    run = functools.partial(rope_and_write_kv, implementation="sm90")
    program = compile_for_h200(
        lambda qkv, pages, index, angles: run(qkv, pages, index, rotation=angles),
        *(qkv, Pages(pages, pages), index, (angles,) * 2),
    )
    assert program.spill_bytes == 0


@pytest.mark.parametrize(
    ("num_tokens", "head_dim", "half", "tokens"),
    [(1, 128, 64, 4), (33, 128, 64, 8), (513, 128, 64, 16), (1, 80, 16, 8)],
)
def test_few_tokens_have_small_blocks(num_tokens, head_dim, half, tokens):
    assert heuristic(num_tokens, 8, 6, head_dim, half).tokens == tokens


def test_refuses_with_a_reason():
    arrays, options, _ = make_case(num_tokens=4)
    unchecked = inspect.unwrap(rope_and_write_kv)
    with pytest.raises(ValueError, match="a query, a key and a value"):
        rope_and_write_kv(arrays[0][:, :, 1:3], *arrays[1:], **options)
    norms = HeadNorms(jnp.ones(64), jnp.ones(32), eps=EPS)
    with pytest.raises(ValueError, match=r"the size of a head, 64, got \[\(64,\), \(32,\)\]"):
        unchecked(*arrays, **options | {"head_norms": norms})
    with pytest.raises(NotImplementedError, match="all be bfloat16 or all float16, got float32, bfloat16"):
        rope_and_write_kv_sm90(arrays[0].astype(jnp.float32), *arrays[1:], **options)
    arrays, options, _ = make_case(num_tokens=4, heads=(2, 1, 40), half=12)
    with pytest.raises(NotImplementedError, match="multiples of 8, got 40 and 12"):
        rope_and_write_kv_sm90(*arrays, **options)
