"""The names of a decoder's modules in a checkpoint, and how their tensors are arranged; Llama's by default."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """The names of the modules of a block with experts, relative to the block.

    Attributes:
        of_shared: gate, up and down of the shared expert; None if they are called as those of others.
        fused: tensors that hold all experts, of gate before up and of down; None if each expert has its own.
    """

    router: str = "gate"
    experts: str = "experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    selection_bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_expert"
    of_shared: tuple[str, str, str] | None = None
    shared_gate: str = "shared_expert_gate"
    latents: tuple[str, str] = ("fc1_latent_proj", "fc2_latent_proj")
    fused: tuple[str, str] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNames:
    """The names of the modules of a block with the gated delta rule, relative to the block.

    Attributes:
        qkvz: one tensor with the rows of query, key, values and gates of each key head; two, of which the first has
            query, key and values of all heads; or four.
        rates: one tensor with the strengths and decays of each key head, or two.
        convolution: one tensor, or one each of query, key and values.
    """

    qkvz: tuple[str, ...] = ("in_proj_qkvz",)
    rates: tuple[str, ...] = ("in_proj_ba",)
    convolution: tuple[str, ...] = ("conv1d",)
    norm: str = "norm"
    out: str = "out_proj"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """The names of a decoder's modules.

    Attributes:
        layers: the list of layers; the names of norms, `attention` and `mlp` are relative to a layer. An empty `mlp`
            means that a layer holds the matrices of its feed-forward itself.
        qkv: three tensors, or one that has the rows of q, k and v. Relative to `attention`, as `out`, `q_norm` and
            `k_norm`, `gate` and `sinks` are.
        gate: the projection to gates of the attention's output; empty if q has each head's rows of it behind the
            head's own.
        is_by_kv_head: the one tensor of `qkv` has for each KV head its queries, its key and its value.
        is_interleaved: heads rotate the pairs of dimensions (2i, 2i + 1) instead of the two halves of a head.
        gate_up: two tensors, or one of both; relative to `mlp`, as `up`, `down` and those of `experts` are.
    """

    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    lm_head: str = "lm_head"

    attention_norm: str = "input_layernorm"
    attention_post_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"

    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    gate: str = ""
    sinks: str = "sinks"
    is_by_kv_head: bool = False
    is_interleaved: bool = False
    delta_net: DeltaNames = DeltaNames()

    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    up: str = "up_proj"
    down: str = "down_proj"
    activation: str = "act_fn"
    experts: ExpertNames = ExpertNames()


LLAMA_NAMES = Names()
SANDWICH_NAMES = Names(mlp_norm="pre_feedforward_layernorm")
"""The names of models with norms before and after each block, as Gemma 2."""
