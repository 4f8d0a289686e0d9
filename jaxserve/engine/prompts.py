"""The forms in which callers may give prompts, and all of them as token ids. No jax here."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex, TypedDict, cast

from jaxserve.errors import InvalidRequest
from jaxserve.tokenizer import Tokenizer


class PromptDict(TypedDict, total=False):
    """A prompt as token ids with the text to show for it, or one of the two."""

    prompt_token_ids: Iterable[SupportsIndex]
    prompt: str


Prompt = str | Iterable[SupportsIndex] | PromptDict


class TokenizedPrompt(NamedTuple):
    """Token ids (still to be validated), and their text, if it is known."""

    token_ids: Iterable[SupportsIndex]
    text: str | None


def as_prompt_list(prompts: Any) -> list[Any]:
    """Convert one prompt (a text, a dict, token ids) or an iterable of many to a list of prompts. Raises
    InvalidRequest.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    entries = list(_iterable(prompts))
    return [entries] if entries and _is_token_id(entries[0]) else entries


def tokenize_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, *, read: Callable[[str], str] = str
) -> list[TokenizedPrompt]:
    """All prompts as token ids; the texts are encoded in one go, as `read` returns them. Raises InvalidRequest for a
    malformed prompt.
    """
    parts = [_parts(prompt) for prompt in prompts]
    texts = [text for token_ids, text in parts if token_ids is None and text is not None]
    encoded = iter(tokenizer.encode_batch([read(text) for text in texts]))
    return [TokenizedPrompt(next(encoded) if token_ids is None else token_ids, text) for token_ids, text in parts]


def _parts(prompt: Prompt) -> tuple[Iterable[SupportsIndex] | None, str | None]:
    """Token ids and text of a prompt: at least one of them."""
    if isinstance(prompt, str):
        return None, prompt
    if not isinstance(prompt, Mapping):
        return _iterable(prompt), None
    fields = cast(PromptDict, prompt)
    if unknown := set(fields) - {"prompt", "prompt_token_ids"}:
        raise InvalidRequest(f"a prompt has no field {', '.join(map(repr, sorted(unknown)))}", param="prompt")
    token_ids, text = fields.get("prompt_token_ids"), fields.get("prompt")
    if token_ids is None and not isinstance(text, str):
        raise InvalidRequest("a prompt needs prompt, a text, or prompt_token_ids", param="prompt")
    return token_ids, text


def _iterable(prompt: Any) -> Iterable[Any]:
    """Raise InvalidRequest for an object that is not a prompt. Bytes are refused explicitly, as they would pass as
    token ids.
    """
    if not isinstance(prompt, Iterable) or isinstance(prompt, (bytes, bytearray)):
        raise InvalidRequest(
            f"a prompt is a text, a list of token ids or a dict of them, not {type(prompt).__name__}", param="prompt"
        )
    return prompt


def _is_token_id(entry: Any) -> bool:
    """Return true for an integer of any library; an array has `__index__` too, but raises."""
    try:
        operator.index(entry)
    except TypeError:
        return False
    return True
