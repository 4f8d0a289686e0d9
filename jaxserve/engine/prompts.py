"""The forms in which callers may give prompts, all of them as token ids, and how those are truncated. No jax here."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex, TypedDict, cast

from jaxserve.errors import InvalidRequest
from jaxserve.loading.affixes import Affixes
from jaxserve.request import TruncationSide
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


class Truncation(NamedTuple):
    """How a prompt is shortened, if `limit` is not None.

    Attributes:
        limit: tokens to keep; -1 keeps as many as there is `room` for.
        side: the side of the text that is cut off.
    """

    limit: int | None
    side: TruncationSide
    room: int

    def num_tokens(self, max_model_len: int) -> int | None:
        """Return how many tokens a prompt may keep, None if all. Raises InvalidRequest."""
        limit = self.limit
        if limit is None:
            return None
        if isinstance(limit, bool) or not isinstance(limit, int) or (limit < 1 and limit != -1):
            raise InvalidRequest(
                f"truncate_prompt_tokens must be -1 or at least 1, got {limit!r}", param="truncate_prompt_tokens"
            )
        if limit > max_model_len:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be at most the model's context length of {max_model_len}, got {limit}",
                param="truncate_prompt_tokens",
            )
        return self.room if limit == -1 else limit

    def kept(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """Return `num_tokens` tokens of a text, or all if it has no more."""
        if len(token_ids) <= num_tokens:
            return token_ids
        return token_ids[len(token_ids) - num_tokens :] if self.side == "left" else token_ids[:num_tokens]


def as_prompt_list(prompts: Any) -> list[Any]:
    """Convert one prompt (a text, a dict, token ids) or an iterable of many to a list of prompts. Raises
    InvalidRequest for what is no prompt.
    """
    entries: list[Any] = [prompts] if isinstance(prompts, (str, Mapping)) else list(_iterable(prompts))
    if entries and _is_token_id(entries[0]):
        entries = [entries]
    for prompt in entries:
        _parts(prompt)
    return entries


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


def truncate(token_ids: list[int], truncation: Truncation, *, affixes: Affixes, max_model_len: int) -> list[int]:
    """Return the prompt with its text shortened; the special tokens around it, `affixes`, stay. Raises
    InvalidRequest.
    """
    limit = truncation.num_tokens(max_model_len)
    if limit is None:
        return token_ids
    start, end = len(affixes.before), len(token_ids) - len(affixes.after)
    num_special = len(affixes.before) + len(affixes.after)
    if -1 < (truncation.limit or 0) < num_special:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {limit}, but the tokenizer adds {num_special} special tokens to each text",
            param="truncate_prompt_tokens",
        )
    kept = truncation.kept(token_ids[start:end], max(0, limit - num_special))
    return token_ids[:start] + kept + token_ids[end:]


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
