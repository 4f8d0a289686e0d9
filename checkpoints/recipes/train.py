"""Train one model: `--stage base` on books, `--stage chat` from a base model, or a small model taught by a larger one.

Muon for the matrices, AdamW for embedding and norms, both from optax parts; bf16 compute over float32 weights. The rate
warms up, stays, and falls linearly to zero, over `--steps` or over `--seconds` by the clock. A run of the same seed and
number of steps reads the same rows.
"""

import argparse
import csv
import itertools
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import Corpus, batches, heldout_rows, pack_chats
from model import CONFIGS, Config, Params, forward, init_params, load_model, num_params, save_model

STEPS_PER_CALL = 8
WARMUP_STEPS = 100
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


def orthogonalize(update: jax.Array) -> jax.Array:
    """Nearest semi-orthogonal matrices of [L, M, N] by five quintic Newton-Schulz steps (Jordan et al., Muon, 2024)."""
    x = update.astype(jnp.bfloat16)
    transposed = x.shape[-2] > x.shape[-1]
    if transposed:
        x = jnp.swapaxes(x, -1, -2)
    x /= jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True).astype(x.dtype) + 1e-7
    for _ in range(5):
        gram = x @ jnp.swapaxes(x, -1, -2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (jnp.swapaxes(x, -1, -2) if transposed else x).astype(jnp.float32)


def scale_by_muon(momentum: float = 0.95) -> optax.GradientTransformation:
    """Orthogonalized Nesterov momentum, scaled to the update size of Adam (Liu et al., Muon is Scalable, 2025)."""

    def update(grads: Params, state: Params, params: Params | None = None) -> tuple[Params, Params]:
        del params
        state = jax.tree.map(lambda m, g: momentum * m + g, state, grads)
        ahead = jax.tree.map(lambda m, g: momentum * m + g, state, grads)
        return jax.tree.map(lambda u: 0.2 * max(u.shape[-2:]) ** 0.5 * orthogonalize(u), ahead), state

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def make_optimizer(weight_decay: float) -> optax.GradientTransformation:
    """Descent directions for a learning rate of one; `train_step` multiplies by the rate of the moment."""
    matrices = {"muon": optax.chain(scale_by_muon(), optax.add_decayed_weights(weight_decay))}
    others = {"adam": optax.scale_by_adam(b1=0.9, b2=0.95)}
    label = lambda params: {kind: "muon" if kind in MATRICES else "adam" for kind in params}  # noqa: E731
    return optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(matrices | others, label))


class State(NamedTuple):
    """Everything a step changes."""

    params: Params
    optimizer: optax.OptState


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Nats per position. The target's logit is picked by comparison: its gradient fuses where a gather's scatters."""
    wide = logits.astype(jnp.float32)
    picked = jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], wide, 0).sum(-1)
    return jax.nn.logsumexp(wide, axis=-1) - picked


def soft_cross_entropy(logits: jax.Array, teacher: jax.Array) -> jax.Array:
    """Cross entropy in nats per position against the teacher's whole distribution."""
    probabilities = jax.nn.softmax(teacher.astype(jnp.float32), axis=-1)
    return jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1) - (probabilities * logits).sum(-1)


