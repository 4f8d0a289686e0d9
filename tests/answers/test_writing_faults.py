"""Faults that models make in writing calls and thoughts, one test a kind: what was meant is read, however it is cut."""

# ruff: noqa: RUF001 (some marks are spelled with full-width bars)

import json

import pytest
from written_answers import Message, loaded, read_alike, reader, rows, thoughts_of, write

from jaxserve.answers.parsing.thought_counter import ReasoningCounter
from jaxserve.answers.syntaxes.thought_table import REASONING_PARSERS

ROWS = rows()
TOOLS = {
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {}}},
    "get_time": {"properties": {"zone": {"type": "string"}}},
    "now": {"properties": {}},
    "run": {"properties": {"command": {"type": "string"}, "input": {"type": "string"}}},
}


def parsed(name, text, *, tools=TOOLS, is_cut=False, **options):
    message = read_alike(ROWS[name], tools, text, is_cut=is_cut, **options)
    return message if is_cut else loaded(message)


def dsml(*parameters, tool="get_weather"):
    written = "".join(
        f'<｜DSML｜parameter name="{key}" string="{flag}">{value}</｜DSML｜parameter>\n'
        for key, flag, value in parameters
    )
    return f'<｜DSML｜invoke name="{tool}">\n{written}</｜DSML｜invoke>\n'


@pytest.mark.parametrize("key", ["arguments", "input", "parameters"])
@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("false", '{"city": "Oslo", "days": 2}', {"city": "Oslo", "days": 2}),
        ("true", '{"city": "Oslo"}', {"city": "Oslo"}),
        ("false", "{'city': 'Oslo'}", {"city": "Oslo"}),
        ("false", '"{\\"days\\": 2}"', {"days": 2}),
        # It is a value of its own if it holds anything else.
        ("false", '{"place": "Oslo"}', None),
        ("false", "{}", None),
        ("true", "Oslo", None),
    ],
)
def test_arguments_in_a_parameter_of_that_name_are_the_arguments(key, flag, value, expected):
    for end in ("", dsml(("zone", "true", "CET"), tool="get_time")):
        text = f"<｜DSML｜function_calls>\n{dsml((key, flag, value))}{end}</｜DSML｜function_calls>"
        (name, arguments), *others = parsed("deepseek_v32", text).calls
        assert name == "get_weather"
        assert arguments == expected if expected else list(arguments) == [key]
        assert others == ([("get_time", {"zone": "CET"})] if end else [])


def test_a_parameter_that_the_tool_has_is_no_wrapper():
    text = f"<｜DSML｜tool_calls>\n{dsml(('input', 'true', '{"command": "ls"}'), tool='run')}</｜DSML｜tool_calls>"
    assert parsed("deepseek_v4", text).calls == (("run", {"input": '{"command": "ls"}'}),)
    written = write(ROWS["qwen3_coder"], None, Message("", (("get_weather", {"arguments": {"city": "Oslo"}}),)))
    assert parsed("qwen3_coder", written).calls == (("get_weather", {"city": "Oslo"}),)
    begun = parsed("qwen3_coder", written[: written.index("slo")], is_cut=True)  # what is in it is not known yet
    assert begun.calls == (("get_weather", r'{"arguments": "{\"city\": \"O'),)


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<｜DSML｜toolcalls>", "</｜DSML｜tool_calls>"),
        ("<｜DSML｜tool>", "</｜DSML｜tool>"),
        ("<｜DSML｜ calls>", "</｜DSML｜ calls>"),
        ("<｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
        ("<｜DSML｜tool_calls>", ""),
        ("", "</｜DSML｜tool_calls>"),
    ],
)
def test_misspelled_marks_of_dsml_are_its_marks(name, opening, closing):
    call = dsml(("city", "true", "Seoul")).replace("invoke", " invoke" if opening.endswith(" calls>") else "invoke")
    expected = (("get_weather", {"city": "Seoul"}),)
    assert parsed(name, f"Let me check.\n{opening}\n{call}{closing}") == Message("Let me check.", expected)
    thought = parsed(name, f"Hm.{opening}\n{call}{closing}", thoughts=REASONING_PARSERS["deepseek_v4"], is_open=True)
    assert thought == Message("", expected, "Hm.")
    prose = f"A section begins by {opening or 'nothing'}, as in <｜DSML｜foo> and <|DSML|tool>."
    assert parsed(name, prose) == Message(prose)


