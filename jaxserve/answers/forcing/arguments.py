"""Write the rules of a Lark grammar for arguments that are written one by one: each between tags, or as in a Python
call.

A text between tags has no escapes: it is any text in which the reader finds no tag. The arguments come in the order of
the schema. `Unsayable` is raised for arguments that cannot be held to their schema in this way; they are written
differently.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.answers.literals.schema import Kind, json_value, property_kind
from jaxserve.answers.syntaxes.syntax import Calls, Tags
from jaxserve.structured.disjoint import follow, types
from jaxserve.structured.equivalents import WITHOUT_MEANING
from jaxserve.structured.grammar import json_rule
from jaxserve.structured.pointers import find, objects

Spell = Callable[[str], str]
"""Spells a text in a grammar: marks that are a single token of the tokenizer as that token, the rest as text."""

_KEY = r"[^<>\"'\s]{1,100}"
_ANY_TEXT = r"(.|\n)*"
_MAX_DEPTH = 32
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_LARGEST = 10**18
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/~%]+)(/.*)?", re.DOTALL)


class Unsayable(Exception):
    """The arguments of a tool cannot be held to its schema as the syntax writes them. The message says why."""


class _Argument(NamedTuple):
    name: str
    schema: Any
    is_required: bool


def literal(text: str) -> str:
    """Return a text in a Lark rule."""
    return json.dumps(text, ensure_ascii=False)


def sequence(*parts: str) -> str:
    """Return parts of a rule, one after the other."""
    return " ".join(part for part in parts if part and part != '""')


class TaggedArguments:
    """Writes arguments between the tags of a syntax."""

    def __init__(self, calls: Calls, tags: Tags, spell: Spell):
        self._tags = tags
        self._spell = spell
        self._value_end = spell(tags.value[1])
        marks = [tags.value[1], tags.key[0], *calls.section, *calls.call, calls.name[0]]
        pieces = {piece for mark in marks for piece in _tag_heads(mark)}
        self._marks = "|".join(sorted(_mark_pattern(piece) for piece in pieces))
        first = "".join(sorted({re.escape(piece[1]) for piece in pieces}))
        # The pattern for JSON strings, which may have no look-ahead: no tag may begin in them.
        self._json_text = rf"^([^<]|<+[^<\s{first}]|<+\s+[^\s/<])*<*\s*$"

    def rules(self) -> str:
        """Return the rule `argument_text`, a text with the tag that ends it."""
        closing = self._tags.value[1]
        mark = closing.lstrip()
        lead = closing[: len(closing) - len(mark)]
        without = f"& ~/{_ANY_TEXT}({self._marks.replace('/', r'\/')}){_ANY_TEXT}/"
        if (spelled := self._spell(mark)).startswith("<["):
            lead = lead.replace("\n", r"\n")
            return f"argument_text: ARGUMENT_TEXT {spelled}\nARGUMENT_TEXT: /{_ANY_TEXT}{lead}/ {without}"
        head, end, rest = mark.partition(">")
        ended = f"ended_text[suffix={literal(lead + head + end)}]: ARGUMENT_TEXT"
        text = sequence("argument_text: ended_text", self._spell(rest))
        return f"{text}\n{ended}\nARGUMENT_TEXT: /{_ANY_TEXT}/ {without}"

    def write(self, parameters: Mapping[str, Any]) -> str:
        """Return a part of a rule for the arguments of a tool. Raises Unsayable."""
        written = []
        for each in _arguments(parameters):
            if not re.fullmatch(_KEY, each.name) or not _is_unicode(each.name):
                raise Unsayable(f"{each.name!r} is no name of an argument between tags")
            one = self._argument(each, parameters)
            written.append(one if each.is_required else f"({one})?")
        return sequence(*written)

    def write_free(self) -> str:
        """Return a part of a rule for arguments of any names, with any values."""
        tags = self._tags
        flag = f"{literal(tags.text_flag)} ({' | '.join(map(literal, tags.flags))})" if tags.text_flag else ""
        before, after = self._spell(tags.key[0]), self._spell(tags.key[1])
        one = sequence(before, f"/{_KEY}/", after, flag, self._spell(tags.value[0]), "argument_text")
        return f"({one})*"

    def _argument(self, argument: _Argument, parameters: Mapping[str, Any]) -> str:
        name, schema, _ = argument
        target = _target(schema, parameters)
        kind = property_kind(parameters, name)
        if values := _listed(target):
            texts = [value for value in values if isinstance(value, str)]
            others = [value for value in values if not isinstance(value, str)]
            flagged = Kind() if self._tags.text_flag else kind
            forms = [
                sequence(self._head(name, is_text=is_text), self._alternatives(some, own), self._value_end)
                for some, own, is_text in ((texts, flagged, True), (others, kind, False))
                if some
            ]
            return forms[0] if len(forms) == 1 else f"({' | '.join(forms)})"
        if _is_any_text(target, parameters):
            return sequence(self._head(name, is_text=True), "argument_text")
        if not kind.types or "string" in kind.types:
            raise Unsayable(f"the text {name!r} has to follow more than its type")
        rule = json_rule(_alone(schema, parameters, rewrite=self._without_tags))
        return sequence(self._head(name, is_text=False), rule, self._value_end)

    def _head(self, name: str, *, is_text: bool) -> str:
        tags, spell = self._tags, self._spell
        if tags.has_entities:
            name = name.replace("&", "&amp;")
        if not tags.text_flag:
            return spell(f"{tags.key[0]}{name}{tags.key[1]}{tags.value[0]}")
        flags = tags.flags[:1] if is_text else tags.flags[1:]
        ends = [spell(f"{flag}{tags.value[0]}") for flag in flags]
        end = ends[0] if len(ends) == 1 else f"({' | '.join(ends)})"
        return sequence(spell(f"{tags.key[0]}{name}{tags.key[1]}{tags.text_flag}"), end)

    def _alternatives(self, values: Sequence[Any], kind: Kind) -> str:
        """Return values as the reader of this kind reads them back."""
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        for value, text in zip(values, texts, strict=True):
            if re.search(self._marks, text):
                raise Unsayable(f"{text!r} has a tag in it")
            if json_value(text, kind) != json.dumps(value, ensure_ascii=False):
                raise Unsayable(f"{text!r} would be read as another value")
        some = " | ".join(literal(text) for text in texts if text)
        return f"({some})?" if "" in texts else f"({some})"

    def _without_tags(self, schema: Any, depth: int = 0) -> Any:
        """Return a schema whose values are written without any tag, and without exponents: the reader takes 1e999 for a
        text. Raises Unsayable.
        """
        if schema is False:
            return schema
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            raise Unsayable("a value of any kind may have a tag in it")
        if "enum" in schema or "const" in schema:
            if re.search(self._marks, json.dumps([schema.get("enum"), schema.get("const")], ensure_ascii=False)):
                raise Unsayable("a value has a tag in it")
            return schema
        schema = dict(schema)
        in_place = [word for word in ("anyOf", "oneOf", "allOf") if word in schema]
        for word in in_place:
            schema[word] = [self._without_tags(each, depth + 1) for each in schema[word]]
        if "type" not in schema:
            if not in_place and "$ref" not in schema:
                raise Unsayable("a value of any kind may have a tag in it")
            return schema
        allowed = types(schema)
        if "string" in allowed and "format" not in schema:
            if "pattern" in schema:
                raise Unsayable("a text with a pattern may have a tag in it")
            schema["pattern"] = self._json_text
        if "number" in allowed and not schema.keys() & _BOUNDS:
            schema |= {"minimum": -_LARGEST, "maximum": _LARGEST}
        if "array" in allowed:
            items = schema.get("items", True)
            if isinstance(items, list) or "additionalItems" in schema:
                raise Unsayable("items of any kind may have a tag in them")
            schema["items"] = self._without_tags(items, depth + 1)
            if "prefixItems" in schema:
                schema["prefixItems"] = [self._without_tags(each, depth + 1) for each in schema["prefixItems"]]
        if "object" in allowed:
            named = schema.get("properties", {})
            is_open = schema.get("additionalProperties") is not False or "patternProperties" in schema
            if is_open or any(re.search(self._marks, name) for name in named):
                raise Unsayable("the keys of an object may have a tag in them")
            schema["properties"] = {name: self._without_tags(each, depth + 1) for name, each in named.items()}
        return schema


class PythonArguments:
    """Writes arguments as those of a call in Python, one tool's. `rules` are those that have been written for them."""

    def __init__(self, prefix: str):
        """Begin the names of all rules with `prefix`."""
        self.rules: list[str] = []
        self._prefix = prefix

    def write(self, parameters: Mapping[str, Any]) -> str:
        """Return a part of a rule for the arguments of a tool. Raises Unsayable."""
        arguments = _arguments(parameters)
        rest = ""  # what may follow an argument
        starts: list[str] = []
        for index, each in reversed(list(enumerate(arguments))):
            if not each.name.isidentifier():
                raise Unsayable(f"{each.name!r} is no name in Python")
            name = f"{self._prefix}{index}"
            self.rules.append(f"{name}: {literal(each.name + '=')} ({self._value(each.schema, parameters)})")
            start = sequence(name, rest)
            starts = [start] if each.is_required else [start, *starts]
            further = f'", " {name}'
            self.rules.append(f"{name}_on: {sequence(further if each.is_required else f'({further})?', rest)}")
            rest = f"{name}_on"
        is_needed = any(each.is_required for each in arguments)
        return f"({' | '.join(starts)}){'' if is_needed else '?'}" if starts else ""

    def write_free(self) -> str:
        """Return a part of a rule for arguments of any names, with any values."""
        one = sequence("/[A-Za-z_][A-Za-z0-9_]{0,99}/", '"="', f"({self._value({}, {})})")
        return f'({one} (", " {one})*)?'

    def _value(self, schema: Any, parameters: Mapping[str, Any]) -> str:
        target = _target(schema, parameters)
        if not isinstance(target, dict):
            target = {}
        if values := _listed(target):
            return " | ".join(literal(_spelled(value)) for value in values)
        meaning = target.keys() - WITHOUT_MEANING
        if meaning == {"anyOf"} and "type" not in target:
            return " | ".join(self._value(each, parameters) for each in target["anyOf"] if each is not False)
        if meaning & {"anyOf", "oneOf", "allOf", "$ref", "enum", "const"}:
            return json_rule(_alone(target, parameters))
        allowed = types(target)
        words = [literal(word) for name, word in _WORDS if name in allowed]
        others = sorted(allowed - {name for name, _ in _WORDS})
        if others:
            words.append(json_rule(_alone({**target, "type": others}, parameters)))
        return " | ".join(words)


