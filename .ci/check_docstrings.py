"""Refuse docstrings that do not say what they are about: `python .ci/check_docstrings.py FOLDER...`.

A docstring is a sentence of its own that begins with a verb or a noun. Refused are those that only continue the name
before them ("Of ...", "As ...", "The same ...", "By ..."), a function's "Whether ..." instead of "Return whether ...",
and single words. ruff's D401 sees to the mood of verbs; this script reads attributes' docstrings as well.
"""

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

CONTINUES_A_NAME = re.compile(r"(Of|As|By|But|For whom|In which|With which|The same)\b(?! if\b)")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.Constant]]:
    """Yield each docstring's constant after the module, class, function or assignment that it describes."""
    for node in ast.walk(tree):
        if not isinstance(node, DOCUMENTED):
            continue
        for before, statement in zip([node, *node.body], node.body, strict=False):
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if is_text and isinstance(statement.value.value, str):
                yield before, statement.value


def complaint(owner: ast.AST, text: str) -> str | None:
    """Return what is wrong with the docstring of `owner`, or None."""
    if found := CONTINUES_A_NAME.match(text):
        return f'begins with "{found[0]}": begin with a verb or a noun'
    if len(text.split()) < 2:
        return "is one word: write a sentence"
    if isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef) and text.startswith("Whether"):
        decorators = {getattr(node, "id", getattr(node, "attr", None)) for node in owner.decorator_list}
        if not decorators & {"property", "cached_property"}:
            return 'begins with "Whether": write "Return whether ..."'
    return None


def main(folders: list[str]) -> int:
    """Print a line for each docstring refused, and return the exit status."""
    refused = 0
    for path in sorted(path for folder in folders for path in pathlib.Path(folder).rglob("*.py")):
        for owner, constant in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            if problem := complaint(owner, constant.value):
                print(f"{path}:{constant.lineno}: docstring {problem}")  # noqa: T201
                refused += 1
    return refused > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
