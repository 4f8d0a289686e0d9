"""Every syntax that is known by name: what is written so is read back, and what went wrong in writing harms nothing."""

import itertools
import json
import pathlib
import random
import re

import jsonschema
import pytest
from depths import examples
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from written_answers import Message, loaded, read, reader, rows, thoughts_of, write

import jaxserve
from jaxserve.server.parsing.syntax import Channels, Object, PythonCall, Tags, Wrapped
from jaxserve.server.parsing.table import REASONING_PARSERS, TOOL_PARSERS
from jaxserve.server.parsing.tools import Tool
from jaxserve.server.parsing.writer import call_rules, literal
from jaxserve.structured.grammar import JsonOptions, arguments_schema, lark_grammar

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

# Texts of which no syntax takes any part for a mark: what is written between tags has no escapes.
WORDS = st.text(
    st.characters(exclude_characters="<>[]{}()`◁▷|", exclude_categories=["Cs", "Cc"]) | st.just("\n"), max_size=30
)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def values(texts):
    numbers = st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6)
    scalars = st.none() | st.booleans() | numbers | texts
    keys = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
    return st.recursive(scalars, lambda each: st.lists(each, max_size=3) | st.dictionaries(keys, each, max_size=3))


def arguments(texts):
    """Arguments of get_weather that fit its schema."""
    nested = values(texts)
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
    call = st.tuples(st.sampled_from(["get_weather", "fs.read-file"]), arguments(texts)) | st.just(("now", {}))
    words = WORDS.map(lambda text: re.sub(r"(?i)functools|function call|action:|here|to=", "", text).strip())
    most = 3 if row.is_parallel else 1
    calls = st.lists(call, max_size=most).map(tuple)
    return st.builds(Message, content=st.just("") if row.is_bare else words, calls=calls, reasoning=words)


def cut(text, places):
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[first:last] for first, last in itertools.pairwise(bounds)]


PLACES = st.lists(st.integers(0, 10_000), max_size=10)


@pytest.mark.parametrize("name", sorted(ROWS))
@settings(max_examples=examples(20), deadline=None, phases=(Phase.explicit, Phase.generate))
@given(data=st.data())
def test_what_is_written_is_read_back(name, data):
    row, thoughts = ROWS[name], thoughts_of(name)
    message = data.draw(messages(row))
    text = write(row, thoughts, message)
    for pieces in ([text], list(text), cut(text, data.draw(PLACES))):
        assert loaded(read(reader(row, TOOLS, thoughts=thoughts), pieces)) == message


@pytest.mark.parametrize("name", sorted(ROWS))
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
    whole = read(reader(row, TOOLS, thoughts=thoughts), [text], is_cut=is_cut)
    assert read(reader(row, TOOLS, thoughts=thoughts), list(text), is_cut=is_cut) == whole
    for called, written in whole.calls:
        assert called in text
        assert called in TOOLS
        if not is_cut:
            json.loads(written)


@pytest.mark.parametrize("name", sorted(ROWS))
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
    assert read(reader(row, TOOLS), [text]) == Message(text)
    assert read(reader(row, TOOLS), list(text)) == Message(text)
    assert read(reader(row, {}), [text]) == Message(text)


@pytest.mark.parametrize("name", sorted(name for name in DATA if ROWS[name].is_parallel))
def test_a_tool_that_is_not_offered_hides_no_call_and_makes_none(name):
    """Its arguments look like a call of one that is."""
    row = ROWS[name]
    launch, now = ("launch", {"more": {"name": "now", "arguments": {"now": {}}}, "now": {}}), ("now", {})
    for calls in ((launch, now), (now, launch), (launch, now, launch)):
        text = write(row, None, Message("", calls)).removeprefix("\n")
        assert loaded(read(reader(row, TOOLS), [text])).calls == (now,)
        assert loaded(read(reader(row, TOOLS), list(text))).calls == (now,)
    text = write(row, None, Message("", (launch,))).removeprefix("\n")
    assert read(reader(row, TOOLS), list(text)) == Message(text)