_WORDS = (("boolean", "True"), ("boolean", "False"), ("null", "None"))


def _spelled(value: Any) -> str:
    """Return a value as Python writes it, texts as JSON does."""
    if value is None or isinstance(value, bool):
        return repr(value)
    text = json.dumps(value, ensure_ascii=False)
    return text if _is_unicode(text) else json.dumps(value)


def _is_unicode(text: str) -> bool:
    return not re.search("[\ud800-\udfff]", text)


def _arguments(parameters: Mapping[str, Any]) -> list[_Argument]:
    """Return the arguments that a schema from `arguments_schema` names. Raises Unsayable where there may be others, or
    it says more of them together.
    """
    named = parameters.get("properties", {} if parameters.get("additionalProperties") is False else None)
    required = parameters.get("required", [])
    if not isinstance(named, dict):
        raise Unsayable("no arguments are named")
    said = parameters.keys() - WITHOUT_MEANING - {"properties", "required", "additionalProperties", "x-guidance"}
    if said:
        raise Unsayable(f"{min(said)!r} is said of all arguments together")
    if parameters.get("additionalProperties", False) is not False:
        raise Unsayable("there may be other arguments")
    if not set(required) <= named.keys():
        raise Unsayable("an argument is required that is not named")
    for found in objects(named):
        if isinstance(reference := found.get("$ref"), str) and not _REFERENCE.fullmatch(reference):
            raise Unsayable(f"{reference!r} stands for more than a definition")
    arguments = [_Argument(name, schema, name in required) for name, schema in named.items()]
    if any(each.schema is False and each.is_required for each in arguments):
        raise Unsayable("nothing satisfies false")
    return [each for each in arguments if each.schema is not False]


