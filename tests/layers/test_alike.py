"""Layers that are alike are traced once, and none is taken for another one."""

import jax
import jax.numpy as jnp
import pytest
from decode_cases import make_batch, make_cache, make_model

from jaxserve.layers import paths
from jaxserve.layers.paged_kv import PagedKV
from pallas_kernels import layer_matmuls


@pytest.mark.parametrize(
    ("model_type", "fields", "num_functions"),
    [
        ("llama", {}, 2),  # before the first layer there is no update to add
        ("gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 16}, 3),
        ("gpt_neox", {"rotary_pct": 0.5}, 2),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 2),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}, 3),
    ],
)
def test_a_program_has_one_function_for_each_kind_of_layer(model_type, fields, num_functions):
    family, config, params = make_model(model_type, num_hidden_layers=5, **fields)
    pools = [PagedKV(*(jnp.zeros((16, 2, 16, 16)) for _ in range(2))) for _ in range(5)]
    batch, cache = make_batch([5, 1]), make_cache(pools)
    traced = jax.make_jaxpr(lambda *args: family.forward(args[0], config, *args[1:]))(params, batch, cache)
    blocks = [eqn.params["jaxpr"] for eqn in traced.eqns if eqn.params.get("name") == "_run_layer"]
    assert len(blocks) == 5
    assert len(set(map(id, blocks))) == num_functions


def test_fused_layers_are_of_two_kinds(monkeypatch):
    """All but the last one also multiply by the next one's weights."""
    family, config, params = make_model("llama", num_hidden_layers=5)
    pools = [PagedKV(*(jnp.zeros((16, 2, 16, 16)) for _ in range(2))) for _ in range(5)]
    monkeypatch.setattr(paths, "why_not_fused", lambda *_: None)
    for reason in ("why_not", "why_not_attention"):
        monkeypatch.setattr(layer_matmuls, reason, lambda *_, **__: "not here")
    batch, cache = make_batch([5, 1]), make_cache(pools)
    traced = jax.make_jaxpr(lambda *args: family.forward(args[0], config, *args[1:]))(params, batch, cache)
    layers = [eqn.params["jaxpr"] for eqn in traced.eqns if eqn.params.get("name") == "run_fused_layer"]
    assert (len(layers), len(set(map(id, layers)))) == (5, 2)
