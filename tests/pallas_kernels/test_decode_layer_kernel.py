"""A layer of a decode step in one kernel: interpreted with race detection against float64, compiled, on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from interpreting import interpret
from kernel_results import in_float, silu
from test_layer_matmuls import FEW_SMS, cut_for

from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.layer_matmuls import Weights, decode_layer, why_not_attention
from pallas_kernels.layer_matmuls.reference import layer_matmuls_reference
from pallas_kernels.layer_matmuls.sm90 import Config, decode_layer_sm90
from pallas_kernels.paging import Pages

EPS = 1e-5


def make_case(
    seq_lens, *, num_kv_heads=2, queries=4, head_dim=64, block_size=16, hidden=128, inner=64, outputs=72, seed=0
):
    rng = np.random.default_rng(seed)
    T, K, G, D, S = len(seq_lens), num_kv_heads, queries, head_dim, block_size

    def array(*shape, size=1.0):
        return jnp.asarray(size * rng.standard_normal(shape), jnp.bfloat16)

    seq_lens = np.array(seq_lens, np.int32)
    width = max(1, -(-int(seq_lens.max()) // S))
    num_pages = T * width + 2
    pages = rng.permutation(num_pages - 1)[: T * width].reshape(T, width) + 1
    k_pages, v_pages = (np.full((num_pages, K, S, D), np.nan, np.float32) for _ in range(2))
    for row, length in enumerate(seq_lens):
        for position in range(length - 1):
            for pool in (k_pages, v_pages):
                pool[pages[row, position // S], :, position % S] = rng.standard_normal((K, D))
    last = np.maximum(seq_lens - 1, 0)
    places = np.where(seq_lens > 0, pages[np.arange(T), last // S] * S + last % S, num_pages * S + np.arange(T))
    angles = rng.uniform(0, 6, (T, D // 2))
    A = K * G * D
    return {
        "qkv": array(T, K, G + 2, D),
        "pages": Pages(jnp.asarray(k_pages, jnp.bfloat16), jnp.asarray(v_pages, jnp.bfloat16)),
        "residual": array(T, hidden),
        "weights": Weights(
            o=array(hidden, A, size=A**-0.5),
            gate_up=array(2, inner, hidden, size=hidden**-0.5),
            down=array(hidden, inner, size=2 * inner**-0.5),
            qkv=None if outputs is None else array(outputs, hidden, size=hidden**-0.5),
        ),
        "gains": (1 + 0.2 * array(hidden), 1 + 0.2 * array(hidden)),
        "rotation": (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)),
        "write_index": jnp.asarray(places, jnp.int32),
        "block_tables": jnp.asarray(pages, jnp.int32),
        "seq_lens": jnp.asarray(seq_lens),
    }


def bf16(x):
    return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16).astype(jnp.float32), np.float64)


def reference(case, scale):
    floats = {
        name: in_float(value) for name, value in case.items() if name not in ("write_index", "block_tables", "seq_lens")
    }
    qkv, k_pages, v_pages = floats["qkv"], *(pool.copy() for pool in floats["pages"][:2])
    T, K, members, D = qkv.shape
    S = k_pages.shape[2]
    c, s = (x[:, None, None] for x in floats["rotation"])
    x, y = np.split(qkv[:, :, :-1], 2, axis=-1)
    turned = bf16(np.concatenate([x * c - y * s, y * c + x * s], axis=-1))
    heads = np.zeros((T, K, members - 2, D))
    for row, length in enumerate(np.asarray(case["seq_lens"])):
        if not length:
            continue
        place = int(case["write_index"][row])
        k_pages[place // S, :, place % S] = turned[row, :, -1]
        v_pages[place // S, :, place % S] = qkv[row, :, -1]
        pages = np.asarray(case["block_tables"])[row]
        k, v = (np.concatenate(list(np.swapaxes(pool[pages], 1, 2)))[:length] for pool in (k_pages, v_pages))
        for head in range(K):
            scores = turned[row, head, :-1] @ k[:, head].T * scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads[row, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, head]
    out = layer_matmuls_reference(
        heads.reshape(T, -1),
        floats["residual"],
        **floats["weights"]._asdict(),
        gains=floats["gains"],
        activation=silu,
        eps=EPS,
    )
    return *out, Pages(k_pages, v_pages)


def check(got, case, scale, tolerance=1e-2):
    used = np.asarray(case["seq_lens"]) > 0
    want = reference(case, scale)
    for result, expected in zip(got[:2], want[:2], strict=True):
        result, expected = in_float(result)[used], expected[used]
        error = np.linalg.norm(result - expected) / np.linalg.norm(expected)
        assert error <= tolerance, error
    for result, expected in zip(got[2][:2], want[2][:2], strict=True):
        np.testing.assert_allclose(in_float(result), expected, rtol=2**-7, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seq_lens", "sizes"),
    [
        ([5, 0, 1, 300, 64, 65, 17], {}),
        ([128, 129, 0, 3, 700, 2, 1, 16, 33], {"queries": 5, "head_dim": 128, "num_kv_heads": 1, "outputs": None}),
        ([70, 1, 9, 8], {"queries": 12, "block_size": 8}),
        ([300, 0, 64], {"queries": 33, "block_size": 64, "num_kv_heads": 1}),
    ],
)
def test_interpreted_without_races(capsys, monkeypatch, seq_lens, sizes):
    cut_for(monkeypatch, FEW_SMS)
    case = make_case(seq_lens, **sizes)
    scale = 0.125
    slot = 64 * 2 * case["qkv"].shape[-1]
    got = interpret(
        capsys,
        decode_layer_sm90,
        **case,
        scale=scale,
        activation=jax.nn.silu,
        eps=EPS,
        config=Config(slot_bytes=slot, w_slots=3, x_bytes=16384),
        interpret=True,
    )
    check(got, case, scale)


@pytest.mark.parametrize("outputs", quick_first([72, None]))
def test_xla_matches_the_definition(outputs):
    case = make_case([5, 0, 1, 70, 16], outputs=outputs)
    case |= {"pages": jax.tree.map(jnp.nan_to_num, case["pages"])}
    check(decode_layer(**case, scale=0.1, activation=jax.nn.silu, eps=EPS), case, 0.1)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"num_rows": 17}, NotImplementedError, "at most 16 rows, got 17"),
        ({"dtype": jnp.float16}, NotImplementedError, "bfloat16, got heads of float16"),
        ({"residual": jnp.float32}, NotImplementedError, "bfloat16, got residual of float32"),
        ({"pages": jnp.float8_e4m3fn}, NotImplementedError, "bfloat16, got pages of float8_e4m3fn"),
        ({"v_pages": jnp.float32}, ValueError, "v must be in pages as k, bfloat16 of shape"),
        ({"head_dim": 96}, NotImplementedError, "whole heads of 64 or 128, got 96 of which 96 are turned"),
        ({"half": 16}, NotImplementedError, "whole heads of 64 or 128, got 64 of which 32 are turned"),
        ({"queries": 65}, NotImplementedError, "at most 64 queries a KV head, got 65"),
        ({"block_size": 128}, NotImplementedError, "pages of 8, 16, 32 or 64 tokens, got 128"),
        ({"hidden": 192}, ValueError, r"o must have shape \(192, 512\), got \(128, 512\)"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_said(changes, error, reason):
    sizes = {"num_rows": 2, "head_dim": 64, "queries": 4, "block_size": 16, "hidden": 128, "half": None} | changes
    dtype, head_dim, num_rows = changes.get("dtype", jnp.bfloat16), sizes["head_dim"], sizes["num_rows"]

    def zeros(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    width = 2 * sizes["queries"] * head_dim
    half = sizes["half"] or head_dim // 2
    pages = 8, 2, sizes["block_size"], head_dim
    weights = Weights(zeros(128, width), zeros(2, 64, 128), zeros(128, 64), None)
    args = (
        zeros(num_rows, 2, sizes["queries"] + 2, head_dim),
        Pages(
            zeros(*pages, dtype=changes.get("pages", dtype)),
            zeros(*pages, dtype=changes.get("v_pages", changes.get("pages", dtype))),
        ),
        zeros(num_rows, sizes["hidden"], dtype=changes.get("residual", dtype)),
        weights,
        (zeros(128), zeros(128)),
    )
    of_rows = {
        "rotation": (zeros(num_rows, half, dtype=jnp.float32),) * 2,
        "write_index": zeros(num_rows, dtype=jnp.int32),
        "block_tables": zeros(num_rows, 3, dtype=jnp.int32),
        "seq_lens": zeros(num_rows, dtype=jnp.int32),
    }
    run = functools.partial(decode_layer, scale=0.1, activation=jax.nn.silu, eps=EPS, implementation="sm90")
    with pytest.raises(error, match=reason):
        jax.eval_shape(lambda args, of_rows: run(*args, **of_rows), args, of_rows)
    if error is NotImplementedError and "residual" not in changes:
        assert why_not_attention(args[0], args[1], weights, half=half) is not None


LLAMA_3_8B = {"num_kv_heads": 8, "head_dim": 128, "hidden": 4096, "inner": 14336, "outputs": 6144}
MANY_QUERIES = {"num_kv_heads": 1, "queries": 48, "head_dim": 128, "hidden": 6144, "inner": 24576, "outputs": 6400}
SMALL_HEADS = {"num_kv_heads": 8, "head_dim": 64, "block_size": 8, "hidden": 2048, "inner": 8192, "outputs": 3072}


# With 16 rows, and with one the plain layer and the one with most queries.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "sizes"),
    [
        (1, LLAMA_3_8B),
        (16, LLAMA_3_8B | {"outputs": None}),
        (16, SMALL_HEADS),
        (1, MANY_QUERIES),
        (16, MANY_QUERIES),
        (16, {"num_kv_heads": 4, "queries": 7, "head_dim": 128, "block_size": 64, "hidden": 3584, "inner": 18944}),
    ],
    ids=str,
)
def test_compiles_without_spilling(num_rows, sizes):
    small = {"hidden": 64, "inner": 64, "outputs": None}
    case = jax.eval_shape(lambda: make_case([64] * num_rows, **sizes | small))
    hidden, inner, outputs = sizes["hidden"], sizes["inner"], sizes.get("outputs", 72)

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    case |= {
        "residual": of(num_rows, hidden),
        "weights": Weights(
            of(hidden, case["weights"].o.shape[1]),
            of(2, inner, hidden),
            of(hidden, inner),
            None if outputs is None else of(outputs, hidden),
        ),
        "gains": (of(hidden), of(hidden)),
    }
    run = functools.partial(decode_layer_sm90, scale=0.1, activation=jax.nn.silu, eps=EPS)
    program = compile_for_h200(lambda case: run(**case), case)
    assert [kernel.spill_bytes for kernel in program.kernels if kernel.name == "layer_matmuls"] == [0]


GPU = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
RUN = jax.jit(functools.partial(decode_layer_sm90, scale=0.1, activation=jax.nn.silu, eps=EPS))


@GPU
@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 128, "num_kv_heads": 8, "hidden": 1024, "inner": 2816, "outputs": 512},
        {"head_dim": 64, "num_kv_heads": 2, "queries": 7, "hidden": 896, "inner": 4864, "outputs": 1152},
        {"head_dim": 64, "num_kv_heads": 1, "queries": 40, "hidden": 256, "inner": 20_480, "outputs": None},
        {"head_dim": 128, "num_kv_heads": 4, "queries": 8, "block_size": 64, "hidden": 1024, "inner": 512},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "seq_lens",
    [[1], [64], [65], [3000], [5, 0, 1, 300, 64, 65, 17], [700] * 16, [1] * 9, [130] * 11 + [5000]],
    ids=lambda lens: f"{len(lens)} to {max(lens)}",
)
def test_on_a_gpu(seq_lens, sizes):
    case = make_case(seq_lens, **sizes)
    got = RUN(**case)
    check(got, case, 0.1)
    for _ in range(20):
        for a, b in zip(*map(jax.tree.leaves, (RUN(**case), got)), strict=True):
            np.testing.assert_array_equal(in_float(a), in_float(b))


@GPU
@pytest.mark.parametrize("num_rows", [1, 5, 16])
def test_layers_one_after_the_other_on_a_gpu(num_rows):
    """In one program, each layer's qkv from the previous one: they use the same counters, and their results equal those
    of separate calls.
    """
    sizes = {"head_dim": 128, "num_kv_heads": 4, "hidden": 2048, "inner": 2816, "outputs": 4 * 6 * 128}
    cases = [make_case([100 + 37 * (row % 9) for row in range(num_rows)], **sizes, seed=seed) for seed in range(6)] * 4

    def layers(cases):
        x, qkv, results = cases[0]["residual"], cases[0]["qkv"], []
        for case in cases:
            given = case | {"residual": x, "qkv": qkv}
            x, y, pages = RUN(**given)
            results.append((x, qkv, y, pages))
            x, qkv = x / 4, y.reshape(qkv.shape)
        return results

    together, alone = jax.jit(layers)(cases), layers(cases)
    for got, want in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(in_float(got), in_float(want))
    check((together[0][0], *together[0][2:]), cases[0], 0.1)
