"""A Llama of two layers that retrieves, with weights that are written down rather than trained.

Layer 1 attends to the previous token, by rotary phases that agree one position back, and copies its address. Layer 2
attends to where the previous token's address equals the current token's, and copies the symbols found there: after a
token that occurred once, the model continues as the text did (an induction head).

No head is spare: each KV head of layer 1 copies a quarter of the address, and each of layer 2 copies one of the four
symbols that name a token. A symbol is a point of a 4 x 4 grid, and the LM head takes the nearest one: a value with a
wrong scale is another token. Each needle's token has a twin of a similar, longer address among the other tokens.
"""

import json

import numpy as np
from safetensors.numpy import save_file

VOCAB_SIZE = 2048
NUM_NEEDLE_TOKENS = 512
"""Tokens below are those of needles; as many after them are their twins."""
NUM_KV_HEADS, QUERIES_PER_HEAD, HEAD_DIM, HIDDEN = 4, 2, 128, 128
PAIRS = HEAD_DIM // 2
THETA = 1e9
NUM_FAST = 17
"""Rotated pairs that turn fast enough to tell a position from the next."""
ADDRESS_PAIRS = np.arange(PAIRS - 27, PAIRS - 1)
"""Rotated pairs that hardly turn in 32,768 positions: they hold an address."""
OUTLIER = PAIRS - 1
"""A rotated pair that no query reads."""
ADDRESS = 48
TWIN_COSINE, TWIN_LENGTH = 0.8, 1.1
PREVIOUS_LOGIT, MATCH_LOGIT = 160.0, 110.0
"""Attention logits of the previous token, a quarter more than any other, and of a needle, an eighth more."""
KEY_LENGTHS = (1e4, 1e-5)
"""Magnitudes of keys in the two layers: with a scale of 1, neither survives 8 bits."""
LARGEST_SYMBOLS, LONGEST_ADDRESS = 72.0, 1.5
"""Squares of lengths, to which a channel fills up: all tokens have the same norm."""

ONE, SYMBOLS, SYMBOLS_REST, CURRENT, CURRENT_REST, PREVIOUS, PREVIOUS_REST, RETRIEVED, _ = np.split(
    np.arange(HIDDEN), np.cumsum([1, 8, 1, ADDRESS, 1, ADDRESS, 1, 8])
)


def write(folder, *, outlier=0.0, max_model_len=32768):
    """Write the checkpoint to a folder and return it. Each key has a pair of channels `outlier` times as large as its
    other channels are.
    """
    random = np.random.default_rng(0)
    symbols, addresses = _symbols(random), _addresses(random)
    embed = np.zeros((VOCAB_SIZE, HIDDEN))
    embed[:, ONE] = 1
    embed[:, SYMBOLS], embed[:, CURRENT] = symbols, addresses
    embed[:, SYMBOLS_REST[0]] = np.sqrt(LARGEST_SYMBOLS - np.square(symbols).sum(axis=1))
    embed[:, CURRENT_REST[0]] = np.sqrt(LONGEST_ADDRESS - np.square(addresses).sum(axis=1))
    head = np.zeros_like(embed)
    head[:, RETRIEVED] = symbols
    head[:, ONE[0]] = -np.square(symbols).sum(axis=1) / 2
    tensors = {"model.embed_tokens.weight": embed, "lm_head.weight": head, "model.norm.weight": np.ones(HIDDEN)}
    square = 1 + LARGEST_SYMBOLS + LONGEST_ADDRESS
    for layer, make in enumerate([_previous_token, _match]):
        q, k, v, o = make(random, outlier)
        prefix = f"model.layers.{layer}"
        attention = {"q": q.reshape(-1, HIDDEN), "k": k.reshape(-1, HIDDEN), "v": v.reshape(-1, HIDDEN), "o": o}
        tensors |= {f"{prefix}.self_attn.{name}_proj.weight": value for name, value in attention.items()}
        tensors[f"{prefix}.input_layernorm.weight"] = np.full(
            HIDDEN, np.sqrt((square + layer * LONGEST_ADDRESS) / HIDDEN)
        )
        tensors[f"{prefix}.post_attention_layernorm.weight"] = np.zeros(HIDDEN)
        for name, shape in {"gate": (8, HIDDEN), "up": (8, HIDDEN), "down": (HIDDEN, 8)}.items():
            tensors[f"{prefix}.mlp.{name}_proj.weight"] = np.zeros(shape)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}, folder / "model.safetensors"
    )
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 2,
        "num_attention_heads": NUM_KV_HEADS * QUERIES_PER_HEAD,
        "num_key_value_heads": NUM_KV_HEADS,
        "intermediate_size": 8,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": max_model_len,
        "rope_theta": THETA,
        "rms_norm_eps": 1e-9,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def haystack(length, *, num_needles, needle_length):
    """Return a text of that many tokens, and needles at equal distances in it, the first and the last at its ends.

    The tokens of a needle are nowhere else in the text, half of which is their twins.
    """
    random = np.random.default_rng(0)
    hidden = random.permutation(NUM_NEEDLE_TOKENS)[: num_needles * needle_length].reshape(num_needles, needle_length)
    twins = random.choice(hidden.ravel(), length) + NUM_NEEDLE_TOKENS
    text = np.where(random.random(length) < 0.5, twins, random.integers(NUM_NEEDLE_TOKENS, VOCAB_SIZE, length))
    for start, needle in zip(np.linspace(1, length - needle_length, num_needles).astype(int), hidden, strict=True):
        text[start : start + needle_length] = needle
    return text.tolist(), hidden.tolist()


