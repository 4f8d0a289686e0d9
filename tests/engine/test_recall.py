"""Keys and values in 8 bits over long contexts: a model that retrieves finds every needle, as with floats."""

import jax.numpy as jnp
import pytest
import recall_model
from depths import quick_first
from engine_harness import request, run

from jaxserve.config import EngineConfig
from jaxserve.engine.startup import start_engine
from pallas_kernels.kv_write import xla
from pallas_kernels.paging import round_vectors

NEEDLE_LENGTH = 5
OUTLIERS = {"auto": 1000, "fp8": 1000, "fp8_e5m2": 1000, "int8": 24}
"""How many times as large as others a pair of channels of the keys is: more than 30 times are too many for 8-bit
integers.
"""


def recalled(folder, *, kv_cache_dtype, length, num_needles):
    """Return the continuations of needles by an engine, and what they are; the first request reads the text in chunks,
    the others have it as a prefix.
    """
    text, needles = recall_model.haystack(length, num_needles=num_needles, needle_length=NEEDLE_LENGTH)
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory=length * 2**14 + 2**24,
        max_model_len=length + 2 * NEEDLE_LENGTH,
        max_num_seqs=8,
        max_num_batched_tokens=1024 if length < 4096 else 2048,
        warmup="none",
    )
    engine, _ = start_engine(config, mesh=None, progress=False)
    asked = [request(str(i), text + needle[:1], NEEDLE_LENGTH - 1) for i, needle in enumerate(needles)]
    results = run(engine, asked[:1], check=False) | run(engine, asked[1:], check=False)
    engine.close()
    assert all(results[str(i)].num_cached_tokens >= length - 32 for i in range(1, num_needles))
    return [results[str(i)].token_ids for i in range(num_needles)], [needle[1:] for needle in needles]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return recall_model.write(tmp_path_factory.mktemp("recall"))


@pytest.mark.parametrize(
    ("kv_cache_dtype", "length", "num_needles"),
    quick_first(
        [("fp8", 2048, 12), ("auto", 16_000, 32), ("fp8", 32_000, 32), ("fp8_e5m2", 16_000, 32), ("int8", 16_000, 32)]
    ),
)
def test_all_needles_of_a_text(tmp_path, kv_cache_dtype, length, num_needles):
    folder = recall_model.write(tmp_path, outlier=OUTLIERS[kv_cache_dtype])
    found, needles = recalled(folder, kv_cache_dtype=kv_cache_dtype, length=length, num_needles=num_needles)
    assert found == needles


@pytest.mark.slow
def test_integers_lose_keys_beside_large_outliers(tmp_path):
    """The step of a vector's integers follows its largest channel, as docs/quantization.md says."""
    folder = recall_model.write(tmp_path, outlier=100)
    found, needles = recalled(folder, kv_cache_dtype="int8", length=1024, num_needles=8)
    assert not any(one == other for one, other in zip(found, needles, strict=True))


def _one(x, dtype, scales=None):
    return round_vectors(x, dtype, jnp.ones(x.shape[:-1], jnp.float32))


def _of_another_head(x, dtype, scales=None):
    codes, scales = round_vectors(x, dtype)
    return codes, jnp.roll(scales, 1, axis=-1)


def _of_another_token(x, dtype, scales=None):
    codes, scales = round_vectors(x, dtype)
    return codes, jnp.roll(scales, 1, axis=0)


def _of_all_heads(x, dtype, scales=None):
    codes, scales = round_vectors(x, dtype)
    return codes, jnp.broadcast_to(scales.max(axis=-1, keepdims=True), scales.shape)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [_of_another_head, _one, _of_another_token, _of_all_heads])
def test_a_wrong_scale_loses_needles(folder, monkeypatch, broken):
    """The tests above can fail: with scales of 1, and with those of other heads or of other tokens."""

    monkeypatch.setattr(xla, "round_vectors", broken)
    found, needles = recalled(folder, kv_cache_dtype="fp8", length=1024, num_needles=8)
    assert sum(one == other for one, other in zip(found, needles, strict=True)) == 0