@pytest.mark.parametrize(
    "name", sorted(name for name in DATA if ROWS[name].is_list and ROWS[name].section[0] and not ROWS[name].is_bare)
)
def test_a_list_without_calls_is_no_words(name):
    opening, closing = ROWS[name].section
    for text in (f"{opening}[]{closing}", f"{opening} [ ]{closing}"):
        assert read(reader(ROWS[name], TOOLS), [text]) == Message()
        assert read(reader(ROWS[name], TOOLS), list(text)) == Message()
    for text in (f"{opening}[1", f"{opening} [] and [1"):
        assert read(reader(ROWS[name], TOOLS), list(text)).content.endswith("[1")


@pytest.mark.parametrize("name", sorted(name for name in DATA if isinstance(ROWS[name].arguments, Tags)))
@pytest.mark.parametrize("arguments", [{}, {"city": "Oslo", "days": 2}])
def test_an_object_in_place_of_tags_is_the_arguments(name, arguments):
    row = ROWS[name]
    text = write(row, None, Message("", (("get_weather", {}), ("now", {})))).replace(
        f"get_weather{row.name[1]}", f"get_weather{row.name[1]}{json.dumps(arguments)}"
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
    assert loaded(read(reader(ROWS[name], TOOLS), [text])) == expected
    assert loaded(read(reader(ROWS[name], TOOLS), list(text))) == expected


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
        assert read(reader(ROWS[name], TOOLS), [text]) == Message(text)
        assert read(reader(ROWS[name], TOOLS), list(text)) == Message(text)


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
    "name", sorted(name for name in DATA if not isinstance(ROWS[name].arguments, Tags | PythonCall))
)
@pytest.mark.parametrize("nothing", NO_ARGUMENTS)
def test_no_arguments_are_an_empty_object(name, nothing):
    row = ROWS[name]
    if nothing == "null" and row.name == ("call:", ""):
        nothing = " null"  # it would belong to the name
    text = write(row, None, Message("", (("now", {}), ("get_weather", {"days": 3}))[: 2 if row.is_parallel else 1]))
    text = text.replace("{}", nothing, 1)
    got = read(reader(row, TOOLS), list(text.removeprefix("\n")))
    assert (got.calls[0][0], json.loads(got.calls[0][1])) == ("now", {})
    assert [json.loads(written) for _, written in got.calls[1:]] == [{"days": 3}][: len(got.calls) - 1]
    assert len(got.calls) == (2 if row.is_parallel else 1)
    assert got.content == ""


def test_the_page_of_syntaxes_names_all_of_them():
    page = (pathlib.Path(jaxserve.__file__).parents[1] / "docs" / "syntaxes.md").read_text(encoding="utf-8")
    calls, thoughts = page.split("## Tool calls")[1].split("## How")[0].split("## Thoughts")
    for table, names in ((calls, TOOL_PARSERS), (thoughts, REASONING_PARSERS)):
        rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
        assert sorted(re.findall("`(.*?)`", "".join(rows))) == sorted(names)


PLACE = {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]}
WRITTEN = {
    "typed": {
        "properties": {
            "city": {"enum": ["Oslo", "Z\u00fcrich"]},
            "days": {"type": "integer"},
            "ok": {"type": "boolean"},
        },
        "required": ["city", "days"],
    },
    "texts": {
        "properties": {
            "first": {"type": "string"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "any": {},
            "id": {"type": ["string", "integer"]},
        },
        "required": ["note", "id"],
    },
    "optional": {"properties": {"a": {"type": "string"}, "b": {"type": "boolean"}, "c": {"type": "null"}}},
    "listed": {
        "properties": {
            "code": {"type": "string", "enum": ["1", "02134", "true", "null", "", "a < b"]},
            "mode": {"enum": ["on", None, True, 3, "3"]},
            "kind": {"const": "f"},
            "level": {"type": "integer", "enum": [1, 2]},
        },
        "required": ["code", "mode", "kind", "level"],
    },
    "nested": {
        "properties": {
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
            "place": {"$ref": "#/$defs/place"},
            "maybe": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
            "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            "ratio": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
        },
        "required": ["tags", "place", "maybe", "ratio"],
        "$defs": {"place": PLACE, "unused": {"type": "string"}},
    },
    "free": {"properties": {"any": {"type": "object"}, "list": {"type": "array", "maxItems": 2}}, "required": ["any"]},
    "bounded": {"properties": {"city": {"type": "string", "maxLength": 6}}, "required": ["city"]},
    "pattern": {"properties": {"city": {"type": "string", "pattern": "^[a-c]{1,3}$"}}, "required": ["city"]},
    "open": {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "integer"}},
    "unnamed": {"maxProperties": 2},
    "referred": {"$ref": "#/$defs/place", "$defs": {"place": PLACE}},
    "either": {"anyOf": [PLACE, {"properties": {"city": {"type": "string"}}, "required": ["city"]}]},
    "odd names": {"properties": {"a b": {"type": "integer"}, "<x>": {"type": "integer"}}, "required": ["a b"]},
}


