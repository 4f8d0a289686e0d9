"""Attention with a window does not use any page before the window: it may be another request's by now."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from interpreting import interpret
from poisoned_pages import make_pages

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.sm90 import Config as DecodeConfig
from pallas_kernels.paged_attention.sm90 import paged_attention_sm90
from pallas_kernels.paging import Pages, Scores
from pallas_kernels.ragged_prefill_attention import ragged_prefill_attention
from pallas_kernels.ragged_prefill_attention.sm90 import Config as PrefillConfig
from pallas_kernels.ragged_prefill_attention.sm90 import ragged_prefill_attention_sm90

WINDOW, BLOCK_SIZE, HEAD_DIM = 90, 16, 16
OPTIONS = {"scores": Scores(scale=0.25, sliding_window=WINDOW)}


def make_case(chunks):
    """Return q, K and V pages, and the layout of rows of (new tokens, context); and K and V with NaN in all pages that
    are entirely before what a row's first token attends to.
    """
    rng = np.random.default_rng(0)
    lens = np.array([context for _, context in chunks], np.int32)
    k, v, tables = make_pages(rng, lens, 1, HEAD_DIM, block_size=BLOCK_SIZE, max_blocks=20)
    given_back = k.copy(), v.copy()
    for table, (new, context) in zip(tables, chunks, strict=True):
        first = (context - new - WINDOW + 1) // BLOCK_SIZE
        assert first > 0
        assert first * BLOCK_SIZE % 64, "a block of keys of the kernel is only in part before the window"
        for pages in given_back:
            pages[table[:first]] = np.nan
    q = rng.standard_normal((sum(new for new, _ in chunks), 1, HEAD_DIM))
    arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (q, Pages(k, v), Pages(*given_back)))
    return arrays, {"block_tables": jnp.asarray(tables), "seq_lens": jnp.asarray(lens)}


@pytest.mark.slow
@pytest.mark.parametrize("implementation", quick_first(["xla", "sm90"]))
def test_decode(capsys, implementation):
    (q, pages, given_back), layout = make_case([(1, 300), (1, 123)])
    if implementation == "xla":
        run = functools.partial(paged_attention, **layout, **OPTIONS)
        want, got = run(q[:, None], pages)[0], run(q[:, None], given_back)[0]
    else:
        config = DecodeConfig(block_kv=64, stages=2, streams=1, num_ctas=2)
        others = {"room": 2, "config": config, "interpret": True}
        run = functools.partial(paged_attention_sm90, **layout, **OPTIONS, **others)
        want = paged_attention(q[:, None], pages, **layout, **OPTIONS)[0]
        got = interpret(capsys, run, q[:, None], given_back)[0]
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=0.02)


@pytest.mark.parametrize("implementation", quick_first(["xla", "sm90"]))
def test_prefill(capsys, implementation):
    (q, pages, given_back), layout = make_case([(2, 300), (30, 150)])
    layout |= {"query_starts": jnp.array([0, 2, 32], jnp.int32), "first_row": jnp.int32(0), "num_rows": jnp.int32(2)}
    want = ragged_prefill_attention(q, pages, **layout, **OPTIONS)
    if implementation == "xla":
        got = ragged_prefill_attention(q, given_back, **layout, **OPTIONS)
    else:
        config = PrefillConfig(block_kv=64, k_stages=2, v_stages=2, q_slots=2, num_ctas=2)
        run = functools.partial(ragged_prefill_attention_sm90, **layout, **OPTIONS, config=config, interpret=True)
        got = interpret(capsys, run, q, given_back, None)
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=0.02)
