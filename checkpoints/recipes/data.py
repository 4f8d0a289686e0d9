"""Batches for training: rows of 1025 tokens, `<|begin|>` first, drawn from the packed books and chats."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BEGIN, END_OF_TEXT = 0, 1
ROW = 1025  # 1024 inputs and the token that follows the last


@dataclass(frozen=True)
class Corpus:
    """The packed token streams in memory, and the UTF-8 bytes of every token of the vocabulary."""

    books: dict[str, np.ndarray]
    chats: dict[str, list[np.ndarray]]
    token_bytes: np.ndarray

    @classmethod
    def load(cls, root: Path) -> "Corpus":
        """Read what pack.py wrote."""
        layout = json.loads((root / "layout.json").read_text())
        names = ("tales", "plain", "prose", "heldout")
        books = {name: np.fromfile(root / f"{name}.bin", np.uint16) for name in names}
        chats = {}
        for name in ("chats", "chats_heldout"):
            starts = np.fromfile(root / f"{name}.starts", np.uint32)
            chats[name] = np.split(np.fromfile(root / f"{name}.bin", np.uint16), starts[1:])
        return cls(books, chats, np.array(layout["token_bytes"], np.int32))


def book_rows(stream: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Rows [N, 1025]: `<|begin|>`, then the 1024 tokens from each start, wherever in a story that is."""
    rows = np.empty((len(starts), ROW), np.uint16)
    rows[:, 0] = BEGIN
    rows[:, 1:] = stream[starts[:, None] + np.arange(ROW - 1)]
    return rows


def endless_books(corpus: Corpus, weights: dict[str, int], rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Rows without end: epochs without replacement, each at a new random phase; a group is read `weight` times each."""
    while True:
        windows = []
        for group, weight in weights.items():
            num_tokens = len(corpus.books[group])
            for _ in range(weight):
                starts = np.arange(rng.integers(ROW - 1), num_tokens - ROW, ROW - 1)
                parts = np.array_split(rng.permutation(starts), max(1, len(starts) // 32))
                windows += [(group, part) for part in parts]
        for index in rng.permutation(len(windows)):
            group, starts = windows[index]
            yield from book_rows(corpus.books[group], starts)


def pack_chats(chats: list[np.ndarray], rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield the rows of one epoch: whole conversations one after another, the last one of each row cut at its end."""
    parts, size = [], 0
    for index in rng.permutation(len(chats)):
        parts.append(chats[index])
        size += len(chats[index])
        if size >= ROW:
            yield np.concatenate(parts)[:ROW]
            parts, size = [], 0


def endless_chats(chats: list[np.ndarray], rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Rows without end: every epoch packs the conversations in another order."""
    while True:
        yield from pack_chats(chats, rng)


def batches(
    corpus: Corpus, num_rows: int, weights: dict[str, int], chat_share: float, seed: int
) -> Iterator[np.ndarray]:
    """Batches [num_rows, 1025] without end, `chat_share` of each from the chats, the rest from the books."""
    rng = np.random.default_rng(seed)
    books, chats = endless_books(corpus, weights, rng), endless_chats(corpus.chats["chats"], rng)
    num_chats = round(num_rows * chat_share)
    while True:
        rows = [next(chats) for _ in range(num_chats)] + [next(books) for _ in range(num_rows - num_chats)]
        yield np.stack(rows)


def heldout_rows(corpus: Corpus, limit: int | None = None) -> np.ndarray:
    """Rows over the held-out books, disjoint and in order; `limit` of them, evenly spaced."""
    stream = corpus.books["heldout"]
    starts = np.arange(0, len(stream) - ROW, ROW - 1)
    if limit is not None and limit < len(starts):
        starts = starts[np.linspace(0, len(starts) - 1, limit).astype(int)]
    return book_rows(stream, starts)
