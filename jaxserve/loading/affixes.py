"""The special tokens that a tokenizer puts before and after each text, as its post-processor says. No jax."""

import itertools
import json
from typing import Any, NamedTuple

from tokenizers import Tokenizer, processors


class Affixes(NamedTuple):
    """Ids of the special tokens that are added before a text, and after it."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


class AddedByOption(NamedTuple):
    """A token that an option of tokenizer_config.json adds (true), leaves out (false) or does not mention (None)."""

    token_id: int | None
    is_added: bool | None


def read_affixes(backend: Tokenizer) -> Affixes:
    """Return what the tokenizer adds to a single text."""
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    for step in _steps(backend):
        around = _affixes_of(step)
        before, after = around.before + before, after + around.after
    return Affixes(before, after)


def apply_options(backend: Tokenizer, *, bos: AddedByOption, eos: AddedByOption) -> None:
    """Make the tokenizer add BOS and EOS as the options say; other special tokens stay.

    The post-processor is replaced only where it adds something else.
    """
    now = read_affixes(backend)
    before, after = now
    if bos.is_added and bos.token_id is not None and bos.token_id not in before:
        before = (bos.token_id, *before)
    if eos.is_added and eos.token_id is not None and eos.token_id not in after:
        after = (*after, eos.token_id)
    if bos.is_added is False:
        before = tuple(token_id for token_id in before if token_id != bos.token_id)
    if eos.is_added is False:
        after = tuple(token_id for token_id in after if token_id != eos.token_id)
    if (before, after) != now:
        _write_affixes(backend, Affixes(before, after))


def _write_affixes(backend: Tokenizer, affixes: Affixes) -> None:
    names = {token_id: backend.id_to_token(token_id) for token_id in (*affixes.before, *affixes.after)}

    def around(text: str, type_id: int) -> list[dict[str, Any]]:
        before, after = (
            [{"SpecialToken": {"id": names[token_id], "type_id": type_id}} for token_id in side] for side in affixes
        )
        return [*before, {"Sequence": {"id": text, "type_id": type_id}}, *after]

    template = {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {name: {"id": name, "ids": [token_id], "tokens": [name]} for token_id, name in names.items()},
    }
    others = [step for step in _steps(backend) if step["type"] == "ByteLevel"]  # which adds no token
    processor = processors.Sequence([])
    processor.__setstate__(json.dumps({"type": "Sequence", "processors": [*others, template]}).encode())
    backend.post_processor = processor


def _steps(backend: Tokenizer) -> list[dict[str, Any]]:
    processor = backend.post_processor
    return [] if processor is None else _flattened(json.loads(processor.__getstate__()))


def _flattened(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [each for child in step["processors"] for each in _flattened(child)]


def _affixes_of(step: dict[str, Any]) -> Affixes:
    match step:
        case {"type": "TemplateProcessing", "single": pieces, "special_tokens": tokens}:
            texts = [index for index, piece in enumerate(pieces) if "Sequence" in piece]
            if not texts:
                return Affixes()
            ids = [tokens[piece["SpecialToken"]["id"]]["ids"] if "SpecialToken" in piece else [] for piece in pieces]
            before, after = itertools.chain(*ids[: texts[0]]), itertools.chain(*ids[texts[-1] + 1 :])
            return Affixes(tuple(before), tuple(after))
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, cls], "sep": [_, sep]}:
            return Affixes((cls,), (sep,))
    return Affixes()