MARKED = sorted(
    name
    for name, row in ROWS.items()
    if (row.section[0].strip() or row.call[0].strip()) and not row.is_bare and thoughts_of(name).calls_end
)


@pytest.mark.parametrize("name", MARKED)
def test_a_call_that_thoughts_only_mention_is_not_made(name):
    """What follows it decides: more thoughts and their end, or the end of the thoughts or of the answer at once."""
    row, thoughts = ROWS[name], thoughts_of(name)
    closing = thoughts.closing[0].strip()
    calls = (("get_weather", {"city": "Oslo"}),)
    mentioned, made = (write(row, None, Message("", each)).strip() for each in (calls, (("now", {}),)))
    options = {"thoughts": thoughts, "is_open": True}
    text = f"I may write {mentioned} here"
    assert parsed(name, f"{text}{closing}{made}", **options) == Message("", (("now", {}),), text)
    assert parsed(name, f"{text}{closing}Yes.", **options) == Message("Yes.", (), text)
    assert parsed(name, f"Hm. {mentioned}{made}", **options) == Message("", (*calls, ("now", {})), "Hm.")
    assert parsed(name, f"Hm. {mentioned}\n{closing}\nYes.", **options) == Message("Yes.", calls, "Hm.")
    got = parsed(name, f"Hm. {mentioned} More.", **options)
    assert (got.calls, got.reasoning, got.content.strip()) == (calls, "Hm.", "More.")


@pytest.mark.parametrize("end", [1, 8, 25, 60, 200])
def test_a_call_in_thoughts_that_is_cut_shows_no_markup(end):
    call = write(ROWS["hermes"], None, Message("", (("get_weather", {"city": "Oslo"}),))).strip()
    thoughts = REASONING_PARSERS["qwen3"]
    got = parsed("hermes", f"Hm. {call}"[: 4 + end], thoughts=thoughts, is_open=True, is_cut=True)
    assert (got.reasoning, got.content) == ("Hm.", "")


def test_thoughts_that_mention_a_call_are_counted():
    call = write(ROWS["hermes"], None, Message("", (("now", {}),))).strip()
    pieces = ["Hm ", *call, " so", "</think>", "Yes", " ."]
    counter = ReasoningCounter(
        reader(ROWS["hermes"], TOOLS, thoughts=REASONING_PARSERS["qwen3"], is_open=True), token_text=pieces.__getitem__
    )
    assert sum(counter.count([index]) for index in range(len(pieces))) == len(pieces) - 3


@pytest.mark.parametrize("name", ["cohere_command3", "cohere_command4"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A <co>rainbow</co: 0:[1]>.", "A rainbow."),
        ("<co: 0>foo</co: 0> <co: 1,2>bar</co: 0:[1,2],1:[3,4]>", "foo bar"),
        ("x <co is, <code>y</code>, </cow>", "x <co is, <code>y</code>, </cow>"),
    ],
)
def test_citations_are_not_shown(name, text, expected):
    thoughts = REASONING_PARSERS[name]
    opening, closing = thoughts.answer
    written = f"{thoughts.opening[0]}{text}{thoughts.closing[0]}{opening}{text}{closing}"
    assert parsed("cohere_command3", written, thoughts=thoughts) == Message(expected, (), expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel>thought\n<channel|>Hello.<channel|>", Message("Hello.")),
        ("<|channel><|channel>thought\nHm.\n<channel|>Hello.", Message("Hello.", (), "Hm.")),
        ("Hello.<channel|> And <channel|>more.", Message("Hello. And more.")),
        ("<|channel>thought\nHm.<channel|><channel|>Hello.", Message("Hello.", (), "Hm.")),
    ],
)
def test_stray_marks_of_gemma_are_not_shown(text, expected):
    assert parsed("gemma4", text, thoughts=REASONING_PARSERS["gemma4"]) == expected


