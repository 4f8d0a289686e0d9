"""Latent attention in plain XLA against its definition in float64, and that against one written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from latent_cases import check, make_case

from pallas_kernels.latent_attention import latent_attention

CASES = {
    "decode": {"chunks": [(1, 70), (1, 300), (1, 5)], "heads": 4, "sizes": (12, 4)},
    "decode, padded": {"chunks": [(1, 70), (1, 5)], "heads": 4, "sizes": (12, 4), "num_tokens": 4, "max_rows": 4},
    "chunks": {"chunks": [(1, 9), (40, 150), (3, 3)], "heads": 3, "sizes": (8, 6), "num_tokens": 60, "max_rows": 5},
    "one token": {"chunks": [(1, 33)], "heads": 5, "sizes": (16, 2)},
    "bfloat16": {"chunks": [(2, 20), (70, 70)], "heads": 2, "sizes": (8, 8), "dtype": jnp.bfloat16},
}


@pytest.mark.parametrize("case", CASES)
def test_xla(case):
    arrays, layout, options, want = make_case(**{"dtype": jnp.float32} | CASES[case])
    check(jax.jit(functools.partial(latent_attention, **options))(*arrays, **layout), want)


def test_the_definition():
    """Each head's query, position by position: absorbed weights give what keys and values made of latents would."""
    (q, pages), layout, options, want = make_case(CASES["chunks"]["chunks"], heads=3, sizes=(8, 6), dtype=jnp.float32)
    row, start, seq_len = 1, 1, 150
    table = np.asarray(layout["block_tables"])[row]
    vectors = [np.asarray(pages.k, np.float64)[table[i // 16], 0, i % 16] for i in range(seq_len)]
    for token, head in ((0, 0), (7, 2), (39, 1)):
        query = np.asarray(q, np.float64)[start + token, head]
        seen = vectors[: seq_len - 40 + token + 1]
        weights = np.exp([options["scale"] * query @ vector for vector in seen])
        latent = sum(weight * vector[:8] for weight, vector in zip(weights / weights.sum(), seen, strict=True))
        np.testing.assert_allclose(want[start + token, head], latent, rtol=1e-9)
