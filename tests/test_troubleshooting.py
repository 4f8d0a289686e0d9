"""docs/troubleshooting.md quotes messages as the code has them."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
VALUE = "\0"
"""In a message, what is put in."""


def messages():
    """What the page quotes in the first column of its table."""
    rows = [line.split(" | ")[0] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [quoted for row in rows for quoted in re.findall("`([^`]+)`", row)]


@functools.cache
def texts():
    """Every text in the code; values that are put in are VALUE."""
    found = set()
    for path in (ROOT / "jaxserve").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else VALUE for part in node.values]
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"%[\d.]*[a-z]", VALUE, node.value))
    return found


def is_in_the_code(message):
    """True if one text has all of the message, in order; "..." and N stand for any values."""
    pieces = [re.escape(piece.strip()) for piece in re.split(r"\.\.\.|\bN\b", message) if piece.strip()]
    return any(re.search(".*".join(pieces), text, re.DOTALL) for text in texts())


@pytest.mark.parametrize("message", messages())
def test_a_quoted_message_is_one_of_ours(message):
    assert is_in_the_code(message)


@pytest.mark.parametrize(
    "message", ["no such message of ours", "this GPU has no float16", "... does not fit its config.yaml"]
)
def test_others_are_not(message):
    assert not is_in_the_code(message)


def test_what_ends_a_start_is_explained():
    """Errors that a user meets before anything runs, one of each kind."""
    page = " ".join(messages())
    for words in ("GiB are free", "max_model_len", "unknown model_type", "does not fit", "no kernels", "cannot listen"):
        assert words in page
