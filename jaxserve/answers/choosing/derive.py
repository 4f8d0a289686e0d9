"""Derive a syntax from a chat template: how it renders a made-up call shows how the model writes calls.

Words that no template contains serve as names, keys, values and thoughts; the text between them is the syntax. Texts
are compared in segments (a tag, a word, a run of white space), so that two marks that begin alike are not cut in two. A
syntax that does not read its own template's turns back is dropped: no syntax is better than a wrong one.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.answers.choosing.message_style import message_style
from jaxserve.answers.choosing.texts import TAG, common_prefix, common_suffix, split_key, split_name
from jaxserve.answers.parsing.events import CallArguments, CallStart, Content, Reasoning
from jaxserve.answers.parsing.reader import Reader
from jaxserve.answers.syntaxes.syntax import Calls, Ids, Object, PythonCall, Syntax, Tags, Thoughts, Wrapped
from jaxserve.errors import InvalidRequest
from jaxserve.tokenizer import Tokenizer

QUESTION, WORDS, THOUGHTS = "questionqu", "wordsqc", "musingqt"

MAX_MARK = 200
"""Most characters of a mark; anything longer is text that the template writes once, not a mark."""


class Call(NamedTuple):
    """A made-up call."""

    name: str
    id: str
    arguments: dict[str, Any]


# Keys are in alphabetical order, since some templates sort them. Ids have nine letters and digits, as Mistral's must.
FIRST = Call("fetchqa", "callida01", {"keyaa": "worthaa", "keybb": 4711})
SECOND = Call("fetchqb", "callida02", {"keycc": "worthcc", "keydd": 4713})
_LONG_ID = "call_0123456789abcdef01234567"

_TAGS = re.compile(TAG)

# Variables that turn thinking on, and off, where a template has a switch.
_SWITCHES: tuple[dict[str, Any], ...] = (
    {},
    {"enable_thinking": True, "thinking": True},
    {"enable_thinking": False, "thinking": False},
)


def derive(tokenizer: Tokenizer) -> Syntax:
    """Return the syntax of calls and of thoughts that the chat template shows; each is None if it does not show
    them.
    """
    turns = _Turns(tokenizer)
    plain, _, end = turns.turn(content=WORDS).partition(WORDS)
    if not plain:
        return Syntax()
    thoughts = _derive_thoughts(turns, plain, end, template=tokenizer.chat_template or "")
    calls = _derive_calls(turns, plain, end, thoughts)
    return Syntax(calls, thoughts)


class _Turns:
    """Renders an assistant's turn by a chat template; every text is what follows the user's question."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._style = message_style(tokenizer)

    def turn(
        self,
        *calls: Call,
        content: str | list[dict[str, Any]] = "",
        thoughts: str = "",
        variables: Mapping[str, Any] = _SWITCHES[0],
    ) -> str:
        """Return the turn with this content; "" if the template fails."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thoughts:
            # rendering also passes it under the other names that templates use
            message["reasoning_content"] = thoughts
        if calls:
            message["content"] = content or self._style.empty_content
            message["tool_calls"] = [self._call(call) for call in calls]
        return self._render(message, variables=variables)

    def prompt(self, variables: Mapping[str, Any]) -> str:
        """Return the prompt up to where the model's own words begin; "" if the template fails."""
        return self._render(variables=variables)

    def _call(self, call: Call) -> dict[str, Any]:
        arguments = json.dumps(call.arguments) if self._style.arguments_are_text else call.arguments
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}

    def _render(self, *turn: dict[str, Any], variables: Mapping[str, Any]) -> str:
        try:
            text = self._tokenizer.render_chat_template(
                [{"role": "user", "content": QUESTION}, *turn],
                tools=[_tool(FIRST), _tool(SECOND)],
                add_generation_prompt=not turn,
                template_kwargs=variables,
            )
        except InvalidRequest:
            return ""
        return text.rpartition(QUESTION)[2]


def _tool(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "description": "Do it.", "parameters": _schema(call)}
    return {"type": "function", "function": function}


def _schema(call: Call) -> dict[str, Any]:
    kinds = {str: "string", int: "integer"}
    properties = {key: {"type": kinds[type(value)], "description": "It."} for key, value in call.arguments.items()}
    return {"type": "object", "properties": properties, "required": []}


