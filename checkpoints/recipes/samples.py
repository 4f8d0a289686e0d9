"""Print what a model says to twenty fixed prompts, ten stories and ten chats, as markdown: each once, unselected."""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from model import CONFIGS, Config, Params, forward, load_model
from tokenizers import Tokenizer

STORIES = (
    "Once upon a time there was a little fox who",
    "The old lighthouse keeper lit his lamp and",
    "It was a dark and stormy night, and the ship",
    "In a small village at the foot of the mountain there lived a miller",
    '"Who is there?" cried the king,',
    "The dragon had slept for a hundred years when",
    "The detective looked at the letter for a long time. At last",
    "When the snow began to fall, the children",
    "Far out at sea, where the water is as blue as",
    "The princess opened the door and saw",
)
CHATS = (
    "Hello! How are you?",
    "Who are you?",
    "Tell me a story about a fox.",
    "Please tell me a story about a princess.",
    "Do you like football?",
    "Can I get a latte, please?",
    "What can you do?",
    "Do you know any good movies?",
    "Continue this story: The little boat drifted away from the shore.",
    "Thank you very much!",
)


@partial(jax.jit, static_argnums=0)
def sample(cfg: Config, params: Params, tokens: jax.Array, at: jax.Array, temperature: jax.Array, key: jax.Array):
    """Sample a next token for each row of tokens [B, T] after position `at` [B]."""
    logits = forward(cfg, params, tokens, dtype=jnp.float32)[jnp.arange(len(tokens)), at]
    return jax.random.categorical(key, logits / temperature)


def generate(
    cfg: Config, params: Params, prompts: list[list[int]], num_tokens: int, temperature: float, seed: int
) -> list[list[int]]:
    """Continuations of each prompt, up to `num_tokens` or an end token."""
    lengths = np.array([len(prompt) for prompt in prompts])
    rows = np.zeros((len(prompts), int(lengths.max()) + num_tokens), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    each, start = np.arange(len(prompts)), lengths.copy()
    for step in range(num_tokens):
        key = jax.random.key(seed + step)
        rows[each, lengths] = np.asarray(sample(cfg, params, rows, lengths - 1, jnp.float32(temperature), key))
        lengths += 1
    outputs = []
    for row, at in zip(rows, start, strict=True):
        said = row[at : at + num_tokens].tolist()
        stops = [i for i, token in enumerate(said) if token in (1, 5)]
        outputs.append(said[: stops[0]] if stops else said)
    return outputs


def main() -> None:
    """Print the samples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=CONFIGS, default="scribe-15m")
    parser.add_argument("--checkpoints", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=120)
    args = parser.parse_args()
    folder, cfg = args.checkpoints / args.model, CONFIGS[args.model]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    params = load_model(cfg, folder / "model.safetensors")
    texts = [*STORIES, *(f"<|user|>{chat}<|end|><|assistant|>" for chat in CHATS)]
    prompts = [tokenizer.encode(text).ids for text in texts]
    outputs = generate(cfg, params, prompts, args.tokens, args.temperature, args.seed)
    for prompt, output in zip([*STORIES, *CHATS], outputs, strict=True):
        said = tokenizer.decode(output).strip()
        print(f"**{prompt}**\n\n" + "\n".join(f"> {line}".rstrip() for line in said.split("\n")) + "\n")


if __name__ == "__main__":
    main()
