"""Find objects in a JSON document: by a JSON pointer, or all of them."""

import re
import urllib.parse
from collections.abc import Iterator
from typing import Any


def find(root: Any, reference: str) -> Any:
    """Return what a reference's JSON pointer names in the document, or None if nothing or if it is not a pointer."""
    if not re.fullmatch(r"#(/.*)?", reference, re.DOTALL):
        return None
    found = root
    for part in urllib.parse.unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects within a JSON value."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield item
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
