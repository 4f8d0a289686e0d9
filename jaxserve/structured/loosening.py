"""Leave out of a schema what no grammar can follow, where its author did not ask for more (`strict`).

What is left out makes the schema looser: whatever the rest says is followed, and the answer is JSON.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxserve.structured.equivalents import WITHOUT_MEANING, Unfollowable
from jaxserve.structured.reasons import in_our_words, is_fault_of_schema
from jaxserve.structured.schemas import Rewriter, parsed

_SECONDS = 2.0
"""Maximum processor seconds of trying what can be kept. After that, all that is untried is left out: what is followed
must not depend on how busy the machine is.
"""

# Keywords without which a schema would say nothing: they are kept, or the schema is refused.
_KEPT = (WITHOUT_MEANING - {"$schema", "$id"}) | {
    *("properties", "required", "items", "prefixItems", "additionalProperties", "additionalItems", "enum", "const"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
_MOST_VALUABLE = ("$ref", "allOf", "anyOf", "oneOf")

Try = Callable[[Any], str | None]
"""Compiles a schema. Returns the grammar engine's message if that fails."""


class Loosened(NamedTuple):
    """A schema that can be followed, and what has been left out of it: keywords with their paths."""

    schema: Any
    left_out: list[str]


class _Part(NamedTuple):
    """A keyword of a schema in the document."""

    schema: dict[str, Any]
    keyword: str
    path: str


def loosened(text: str, *, is_closed: bool, attempt: Try) -> Loosened:
    """Parse a schema and rewrite it, as `followable` does, without what cannot be followed.

    Raises Unfollowable for a malformed schema, for one that nothing satisfies, and for one that is too large.
    """
    root = parsed(text)
    if not isinstance(root, dict):
        return Loosened(root, [])
    rewriter = Rewriter(root, is_closed=is_closed, may_leave_out=True)
    rewriter.rewrite()
    left_out = list(rewriter.left_out)
    if (message := attempt(root)) is not None:
        _raise_fault(message)
        left_out += _Search(root, list(rewriter.nodes), attempt).left_out()
    return Loosened(root, left_out)


class _Search:
    """Finds a small number of keywords without which a schema can be followed."""

    def __init__(self, root: Any, nodes: list[tuple[dict[str, Any], str]], attempt: Try):
        self._root = root
        self._attempt = attempt
        self._deadline = time.process_time() + _SECONDS
        self._written = [(schema, dict(schema)) for schema, _ in nodes]
        self._parts = [
            _Part(schema, keyword, path) for schema, path in nodes for keyword in schema if keyword not in _KEPT
        ]
        self._parts.sort(key=lambda part: part.keyword not in _MOST_VALUABLE)
        self._out = set(range(len(self._parts)))

    def left_out(self) -> list[str]:
        """Remove the keywords from the schema and return them with their paths. Raises Unfollowable if it cannot be
        followed without any of them either.
        """
        if (message := self._try()) is not None:
            raise Unfollowable(in_our_words(message))
        self._put_back(range(len(self._parts)))
        self._try()
        return [f"{self._parts[index].keyword!r} at {self._parts[index].path}" for index in sorted(self._out)]

    def _put_back(self, some: range) -> None:
        """Put back those of some keywords with which the schema can be followed: all at once, or half by half."""
        if not some or time.process_time() > self._deadline:
            return
        self._out.difference_update(some)
        if (message := self._try()) is None:
            return
        self._out.update(some)
        if len(some) == 1:
            _raise_fault(message)
            return
        middle = len(some) // 2
        self._put_back(some[:middle])
        self._put_back(some[middle:])

    def _try(self) -> str | None:
        """Write the schema without what is left out, in the order of its author, and compile it."""
        out = {(id(self._parts[index].schema), self._parts[index].keyword) for index in self._out}
        for schema, written in self._written:
            schema.clear()
            schema.update((key, value) for key, value in written.items() if (id(schema), key) not in out)
        return self._attempt(self._root)


def _raise_fault(message: str) -> None:
    if is_fault_of_schema(message):
        raise Unfollowable(in_our_words(message))
