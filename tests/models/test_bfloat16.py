"""Every family in bfloat16: what is computed in a wider type is converted back to the dtype that is served."""

import functools

import jax
import jax.numpy as jnp
import pytest
from depths import quick_only
from golden_models import GOLDENS, ONE_OF_EACH_DECODER
from jax.sharding import AbstractMesh
from paged import BLOCK_SIZE, make_batch

from jaxserve.execution.kv_cache import abstract_kv_cache
from jaxserve.layers.context import StepContext
from jaxserve.layers.params import leaf_specs
from jaxserve.loading.huggingface import load_config
from jaxserve.models import get_family


@pytest.mark.parametrize("golden", quick_only(GOLDENS, *ONE_OF_EACH_DECODER), ids=lambda path: path.name)
def test_bfloat16_step(golden):
    """Traced only: strict promotion rejects mixed types, and the KV cache must be returned with the types that it
    had.
    """
    dtype = jnp.dtype(jnp.bfloat16)
    fields = load_config(golden)
    family = get_family(fields)
    config = family.config(fields)
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype_in(dtype)), leaf_specs(family.param_specs(config))
    )

    sizes = {"num_blocks": 9, "block_size": BLOCK_SIZE, "num_slots": 9}
    mesh = AbstractMesh((1,), ("tensor",))
    cache = jax.tree.map(
        lambda pool: jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        abstract_kv_cache(family.kv_specs(config), **sizes, dtype=dtype, mesh=mesh),
    )
    batch, _ = make_batch([([1, 2, 3], (0,), 0, 3), ([4], (1,), 0, 1)], num_tokens=6, num_rows=3, num_blocks=9)
    forward = functools.partial(family.forward, config=config)
    hidden, cache_after = jax.eval_shape(
        lambda params, cache: forward(params, batch=batch, kv_cache=cache), params, cache
    )
    assert (hidden.shape, hidden.dtype) == ((6, config.hidden_size), dtype)
    assert cache_after == cache
    logits = jax.eval_shape(
        lambda params, hidden: family.head(params, config, hidden, StepContext("xla")), params, hidden
    )
    assert (logits.shape, logits.dtype) == ((6, config.vocab_size), jnp.float32)


def test_routers_that_transformers_keeps_in_float32():
    """Rounding them would change which experts are chosen."""
    [golden] = [path for path in GOLDENS if path.name == "ernie4_5_moe_tied"]
    family = get_family(fields := load_config(golden))
    blocks = [layer["mlp"] for layer in family.param_specs(family.config(fields))["layers"]]
    dtypes = {block["router"].dtype_in(jnp.dtype(jnp.bfloat16)) for block in blocks if "router" in block}
    assert dtypes == {jnp.dtype(jnp.float32)}