def prepared(schema):
    """The parameters of a tool as they come to a writer."""
    return json.loads(arguments_schema(json.dumps(schema), param="tools", options=JsonOptions()))


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case)
        for name, row in sorted(ROWS.items())
        for case in (WRITTEN if isinstance(row.arguments, Tags | PythonCall) else ["typed"])
    ],
)
def test_what_the_grammar_lets_a_model_write_is_read_back(name, case):
    """A call that is forced is a call, and follows its schema: whatever of what is allowed a model chooses."""
    row = ROWS[name]
    schemas = {"get_weather": {"type": "object", **WRITTEN[case]}, "now": {"type": "object", "properties": {}}}
    tools = [Tool(called, prepared(schema)) for called, schema in schemas.items()]
    rules = call_rules(row, tools, spell=literal, is_parallel=True)
    grammar = lark_grammar(f"start: calls\n{rules}", param="tools")
    for seed in range(4):
        text = sentence(grammar, random.Random(seed), traps(row))
        got = loaded(read(reader(row, schemas), list(text)))
        assert got.calls, text
        assert not got.content.strip(), text
        for called, written in got.calls:
            jsonschema.validate(written, schemas[called])
            assert called != "now" or not written


def traps(row):
    """What a model may want to write within a value: tags, also drifted ones, and words that mean no text."""
    tags = row.arguments if isinstance(row.arguments, Tags) else Tags(key=("", ""), value=("", ""))
    marks = [*tags.value, tags.key[0], *row.section, *row.call, *row.name]
    drifted = [mark.replace("</", "</ ").replace(">", " >") for mark in marks if "</" in mark]
    return [tags.value[1] or '"', *marks, *drifted, "null", "3", "True", " ", "\n\n", "\\n", "<", "</", "<b>"]


def sentence(grammar, choose, words=()):
    """Some text that a grammar allows, with as much of these words as it allows: digits and white space are unlikely,
    and the first word likely, so that it ends.
    """
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    text = bytearray()
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        if matcher.is_accepting() and (not allowed or choose.random() < 0.5):
            break
        likely = [byte for byte in allowed if chr(byte) not in "0123456789 \n\t"]
        written = [choose.choice(likely if likely and choose.random() < 0.8 else allowed)]
        if words and choose.random() < 0.3:
            word = list((words[0] if choose.random() < 0.5 else choose.choice(words)).encode())
            written = word[: matcher.validate_tokens(word)]
        assert matcher.consume_tokens(written), matcher.get_error()
        text += bytes(written)
        assert len(text) < 5000
    return text.decode()


FORECAST = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ok": {"type": ["boolean", "null"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "units": {"enum": ["C", "F"]},
    },
    "required": ["city", "ok"],
}
QWEN = "<tool_call>\n<function=f>\n{}</function>\n</tool_call>"