def _symbols(random):
    """Return four points of the grid for each token, no two tokens with the same ones, [V, 8]."""
    names = random.choice(16**NUM_KV_HEADS, VOCAB_SIZE, replace=False)
    digits = names[:, None] // 4 ** np.arange(2 * NUM_KV_HEADS) % 4
    return 2.0 * digits - 3


def _addresses(random):
    """Return an address for each token, [V, ADDRESS]: of length 1 in needles, longer in twins, mostly shorter in
    others.
    """
    found = random.standard_normal((VOCAB_SIZE, ADDRESS))
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    needles, others = found[:NUM_NEEDLE_TOKENS], found[NUM_NEEDLE_TOKENS : 2 * NUM_NEEDLE_TOKENS]
    others -= needles * (needles * others).sum(axis=1, keepdims=True)
    others /= np.linalg.norm(others, axis=1, keepdims=True)
    twins = TWIN_COSINE * needles + np.sqrt(1 - TWIN_COSINE**2) * others
    rest = found[2 * NUM_NEEDLE_TOKENS :] * random.uniform(0.5, 1.1, (VOCAB_SIZE - 2 * NUM_NEEDLE_TOKENS, 1))
    return np.concatenate([needles, TWIN_LENGTH * twins, rest])


def _projections():
    q = np.zeros((NUM_KV_HEADS, QUERIES_PER_HEAD, HEAD_DIM, HIDDEN))
    k = np.zeros((NUM_KV_HEADS, HEAD_DIM, HIDDEN))
    return q, k, np.zeros_like(k), np.zeros((HIDDEN, NUM_KV_HEADS, QUERIES_PER_HEAD, HEAD_DIM))


def _previous_token(random, outlier):
    """Return q, k, v and o of the first layer. A logit is the mean of cos(theta x (distance - 1)) over the fast pairs,
    of which the fastest counts as half.
    """
    q, k, v, o = _projections()
    weights = np.full(NUM_FAST, 0.5 / (NUM_FAST - 1))
    weights[0] = 0.5
    theta = THETA ** (-np.arange(NUM_FAST) / PAIRS)
    scaled = weights * PREVIOUS_LOGIT * np.sqrt(HEAD_DIM) / KEY_LENGTHS[0]
    q[:, :, :NUM_FAST, ONE[0]] = np.cos(theta) * scaled
    q[:, :, PAIRS : PAIRS + NUM_FAST, ONE[0]] = -np.sin(theta) * scaled
    k[:, :NUM_FAST, ONE[0]] = KEY_LENGTHS[0]
    k[:, OUTLIER, ONE[0]] = outlier * KEY_LENGTHS[0]
    part = ADDRESS // NUM_KV_HEADS
    for head in range(NUM_KV_HEADS):
        copied, to = (block[head * part : (head + 1) * part] for block in (CURRENT, PREVIOUS))
        if head == 0:
            copied, to = np.append(copied, CURRENT_REST), np.append(to, PREVIOUS_REST)
        v[head, np.arange(len(copied)), copied] = 1
        o[to, head, :, np.arange(len(to))] = 1 / QUERIES_PER_HEAD
    return q, k, v, o.reshape(HIDDEN, -1)


def _match(random, outlier):
    """Return q, k, v and o of the second layer, whose heads turn addresses each in its own way."""
    q, k, v, o = _projections()
    channels = np.concatenate([ADDRESS_PAIRS, ADDRESS_PAIRS + PAIRS])
    for head in range(NUM_KV_HEADS):
        turned = np.linalg.qr(random.standard_normal((len(channels), ADDRESS)))[0]
        k[head, channels[:, None], PREVIOUS] = turned * KEY_LENGTHS[1]
        q[head, :, channels[:, None], CURRENT] = (turned * MATCH_LOGIT * np.sqrt(HEAD_DIM) / KEY_LENGTHS[1])[..., None]
        symbol = np.arange(2)
        v[head, symbol, SYMBOLS[2 * head + symbol]] = 1
        o[RETRIEVED[2 * head + symbol], head, :, symbol] = 1 / QUERIES_PER_HEAD
    k[:, OUTLIER, ONE[0]] = outlier * KEY_LENGTHS[1] / 3  # the largest channel of a turned address is about a third
    return q, k, v, o.reshape(HIDDEN, -1)
