"""A Llama of the recipes: shapes, initial weights, the training forward pass, and its Hugging Face files.

Weights of one kind are stacked over layers, `[L, in, out]`, so that an optimizer step is one batched product per kind.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import load_file, save_file

Params = dict[str, jax.Array]
ROPE_THETA = 10000.0
NORM_EPS = 1e-5


@dataclass(frozen=True)
class Config:
    """The shape of a model, under Hugging Face's names."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    head_dim: int = 64
    vocab_size: int = 8192
    max_position_embeddings: int = 1024

    def hugging_face(self) -> dict:
        """Return the contents of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "hidden_act": "silu",
            "rms_norm_eps": NORM_EPS,
            "rope_theta": ROPE_THETA,
            "rope_scaling": None,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
            "torch_dtype": "bfloat16",
        }


CONFIGS = {
    "scribe-15m": Config(384, 8, 6, 2, 1024),
    "scribe-2m": Config(192, 3, 4, 2, 256),
    "test": Config(64, 2, 2, 1, 128),
}

# kind -> Hugging Face name within a layer; matrices are stored there as [out, in].
LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def init_params(cfg: Config, key: jax.Array) -> Params:
    """Float32 master weights: normal(0.02), zero for the two matrices that write into the residual stream."""
    D, L, F = cfg.hidden_size, cfg.num_hidden_layers, cfg.intermediate_size
    q, kv = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    shapes = {"q": (L, D, q), "k": (L, D, kv), "v": (L, D, kv), "gate": (L, D, F), "up": (L, D, F)}
    keys = jax.random.split(key, len(shapes) + 1)
    drawn = zip(keys[1:], shapes.items(), strict=True)
    params = {kind: 0.02 * jax.random.normal(k, shape) for k, (kind, shape) in drawn}
    return params | {
        "embed": 0.02 * jax.random.normal(keys[0], (cfg.vocab_size, D)),
        "o": jnp.zeros((L, q, D)),
        "down": jnp.zeros((L, F, D)),
        "attention_norm": jnp.ones((L, D)),
        "mlp_norm": jnp.ones((L, D)),
        "final_norm": jnp.ones(D),
    }


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + NORM_EPS)
    return (wide * weight).astype(x.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Apply rotary embeddings in Hugging Face's layout: the two halves of a head are the two coordinates."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rotation(head_dim: int, num_positions: int) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines [T, 1, head_dim / 2] of the positions from 0 on."""
    frequencies = ROPE_THETA ** -(np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    angles = np.arange(num_positions, dtype=np.float32)[:, None, None] * frequencies
    return jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))


def mlp(p: Params, x: jax.Array) -> jax.Array:
    """Return the update of the second half of a layer, which reads `x` through its norm."""
    h = rms_norm(x, p["mlp_norm"])
    return (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def qkv(cfg: Config, p: Params, h: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, ...]:
    """Return queries [B, T, H, D], keys and values [B, T, K, D] of normed inputs [B, T, E]; the first two rotated."""
    shape, D = h.shape[:2], cfg.head_dim
    q, k = (rotate((h @ p[kind]).reshape(*shape, -1, D), cos, sin) for kind in "qk")
    return q, k, (h @ p["v"]).reshape(*shape, -1, D)


def cast(params: Params, dtype: DTypeLike) -> Params:
    """Return the weights in `dtype`, norms as they are."""
    return {kind: w if kind.endswith("norm") else w.astype(dtype) for kind, w in params.items()}


def of_layer(params: Params, layer: int) -> Params:
    """Return the weights of one layer."""
    return {kind: params[kind][layer] for kind in LAYER_NAMES}


def streams(
    cfg: Config, params: Params, tokens: jax.Array, dtype: DTypeLike = jnp.bfloat16, attention: str | None = None
) -> list[jax.Array]:
    """Return the residual stream [B, T, E] before each layer and behind the last, for tokens [B, T]."""
    params, (cos, sin) = cast(params, dtype), rotation(cfg.head_dim, tokens.shape[1])
    x = params["embed"][tokens]
    found = [x]
    for layer in range(cfg.num_hidden_layers):
        p = of_layer(params, layer)
        q, k, v = qkv(cfg, p, rms_norm(x, p["attention_norm"]), cos, sin)
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
        x = x + h.reshape(*h.shape[:2], -1) @ p["o"]
        x = x + mlp(p, x)
        found.append(x)
    return found


def forward(
    cfg: Config, params: Params, tokens: jax.Array, dtype: DTypeLike = jnp.bfloat16, attention: str | None = None
) -> jax.Array:
    """Logits [B, T, V] in `dtype` of tokens [B, T], computed in `dtype` from the float32 weights."""
    x = streams(cfg, params, tokens, dtype, attention)[-1]
    return rms_norm(x, params["final_norm"]) @ params["embed"].astype(dtype).T


def save_model(cfg: Config, params: Params, path: Path) -> None:
    """Write the weights as bfloat16 safetensors under Hugging Face names (the tied head is not repeated)."""
    host = {kind: np.asarray(w.astype(jnp.bfloat16)) for kind, w in params.items()}
    tensors = {"model.embed_tokens.weight": host["embed"], "model.norm.weight": host["final_norm"]}
    for kind, name in LAYER_NAMES.items():
        for layer in range(cfg.num_hidden_layers):
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ascontiguousarray(host[kind][layer].T)
    save_file(tensors, path, metadata={"format": "pt"})


def load_model(cfg: Config, path: Path) -> Params:
    """Float32 weights of a file that `save_model` wrote."""
    tensors = load_file(path)
    params = {"embed": tensors["model.embed_tokens.weight"], "final_norm": tensors["model.norm.weight"]}
    for kind, name in LAYER_NAMES.items():
        layers = [tensors[f"model.layers.{i}.{name}.weight"].T for i in range(cfg.num_hidden_layers)]
        params[kind] = np.stack(layers)
    return {kind: jnp.asarray(w, jnp.float32) for kind, w in params.items()}


def num_params(params: Params) -> int:
    """Weights in all; the tied embedding counts once."""
    return sum(w.size for w in params.values())