def tag(key, value):
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def allows(name, schema, text):
    """Return whether this text may be a call of the tool f in this syntax."""
    rules = call_rules(ROWS[name], [Tool("f", prepared(schema))], spell=literal, is_parallel=False)
    matcher = LLMatcher(LLTokenizer("byte"), lark_grammar(f"start: calls\n{rules}", param="tools"))
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("name", "text", "is_allowed"),
    [
        ("qwen3_coder", QWEN.format(tag("city", "A <b>\n</b> {x}\n") + tag("ok", "true")), True),
        ("qwen3_coder", QWEN.format(tag("city", "") + tag("ok", "null") + tag("tags", '["a < b"]')), True),
        ("qwen3_coder", QWEN.format(tag("city", "A") + tag("days", "3") + tag("ok", "true") + tag("units", "F")), True),
        ("qwen3_coder", QWEN.format(tag("city", "A")), False),
        ("qwen3_coder", QWEN.format(tag("ok", "true") + tag("city", "A")), False),
        ("qwen3_coder", QWEN.format(tag("city", "</parameter>") + tag("ok", "true")), False),
        ("qwen3_coder", QWEN.format(tag("city", "< / parameter1>") + tag("ok", "true")), False),
        ("qwen3_coder", QWEN.format(tag("city", "<parameter=x>") + tag("ok", "true")), False),
        ("qwen3_coder", QWEN.format(tag("city", "A") + tag("ok", "yes")), False),
        ("qwen3_coder", QWEN.format(tag("city", "A") + tag("ok", "true") + tag("tags", '["</parameter>"]')), False),
        ("qwen3_coder", QWEN.format(tag("city", "A") + tag("ok", "true") + tag("units", "K")), False),
        ("qwen3_coder", QWEN.format(tag("city", "A") + tag("ok", "true") + tag("more", "K")), False),
        ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {"city":"A","ok":true}}\n</tool_call>', False),
        ("glm47", "<tool_call>f<arg_key>city</arg_key><arg_value>A</arg_value><arg_key>ok</arg_key><arg_value>true"
         "</arg_value></tool_call>", True),
        ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="city"'  # noqa: RUF001
         ' string="true">A</｜DSML｜parameter>\n<｜DSML｜parameter name="ok" string="false">true</｜DSML｜parameter>\n'  # noqa: RUF001
         '</｜DSML｜invoke>\n</｜DSML｜function_calls>', True),  # noqa: RUF001
        ("pythonic", '[f(city="A \\"B\\"", ok=True)]', True),
        ("pythonic", '[f(city="A", days=3, ok=None, tags=["</parameter>"], units="C")]', True),
        ("pythonic", '[f(city="A", ok=False, units="C")]', True),
        ("pythonic", '[f(city="A")]', False),
        ("pythonic", '[f(ok=True, city="A")]', False),
        ("pythonic", '[f(city="A", ok=true)]', False),
        ("pythonic", '[f(city="A", ok=True, )]', False),
        ("pythonic", '[{"name": "f", "arguments": {"city":"A","ok":true}}]', False),
        ("lfm2", '<|tool_call_start|>[f(city="A", ok=True)]<|tool_call_end|>', True),
        ("olmo3", '<function_calls>f(city="A", ok=True)</function_calls>', True),
    ],
)  # fmt: skip
def test_a_forced_call_is_written_as_the_syntax_has_it(name, text, is_allowed):
    assert allows(name, FORECAST, text) == is_allowed


@pytest.mark.parametrize("case", ["bounded", "pattern", "open", "unnamed", "referred", "either", "odd names", "free"])
def test_what_tags_cannot_say_is_an_object(case):
    arguments = {"bounded": {"city": "A"}, "pattern": {"city": "a"}, "open": {"b": 1}, "unnamed": {"x": []}}
    arguments |= {"referred": {"lat": 1}, "either": {"lat": 1}, "odd names": {"a b": 1}, "free": {"any": {"</a>": 1}}}
    for name in ("qwen3_coder", "glm45", "seed_oss"):
        opening, closing = ROWS[name].call
        text = f'{opening}{{"name": "f", "arguments": {json.dumps(arguments[case])}}}{closing.splitlines()[-1]}'
        assert allows(name, {"type": "object", **WRITTEN[case]}, text)


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder", "deepseek_v32", "lfm2"])
def test_a_tool_that_is_not_strict_is_called_with_any_arguments(name):
    row = ROWS[name]
    tools = [Tool("get_weather", {"type": "object", **WRITTEN["typed"]}), Tool("now", {}, is_strict=False)]
    rules = call_rules(row, tools, spell=literal, is_parallel=True, is_free=True)
    matcher = LLMatcher(LLTokenizer("byte"), lark_grammar(f"start: calls\n{rules}", param="tools"))
    text = write(row, None, Message("", (("get_weather", {"what": 'a "b"', "n": None}), ("now", {"x": 3}))))
    text = text.removeprefix("\n").replace("'a \"b\"'", '"a"')
    assert matcher.try_consume_tokens(list(text.encode())) == len(text.encode())
    assert matcher.is_accepting()
