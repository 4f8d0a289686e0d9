"""Benchmark of `sample`: 64 rows and one row of a Llama-3 vocabulary, with equal parameters in every row, or all
mixed.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.sampling.op import sample
from pallas_kernels.timing import Row, compare, floor, num_rotations, on_gpu, ours

_PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_SETTINGS = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.95, min_p 0.05": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05},
}


def _gumbel_argmax(logits: Float[Array, "B V"], columns: dict[str, Array]) -> Int32[Array, " B"]:
    """Without filters. A noise for each token instead of a number for each row."""
    seed = lax.bitcast_convert_type(columns["uniform"][0, 0], jnp.uint32)
    return jnp.argmax(logits + jax.random.gumbel(jax.random.key(seed), logits.shape), axis=1)


def _by_sorting(logits: Float[Array, "B V"], columns: dict[str, Array]) -> Int32[Array, " B"]:
    """Filter and draw among the 64 largest, found by `lax.top_k`; top-k and top-p must not keep more."""
    largest, ids = lax.top_k(logits, 64)
    rank = jnp.arange(64)[None]
    top_k = jnp.where(columns["top_k"] > 0, columns["top_k"], 64)[:, None]
    p = jax.nn.softmax(jnp.where(rank < top_k, largest / columns["temperature"][:, None], -jnp.inf), axis=1)
    is_kept = (jnp.cumsum(p, axis=1) - p < columns["top_p"][:, None]) & (p >= columns["min_p"][:, None] * p[:, :1])
    running = jnp.cumsum(jnp.where(is_kept, p, 0.0), axis=1)
    chosen = jnp.argmax(running > columns["uniform"][:, :1] * running[:, -1:], axis=1)
    return jnp.take_along_axis(ids, chosen[:, None], axis=1)[:, 0]


_PEERS: dict[str, dict[str, Callable[..., Any]]] = {
    "greedy": {"jnp.argmax": lambda logits, _: jnp.argmax(logits, axis=1)},
    "temperature": {"Gumbel and argmax": _gumbel_argmax},
    "top_k 50": {"lax.top_k(64)": _by_sorting},
    "top_k 50, top_p 0.95, min_p 0.05": {"lax.top_k(64)": _by_sorting},
}


def sampling_rows() -> Iterator[Row]:
    """Logits are normal with a deviation of 2: with top_p 0.9, thousands of tokens are left."""
    vocab_size = 128_256 if on_gpu() else 8_192
    for num_rows in (64, 1) if on_gpu() else (8,):
        num_bytes = 4 * num_rows * vocab_size
        for name in (*_SETTINGS, "all of these, mixed"):
            settings = list(itertools.islice(itertools.cycle(_SETTINGS.values()), num_rows))
            if name in _SETTINGS:
                settings = [_SETTINGS[name]] * num_rows
            elif num_rows == 1:
                continue
            inputs = [_arrays(settings, vocab_size, seed) for seed in range(num_rotations(num_bytes))]
            calls = ours(_call) | _PEERS.get(name, {})
            yield from compare(f"{num_rows} x {vocab_size}, {name}", calls, inputs, bound=floor(num_bytes=num_bytes))


def _call(logits: Array, columns: dict[str, Array], *, implementation: Any) -> tuple[Array, Array]:
    return sample(logits, **columns, implementation=implementation)


def _arrays(settings: list[dict[str, float]], vocab_size: int, seed: int) -> tuple[Any, ...]:
    """Logits, and a column of each parameter."""
    key = jax.random.key(seed)
    columns = {
        name: jnp.asarray(
            [(_PLAIN | setting)[name] for setting in settings], jnp.int32 if name == "top_k" else jnp.float32
        )
        for name in _PLAIN
    }
    columns["uniform"] = jax.random.uniform(key, (len(settings), 2))
    return 2 * jax.random.normal(key, (len(settings), vocab_size)), columns
