"""Families that are not in transformers, in torch, for goldens alone: written from what their published code does.

Only what goldens need is here: one text at once, no cache. Nothing of it is shared with jaxserve.
"""

import types

import torch
import transformers
from torch import nn
from torch.nn import functional


class RootMeanSquare(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def angles(length, size, base):
    """Return the angles [T, size / 2] of the positions of a text."""
    return torch.arange(length).float()[:, None] * base ** (-torch.arange(0, size, 2).float() / size)


def turn_halves(x, angles):
    """Rotate heads [T, H, D], of which dimension i and i + D / 2 are a pair."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def turn_neighbours(x, angles):
    """Rotate heads [T, H, D], of which dimensions 2i and 2i + 1 are a pair."""
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


def attend(q, k, v):
    """Causal attention of [T, H, D] to [T, K, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v).flatten(1)


class QwenConfig(transformers.PreTrainedConfig):
    model_type = "qwen"
    tie_word_embeddings: bool = False


class QwenLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size // 2, not config.no_bias
        self.heads, self.head_dim, self.base = config.num_attention_heads, config.kv_channels, config.rotary_emb_base
        of_heads = self.heads * self.head_dim
        self.ln_1, self.ln_2 = (RootMeanSquare(size, config.layer_norm_epsilon) for _ in range(2))
        self.attn = nn.ModuleDict(
            {"c_attn": nn.Linear(size, 3 * of_heads), "c_proj": nn.Linear(of_heads, size, bias=bias)}
        )
        self.mlp = nn.ModuleDict({name: nn.Linear(size, inner, bias=bias) for name in ("w1", "w2")})
        self.mlp["c_proj"] = nn.Linear(inner, size, bias=bias)

    def forward(self, x):
        q, k, v = self.attn["c_attn"](self.ln_1(x)).view(len(x), 3, self.heads, self.head_dim).unbind(1)
        turned = angles(len(x), self.head_dim, self.base)
        x = x + self.attn["c_proj"](attend(turn_halves(q, turned), turn_halves(k, turned), v))
        y = self.ln_2(x)
        return x + self.mlp["c_proj"](self.mlp["w1"](y) * functional.silu(self.mlp["w2"](y)))


class QwenLMHeadModel(transformers.PreTrainedModel):
    """Qwen 1 up to its `seq_length`, where neither `use_dynamic_ntk` nor `use_logn_attn` does anything."""

    config_class = QwenConfig

    def __init__(self, config):
        super().__init__(config)
        norm = RootMeanSquare(config.hidden_size, config.layer_norm_epsilon)
        layers = nn.ModuleList(QwenLayer(config) for _ in range(config.num_hidden_layers))
        embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.transformer = nn.ModuleDict({"wte": embedding, "h": layers, "ln_f": norm})
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, token_ids, use_cache=False):
        x = self.transformer["wte"](token_ids[0])
        for layer in self.transformer["h"]:
            x = layer(x)
        return types.SimpleNamespace(logits=self.lm_head(self.transformer["ln_f"](x))[None])


class ChatGLMConfig(transformers.PreTrainedConfig):
    model_type = "chatglm"
    tie_word_embeddings: bool = False


class ChatGLMLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, inner, bias = config.hidden_size, config.ffn_hidden_size, config.add_bias_linear
        self.heads, self.groups, self.head_dim = (
            config.num_attention_heads,
            config.multi_query_group_num,
            config.kv_channels,
        )
        self.base = 10000.0 * config.rope_ratio
        self.input_layernorm, self.post_attention_layernorm = (
            RootMeanSquare(size, config.layernorm_epsilon) for _ in range(2)
        )
        total = (self.heads + 2 * self.groups) * self.head_dim
        self.self_attention = nn.ModuleDict(
            {
                "query_key_value": nn.Linear(size, total, bias=bias or config.add_qkv_bias),
                "dense": nn.Linear(self.heads * self.head_dim, size, bias=bias),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "dense_h_to_4h": nn.Linear(size, 2 * inner, bias=bias),
                "dense_4h_to_h": nn.Linear(inner, size, bias=bias),
            }
        )

    def turn(self, x):
        """Rotate the first half of each head."""
        rotated, rest = x.split(self.head_dim // 2, dim=-1)
        return torch.cat([turn_neighbours(rotated, angles(len(x), self.head_dim // 2, self.base)), rest], dim=-1)

    def forward(self, x):
        qkv = self.self_attention["query_key_value"](self.input_layernorm(x)).view(len(x), -1, self.head_dim)
        q, k, v = qkv.split([self.heads, self.groups, self.groups], dim=1)
        x = x + self.self_attention["dense"](attend(self.turn(q), self.turn(k), v))
        gate, up = self.mlp["dense_h_to_4h"](self.post_attention_layernorm(x)).chunk(2, dim=-1)
        return x + self.mlp["dense_4h_to_h"](functional.silu(gate) * up)


class ChatGLMForConditionalGeneration(transformers.PreTrainedModel):
    config_class = ChatGLMConfig

    def __init__(self, config):
        super().__init__(config)
        norm = RootMeanSquare(config.hidden_size, config.layernorm_epsilon)
        layers = nn.ModuleList(ChatGLMLayer(config) for _ in range(config.num_layers))
        table = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.transformer = nn.ModuleDict(
            {
                "embedding": nn.ModuleDict({"word_embeddings": table}),
                "encoder": nn.ModuleDict({"layers": layers, "final_layernorm": norm}),
                "output_layer": nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False),
            }
        )
        self.post_init()

    def forward(self, token_ids, use_cache=False):
        x = self.transformer["embedding"]["word_embeddings"](token_ids[0])
        for layer in self.transformer["encoder"]["layers"]:
            x = layer(x)
        x = self.transformer["encoder"]["final_layernorm"](x)
        return types.SimpleNamespace(logits=self.transformer["output_layer"](x)[None])