@pytest.mark.parametrize("identity", ["0", "functions:5", ":0", "functions.3"])
@pytest.mark.parametrize(
    ("arguments", "called"),
    [
        ('{"city": "Oslo"}', "get_weather"),
        ('{"zone": "CET"}', "get_time"),
        ('{"command": "ls", "input": ""}', "run"),
        ('{"place": "Oslo"}', None),
        ("{}", None),
    ],
)
def test_a_number_without_a_name_calls_the_tool_whose_arguments_these_are(identity, arguments, called):
    text = (
        f"<|tool_calls_section_begin|><|tool_call_begin|>{identity}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    got = parsed("kimi_k2", text)
    assert [name for name, _ in got.calls] == ([called] if called else [])
    assert got.content == ("" if called else text)
    assert parsed("kimi_k2", text, tools={"any": {}}).calls == ()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('"echo "hi" there"', 'echo "hi" there'),
        ('"say "yes", please"', 'say "yes", please'),
        ('"<a href="x">hi</a>"', '<a href="x">hi</a>'),
        ('"python3 -c "print(f(3*x, s=\'\\\\,\'))""', "python3 -c \"print(f(3*x, s='\\,'))\""),
        ('"grep -c "a: b" x"', 'grep -c "a: b" x'),
        ("'it's here'", "it's here"),
        ('"plain"', "plain"),
        ('"a\\"b\\\\"', 'a"b\\'),
        ('"ends in quotes """', 'ends in quotes ""'),
    ],
)
@pytest.mark.parametrize("after", ["", ', "input": "x"', ' ,\n    "input": "x"', ' "input": "x"'])
def test_quotes_in_a_text_need_no_escapes(written, expected, after):
    text = f'<tool_call>{{"name": "run", "arguments": {{"command": {written}{after}}}}}</tool_call>'
    assert parsed("hermes", text) == Message("", (("run", {"command": expected} | ({"input": "x"} if after else {})),))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (r"""'python3 -c "print(f(3*x, s='\\,'))"'""", "python3 -c \"print(f(3*x, s='\\,'))\""),
        ("'sed -n '1,5p' x'", "sed -n '1,5p' x"),
        ('"echo "(a)"; ls"', 'echo "(a)"; ls'),
        ("'x'", "x"),
    ],
)
@pytest.mark.parametrize("after", ["", ", input='y'"])
def test_quotes_in_a_text_of_a_call_in_python_need_no_escapes(written, expected, after):
    text = f"<|tool_call_start|>[run(command={written}{after}), now()]<|tool_call_end|>"
    arguments = {"command": expected} | ({"input": "y"} if after else {})
    assert parsed("lfm2", text).calls == (("run", arguments), ("now", {}))


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "kimi_k2"])
def test_arguments_in_a_text_may_lack_escapes(name):
    row = ROWS[name]
    text = write(row, None, Message("", (("get_weather", {"city": "Oslo", "days": 2}),))).removeprefix("\n")
    text = text.replace('{"city": "Oslo", "days": 2}', '"{"city": "Oslo", "days": 2}"')
    assert parsed(name, text) == Message("", (("get_weather", {"city": "Oslo", "days": 2}),))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{'urgent', 'bug'}", ["urgent", "bug"]),
        ("{1, 2.5, -3}", [1, 2.5, -3]),
        ("{'one'}", ["one"]),
        ("{True, None}", [True, None]),
        ("[{'a'}, {'b': {'c', }}]", [["a"], {"b": ["c"]}]),
        ("{}", {}),
        ("{'a': 1}", {"a": 1}),
    ],
)
def test_a_set_of_python_is_a_list(written, expected):
    text = f"<|tool_call_start|>[get_weather(city='Oslo', tags={written})]<|tool_call_end|>"
    assert parsed("lfm2", text).calls == (("get_weather", {"city": "Oslo", "tags": expected}),)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('<![CDATA[<a href="/x">hi</a> </param>]]>', '<a href="/x">hi</a> </param>'),
        ("\n<![CDATA[a\n]] > b]]>\n", "a\n]] > b"),
        ("<![CDATA[]]>", ""),
        ("plain <![CDATA[x]]>", "plain <![CDATA[x]]>"),
        ("plain", "plain"),
    ],
)
def test_character_data_is_what_is_in_it(written, expected):
    text = f'<function name="run"><param name="command">{written}</param><param name="input">x</param></function>'
    assert parsed("minicpm5", text).calls == (("run", {"command": expected, "input": "x"}),)


