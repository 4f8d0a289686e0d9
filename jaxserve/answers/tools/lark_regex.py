"""Rewrite a Lark grammar without recursion as one regular expression, which a text in a JSON schema can be held to."""

import re
from collections.abc import Iterator, Mapping

MAX_LENGTH = 16 * 1024
"""Maximum characters of an expression: rules are written out wherever they are used."""

_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "SIGNED_NUMBER": r"(?:[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
"""Terminals of Lark's library `common`."""

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|//[^\n]*|\#[^\n]*)
    | (?P<line>(?:\r?\n[ \t]*)+)
    | (?P<range>"(?:\\.|[^"\\])"\s*\.\.\s*"(?:\\.|[^"\\])")
    | (?P<text>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?!/)(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n])+/[imslux]*)
    | (?P<repeat>~\s*\d+(?:\s*\.\.\s*\d+)?)
    | (?P<name>[A-Za-z_]\w*)
    | (?P<sign>[()\[\]|?*+])
    | (?P<alias>->\s*\w+)""",
    re.VERBOSE,
)
_RULE = re.compile(r"[?!]*([A-Za-z_]\w*)(?:\.-?\d+)?[ \t]*:(?!:)")
_IMPORT = re.compile(r"%import[ \t]+common\.(\w+)(?:[ \t]*->[ \t]*(\w+))?[ \t]*(?://.*)?$")
_IMPORTS = re.compile(r"%import[ \t]+common[ \t]*\(([\w\s,]*)\)[ \t]*$")


class _Beyond(Exception):
    """The grammar cannot be rewritten."""


def lark_regex(grammar: str) -> str | None:
    """Return the expression for the texts of a grammar's rule `start`; None if the grammar is recursive, or has parts
    that this does not rewrite (%ignore, templates, look-around).
    """
    try:
        rules = dict(_rules(grammar))
        return _Writer(rules).rule("start", ())
    except _Beyond:
        return None


def _rules(grammar: str) -> Iterator[tuple[str, str]]:
    """Yield each rule with its text. Imported terminals are rules whose text is a regular expression."""
    name, parts = "", []
    for line in grammar.splitlines():
        statement = line.strip()
        if statement.startswith("%"):
            imported, several = _IMPORT.match(statement), _IMPORTS.match(statement)
            if imported is None and several is None:
                raise _Beyond
            names = [(imported[1], imported[2] or imported[1])] if imported is not None else []
            names += [(each.strip(), each.strip()) for each in several[1].split(",")] if several is not None else []
            for common, alias in names:
                if common not in _COMMON:
                    raise _Beyond
                yield alias, f"/{_COMMON[common]}/"
            continue
        if rule := _RULE.match(statement):
            if name:
                yield name, "\n".join(parts)
            name, parts = rule[1], [statement[rule.end() :]]
        elif name:
            parts.append(statement)
        elif statement and not statement.startswith(("//", "#")):
            raise _Beyond
    if name:
        yield name, "\n".join(parts)


class _Writer:
    """Writes rules as expressions."""

    def __init__(self, rules: Mapping[str, str]):
        self._rules = rules
        self._length = 0

    def rule(self, name: str, above: tuple[str, ...]) -> str:
        """Return the expression of a rule; `above` are the rules that it is part of."""
        if name in above or name not in self._rules:
            raise _Beyond
        tokens = list(_tokens(self._rules[name]))
        expression = self._choice(tokens, (*above, name))
        if tokens:
            raise _Beyond
        self._length += len(expression)
        if self._length > MAX_LENGTH:
            raise _Beyond
        return expression

    def _choice(self, tokens: list[tuple[str, str]], above: tuple[str, ...]) -> str:
        """Read alternatives up to a closing bracket, and take their tokens away."""
        options = [self._sequence(tokens, above)]
        while tokens and tokens[0][1] == "|":
            tokens.pop(0)
            options.append(self._sequence(tokens, above))
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def _sequence(self, tokens: list[tuple[str, str]], above: tuple[str, ...]) -> str:
        parts: list[str] = []
        while tokens and tokens[0][1] not in ("|", ")", "]"):
            kind, text = tokens.pop(0)
            match kind:
                case "text":
                    parts.append(_literal(text))
                case "regex":
                    parts.append(_inlined(text))
                case "range":
                    first, last = re.findall(r'"(\\.|[^"\\])"', text)
                    parts.append(f"[{_in_class(first)}-{_in_class(last)}]")
                case "name":
                    parts.append(f"(?:{self.rule(text, above)})")
                case "repeat":
                    if not parts:
                        raise _Beyond
                    least, _, most = re.sub(r"[~\s]", "", text).partition("..")
                    parts[-1] = f"(?:{parts[-1]}){{{least}{',' + most if most else ''}}}"
                case _ if text in "([":
                    inner = f"(?:{self._choice(tokens, above)})"
                    if not tokens or tokens.pop(0)[1] != {"(": ")", "[": "]"}[text]:
                        raise _Beyond
                    parts.append(inner if text == "(" else f"(?:{inner})?")
                case _:
                    if not parts or text not in "?*+":
                        raise _Beyond
                    parts[-1] = f"(?:{parts[-1]}){text}"
        return "".join(parts)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise _Beyond
        position = match.end()
        if match.lastgroup not in ("space", "line", "alias"):
            yield match.lastgroup, match[0]


def _literal(text: str) -> str:
    if text.endswith("i"):
        raise _Beyond
    parts = re.findall(r"\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\.|[^\\]", text[1:-1])
    return "".join(part if re.match(r"\\[uxnrtfv\\]", part) else re.escape(part.removeprefix("\\")) for part in parts)


def _inlined(text: str) -> str:
    body, _, flags = text[1:].rpartition("/")
    if flags or re.search(r"\(\?(?!:)|\\[bBAZzGkK1-9]|(?<!\\)\$|(?<![\\\[])\^", body):
        raise _Beyond
    return f"(?:{body.replace(chr(92) + '/', '/')})"


def _in_class(character: str) -> str:
    return character if character.startswith("\\") else re.escape(character)
