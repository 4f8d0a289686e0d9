"""Every syntax that is known by name: what is written in it is read back, and writing errors do no harm."""

import json
import pathlib
import re

import pytest
from depths import examples, quick_only
from event_cases import cut
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from written_answers import Message, loaded, read, read_alike, reader, rows, thoughts_of, write

import jaxserve
from jaxserve.answers.syntaxes.syntax import Channels, Elements, Object, PythonCall, Tags, Wrapped
from jaxserve.answers.syntaxes.table import TOOL_PARSERS
from jaxserve.answers.syntaxes.thought_table import REASONING_PARSERS

ROWS = rows()
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "ok": {"type": "boolean"},
        "tags": {"type": "array"},
        "more": {"type": "object"},
        "note": {"type": ["string", "null"]},
    },
}
TOOLS = {"get_weather": PARAMETERS, "now": {"type": "object", "properties": {}}, "fs.read-file": PARAMETERS}
DATA = sorted(name for name, row in ROWS.items() if not isinstance(row.arguments, Channels))

# Texts of which no syntax takes any part for a mark: text between tags has no escapes.
WORDS = st.text(
    st.characters(exclude_characters="<>[]{}()`◁▷|", exclude_categories=["Cs", "Cc"]) | st.just("\n"), max_size=30
)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def values(texts):
    numbers = st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6)
    scalars = st.none() | st.booleans() | numbers | texts
    keys = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
    return st.recursive(scalars, lambda each: st.lists(each, max_size=3) | st.dictionaries(keys, each, max_size=3))


def arguments(texts, *, has_types=True):
    """Arguments of get_weather that fit its schema. `has_types`: the syntax shows the types of nested values."""
    nested = values(texts) if has_types else texts
    return st.fixed_dictionaries(
        {},
        optional={
            "city": texts,
            "days": st.integers(-(10**15), 10**15),
            "ratio": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-5, 5),
            "ok": st.booleans(),
            "tags": st.lists(nested, max_size=3),
            "more": st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), nested, max_size=3),
            "note": texts.filter(lambda text: text.strip().lower() not in ("null", "none", "nil")),
        },
    )


def messages(row):
    texts = (
        ANY_TEXT if isinstance(row.arguments, Wrapped | PythonCall | Channels) or row.arguments == Object() else WORDS
    )
    has_types = not isinstance(row.arguments, Elements)
    call = st.tuples(st.sampled_from(["get_weather", "fs.read-file"]), arguments(texts, has_types=has_types))
    call |= st.just(("now", {}))
    words = WORDS.map(lambda text: re.sub(r"(?i)functools|function call|action:|here|to=", "", text).strip())
    most = 3 if row.is_parallel else 1
    calls = st.lists(call, max_size=most).map(tuple)
    return st.builds(Message, content=st.just("") if row.is_bare else words, calls=calls, reasoning=words)


NAMES = quick_only(sorted(ROWS), *sorted(ROWS)[::3])
PLACES = st.lists(st.integers(0, 10_000), max_size=10)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(20), deadline=None, phases=(Phase.explicit, Phase.generate))
@given(data=st.data())
def test_what_is_written_is_read_back(name, data):
    row, thoughts = ROWS[name], thoughts_of(name)
    message = data.draw(messages(row))
    text = write(row, thoughts, message)
    for pieces in ([text], list(text), cut(text, data.draw(PLACES))):
        assert loaded(read(reader(row, TOOLS, thoughts=thoughts), pieces)) == message


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(20), deadline=None, phases=(Phase.explicit, Phase.generate))
@given(data=st.data())
def test_a_text_that_went_wrong_calls_nothing_else_and_is_read_alike_in_pieces(name, data):
    """Some characters are left out, doubled or put in: no tool is called that the text does not name."""
    row, thoughts = ROWS[name], thoughts_of(name)
    text = write(row, thoughts, data.draw(messages(row)))
    assume(text)
    for _ in range(data.draw(st.integers(1, 3))):
        first = data.draw(st.integers(0, len(text)))
        last = min(len(text), first + data.draw(st.integers(0, 12)))
        put = data.draw(st.sampled_from(["", text[first:last] * 2, "<", ">", "\n", '"', "}", "</think>", "x"]))
        text = text[:first] + put + text[last:]
    is_cut = data.draw(st.booleans())
    whole = read_alike(row, TOOLS, text, thoughts=thoughts, is_cut=is_cut)
    for called, written in whole.calls:
        assert called in text
        assert called in TOOLS
        if not is_cut:
            json.loads(written)