@pytest.mark.parametrize(
    ("written", "kind", "expected"),
    [
        ("null", "string", "null"),
        ("02134", "string", "02134"),
        ("true", "string", "true"),
        ("02", "integer", 2),
        ("null", "null", None),
        ("5", "number", 5),
    ],
)
def test_words_without_quotes_follow_the_schema(written, kind, expected):
    tools = {"f": {"properties": {"x": {"type": kind}}}}
    assert parsed("gemma4", f"<|tool_call>call:f{{x:{written}}}<tool_call|>", tools=tools).calls == (
        ("f", {"x": expected}),
    )


@pytest.mark.parametrize("value", [[{"id": "1", "task": 'say "hi"'}], {"path": "C:\\x", "n": [1, None]}])
def test_a_value_may_have_been_escaped_once_more(value):
    text = json.dumps(json.dumps(value))[1:-1]
    kind = "array" if isinstance(value, list) else "object"
    tools = {"f": {"properties": {"x": {"type": kind}}}}
    written = f"<tool_call>f<arg_key>x</arg_key><arg_value>{text}</arg_value></tool_call>"
    assert parsed("glm47", written, tools=tools).calls == (("f", {"x": value}),)


NESTED = {
    "properties": {
        "order": {"$ref": "#/$defs/order"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "filter": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "integer"}, {"type": "object"}]},
        "label": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "any": {},
    },
    "$defs": {
        "order": {
            "type": "object",
            "properties": {"id": {"type": "integer"}, "lines": {"type": "array", "items": {"$ref": "#/$defs/order"}}},
        }
    },
}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("<order><id>7</id></order>", {"order": {"id": 7}}),
        (
            "<order><lines><item><id>1</id></item>\n<item><lines></lines></item></lines></order>",
            {"order": {"lines": [{"id": 1}, {"lines": ""}]}},
        ),
        ("<order>{\"id\": 7}</order>\n<tags>['a']</tags>", {"order": {"id": 7}, "tags": ["a"]}),
        ("<tags><item>1</item><item>b</item></tags>", {"tags": ["1", "b"]}),
        ("<tags><tag>1</tag></tags>", {"tags": ["1"]}),
        ("<filter><item>1</item></filter>", {"filter": [1]}),
        ("<filter>5</filter>", {"filter": 5}),
        ("<filter><max>10</max></filter>", {"filter": {"max": "10"}}),
        ("<label>hi</label>", {"label": "hi"}),
        ("<any><item>x</item></any>", {"any": ["x"]}),
        ("<any><a>x</a><b>{}</b></any>", {"any": {"a": "x", "b": "{}"}}),
        ("<order><id>7</id>", {"order": {"id": 7}}),
        ("</id><order><id>7</order>", {"order": {"id": 7}}),
        ("", {}),
    ],
)
def test_elements_in_elements_are_objects_and_lists(written, expected):
    mark = "]<]minimax[>["
    body = written.replace("<", f"{mark}<")
    text = (
        f'{mark}<tool_call>\n{mark}<invoke name="f">{body}{mark}</invoke>\n'
        f'{mark}<invoke name="now">{mark}</invoke>\n{mark}</tool_call>'
    )
    assert parsed("minimax_m3", text, tools={"f": NESTED, "now": {}}).calls == (("f", expected), ("now", {}))


