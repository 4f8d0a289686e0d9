"""Encode the prepared text as token streams that training reads: `<group>.bin` (uint16), `chats.bin`, `layout.json`.

A stream is sections in reading order, each followed by `<|endoftext|>`. `chats.bin` holds rendered conversations
(`<|begin|>` first); `chats.starts` their offsets (uint32). `layout.json` has the counts and the bytes of every token.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from train_tokenizer import BEGIN, END_OF_TEXT, END_OF_TURN, SPECIAL_TOKENS

GROUPS = ("tales", "plain", "prose", "heldout")


def read_rows(path: Path) -> Iterator[dict]:
    """Objects of a JSON-lines file."""
    with open(path, encoding="utf-8") as f:
        yield from map(json.loads, f)


def batches(texts: Iterable[str], size: int = 512) -> Iterator[list[str]]:
    """Yield lists of `size` texts; the last may be shorter."""
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[list[int]]:
    """Token ids of each text, without the leading `<|begin|>` that the tokenizer adds by default."""
    for batch in batches(texts):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield encoding.ids


def render(messages: list[dict[str, str]]) -> str:
    """Return what the chat template renders, spelled out so that packing needs no template engine."""
    return BEGIN + "".join(f"<|{m['role']}|>{m['content'].strip()}{END_OF_TURN}" for m in messages)


def token_bytes(tokenizer: Tokenizer) -> list[int]:
    """UTF-8 bytes of every token; a special token has none. In a byte-level vocabulary one character is one byte."""
    ids = range(tokenizer.get_vocab_size())
    return [0 if (piece := tokenizer.id_to_token(i)) in SPECIAL_TOKENS else len(piece) for i in ids]


def main() -> None:
    """Write the packed streams."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="what prepare.py wrote")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)

    layout: dict = {"tokens": {}, "token_bytes": token_bytes(tokenizer)}
    for group in GROUPS:
        texts = (row["text"] for row in read_rows(args.data / "books.jsonl") if row["group"] == group)
        stream = [np.array([*ids, end_of_text], np.uint16) for ids in encode(tokenizer, texts)]
        np.concatenate(stream).tofile(args.out / f"{group}.bin")
        layout["tokens"][group] = int(sum(map(len, stream)))
    for split in ("train", "heldout"):
        rows = (row for row in read_rows(args.data / "chats.jsonl") if row["split"] == split)
        chats = [np.array(ids, np.uint16) for ids in encode(tokenizer, (render(row["messages"]) for row in rows))]
        name = "chats" if split == "train" else "chats_heldout"
        np.concatenate(chats).tofile(args.out / f"{name}.bin")
        np.cumsum([0, *map(len, chats)])[:-1].astype(np.uint32).tofile(args.out / f"{name}.starts")
        layout["tokens"][name] = int(sum(map(len, chats)))
    (args.out / "layout.json").write_text(json.dumps(layout) + "\n")
    print(layout["tokens"])


if __name__ == "__main__":
    main()
