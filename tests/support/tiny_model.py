"""A random Llama of one layer with a tokenizer of bytes and of pieces that cross JSON's punctuation."""

import json
import pathlib
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.tokenizer import Tokenizer

# Pairs that are merged in this order: tokens that span the ends of strings, keys and brackets.
MERGES = [
    *(
        ("{", '"'),
        ('"', ":"),
        ('"', ","),
        ('"', "}"),
        ("]", "}"),
        ("}", "}"),
        ("[", "{"),
        ("[", "]"),
        ("{", "}"),
        ('",', "Ġ"),
    ),
    *(
        ("t", "r"),
        ("u", "e"),
        ("tr", "ue"),
        ("f", "a"),
        ("l", "s"),
        ("fa", "ls"),
        ("fals", "e"),
        ("n", "u"),
        ("nu", "ll"),
    ),
    *(
        ("l", "l"),
        ("1", "2"),
        ("0", "0"),
        ("a", "l"),
        ("p", "h"),
        ("al", "ph"),
        ("alph", "a"),
        ("\\", '"'),
        ("\\", "n"),
    ),
    *(('":', "Ġ"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("Ċ", "ĠĠ"), ("Ã", "©"), ("}", ",")),
]
MERGES.sort(key=lambda pair: pair == ("nu", "ll"))  # after ("l", "l")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}"
)


def write(
    folder: pathlib.Path, *, chat_template: str | None = None, special_tokens: Sequence[str] = ()
) -> pathlib.Path:
    """Write a model directory; start it with load_format="dummy"."""
    merges = sorted(MERGES, key=lambda pair: len("".join(pair)))
    pieces = list(dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|eot|>", *special_tokens])
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|eot|>")]})
    )
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "vocab_size": tokenizer.get_vocab_size() + 7,  # models have more logits than their tokenizers tokens
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def ascii_tokenizer(*, has_eos: bool = True) -> Tokenizer:
    """Return a tokenizer with one token for each of the 95 printable ASCII characters and the line feed, then EOS: for
    models of 100 tokens.
    """
    stand_in = {" ": "Ġ", "\n": "Ċ"}
    characters = [*map(chr, range(0x20, 0x7F)), "\n"]
    vocabulary = {stand_in.get(character, character): i for i, character in enumerate(characters)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return Tokenizer(tokenizer, special_tokens={"eos_token": "</s>"} if has_eos else {})
