"""Train an EAGLE-3 head for scribe-15m (Li et al. 2025, arXiv:2503.01840) on text that scribe-15m writes; export it.

The head learns scribe-15m's whole distribution over `--unroll` passes, each on the features that the pass before made,
as it will draft. Its matrices are rounded to 4 bits in training already, and stored so (compressed-tensors); embedding
and LM head are those of scribe-15m.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from model import (
    CONFIGS,
    LAYER_NAMES,
    Config,
    Params,
    cast,
    load_model,
    mlp,
    of_layer,
    qkv,
    rms_norm,
    rotation,
    streams,
)
from safetensors.numpy import save_file
from train import schedule, soft_cross_entropy

TARGET = CONFIGS["scribe-15m"]
SIZES = {
    "small": replace(TARGET, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, intermediate_size=64),
    "layer": replace(TARGET, num_hidden_layers=1),
}
TAPS = (1, 4, 7)
"""Layers whose inputs the head reads."""
GROUP = 64
"""Inputs that share a scale."""
BEGIN, USER = 0, 3
NAMES = {kind: f"layers.0.{name}" for kind, name in LAYER_NAMES.items()} | {
    "attention_norm": "layers.0.input_layernorm", "feature_norm": "layers.0.hidden_norm", "norm": "norm", "fc": "fc"
}  # fmt: skip
ADAM = optax.chain(
    optax.clip_by_global_norm(1.0), optax.scale_by_adam(b1=0.9, b2=0.95), optax.add_decayed_weights(0.01)
)


@partial(jax.jit, static_argnums=(0, 2))
def write(
    cfg: Config, params: Params, length: int, first: jax.Array, since: jax.Array, heat: jax.Array, key: jax.Array
):
    """Return rows [B, length] of text: `<|begin|>`, then `first` [B] unless negative. Tokens are drawn at temperature
    1, and from position `since` [B] on at `heat` [B], where 0 takes the most likely.
    """
    params, (cos, sin), B = cast(params, jnp.bfloat16), rotation(cfg.head_dim, length), len(first)
    G = cfg.num_attention_heads // cfg.num_key_value_heads

    def step(state, t):
        token, keys, values = state
        x = params["embed"][token][:, None]
        for layer in range(cfg.num_hidden_layers):
            p = of_layer(params, layer)
            q, k, v = qkv(cfg, p, rms_norm(x, p["attention_norm"]), cos[t][None], sin[t][None])
            keys, values = keys.at[layer, :, t].set(k[:, 0]), values.at[layer, :, t].set(v[:, 0])
            q = q.reshape(B, -1, G, cfg.head_dim) * cfg.head_dim**-0.5
            scores = jnp.einsum("bkgd,btkd->bkgt", q, keys[layer]).astype(jnp.float32)
            shares = jax.nn.softmax(jnp.where(jnp.arange(length) <= t, scores, -jnp.inf)).astype(x.dtype)
            x = x + jnp.einsum("bkgt,btkd->bkgd", shares, values[layer]).reshape(B, 1, -1) @ p["o"]
            x = x + mlp(p, x)
        logits = (rms_norm(x[:, 0], params["final_norm"]) @ params["embed"].T).astype(jnp.float32)
        noise = jax.random.gumbel(jax.random.fold_in(key, t), logits.shape)
        drawn = jnp.argmax(logits + jnp.where(t < since, 1.0, heat)[:, None] * noise, axis=-1).astype(jnp.int32)
        return (jnp.where((t == 0) & (first >= 0), first, drawn), keys, values), token

    cache = jnp.zeros((cfg.num_hidden_layers, B, length, cfg.num_key_value_heads, cfg.head_dim), jnp.bfloat16)
    _, rows = jax.lax.scan(step, (jnp.full(B, BEGIN, jnp.int32), cache, cache), jnp.arange(length))
    return rows.T


def texts(params: Params, num_rows: int, length: int, key: jax.Array) -> jax.Array:
    """Return rows of the model's own text: three in four as of a book, the others chats; their second part is at a
    temperature of 0, 0.7 or 1.
    """
    where, heats, kinds, noise = jax.random.split(key, 4)
    since = jax.random.randint(where, num_rows, 16, length // 2)
    heat = jax.random.choice(heats, jnp.array([0.0, 0.7, 1.0]), (num_rows,))
    first = jnp.where(jax.random.uniform(kinds, num_rows) < 0.25, USER, -1)
    return write(TARGET, params, length, first, since, heat, noise)


def init(cfg: Config, target: Params, key: jax.Array) -> Params:
    """Return initial weights: the feature is the last of the three taps, and the last norm is the target's."""
    D, F, q, kv = (
        cfg.hidden_size,
        cfg.intermediate_size,
        *(n * cfg.head_dim for n in (cfg.num_attention_heads, cfg.num_key_value_heads)),
    )
    shapes = {"fc": (3 * D, D), "q": (2 * D, q), "k": (2 * D, kv), "v": (2 * D, kv), "gate": (D, F), "up": (D, F)}
    shapes |= {"o": (q, D), "down": (F, D)}
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    params = {kind: 0.02 * jax.random.normal(keys[kind], shape) for kind, shape in shapes.items()}
    params["fc"] = params["fc"].at[2 * D :].add(jnp.eye(D))
    norms = {kind: jnp.ones(D) for kind in ("attention_norm", "feature_norm", "mlp_norm")}
    return params | norms | {"norm": jnp.array(target["final_norm"])}