@pytest.mark.parametrize("name", NAMES)
def test_wherever_an_answer_is_cut_no_markup_is_shown(name):
    row, thoughts = ROWS[name], thoughts_of(name)
    content = "" if row.is_bare else "I look."
    calls = (("get_weather", {"city": "Oslo", "days": 2}), ("now", {}))[: 2 if row.is_parallel else 1]
    message = Message(content, calls, "Hm, so.")
    text = write(row, thoughts, message)
    for end in range(len(text)):
        got = read(reader(row, TOOLS, thoughts=thoughts), [text[:end]], is_cut=True)
        assert message.content.startswith(got.content.rstrip()), (text[:end], got)
        assert message.reasoning.startswith(got.reasoning), (text[:end], got)
        assert [called for called, _ in got.calls] == [called for called, _ in calls][: len(got.calls)]
        for _, written in got.calls[:-1]:
            json.loads(written)


@pytest.mark.parametrize("name", DATA)
def test_a_tool_that_is_not_offered_is_not_called_and_nothing_is_lost(name):
    row = ROWS[name]
    text = write(row, None, Message("" if row.is_bare else "Hi.", (("launch", {"city": "Oslo"}),)))
    text += " Good luck!"
    assert read_alike(row, TOOLS, text) == Message(text)
    assert read(reader(row, {}), [text]) == Message(text)


@pytest.mark.parametrize("name", DATA)
def test_a_tool_that_is_not_offered_hides_no_call_and_makes_none(name):
    """Its arguments look like a call of one that is."""
    row = ROWS[name]
    launch, now = ("launch", {"more": {"name": "now", "arguments": {"now": {}}}, "now": {}}), ("now", {})
    for calls in ((launch, now), (now, launch), (launch, now, launch)):
        text = write(row, None, Message("", calls)).removeprefix("\n")
        assert loaded(read_alike(row, TOOLS, text)).calls == (now,)
        marked = row.section[0] + text if row.is_bare and not text.startswith("[") else text
        assert loaded(read(reader(row, TOOLS), list(marked))).calls == (now,)
    text = write(row, None, Message("", (launch,))).removeprefix("\n")
    assert read(reader(row, TOOLS), list(text)) == Message(text)


@pytest.mark.parametrize(
    "name", sorted(name for name in DATA if ROWS[name].is_list and ROWS[name].section[0] and not ROWS[name].is_bare)
)
def test_a_list_without_calls_is_no_words(name):
    opening, closing = ROWS[name].section
    for text in (f"{opening}[]{closing}", f"{opening} [ ]{closing}"):
        assert read_alike(ROWS[name], TOOLS, text) == Message()
    for text in (f"{opening}[1", f"{opening} [] and [1"):
        assert read(reader(ROWS[name], TOOLS), list(text)).content.endswith("[1")


@pytest.mark.parametrize("name", sorted(name for name in DATA if isinstance(ROWS[name].arguments, Tags | Elements)))
@pytest.mark.parametrize("arguments", [{}, {"city": "Oslo", "days": 2}])
def test_an_object_in_place_of_tags_is_the_arguments(name, arguments):
    row = ROWS[name]
    text = write(row, None, Message("", (("get_weather", {}), ("now", {})))).replace(
        head := f"get_weather{row.name[1]}".replace("{index}", "0"), head + json.dumps(arguments)
    )
    expected = Message("", (("get_weather", arguments), ("now", {})))
    assert loaded(read(reader(row, TOOLS), list(text.removeprefix("\n")))) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm45", "<tool_call>get_weather\n<arg_key>city<arg_value>Oslo</arg_value><arg_key>days\n<arg_value>2"),
        ("qwen3_coder", "<function=get_weather>\n<parameter=city\nOslo\n</parameter>\n<parameter=days\n2\n</function>"),
        ("qwen3_coder", "<function='get_weather'><parameter=\"city\">Oslo</parameter><parameter='days'>2</function>"),
        (
            "minimax_m2",
            "<invoke name=get_weather><parameter name='city'>Oslo</parameter><parameter name=days>2</invoke>",
        ),
        (
            "step3",
            "<steptml:invoke name='get_weather'><steptml:parameter name=city>Oslo<steptml:parameter name='days'>2",
        ),
    ],
)
def test_tags_of_names_and_keys_may_lack_their_end_or_have_other_quotes(name, text):
    expected = Message("", (("get_weather", {"city": "Oslo", "days": 2}),))
    assert loaded(read_alike(ROWS[name], TOOLS, text)) == expected


