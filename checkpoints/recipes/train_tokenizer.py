"""Train the byte-level BPE tokenizer of both models and write it in Hugging Face layout.

The text is split as Llama 3 splits it, so that a run of newlines is one piece and the merges never cross words. Every
encoded text starts with `<|begin|>`; a turn of a chat is `<|user|>...<|end|>`.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN, END_OF_TEXT, SYSTEM, USER, ASSISTANT, END_OF_TURN = SPECIAL_TOKENS = (
    "<|begin|>",
    "<|endoftext|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role must be system, user or assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def training_text(data: Path) -> Iterator[str]:
    """Text of the training books and chats, held-out ones left out."""
    with open(data / "books.jsonl", encoding="utf-8") as f:
        for row in map(json.loads, f):
            if row["group"] != "heldout":
                yield row["text"]
    with open(data / "chats.jsonl", encoding="utf-8") as f:
        for row in map(json.loads, f):
            if row["split"] == "train" and row["source"] != "stories":
                yield from (message["content"] for message in row["messages"])


def train(data: Path, vocab_size: int) -> Tokenizer:
    """Train a tokenizer of `vocab_size` entries, the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(data), trainer)
    begin = (BEGIN, tokenizer.token_to_id(BEGIN))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[begin]
    )
    return tokenizer


def main() -> None:
    """Write the tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="what prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for tokenizer.json and tokenizer_config.json")
    parser.add_argument("--vocab-size", type=int, default=8192)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train(args.data, args.vocab_size)
    tokenizer.save(str(args.out / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT, END_OF_TURN],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    (args.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{tokenizer.get_vocab_size()} entries")


if __name__ == "__main__":
    main()
