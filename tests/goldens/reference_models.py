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


def attend(q, k, v, slopes=None):
    """Causal attention of [T, H, D] to [T, K, D], with ALiBi if there are slopes [H]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if slopes is not None:
        scores = scores + slopes[:, None, None] * torch.arange(len(k)).float()
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
            {"dense_h_to_4h": nn.Linear(size, 2 * inner, bias=bias), "dense_4h_to_h": nn.Linear(inner, size, bias=bias)}
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


class Model(transformers.PreTrainedModel):
    """A decoder whose layers are `self.model`'s: an embedding, layers, a norm and an LM head."""

    def __init__(self, config):
        super().__init__(config)
        layers = nn.ModuleList(self.layer(config, index) for index in range(config.num_hidden_layers))
        norm = RootMeanSquare(config.hidden_size, config.rms_norm_eps)
        embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model = nn.ModuleDict({self.embedding: embedding, "layers": layers, "norm": norm})
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, token_ids, use_cache=False):
        x = self.model[self.embedding](token_ids[0])
        for layer in self.model["layers"]:
            x = layer(x)
        head = self.lm_head.weight
        if self.config.norm_head:
            head = head / head.norm(dim=self.unit_axis, keepdim=True)
        return types.SimpleNamespace(logits=functional.linear(self.model["norm"](x), head)[None])


class Gated(nn.Module):
    """A feed-forward."""

    def __init__(self, size, inner):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class BaichuanConfig(transformers.PreTrainedConfig):
    model_type = "baichuan"
    tie_word_embeddings: bool = False


class BaichuanLayer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        size, self.heads = config.hidden_size, config.num_attention_heads
        self.has_rope = not hasattr(config, "model_max_length")
        self.input_layernorm, self.post_attention_layernorm = (
            RootMeanSquare(size, config.rms_norm_eps) for _ in range(2)
        )
        self.self_attn = nn.ModuleDict(
            {"W_pack": nn.Linear(size, 3 * size, bias=False), "o_proj": nn.Linear(size, size, bias=False)}
        )
        self.mlp = Gated(size, config.intermediate_size)

    def forward(self, x):
        q, k, v = self.self_attn["W_pack"](self.input_layernorm(x)).view(len(x), 3, self.heads, -1).unbind(1)
        slopes = None
        if self.has_rope:
            turned = angles(len(x), q.shape[-1], 10000.0)
            q, k = turn_halves(q, turned), turn_halves(k, turned)
        else:  # those of four heads, the only number that goldens have
            slopes = 2.0 ** torch.tensor([-2.0, -4.0, -6.0, -8.0])
        x = x + self.self_attn["o_proj"](attend(q, k, v, slopes))
        return x + self.mlp(self.post_attention_layernorm(x))


class BaichuanForCausalLM(Model):
    config_class, layer, embedding, unit_axis = BaichuanConfig, BaichuanLayer, "embed_tokens", 1


class BailingMoeConfig(transformers.PreTrainedConfig):
    model_type = "bailing_moe"
    tie_word_embeddings: bool = False


class BailingMoeV2Config(BailingMoeConfig):
    model_type = "bailing_moe_v2"


class BailingExperts(nn.Module):
    """Chosen by softmax in the first generation; by sigmoid, groups and a bias in the second."""

    def __init__(self, config):
        super().__init__()
        size, inner = config.hidden_size, config.moe_intermediate_size
        self.config, self.is_second = config, config.model_type == "bailing_moe_v2"
        self.gate = nn.Linear(size, config.num_experts, bias=False)
        if self.is_second:
            self.gate.expert_bias = nn.Parameter(torch.zeros(config.num_experts))
        self.experts = nn.ModuleList(Gated(size, inner) for _ in range(config.num_experts))
        self.shared_experts = Gated(size, inner * config.num_shared_experts)

    def choose(self, logits):
        """Return the weights [T, k] of chosen experts, and which they are."""
        config = self.config
        if not self.is_second:
            return logits.softmax(-1).topk(config.num_experts_per_tok)
        scores = logits.sigmoid()
        preferences = (scores + self.gate.expert_bias).unflatten(-1, (config.n_group, -1))
        groups = preferences.topk(2).values.sum(-1).topk(config.topk_group).indices
        is_out = torch.ones(preferences.shape[:2], dtype=torch.bool).scatter(1, groups, False)
        chosen = preferences.masked_fill(is_out[..., None], -torch.inf).flatten(1).topk(config.num_experts_per_tok)
        return scores.gather(1, chosen.indices), chosen.indices

    def forward(self, x):
        weights, chosen = self.choose(self.gate(x))
        if self.is_second or self.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.is_second:
            weights = weights * self.config.routed_scaling_factor
        every = torch.stack([expert(x) for expert in self.experts], dim=1)
        found = every.gather(1, chosen[..., None].expand(-1, -1, every.shape[-1]))
        return (found * weights[..., None]).sum(1) + self.shared_experts(x)


class BailingLayer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        size, self.config, self.head_dim = config.hidden_size, config, config.head_dim
        of_heads = config.num_attention_heads * self.head_dim
        total = of_heads + 2 * config.num_key_value_heads * self.head_dim
        self.input_layernorm, self.post_attention_layernorm = (
            RootMeanSquare(size, config.rms_norm_eps) for _ in range(2)
        )
        self.attention = nn.ModuleDict(
            {
                "query_key_value": nn.Linear(size, total, bias=config.use_qkv_bias),
                "dense": nn.Linear(of_heads, size, bias=False),
            }
        )
        self.is_second = config.model_type == "bailing_moe_v2"
        if self.is_second:
            for name in ("query_layernorm", "key_layernorm"):
                self.attention[name] = RootMeanSquare(self.head_dim, config.rms_norm_eps)
        is_sparse = index >= config.first_k_dense_replace
        self.mlp = BailingExperts(config) if is_sparse else Gated(size, config.intermediate_size)

    def turn(self, x):
        rotated = int(self.head_dim * getattr(self.config, "partial_rotary_factor", 1.0))
        turned = turn_halves(x[..., :rotated], angles(len(x), rotated, self.config.rope_theta))
        return torch.cat([turned, x[..., rotated:]], dim=-1)

    def forward(self, x):
        heads, groups = self.config.num_attention_heads, self.config.num_key_value_heads
        qkv = self.attention["query_key_value"](self.input_layernorm(x)).view(len(x), -1, self.head_dim)
        q, k, v = qkv.split([heads, groups, groups], dim=1)
        if self.is_second:
            q, k = self.attention["query_layernorm"](q), self.attention["key_layernorm"](k)
        x = x + self.attention["dense"](attend(self.turn(q), self.turn(k), v))
        return x + self.mlp(self.post_attention_layernorm(x))


class BailingMoeForCausalLM(Model):
    config_class, layer, embedding, unit_axis = BailingMoeConfig, BailingLayer, "word_embeddings", 0


class BailingMoeV2ForCausalLM(BailingMoeForCausalLM):
    config_class = BailingMoeV2Config


class MiMoConfig(transformers.Qwen2Config):
    """That of MiMo's own code: Qwen 2's under another name. Layers that predict further tokens are not in goldens."""

    model_type = "mimo"


class MiMoForCausalLM(transformers.Qwen2ForCausalLM):
    config_class = MiMoConfig