def opening(row):
    return (row.section[0] or row.call[0] or row.name[0]).strip()


@pytest.mark.parametrize("name", sorted(name for name in DATA if opening(ROWS[name])))
def test_a_mark_in_words_is_words(name):
    mark = opening(ROWS[name])
    for text in (
        f"A call begins by {mark} and so on.  \n Good luck!",
        f"{mark} is how it begins",
        f"write {mark}name, then",
        f"twice: {mark} {mark}",
        f"{mark}now we know",
    ):
        assert read_alike(ROWS[name], TOOLS, text) == Message(text)


@pytest.mark.parametrize("name", DATA)
def test_a_call_ends_thoughts_that_are_open_where_models_write_so(name):
    row, thoughts = ROWS[name], thoughts_of(name)
    if row.is_bare:
        return  # nothing marks it
    text = write(row, None, Message("I look.", (("now", {}),)))
    got = read(reader(row, TOOLS, thoughts=thoughts, is_open=True), [text])
    if thoughts.calls_end:
        assert got == Message("", (("now", "{}"),), "I look.")
    else:
        assert got == Message("", (), text)
    bare = f"I look: {opening(row)} is what I write"
    assert read(reader(row, TOOLS, thoughts=thoughts, is_open=True), list(bare)).reasoning == bare


@pytest.mark.parametrize("name", sorted(name for name, row in ROWS.items() if row.is_parallel and row.call[0].strip()))
def test_a_call_that_begins_in_an_unfinished_one_ends_it(name):
    row = ROWS[name]
    calls = (("get_weather", {"days": 2}), ("now", {}))
    first, second = (
        write(row, None, Message("", (call,))).removeprefix("\n").removeprefix(row.section[0]) for call in calls
    )
    cut_off = first[: first.index("2") + 1]
    got = loaded(read(reader(row, TOOLS), [row.section[0] + cut_off + second]))
    assert got == Message("", calls)


@pytest.mark.parametrize("name", DATA)
def test_a_section_s_marks_may_be_missing_or_doubled(name):
    row = ROWS[name]
    if row.is_bare or not row.section[0].strip() or isinstance(row.arguments, PythonCall):
        return
    message = Message("", (("get_weather", {"city": "Oslo"}), ("now", {})))
    text = write(row, None, message).removeprefix("\n")
    doubled = row.section[0] + text + row.section[1]
    assert loaded(read(reader(row, TOOLS), [doubled])) == message
    unclosed = text.removesuffix(row.section[1])
    assert loaded(read(reader(row, TOOLS), [unclosed])) == message
    if row.call[0].strip() or row.name[0].startswith("<"):
        assert loaded(read(reader(row, TOOLS), [text.removeprefix(row.section[0])])) == message


NO_ARGUMENTS = ['""', '"  "', "null", "{}", "{ }", ""]


@pytest.mark.parametrize(
    "name", sorted(name for name in DATA if not isinstance(ROWS[name].arguments, Tags | Elements | PythonCall))
)
@pytest.mark.parametrize("nothing", NO_ARGUMENTS)
def test_no_arguments_are_an_empty_object(name, nothing):
    row = ROWS[name]
    if row.is_bare and isinstance(row.arguments, Object) and nothing[:1] != "{":
        return  # only an object shows that it is a call
    if nothing == "null" and row.name == ("call:", ""):
        nothing = " null"  # it would belong to the name
    text = write(row, None, Message("", (("now", {}), ("get_weather", {"days": 3}))[: 2 if row.is_parallel else 1]))
    text = text.replace("{}", nothing, 1)
    got = read(reader(row, TOOLS), list(text.removeprefix("\n")))
    assert (got.calls[0][0], json.loads(got.calls[0][1])) == ("now", {})
    assert [json.loads(written) for _, written in got.calls[1:]] == [{"days": 3}][: len(got.calls) - 1]
    assert len(got.calls) == (2 if row.is_parallel else 1)
    assert got.content == ""


