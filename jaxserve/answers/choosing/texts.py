"""Take texts of chat templates apart at tags, for `derive` and `response_template`."""

import re
from collections.abc import Sequence

TAG = r"</?\|[^<>\s]+>|<[^<>\s]*\|>|</?[^<>\s\"'=]+>|\[/?[A-Z][A-Z_]*\]|◁/?\w+▷"
"""Matches a mark that is complete by itself."""

_SEGMENT = re.compile(rf"{TAG}|</?[^<>\s\"'=]+|\s+|\w+|.", re.DOTALL)


def common_prefix(first: str, second: str) -> str:
    """Return the segments (a tag, a word, a run of white space, a character) with which both texts begin."""
    return first[: _shared_length(_SEGMENT.findall(first), _SEGMENT.findall(second))]


def common_suffix(first: str, second: str) -> str:
    """Return the segments with which both texts end."""
    length = _shared_length(_SEGMENT.findall(first)[::-1], _SEGMENT.findall(second)[::-1])
    return first[len(first) - length :]


def _shared_length(first: Sequence[str], second: Sequence[str]) -> int:
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += len(one)
    return length


def split_name(opening: str) -> tuple[str, str]:
    """Split an opening into the mark of a call, and what belongs to the name after it: an unfinished tag, or words."""
    if unfinished := re.search(r"<[^<>]*$", opening):
        return opening[: unfinished.start()], unfinished[0]
    marks = re.match(rf"(?:(?:{TAG})\s*)*", opening)
    length = 0 if marks is None else marks.end()
    return opening[:length], opening[length:]


def split_key(between: str) -> tuple[str, str]:
    """Return what ends a key, and what begins its value, of the text between them."""
    opening = re.search(r"<[^/<>][^<>]*>\s*$", between)
    length = len(between) if opening is None else opening.start()
    return between[:length], between[length:]
