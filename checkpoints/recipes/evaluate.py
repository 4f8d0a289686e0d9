"""Measure the finished models on a text file: bits per byte next to `xz -9`, and how many drafted tokens are accepted.

The text is cut into runs of 1023 tokens, each scored after `<|begin|>` alone, in float32. A draft round is k greedy
tokens of the small model; the large one accepts the prefix that equals its own greedy choice and adds one token.
"""

import argparse
import json
import lzma
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from model import CONFIGS, Config, Params, forward, load_model
from tokenizers import Tokenizer
from train import cross_entropy

Model = tuple[Config, Params]


@partial(jax.jit, static_argnums=0)
def nats(cfg: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Nats of tokens[:, 1:], each given what precedes it in its row."""
    logits = forward(cfg, params, tokens, dtype=jnp.float32)
    return cross_entropy(logits[:, :-1], tokens[:, 1:])


@partial(jax.jit, static_argnums=0)
def greedy(cfg: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Return the most likely next token after every position: [B, T]."""
    return forward(cfg, params, tokens, dtype=jnp.float32).argmax(-1)


def bits_per_byte(model: Model, tokenizer: Tokenizer, text: str) -> float:
    """Bits of the tokens of `text` over its UTF-8 bytes."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    total = 0.0
    for start in range(0, len(ids), 1023):
        row = [0, *ids[start : start + 1023]]
        padded = np.array([row + [0] * (1024 - len(row))], np.int32)
        total += float(np.asarray(nats(*model, padded))[0, : len(row) - 1].sum())
    return total / np.log(2) / len(text.encode())


def acceptance(target: Model, draft: Model, tokenizer: Tokenizer, text: str, k: int, num_prompts: int) -> dict:
    """Greedy speculative decoding of 64 tokens after each of `num_prompts` prompts of 63 tokens from `text`.

    An accepted draft equals the target's own greedy text, so every round sees a prefix of that text: it is enough to
    know at which of its positions the small model would have guessed the next token.
    """
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    starts = np.linspace(0, len(ids) - 63, num_prompts).astype(int)
    rows = np.zeros((num_prompts, 128), np.int32)
    rows[:, 1:64] = [ids[start : start + 63] for start in starts]
    for at in range(64, 128):
        rows[:, at] = np.asarray(greedy(*target, rows))[:, at - 1]
    guessed = np.asarray(greedy(*draft, rows))[:, 63:127] == rows[:, 64:]
    num_rounds, num_accepted = 0, 0
    for hits in guessed:
        at = 0
        while at + k < len(hits):
            accepted = int(np.cumprod(hits[at : at + k]).sum())
            at += accepted + 1
            num_rounds += 1
            num_accepted += accepted
    return {
        "k": k,
        "rounds": num_rounds,
        "guessed_share": round(float(guessed.mean()), 4),
        "accepted_share_of_drafted": round(num_accepted / (k * num_rounds), 4),
        "tokens_per_round": round(1 + num_accepted / num_rounds, 3),
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--text", type=Path, default=Path(__file__).parent / "heldout.txt")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(args.checkpoints / "scribe-15m" / "tokenizer.json"))
    models = {
        name: (CONFIGS[name], load_model(CONFIGS[name], args.checkpoints / name / "model.safetensors"))
        for name in ("scribe-15m", "scribe-2m")
    }
    size = len(text.encode())
    figures: dict = {"text_bytes": size, "xz_9": round(8 * len(lzma.compress(text.encode(), preset=9)) / size, 4)}
    for name, model in models.items():
        figures[name] = round(bits_per_byte(model, tokenizer, text), 4)
    target, draft = models["scribe-15m"], models["scribe-2m"]
    figures["acceptance"] = acceptance(target, draft, tokenizer, text, args.k, args.prompts)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