@pytest.mark.parametrize(
    "name", sorted(name for name in DATA if isinstance(ROWS[name].arguments, Tags | Elements | Object))
)
@pytest.mark.parametrize("is_second", [False, True])
def test_the_end_of_the_answer_ends_a_call_without_arguments(name, is_second):
    row = ROWS[name]
    opening = row.section[0] + row.call[0].replace("{name}", "now") + row.name[0].replace("{server}", "tools")
    first = write(row, None, Message("", (("get_weather", {"days": 2}),))).removeprefix("\n") if is_second else ""
    first = first.removesuffix(row.section[1]) + row.separator if first else ""
    opening = opening.removeprefix(row.section[0]) if first and row.section[1] else opening
    closing = row.call[1].strip()
    name_end = row.name[1].replace("{index}", "0")
    for end in ("", " \n", closing[: len(closing) // 2]):
        text = f"{first}{opening}now{name_end}{end}"
        got = loaded(read_alike(row, TOOLS, text))
        assert got.calls[-1] == ("now", {}), text
        assert (len(got.calls), got.content) == (1 + is_second, ""), text
        assert (
            read(reader(row, TOOLS), [text.replace("now", "nothing")]).calls == read(reader(row, TOOLS), [first]).calls
        )


@pytest.mark.parametrize("name", sorted(ROWS))
def test_an_argument_that_is_written_twice_has_its_last_value(name):
    row = ROWS[name]
    arguments = {"city": "Oslo", "days": 2, "note": "Rome", "more": {"aa": "x", "b": "y", "bb": "z"}}
    text = write(row, None, Message("", (("get_weather", arguments),))).removeprefix("\n")
    text = text.replace("note", "city").replace("bb", "aa")
    expected = [("city", "Rome"), ("days", 2), ("more", [("aa", "z"), ("b", "y")])]
    ((called, written),) = read_alike(row, TOOLS, text).calls
    assert (called, json.loads(written, object_pairs_hook=list)) == ("get_weather", expected)


@pytest.mark.parametrize("name", DATA)
def test_the_beginning_of_a_closing_mark_after_a_call_is_no_words(name):
    row = ROWS[name]
    text = write(row, None, Message("", (("now", {}),))).removeprefix("\n")
    tail = row.call[1] + ("]" if row.is_list else "") + ("" if row.is_bare else row.section[1])
    for end in range(len(text) - len(tail), len(text)):
        assert loaded(read(reader(row, TOOLS), list(text[:end]))) == Message("", (("now", {}),)), text[:end]
        assert loaded(read(reader(row, TOOLS), [f"{text}{text[len(text) - len(tail) : end]}"])).calls == (("now", {}),)


@pytest.mark.parametrize("name", sorted(name for name in DATA if ROWS[name].section[1].startswith(("<", "\n<", "]<"))))
def test_words_in_a_section_without_calls_are_shown_without_its_marks(name):
    row = ROWS[name]
    opening, closing = row.section
    for text, expected in (
        (f"{opening}I need none.{closing}", "I need none."),
        (f"Well.\n{opening}No, \n thanks{closing}\nBye", "Well.\nNo, \n thanks\nBye"),
    ):
        assert read_alike(row, TOOLS, text) == Message(expected)
    assert read(reader(row, TOOLS), [f"{opening} is a mark"]).content == f"{opening} is a mark"


def test_the_page_of_syntaxes_names_all_of_them():
    page = (pathlib.Path(jaxserve.__file__).parents[1] / "docs" / "syntaxes.md").read_text(encoding="utf-8")
    calls, thoughts = page.split("## Tool calls")[1].split("## How")[0].split("## Thoughts")
    for table, names in ((calls, TOOL_PARSERS), (thoughts, REASONING_PARSERS)):
        rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
        assert sorted(re.findall("`(.*?)`", "".join(rows))) == sorted(names)


def is_marked(row):
    return bool(row.section[0].strip() or row.call[0].strip()) and not row.is_bare


@pytest.mark.parametrize("name", sorted(name for name in DATA if is_marked(ROWS[name]) and ROWS[name].is_parallel))
def test_a_text_without_an_end_swallows_no_call(name):
    """Its quote, and whatever closes the call, is missing; another call follows, or nothing."""
    row = ROWS[name]
    if not row.call[0].strip():
        return  # nothing shows where the other call begins
    calls = (("get_weather", {"city": "Os"}), ("now", {}))
    first, second = (
        write(row, None, Message("", (call,))).removeprefix("\n").removeprefix(row.section[0]) for call in calls
    )
    cut_off = row.section[0] + first[: first.index("Os") + 2]
    for end in ("", row.call[1]):
        for text, expected in ((cut_off + end + second, calls), (cut_off + end + row.section[1], calls[:1])):
            got = loaded(read_alike(row, TOOLS, text))
            assert [called for called, _ in got.calls] == [called for called, _ in expected], text
            assert got.calls[0][1]["city"].strip("`\n ") == "Os"
            assert (got.calls[1:], got.content) == (expected[1:], "")


@pytest.mark.parametrize(
    "name", sorted(name for name in DATA if not isinstance(ROWS[name].arguments, Tags | Elements | PythonCall))
)
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("[]", {}),
        ("5", {"city": 5}),
        ('"Oslo"', {"city": "Oslo"}),
        ('["Oslo", 2]', {"city": ["Oslo", 2]}),
        ("true", {"city": True}),
        ('"{\\"days\\": 2}"', {"days": 2}),
    ],
)
def test_arguments_are_an_object_whatever_a_model_writes(name, value, expected):
    row = ROWS[name]
    if row.is_bare and isinstance(row.arguments, Object):
        return  # only an object shows that it is a call
    text = write(row, None, Message("", (("get_weather", {}),))).removeprefix("\n").replace("{}", value)
    if row.name == ("call:", "") and value[0] not in '["':
        text = text.replace(value, f" {value}")  # it would belong to the name
    assert loaded(read(reader(row, TOOLS), list(text))).calls == (("get_weather", expected),)
    if value == "5":
        assert loaded(read(reader(row, {"get_weather": {}}), [text])).calls == (("get_weather", {"": 5}),)