class _Core(NamedTuple):
    """The position of a call's own words in a text, from `start` to `end`, and how its arguments are written.

    `after_name` is the text between the name and arguments that are an object; `gaps` are the texts before each key and
    each value of arguments that are not an object.
    """

    start: int
    end: int
    arguments: Wrapped | Object | None
    after_name: str = ""
    gaps: tuple[str, ...] = ()


def _derive_calls(turns: _Turns, plain: str, end: str, thoughts: Thoughts | None) -> Calls | None:
    """Return how calls are written; None if they are not shown, or not read back."""
    one = _body(turns.turn(FIRST), plain, end)
    two = _body(turns.turn(FIRST, SECOND), plain, end)
    core = _find(one, FIRST)
    if core is None:
        return None
    first = _find(two, FIRST)
    second = None if first is None else _find(two, SECOND, start=first.end)
    before, after = _without_thoughts(one[: core.start], thoughts), one[core.end :]
    between = None if first is None or second is None else two[first.end : second.start]
    after_name = core.after_name
    arguments: Wrapped | Object | Tags | PythonCall | None = core.arguments
    if arguments is None:
        form = _form(core.gaps, after)
        if form is None:
            return None
        arguments, after_name, closing = form
        after = after[len(closing) :]
        between = None if between is None else between[len(closing) :]
    elif second is not None and second.after_name != after_name:
        after_name = _numbered(after_name, second.after_name)
    refuses_long_ids = not turns.turn(FIRST._replace(id=_LONG_ID))
    ids = Ids.NUMBERED if "{index}" in after_name else Ids.NINE if refuses_long_ids else Ids.ANY
    calls = _marked(before, between, after, name_end=after_name, arguments=arguments, ids=ids)
    return calls if _reads_calls(turns, Syntax(calls, thoughts), plain, end) else None


def _body(turn: str, plain: str, end: str) -> str:
    """Strip from a turn the header that it has in common with a turn of plain words, and the end of such a turn."""
    body = turn[len(common_prefix(turn, plain)) :]
    body = body.removesuffix(common_suffix(body, end))
    mark = end.strip()
    body = body.partition(mark)[0] if mark else body
    return re.sub(rf"(?:{TAG})(?:{FIRST.id}|{SECOND.id})", "", body)  # a model may leave ids out


def _without_thoughts(before: str, thoughts: Thoughts | None) -> str:
    """Strip the marks of empty thoughts from the text before a call."""
    for mark in () if thoughts is None else (*thoughts.opening, *thoughts.closing):
        before = before.lstrip().removeprefix(mark.strip())
    return before


def _find(text: str, call: Call, *, start: int = 0) -> _Core | None:
    """Find a call in a text: inside an object, before an object, or before keys and values. None if it is not there."""
    name_start = text.find(call.name, start)
    if name_start < 0:
        return None
    for brace in re.finditer(r"\{", text[start:name_start]):
        value, end = _decode(text, start + brace.start())
        if end > name_start:
            wrapped = _wrapped(value, call)
            return None if wrapped is None else _Core(start + brace.start(), end, wrapped)
    name_end = name_start + len(call.name)
    brace = text.find("{", name_end)
    value, end = _decode(text, brace) if brace >= 0 else (None, -1)
    if value == call.arguments:
        return _Core(name_start, end, Object(), after_name=text[name_end:brace].replace(call.id, ""))
    gaps, position = [], name_end
    for needle in (str(part) for item in call.arguments.items() for part in item):
        found = text.find(needle, position)
        if found < 0:
            return None
        gaps.append(text[position:found])
        position = found + len(needle)
    return _Core(name_start, position, None, gaps=tuple(gaps))


