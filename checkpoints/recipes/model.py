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


def forward(
    cfg: Config, params: Params, tokens: jax.Array, dtype: DTypeLike = jnp.bfloat16, attention: str | None = None
) -> jax.Array:
    """Logits [B, T, V] in `dtype` of tokens [B, T], computed in `dtype` from the float32 weights."""
    B, T = tokens.shape
    H, K, D = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    frequencies = ROPE_THETA ** -(np.arange(0, D, 2, dtype=np.float32) / D)
    angles = np.arange(T, dtype=np.float32)[:, None, None] * frequencies
    cos, sin = jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))
    norms = ("attention_norm", "mlp_norm", "final_norm")
    params = {kind: w if kind in norms else w.astype(dtype) for kind, w in params.items()}

    x = params["embed"][tokens]
    for layer in range(cfg.num_hidden_layers):
        p = {kind: params[kind][layer] for kind in LAYER_NAMES}
        h = rms_norm(x, p["attention_norm"])
        q = rotate((h @ p["q"]).reshape(B, T, H, D), cos, sin)
        k = rotate((h @ p["k"]).reshape(B, T, K, D), cos, sin)
        v = (h @ p["v"]).reshape(B, T, K, D)
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
        x = x + h.reshape(B, T, H * D) @ p["o"]
        h = rms_norm(x, p["mlp_norm"])
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return rms_norm(x, params["final_norm"]) @ params["embed"].T


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