@pytest.mark.parametrize("name", sorted(name for name in DATA if is_marked(ROWS[name])))
def test_marks_with_nothing_between_them_are_no_words(name):
    row = ROWS[name]
    for opening, closing in (row.section, row.call):
        if opening.strip() and closing.strip("` \n"):
            opening = opening.replace("{name}", "now")
            for text in (opening + closing, f"{opening.strip()} \n {closing.strip()}"):
                assert read(reader(row, TOOLS), list(text)).content.strip("` \n") == "", text
                assert read(reader(row, TOOLS), [f"Hi. {text}"]).content.strip("` \n") == "Hi.", text


WEATHER = Message("", (("get_weather", {"city": "Oslo Town", "days": 2}),))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4", "<|tool_call>call:get_weather{city:Oslo Town,days:2}<tool_call|>"),
        ("gemma4", '<|tool_call>:get_weather{city:<|"|>Oslo Town<|"|>, days:02}<tool_call|>'),
        ("functiongemma", "<start_function_call>call:get_weather{city: Oslo Town, days: 2 }<end_function_call>"),
        ("kimi_k2", '<|tool_call_begin|>.get_weather:0<|tool_call_argument_begin|>{"city": Oslo Town, "days": 2}'),
        ("pythonic", "[get_weather(**{'city': 'Oslo Town', 'days': 2})]"),
        ("pythonic", "[get_weather(**{}, city='Oslo Town', **{'days': 2},)]"),
        ("pythonic", "[get_weather('Oslo Town', **{'days': 2})]"),
        ("lfm2", "<|tool_call_start|>[get_weather(city=Oslo Town, days=2)]<|tool_call_end|>"),
        ("granite", '<tool_call>[{"name": "get_weather", "arguments": {"city": "Oslo Town", "days": 2}}]'),
        ("xlam", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo Town", "days": 2}}]'),
        ("xlam", '<tool_call>[{"name": "get_weather", "arguments": {"city": "Oslo Town", "days": 2}}]</tool_call>'),
        ("xlam", '```json\n[{"name": "get_weather", "arguments": {"city": "Oslo Town", "days": 2}}]\n```'),
        ("gigachat3", '<|function_call|>{"name": "get_weather", "arguments": {"city": "Oslo Town", "days": 2}}'),
        ("gigachat3-1", '<|function_call|>{"name": "get_weather", "arguments": {"city": "Oslo Town", "days": 2}}'),
        ("gigachat3-1", 'function call<|role_sep|>\n{"name": "get_weather", "arguments": {city: Oslo Town, days: 2}'),
    ],
)  # fmt: skip
def test_other_forms_that_models_write(name, text):
    assert loaded(read_alike(ROWS[name], TOOLS, text)) == WEATHER


@pytest.mark.parametrize(
    ("key", "flag", "written", "expected"),
    [
        ("city", "true", "42", "42"),
        ("days", "true", "42", 42),
        ("unknown", "true", "42", "42"),
        ("unknown", "false", "42", 42),
        ("unknown", "false", "true", True),
        ("city", "false", "42", "42"),
    ],
)
def test_a_flag_says_what_the_schema_does_not(key, flag, written, expected):
    row = ROWS["deepseek_v32"]
    text = write(row, None, Message("", (("get_weather", {key: written}),)))
    text = text.replace('string="true"', f'string="{flag}"').removeprefix("\n")
    assert loaded(read(reader(row, TOOLS), list(text))).calls == (("get_weather", {key: expected}),)