def _target(schema: Any, parameters: Mapping[str, Any]) -> Any:
    return follow(schema, lambda reference: find(parameters, reference))


def _listed(schema: Any) -> list[Any]:
    """Return the values that a schema lists, if it says nothing else."""
    if not isinstance(schema, dict) or schema.keys() - WITHOUT_MEANING not in ({"enum"}, {"const"}):
        return []
    values = [schema["const"]] if "const" in schema else schema["enum"]
    given = {"type": schema["type"]} if "type" in schema else {}
    return [value for value in values if types({"const": value}) & types({**given, "const": value})]


def _is_any_text(schema: Any, parameters: Mapping[str, Any]) -> bool:
    """Return whether a schema allows any text, and whatever else the reader may take a text for."""
    if schema is True:
        return True
    if not isinstance(schema, dict):
        return False
    meaning = schema.keys() - WITHOUT_MEANING
    if meaning == {"anyOf"} and "type" not in schema:
        branches = [_target(each, parameters) for each in schema["anyOf"]]
        are_plain = all(isinstance(each, dict) and not each.keys() - WITHOUT_MEANING for each in branches)
        return are_plain and any("string" in types(each) for each in branches)
    return not meaning and "string" in types(schema)


def _alone(
    schema: Any, parameters: Mapping[str, Any], *, rewrite: Callable[[Any], Any] = lambda schema: schema
) -> dict[str, Any]:
    """Return the schema of an argument with the definitions that it refers to, each of them rewritten."""
    alone = {**rewrite(schema)} if isinstance(schema, dict) else {}
    waiting, definitions = list(_references(alone)), {}
    while waiting:
        word, name = waiting.pop()
        if name in definitions.setdefault(word, {}):
            continue
        if name not in parameters.get(word, {}):
            raise Unsayable(f"{name!r} is not defined")
        definitions[word][name] = rewrite(parameters[word][name])
        waiting.extend(_references(definitions[word][name]))
    kept = {word: parameters[word] for word in ("$schema", "x-guidance") if word in parameters}
    return {**alone, **definitions, **kept}


def _references(schema: Any) -> Iterator[tuple[str, str]]:
    """Return the definitions that a schema refers to: where they are, and their names."""
    for found in objects(schema):
        if isinstance(reference := found.get("$ref"), str):
            match = _REFERENCE.fullmatch(reference)
            if match is None:
                raise Unsayable(f"{reference!r} stands for more than a definition")
            yield match[1], match[2]


def _tag_heads(mark: str) -> list[str]:
    """Return the tags of a mark, without what ends them."""
    return re.findall(r"<[^<>]+", mark)


def _mark_pattern(head: str) -> str:
    """Return an expression for a tag's beginning as the reader takes it: end tags may have white space in them."""
    if head.startswith("</"):
        return rf"<\s{{0,4}}/\s{{0,4}}{re.escape(head[2:])}"
    return r"\s{0,8}".join(re.escape(part) for part in head.split())