def codes(w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return 4-bit integers [in / GROUP, GROUP, out] of a matrix [in, out], and their bf16 scales."""
    groups = w.reshape(-1, GROUP, w.shape[1])
    scales = (jnp.abs(groups).max(axis=1, keepdims=True) / 7 + 1e-8).astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.clip(jnp.round(groups / scales), -8, 7), scales


def rounded(params: Params, is_quantized: bool) -> Params:
    """Return the weights as they will be loaded; gradients pass as if nothing was rounded."""
    if not is_quantized:
        return params
    near = {kind: jnp.multiply(*codes(w)).reshape(w.shape) if w.ndim == 2 else w for kind, w in params.items()}
    return jax.tree.map(lambda w, r: w + jax.lax.stop_gradient(r - w), params, near)


def passes(cfg: Config, p: Params, target: Params, rows: jax.Array, unroll: int, dtype=jnp.bfloat16) -> Iterator[tuple]:
    """Yield, for each pass over rows [B, T], logits [B, T - 1, V] for the second next token of each position, the
    target's logits for it, and which positions count.
    """
    found = streams(TARGET, target, rows, dtype)
    wanted = rms_norm(found[-1], target["final_norm"])[:, 1:] @ target["embed"].astype(dtype).T
    p, table, N = cast(p, dtype), target["embed"].astype(dtype), rows.shape[1] - 1
    token = rms_norm(table[rows[:, 1:]], p["attention_norm"])
    feature = (jnp.concatenate([found[tap] for tap in TAPS], axis=-1) @ p["fc"])[:, :-1]
    cos, sin = rotation(cfg.head_dim, N)
    place, groups = jnp.arange(N), cfg.num_attention_heads // cfg.num_key_value_heads
    repeat = partial(jnp.repeat, repeats=groups, axis=2)

    @jax.checkpoint
    def layer(x: jax.Array, own: list) -> tuple[jax.Array, list]:
        count = len(own)  # passes before
        h = jnp.concatenate([token, rms_norm(x, p["feature_norm"])], axis=-1)
        q, k, v = qkv(cfg, p, h, cos, sin)
        own = [*own, (repeat(k), repeat(v))]
        # A position sees the first pass up to where its chain began, then each pass of its chain at one position.
        scores = [jnp.where(place[:, None] - count >= place, jnp.einsum("bqhd,bkhd->bhqk", q, own[0][0]), -1e30)]
        chain = [[jnp.roll(part, count - 1 - i, axis=1) for part in pair] for i, pair in enumerate(own[1:])]
        scores += [jnp.einsum("bqhd,bqhd->bhq", q, k)[..., None] for k, _ in chain]
        scores = jnp.concatenate(scores, axis=-1).astype(jnp.float32) * cfg.head_dim**-0.5
        shares = jax.nn.softmax(scores).astype(dtype)
        update = jnp.einsum("bhqk,bkhd->bqhd", shares[..., :N], own[0][1])
        for i, (_, v) in enumerate(chain):
            update += shares[..., N + i].swapaxes(1, 2)[..., None] * v
        x = x + update.reshape(*x.shape[:2], -1) @ p["o"]
        return x + mlp(p, x), own

    own = []
    for count in range(unroll):
        hidden, own = layer(feature, own)
        yield rms_norm(hidden, p["norm"]) @ table.T, wanted, place >= count
        feature = jnp.roll(hidden, 1, axis=1)


def loss(p: Params, cfg: Config, data: tuple, unroll: int, is_quantized: bool) -> tuple[jax.Array, jax.Array]:
    """Return the cross entropy against the target in nats, earlier passes weighing more, and the share of positions in
    which the most likely tokens agree, for each pass. `data` is the target's weights and rows.
    """
    losses, right = [], []
    for logits, wanted, counts in passes(cfg, rounded(p, is_quantized), *data, unroll):
        nats = jax.checkpoint(soft_cross_entropy)(logits, jax.lax.stop_gradient(wanted))
        losses.append(jnp.mean(nats, where=counts))
        right.append(jnp.mean(logits.argmax(-1) == wanted.argmax(-1), where=counts))
    weights = 0.8 ** jnp.arange(unroll)
    return (weights * jnp.stack(losses)).sum() / weights.sum(), jnp.stack(right)


evaluate = jax.jit(loss, static_argnums=(1, 3, 4))


@partial(jax.jit, static_argnums=(2, 4, 5), donate_argnums=(0, 1))
def train_step(
    p: Params, state: optax.OptState, cfg: Config, data: tuple, unroll: int, is_quantized: bool, rate: jax.Array
) -> tuple:
    """Return the weights and the optimizer's state after one step, and its loss."""
    (nats, _), grads = jax.value_and_grad(loss, has_aux=True)(p, cfg, data, unroll, is_quantized)
    updates, state = ADAM.update(grads, state, p)
    return jax.tree.map(lambda w, u: w - rate * u, p, updates), state, nats


def export(cfg: Config, p: Params, out: Path, is_quantized: bool, num_drafts: int) -> None:
    """Write config.json and model.safetensors in the format of vLLM's `speculators`."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for kind, w in p.items():
        name = NAMES[kind]
        if w.ndim == 1 or not is_quantized:
            tensors[f"{name}.weight"] = np.asarray(w.astype(jnp.bfloat16)).T
            continue
        integers, scales = (np.asarray(part) for part in codes(w))
        nibbles = (integers.reshape(w.shape).T + 8).astype(np.uint32)
        words = (nibbles.reshape(len(nibbles), -1, 8) << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)
        tensors[f"{name}.weight_packed"] = words.view(np.int32)
        tensors[f"{name}.weight_scale"] = np.asarray(jnp.asarray(scales[:, 0].T, jnp.bfloat16))
        tensors[f"{name}.weight_shape"] = np.array(w.shape[::-1], np.int64)
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}  # bytes are written as they lie
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_drafts}
    fields = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
        },
        "transformer_layer_config": cfg.hugging_face() | {"tie_word_embeddings": False},
        "draft_vocab_size": cfg.vocab_size,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
        "torch_dtype": "bfloat16",
    }
    if is_quantized:
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
        fields["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        }
    (out / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def main() -> None:
    """Write texts, train on them until the time is up, and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--bits", type=int, choices=(4, 16), default=4)
    parser.add_argument("--minutes", type=float, default=3, help="stop by the clock; compilation counts")
    parser.add_argument(
        "--texts", type=int, default=16, help="batches of texts to learn from, unless they take 30% of the time"
    )
    parser.add_argument("--text-rows", type=int, default=1024, help="rows of each")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=32, help="rows of a step")
    parser.add_argument("--unroll", type=int, default=4, help="drafts in a row")
    parser.add_argument("--num-drafts", type=int, default=3, help="drafts that its config.json recommends")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started, seconds = time.monotonic(), 60 * args.minutes
    elapsed = lambda: time.monotonic() - started  # noqa: E731
    target = load_model(TARGET, args.checkpoints / "scribe-15m" / "model.safetensors")
    cfg, is_quantized = SIZES[args.size], args.bits == 4
    first, other, *keys = jax.random.split(jax.random.key(args.seed), args.texts + 2)
    heldout, written = texts(target, args.text_rows, args.length, other)[:16], []
    for key in keys:
        written.append(np.asarray(texts(target, args.text_rows, args.length, key), np.uint16))
        if elapsed() > 0.3 * seconds:
            break
    written = np.concatenate(written)
    print(f"{written.size} tokens written in {elapsed():.0f} s", flush=True)

    p = init(cfg, target, first)
    state, rng, step, progress = ADAM.init(p), np.random.default_rng(args.seed), 0, 0.0
    while progress < 1:
        rows = written[rng.choice(len(written), args.rows, replace=False)].astype(np.int32)
        rate = jnp.float32(args.rate * schedule(step, progress, 0.7))
        p, state, nats = train_step(p, state, cfg, (target, rows), args.unroll, is_quantized, rate)
        if step % 100 == 0:
            print(f"{step} steps, {elapsed():.0f} s: {nats:.4f} nats", flush=True)
        step += 1
        if step % 20 == 0:
            jax.block_until_ready(nats)
        progress = elapsed() / seconds
    export(cfg, p, args.out, is_quantized, args.num_drafts)
    nats, right = evaluate(p, cfg, (target, heldout), args.unroll, is_quantized)
    size = (args.out / "model.safetensors").stat().st_size
    print(f"{step} steps, {size} bytes; other texts: {nats:.4f} nats, drafts right by pass: {np.round(right, 3)}")


if __name__ == "__main__":
    main()