def make_train_steps(
    cfg: Config, optimizer: optax.GradientTransformation, attention: str, teacher: Config | None = None
) -> Callable:
    """Jitted (state, teacher weights, rows [K, B, 1025], rates [K, 2]) -> (state, losses [K]): K steps a call."""

    def loss_fn(params: Params, teacher_params: Params, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs, targets = rows[:, :-1].astype(jnp.int32), rows[:, 1:].astype(jnp.int32)
        logits = forward(cfg, params, inputs, attention=attention)
        hard = cross_entropy(logits, targets).mean()
        if teacher is None:
            return hard, hard
        taught = jax.lax.stop_gradient(forward(teacher, teacher_params, inputs, attention=attention))
        return 0.3 * hard + 0.7 * soft_cross_entropy(logits, taught).mean(), hard

    @partial(jax.jit, donate_argnums=0)
    def train_steps(state: State, teacher_params: Params, rows: jax.Array, rates: jax.Array) -> tuple[State, jax.Array]:
        def step(state: State, xs: tuple[jax.Array, jax.Array]) -> tuple[State, jax.Array]:
            rows, rate = xs
            (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, teacher_params, rows)
            updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
            params = {
                kind: w - (rate[0] if kind in MATRICES else rate[1]) * updates[kind] for kind, w in state.params.items()
            }
            return State(params, optimizer_state), loss

        return jax.lax.scan(step, state, (rows, rates))

    return train_steps


def make_evaluate(cfg: Config, attention: str, token_bytes: np.ndarray) -> Callable:
    """(weights, rows [N, 1025]) -> (bits per byte of text tokens, nats per token)."""

    @jax.jit
    def sums(params: Params, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        targets = rows[:, 1:].astype(jnp.int32)
        nats = cross_entropy(forward(cfg, params, rows[:, :-1].astype(jnp.int32), attention=attention), targets)
        sizes = jnp.asarray(token_bytes)[targets]
        return jnp.stack([jnp.where(sizes > 0, nats, 0).sum(), sizes.sum()]), nats.mean()

    def evaluate(params: Params, rows: np.ndarray) -> tuple[float, float]:
        size = min(32, len(rows))
        parts = [sums(params, rows[i : i + size]) for i in range(0, len(rows) // size * size, size)]
        nats, num_bytes = np.sum([np.asarray(a, np.float64) for a, _ in parts], axis=0)
        return float(nats / num_bytes / np.log(2)), float(np.mean([float(b) for _, b in parts]))

    return evaluate


def schedule(step: int, progress: float, decay: float) -> float:
    """Return the learning rate as a fraction of its peak: it rises over the warm-up, is constant, and falls linearly to
    zero over the last `decay` of the run.
    """
    return min(1.0, (step + 1) / WARMUP_STEPS, (1 - progress) / decay)


def stacked(source: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Batches for one call of `train_steps`: [K, B, 1025]."""
    while True:
        yield np.stack(list(itertools.islice(source, STEPS_PER_CALL)))


def parse_weights(text: str) -> dict[str, int]:
    """`tales=2,prose=1` -> {"tales": 2, "prose": 1}: how often an epoch reads each group of books."""
    return {name: int(weight) for name, weight in (item.split("=") for item in text.split(","))}


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=CONFIGS, required=True)
    parser.add_argument("--data", type=Path, required=True, help="what pack.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for model.safetensors and curve.csv")
    parser.add_argument("--init", type=Path, help="start from this model.safetensors")
    parser.add_argument("--teacher", type=Path, help="a scribe-15m model.safetensors to learn from")
    parser.add_argument("--stage", choices=("base", "chat"), default="base", help="a label in the curve")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--seconds", type=float, help="stop by the clock; compilation counts")
    budget.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--report-every", type=float, default=15, help="seconds between lines of the curve and saves")
    parser.add_argument("--rows", type=int, default=128, help="rows of 1024 tokens a step")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak rate of Muon")
    parser.add_argument("--adam-rate", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--decay", type=float, default=0.5, help="share of the steps in which the rate falls")
    parser.add_argument("--books", type=parse_weights, default="tales=2,plain=1,prose=1", help="books of an epoch")
    parser.add_argument("--chat-share", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attention", choices=("cudnn", "xla"), default="cudnn")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    corpus = Corpus.load(args.data)
    cfg, teacher_cfg = CONFIGS[args.model], CONFIGS["scribe-15m"] if args.teacher else None
    params = load_model(cfg, args.init) if args.init else init_params(cfg, jax.random.key(args.seed))
    teacher_params = load_model(teacher_cfg, args.teacher) if teacher_cfg else {}
    optimizer = make_optimizer(args.weight_decay)
    state = State(params, jax.jit(optimizer.init)(params))
    train_steps = make_train_steps(cfg, optimizer, args.attention, teacher_cfg)
    evaluate = make_evaluate(cfg, args.attention, corpus.token_bytes)
    probe_rows = heldout_rows(corpus, 256)
    chat_rows = np.stack(list(pack_chats(corpus.chats["chats_heldout"], np.random.default_rng(0))))
    source = stacked(batches(corpus, args.rows, args.books, args.chat_share, args.seed))
    print(f"{args.model}: {num_params(params)} parameters on {jax.devices()[0].device_kind}", flush=True)

    started = last_report = time.monotonic()
    step, progress, previous = 0, 0.0, None
    with open(args.out / "curve.csv", "w", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(["stage", "step", "tokens", "seconds", "rate", "train_nats", "heldout_bpb", "chat_nats"])
        while progress < 1:
            share = schedule(step, progress, args.decay)
            rates = np.tile(np.float32([share * args.rate, share * args.adam_rate]), (STEPS_PER_CALL, 1))
            state, losses = train_steps(state, teacher_params, next(source), rates)
            step += STEPS_PER_CALL
            if previous is not None:
                previous.block_until_ready()  # one call runs while the next is prepared
            previous, now = losses, time.monotonic()
            progress = step / args.steps if args.steps else (now - started) / args.seconds
            if now - last_report > args.report_every or progress >= 1:
                bpb, _ = evaluate(state.params, probe_rows)
                _, chat_nats = evaluate(state.params, chat_rows)
                row = [args.stage, step, step * args.rows * 1024, round(now - started, 1), f"{rates[-1, 0]:.3g}"]
                row += [f"{float(jnp.mean(losses)):.4f}", f"{bpb:.4f}", f"{chat_nats:.4f}"]
                writer.writerow(row)
                f.flush()
                print(*row, flush=True)
                save_model(cfg, state.params, args.out / "model.safetensors")
                last_report = time.monotonic()

    rounded = load_model(cfg, args.out / "model.safetensors")
    summary = {
        "model": args.model,
        "stage": args.stage,
        "steps": step,
        "tokens": step * args.rows * 1024,
        "seconds": round(time.monotonic() - started, 1),
        "heldout_bits_per_byte": round(evaluate(rounded, heldout_rows(corpus))[0], 4),
        "heldout_chat_nats_per_token": round(evaluate(rounded, chat_rows)[1], 4),
    }
    print(json.dumps(summary), flush=True)
    (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
