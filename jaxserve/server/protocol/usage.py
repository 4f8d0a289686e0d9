"""The usage object of every answer."""

from collections.abc import Sequence

import msgspec


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens`: prompt tokens whose KV came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """`reasoning_tokens`: completion tokens that are thoughts, if the model's syntax of thoughts is known."""

    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Tokens read and written for one HTTP request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int) -> Usage:
    """Make a Usage with its total."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens),
    )


def total_usage(parts: Sequence[Usage]) -> Usage:
    """Return the usage of several answers together."""
    return usage(
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        completion_tokens=sum(part.completion_tokens for part in parts),
        cached_tokens=sum(part.prompt_tokens_details.cached_tokens for part in parts),
        reasoning_tokens=sum(part.completion_tokens_details.reasoning_tokens for part in parts),
    )