def test_elements_that_nest_without_end_are_text_in_the_end():
    mark = "]<]minimax[>["
    text = f'{mark}<tool_call>{mark}<invoke name="f">' + f"{mark}<a>" * 3000 + f"{mark}</invoke>{mark}</tool_call>"
    ((name, arguments),) = parsed("minimax_m3", text, tools={"f": {}}).calls
    assert name == "f"
    assert json.dumps(arguments).count(f"{mark}<a>") == 3000 - 64


MUSE = '<atem:function_calls>\n<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" to=user<|message|>Hi.<|eot|>", Message("Hi.")),
        (f" to=now<|message|>{MUSE}", Message("", (("now", {}),))),
        (
            f" to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>I look.<|eom|>"
            f"<|start|>assistant to=now<|message|>{MUSE}<|eom|><|start|>assistant to=now<|message|>{MUSE}<|eot|>",
            Message("I look.", (("now", {}), ("now", {})), "Hm."),
        ),
        # What is shown to the user, or thought of, is no call.
        (f" to=user<|message|>Write this: {MUSE}<|eot|>", Message(f"Write this: {MUSE}")),
        (
            f" to=self<|message|>Or {MUSE}?<|eom|><|start|>assistant to=user<|message|>Hi.<|eot|>",
            Message("Hi.", (), f"Or {MUSE}?"),
        ),
    ],
)
def test_a_call_of_muse_is_a_message_to_the_tool(text, expected):
    assert parsed("muse", text, thoughts=REASONING_PARSERS["muse"]) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("to=commentary<|message|>I look.<|eom|>", Message("I look.")),
        ("to=developer<|message|>note<|eom|><|start|>assistant to=user<|message|>Hi.<|eot|>", Message("Hi.")),
        ("to=else<|message|>Hi.<|eom|>", Message("Hi.")),
        ("<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Hi.", Message("Hi.", (), "Hm.")),
        ("<|start|>assistant<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Hi.", Message("Hi.", (), "Hm.")),
        (
            "to=user<|message|>I look.<|eom|><|start|>assistant to=self<|message|>Hm.<|eom|>",
            Message("I look.", (), "Hm."),
        ),
        # The end of thoughts is missing: the next header ends them.
        ("to=self<|message|>Hm.<|start|>assistant to=user<|message|>Hi.<|eot|>", Message("Hi.", (), "Hm.")),
        ("to=self<|message|>Hm. to=user<|message|>Hi.<|eot|>", Message("Hi.", (), "Hm.")),
        ("to=self<|message|>Hm. to=developer<|message|>note<|eom|>", Message("", (), "Hm.")),
        (f"to=self<|message|>Hm. to=now<|message|>{MUSE}<|eom|>", Message("", (("now", {}),), "Hm.")),
        (f"to=now.now<|message|>{MUSE.replace('now', 'now.now')}<|eom|>", Message("", (("now", {}),))),
        (f"to=user<|message|>{MUSE}<|eot|>", Message(MUSE)),
        ("to=user<|message|><b>Hi.</b> to=", Message("<b>Hi.</b> to=")),
    ],
)
def test_messages_of_muse_end_where_the_next_one_begins(text, expected):
    assert parsed("muse", text, thoughts=REASONING_PARSERS["muse"]) == expected


def test_a_message_without_a_recipient_is_words_of_muse_glimmer():
    text = "<|message|>Hi.<|eom|><|start|>assistant to=self<|message|>Hm.<|eom|>"
    assert parsed("muse", text, thoughts=REASONING_PARSERS["muse_glimmer"]) == Message("Hi.", (), "Hm.")