def _decode(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins there, and where it ends; (None, -1) if none does."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, -1


def _wrapped(value: Any, call: Call) -> Wrapped | None:
    """Return under which keys an object has the name and the arguments of a call."""
    if value == {call.name: call.arguments}:
        return Wrapped(name="")
    if not isinstance(value, dict):
        return None
    keys = list(value)
    names = [key for key in keys if value[key] == call.name]
    arguments = [key for key in keys if value[key] in (call.arguments, json.dumps(call.arguments))]
    if len(names) != 1 or len(arguments) != 1:
        return None
    number = keys[0] if str(value[keys[0]]).isdigit() else ""
    return Wrapped(name=names[0], arguments=arguments[0], id=number)


def _form(gaps: Sequence[str], after: str) -> tuple[Tags | PythonCall | Object, str, str] | None:
    """Return how keys and values that are not an object are written, the text after the name, and the text that closes
    the last value or the arguments.

    The first value is a string, the second a number: what surrounds only the string is its quotes.
    """
    before_key, before_text, next_key, before_number = gaps
    quote = before_text.removeprefix(before_number) if before_text.startswith(before_number) else ""
    if before_key.endswith("(") and before_number.startswith("="):
        return (PythonCall(), before_key[:-1], ")") if after.startswith(")") else None
    if before_key.endswith("{") and before_number.startswith(":"):
        quote = quote or before_text[1:]
        closing = before_number[1:] + "}"  # a number may have the same quotes
        return (Object(quote=quote), before_key[:-1], closing) if quote and after.startswith(closing) else None
    key_begin = common_suffix(before_key, next_key).lstrip()
    if not key_begin or quote:
        return None
    value_end = common_prefix(next_key[: len(next_key) - len(key_begin)], after)
    flag = re.fullmatch(r"([\"'])( \w+=)\"(\w+)\"(.*)", before_text, re.DOTALL)
    if flag is not None and before_number != before_text:
        tags = Tags(key=(key_begin, flag[1]), value=(f'"{flag[4]}', value_end), text_flag=f'{flag[2]}"')
    else:
        key_end, value_begin = split_key(before_text)
        tags = Tags(key=(key_begin, key_end), value=(value_begin, value_end))
    return tags, before_key[: len(before_key) - len(key_begin)], value_end


def _numbered(first: str, second: str) -> str:
    """Return the text after the names of two calls, with `{index}` for a number in which they differ."""
    return (
        re.sub(r"\d+", "{index}", first, count=1) if re.sub(r"\d+", "", first) == re.sub(r"\d+", "", second) else first
    )


def _marked(before: str, between: str | None, after: str, *, name_end: str, arguments: Any, ids: Ids) -> Calls:
    """Return calls whose marks are parts of these texts: those before the first call, between two calls (None: there
    can be only one) and after the last call.
    """
    opening = before.lstrip() if between is None else common_suffix(before, between).lstrip()
    closing = after if between is None else common_prefix(between[: len(between) - len(opening)], after).rstrip()
    section = [before[: len(before) - len(opening)].lstrip(), after[len(closing) :].rstrip()]
    separator = "" if between is None else between[len(closing) : len(between) - len(opening)]
    is_list = False
    outer = [section[0] + opening, closing + section[1]] if between is None else section
    if "," in separator or between is None:
        is_list = outer[0].rstrip().endswith("[") and outer[1].lstrip().startswith("]")
    if is_list:
        section = [outer[0].rstrip()[:-1], outer[1].lstrip()[1:]]
        opening, closing = ("", "") if between is None else (opening, closing)
    name_begin = ""
    if not isinstance(arguments, Wrapped):
        opening, name_begin = split_name(opening)
    return Calls(
        arguments=arguments,
        section=(section[0], section[1]),
        call=(opening, closing),
        name=(name_begin, name_end),
        separator=separator,
        is_list=is_list,
        is_bare=not (section[0] or opening or name_begin),
        is_parallel=between is not None,
        ids=ids,
    )


def _derive_thoughts(turns: _Turns, plain: str, end: str, *, template: str) -> Thoughts | None:
    """Return how thoughts are written; None if the template shows none, or if they are not read back."""
    prompts = list(filter(None, map(turns.prompt, _SWITCHES)))
    for before, after in _around_thoughts(turns):
        found = _thoughts(before, after, plain, prompts, end)
        break
    else:
        found = _thoughts_of_prompt(prompts, plain, end, template)
    return found if found is not None and _reads_thoughts(found) else None


def _around_thoughts(turns: _Turns) -> Iterator[tuple[str, str]]:
    """Yield, for each turn that shows thoughts, the text before them and the text from their end to the turn's words or
    call.
    """
    parts = [{"type": "thinking", "thinking": THOUGHTS}, {"type": "text", "text": WORDS}]
    for variables in _SWITCHES[:2]:
        for turn, follows in (
            (turns.turn(content=WORDS, thoughts=THOUGHTS, variables=variables), WORDS),
            (
                turns.turn(FIRST, thoughts=THOUGHTS, variables=variables),
                FIRST.name,
            ),  # some show them only next to a call
            (turns.turn(content=parts, variables=variables), WORDS),
        ):
            before, _, behind = turn.partition(THOUGHTS)
            after, answer, _ = behind.partition(follows)
            is_dumped = "'thinking'" in before or '"thinking"' in before  # the parts themselves, as a text
            if answer and after.strip() and not is_dumped:
                yield before, after


def _thoughts(before: str, after: str, plain: str, prompts: Sequence[str], end: str) -> Thoughts | None:
    """Return the marks in the text before thoughts, and in the text between them and the answer."""
    tags = list(_TAGS.finditer(after))
    closing = after[: tags[1].start()] if len(tags) > 1 else after
    answer = ("", "")
    if len(tags) > 1 and (last := _TAGS.match(end.lstrip())) and tags[1][0] == _opens(last[0]):
        answer = (tags[1][0], last[0])
    mark = _opens(tags[0][0]) if tags else ""
    if mark and mark in before:
        opening = before[before.rfind(mark) :]
    else:
        rests = (before[len(header) :] for header in (*prompts, plain) if before.startswith(header))
        opening = max(rests, key=len, default=before[len(common_prefix(before, plain)) :])
    if not opening.strip():  # the prompt alone begins them
        opening = max(
            (prompt.removeprefix(before) for prompt in prompts if prompt.startswith(before)), key=len, default=""
        )
    if not opening.strip():
        return None
    return Thoughts(opening=(opening.lstrip(),), closing=(closing,), answer=answer)


def _thoughts_of_prompt(prompts: Sequence[str], plain: str, end: str, template: str) -> Thoughts | None:
    """Return thoughts that only the end of the prompt begins: with a tag whose end tag the template knows too."""
    for prompt in prompts:
        found = list(_TAGS.finditer(prompt))
        if not found or "/" in found[-1][0] or prompt[found[-1].end() :].strip():
            continue
        opening = found[-1][0]
        closing = re.sub(r"^([<\[◁])", r"\1/", opening)
        is_header = opening in plain and not re.search("think|thought|reason", opening, re.IGNORECASE)
        if closing in template and closing not in end and not is_header:
            return Thoughts(opening=(prompt[found[-1].start() :],), closing=(closing,))
    return None


def _opens(closing: str) -> str:
    """Return the mark that `closing` closes; "" if its spelling does not tell."""
    opening = closing.replace("/", "", 1) if "/" in closing else closing.replace("END_", "START_")
    return opening if opening != closing else ""


# The proof: the reader must recover from a turn what the template was given.


def _reads_calls(turns: _Turns, syntax: Syntax, plain: str, end: str) -> bool:
    calls = syntax.calls
    assert calls is not None
    if any(len(text) > MAX_MARK for text in (*calls.section, *calls.call, *calls.name, calls.separator)):
        return False
    made: list[tuple[Call, ...]] = [(FIRST,), (FIRST._replace(arguments={}),)]
    if syntax.calls is not None and syntax.calls.is_parallel:
        made.append((SECOND, FIRST))
    return all(
        _read(syntax, _body(turns.turn(*calls), plain, end))
        == ("", "", [(call.name, call.arguments) for call in calls])
        for calls in made
    )


def _reads_thoughts(thoughts: Thoughts) -> bool:
    if any(len(text) > MAX_MARK for text in (*thoughts.opening, *thoughts.closing)):
        return False
    text = f"{thoughts.opening[0]}{THOUGHTS}{thoughts.closing[0]}{thoughts.answer[0]}{WORDS}{thoughts.answer[1]}"
    return _read(Syntax(thoughts=thoughts), text) == (WORDS, THOUGHTS, [])


def _read(syntax: Syntax, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return the words, the thoughts and the calls in a text."""
    reader = Reader(syntax, {call.name: _schema(call) for call in (FIRST, SECOND)})
    events = [*reader.push(text), *reader.finish()]
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[-1][1] += event.text
    words = "".join(event.text for event in events if isinstance(event, Content)).strip()
    thoughts = "".join(event.text for event in events if isinstance(event, Reasoning)).strip()
    return words, thoughts, [(name, _decode(arguments, 0)[0]) for name, arguments in calls]