@pytest.mark.parametrize("name", ["glm45", "glm47", "hy_v3", "hy_v4", "k2_horizon", "iquest_q1"])
def test_an_escaped_line_break_between_tags_is_white_space(name):
    row = ROWS[name]
    text = write(row, None, Message("", (("get_weather", {"city": "Oslo", "days": 2}), ("now", {})))).strip()
    key, value = row.arguments.key, row.arguments.value
    text = text.replace(key[1].strip() + key[1][len(key[1].strip()) :] + value[0], f"{key[1].strip()}\\n{value[0]}")
    text = text.replace(f"get_weather{row.name[1]}", f"get_weather{row.name[1].strip()}\\n")
    assert text.count("\\n") == 3
    assert parsed(name, text) == Message("", (("get_weather", {"city": "Oslo", "days": 2}), ("now", {})))


@pytest.mark.parametrize(
    ("key", "expected"), [("a&amp;b", "a&b"), ("&quot;a&quot;", '"a"'), ("&amp;quot;", "&quot;"), ("a&b", "a&b")]
)
def test_keys_of_kimi_k3_have_entities(key, expected):
    text = write(ROWS["kimi_k3"], None, Message("", (("run", {"kkk": "x &amp; y"}),))).strip().replace("kkk", key)
    assert parsed("kimi_k3", text) == Message("", (("run", {expected: "x &amp; y"}),))


@pytest.mark.parametrize("name", ["xlam", "llama3_json", "pythonic"])
@pytest.mark.parametrize("gap", ["", "\n\n"])
def test_a_call_without_a_mark_may_follow_thoughts_that_nobody_reads(name, gap):
    call = write(ROWS[name], None, Message("", (("get_weather", {"city": "Oslo"}),))).strip()
    calls = (("get_weather", {"city": "Oslo"}),)
    assert parsed(name, f"Hm.</think>{gap}{call}") == Message("Hm.</think>", calls)
    thoughts = REASONING_PARSERS["deepseek_r1"]
    assert parsed(name, f"Hm.</think>{gap}{call}", thoughts=thoughts, is_open=True) == Message("", calls, "Hm.")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all\nHello.", Message("Hello.")),
        (">>>all\nHello.", Message("Hello.")),
        ("alligator", Message("alligator")),
        ('get_weather\n{"city": "Oslo"}', Message("", (("get_weather", {"city": "Oslo"}),))),
        (
            'all\nI look.>>>get_weather\n{"city": "Oslo"}>>>now\n{}',
            Message("I look.", (("get_weather", {"city": "Oslo"}), ("now", {}))),
        ),
        ('launch\n{"name": "now"}>>>now\n{}', Message("", (("now", {}),))),
        ("now\nwe know", Message("now\nwe know")),
    ],
)
def test_messages_of_functionary_begin_with_their_recipient(text, expected):
    thoughts = REASONING_PARSERS["functionary_v3_2"]
    assert parsed("functionary_v3_2", text, thoughts=thoughts) == expected


@pytest.mark.parametrize("is_open", [True, False])
def test_an_answer_of_kimi_k3_is_in_its_channels(is_open):
    thoughts = REASONING_PARSERS["kimi_k3"]
    call = write(ROWS["kimi_k3"], None, Message("", (("get_weather", {"city": "Oslo", "days": 2}),))).strip()
    start = "Hm.<|close|>think<|sep|>" if is_open else ""
    text = f"{start}<|open|>response<|sep|>I look.<|close|>response<|sep|>{call}<|close|>message<|sep|>"
    expected = Message("I look.", (("get_weather", {"city": "Oslo", "days": 2}),), "Hm." if is_open else "")
    assert parsed("kimi_k3", text, thoughts=thoughts, is_open=is_open) == expected
    shown = "I look.<|close|>response<|sep|><|close|>message<|sep|>"  # the prompt has opened the channel
    assert parsed("kimi_k3", shown, thoughts=thoughts) == Message("I look.")
