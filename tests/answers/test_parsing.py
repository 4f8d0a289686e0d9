"""Parse what a model writes: every syntax, with the same result wherever the text is cut into pieces."""

import pytest
from depths import examples
from event_cases import call, cut, hermes, read, reader, tagged
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.answers.parsing.events import CallArguments, CallStart, Content, Reasoning
from jaxserve.answers.syntaxes.harmony import MARKS
from jaxserve.answers.syntaxes.table import TOOL_PARSERS
from jaxserve.answers.syntaxes.thought_table import REASONING_PARSERS

ARGUMENTS = '{"city": "Br\\u00fcn\\"n{]", "days": [1, {"x": null}], "s": "</tool_call> [TOOL_CALLS] \\\\"}'

SEP = "<｜tool▁sep｜>"  # noqa: RUF001
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001


def arg(name, **arguments):
    written = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in arguments.items())
    return f"<tool_call>{name}{written}</tool_call>"


# (parser, the model's text, its contents)
CASES = [
    ("hermes", "Just words, 1 < 2.", [Content("Just words, 1 < 2.")]),
    ("hermes", "ends in a marker's beginning <tool_", [Content("ends in a marker's beginning <tool_")]),
    ("hermes", " spaces \n", [Content(" spaces \n")]),
    ("hermes", hermes("now", "{}"), call("now")),
    ("hermes", hermes("get_weather", ARGUMENTS), call("get_weather", ARGUMENTS)),
    (
        "hermes",
        f"\n\nLet me look.\n{hermes('now', '{}')}\n{hermes('f', '[1]')}\nDone. ",
        [Content("\n\nLet me look."), *call("now"), *call("f", '{"": [1]}'), Content("\nDone.")],
    ),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', call("f", '{"a": 1}')),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', call("f")),
    ("hermes", '<tool_call>{"name": "f", "parameters": null}</tool_call>', call("f")),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', call("f", '{"a": 1}')),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call> x',
        [*call("f", '{"a": 1}'), Content(" x")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', call("f", '{"a": null}')),
    ("hermes", "<tool_call> not JSON </tool_call>", [Content("<tool_call> not JSON </tool_call>")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {invalid json}}</tool_call>', call("f")),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, oh no}}</tool_call>', call("f", '{"a": 1 }')),
    ("hermes", '<tool_call>{"name": "f", "arguments": {no, "a": {b c}}}</tool_call>', call("f", '{ "a": {}}')),
    ("glm45", arg("f", a="{invalid json}"), call("f", '{"a": "{invalid json}"}')),
    ("glm45", arg("get_weather", place="{no json}"), call("get_weather", '{"place": "{no json}"}')),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "say "x", Nonesuch", "b": 1}}</tool_call>',
        call("f", r'{"a": "say \"x\", Nonesuch", "b": 1}'),
    ),
    ("hermes", '<tool_call>{"name": 3}', [Content('<tool_call>{"name": 3}')]),
    ("hermes", '<tool_call>{"na', [Content('<tool_call>{"na')]),
    # Half a surrogate cannot be sent.
    ("hermes", '<tool_call>{"name": "\\ud83d"}', [Content('<tool_call>{"name": "\\ud83d"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "\\ud83d"}</tool_call>', call("f", '{"": "\\ud83d"}')),
    ("qwen3_coder", tagged("get_weather", place='["\\uD83D"]'), call("get_weather", '{"place": ["\\ud83d"]}')),
    ("llama3_json", "It is {not} a call.", [Content("It is {not} a call.")]),
    ("llama3_json", f'{{"name": "f", "parameters": {ARGUMENTS}}}', call("f", ARGUMENTS)),
    ("llama3_json", '\n<|python_tag|>{"name": "now", "parameters": {}}', call("now")),
    ("llama3_json", 'Hm.\n<|python_tag|>{"name": "now", "parameters": {}}', [Content("Hm."), *call("now")]),
    (
        "llama3_json",
        '{"name": "now", "parameters": {}}; {"name": "f", "parameters": {"a": 2}}\n',
        [*call("now"), *call("f", '{"a": 2}')],
    ),
    ("llama3_json", '{"name": "nobody", "age": 3} ', [Content('{"name": "nobody", "age": 3} ')]),
    ("llama3_json", '{"name": "nobody", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}', call("now")),
    ("llama3_json", '<|python_tag|>{"name": "nobody"}; {"name": "now", "parameters": {}}', call("now")),
    ("llama3_json", '{"parameters": {}, "name": "nobody"}\n{"name": "now", "parameters": {}}', call("now")),
    (
        "llama3_json",
        '{"name": "nobody", "parameters": {}} or {"name": "now"',
        [Content('{"name": "nobody", "parameters": {}} or {"name": "now"')],
    ),
    ("llama3_json", '  {"a": 1}', [Content('  {"a": 1}')]),
    ("llama3_json", '<|python_tag|>print("x")', [Content('<|python_tag|>print("x")')]),
    ("mistral", "Words [TOOL", [Content("Words [TOOL")]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": [1, 2]}}]', call("f", '{"a": [1, 2]}')),
    (
        "mistral",
        'Yes. [TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "f", "arguments": {"a": "]"}, "id": "a1"}] ',
        [Content("Yes."), *call("now"), *call("f", '{"a": "]"}')],
    ),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}", call("f", ARGUMENTS)),
    (
        "mistral",
        "[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}[TOOL_CALLS]now{}",
        [CallStart("f", "abc"), CallArguments("{}"), *call("now")],
    ),
    ("mistral", "[TOOL_CALLS]f{}[TOOL_CALLS]no[ARGS]{}", [*call("f"), Content("[TOOL_CALLS]no[ARGS]{}")]),
    ("mistral", "[TOOL_CALLS]nothing more", [Content("[TOOL_CALLS]nothing more")]),
    ("mistral", "[TOOL_CALLS]now[ARGS]", call("now")),
    ("mistral", "[TOOL_CALLS]now", call("now")),
    ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]now[AR", [*call("f"), *call("now")]),
    ("mistral", '[TOOL_CALLS]Let me see. [{"name": "now", "arguments": {}}]', call("now")),
    (
        "mistral",
        '[TOOL_CALLS] [5, {"name": "now", "arguments": {}}, {"a": [1, 2]}, "x", {"name": "f", "arguments": {}}] Bye',
        [*call("now"), *call("f"), Content(" Bye")],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]]', call("now")),
    ("mistral", "[TOOL_CALLS]Let me see. [5]", [Content("[TOOL_CALLS]Let me see. [5]")]),
    ("mistral", "[TOOL_CALLS][1]", [Content("[TOOL_CALLS][1]")]),
    ("deepseek_v3", f"{CALLS}{CALL}f{SEP}{ARGUMENTS}{CALL_END}{CALLS_END}", call("f", ARGUMENTS)),
    (
        "deepseek_v3",
        f"So.\n\n{CALLS}{CALL}function{SEP}f\n```json\n{ARGUMENTS}\n```{CALL_END}\n"
        f"{CALL}function{SEP}now\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
        [Content("So."), *call("f", ARGUMENTS), *call("now")],
    ),
    ("deepseek_v3", f"{CALLS}{CALL}now{SEP}{{}}{CALL_END}{CALLS_END}", call("now")),
    ("deepseek_v3", f"{CALLS}{CALL}f", call("f")),
    ("deepseek_v3", f"{CALLS} hm {CALL}function{SEP}f\n", call("f")),
    ("deepseek_v3", f"{CALLS}{CALL}fu", [Content(f"{CALLS}{CALL}fu")]),
    ("deepseek_v3", f"{CALLS} nothing", [Content(f"{CALLS} nothing")]),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>Thinking.<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
        [Reasoning("Thinking."), Content("Hello.")],
    ),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        [Reasoning("A\nB"), *call("f", '{"a": 1}')],
    ),
    ("gpt_oss", " to=functions.now<|channel|>commentary json<|message|>{}", call("now")),
    (
        "gpt_oss",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Done<|return|>",
        [Content("I look.\nDone")],
    ),
    ("gpt_oss", "No channels <| at all", [Content("No channels <| at all")]),
    ("gpt_oss", "<|channel|>final<|message|>cut <|en", [Content("cut <|en")]),
    ("qwen3_coder", "1 <function, 2 <tool_cal", [Content("1 <function, 2 <tool_cal")]),
    (
        "qwen3_coder",
        f"I look.\n{tagged('get_weather', city='Br\u00fcn"n\n</p', days=2)}\n{tagged('now')}\n",
        [Content("I look."), *call("get_weather", '{"city": "Br\u00fcn\\"n\\n</p", "days": 2}'), *call("now")],
    ),
    (
        "qwen3_coder",
        tagged("get_weather", city="7", days="many", units="F", place="[1, 2.5]", note="null"),
        call("get_weather", '{"city": "7", "days": "many", "units": "F", "place": [1, 2.5], "note": null}'),
    ),
    (
        "qwen3_coder",
        tagged("f", a="True", b="1e999", c="{'x'", d="", e="NaN", g="\n\n x"),
        call("f", '{"a": "True", "b": "1e999", "c": "{\'x\'", "d": "", "e": "NaN", "g": "\\n\\n x"}'),
    ),
    ("qwen3_coder", "<function=now>\n</function>\n</tool_call> x", [*call("now"), Content(" x")]),
    ("qwen3_coder", hermes("f", ARGUMENTS), call("f", ARGUMENTS)),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOsl",
        call("get_weather", '{"city": "Osl"}'),
    ),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=days>\n2", call("get_weather", '{"days": 2}')),
    ("qwen3_coder", "<tool_call> a tag,<function=", [Content("<tool_call> a tag,<function=")]),
    (
        "glm45",
        "So.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo\n</arg_value>\n<arg_key>days</arg_key>"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        [Content("So."), *call("get_weather", '{"city": "Oslo\\n", "days": 2}'), *call("now")],
    ),
    ("glm45", hermes("now", "{}"), call("now")),
    ("glm45", "<tool_call>is a tag</tool_call>", [Content("<tool_call>is a tag</tool_call>")]),
    ("glm45", "<tool_call>now", call("now")),
    ("glm45", "<tool_call>now is", [Content("<tool_call>now is")]),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_every_syntax_is_understood_in_one_piece_and_in_single_characters(name, text, expected):
    assert read(reader(name), [text]) == expected
    assert read(reader(name), list(text)) == expected


@settings(max_examples=examples(300))
@given(case=st.sampled_from(CASES), places=st.lists(st.integers(0, 1000), max_size=12))
def test_where_the_text_is_cut_makes_no_difference(case, places):
    name, text, expected = case
    assert read(reader(name), cut(text, places)) == expected


def test_events_of_two_kinds_are_never_equal():
    events = [Content("a"), Reasoning("a"), CallArguments("a"), CallStart("a")]
    assert [[event == other for other in events] for event in events] == [[i == j for j in range(4)] for i in range(4)]


# Fragments that have a meaning somewhere: their soup must be read the same however it is cut.
FRAGMENTS = sorted(
    {
        text
        for rows in TOOL_PARSERS.values()
        for row in rows
        for pair in (row.section, row.call, row.name)
        for whole in pair
        for text in (whole, whole.strip())
        if text
    }
    | {*MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[CALL_ID]x"}
    | {
        '{"name": "f", "arguments": ',
        '{"name": "now", "parameters": {}}',
        *("{}", "}", '"', "[", "]", ", ", ";", " ", "\n", "\\", "(", ")", "'", "a=", "1"),
    }
    | {"<function=f>", "<function=", "<parameter=a>\n", "\n</parameter>", "</function>", ">"}
    | {"<think>", "</think>", "x", "<", "to=functions.f", "analysis", "final", "f", "now", "```json\n", '{"a": "b"}'}
)


@settings(max_examples=examples(400))
@given(
    name=st.sampled_from(sorted(TOOL_PARSERS)),
    thoughts=st.sampled_from(sorted(REASONING_PARSERS)),
    is_open=st.booleans(),
    is_cut=st.booleans(),
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    places=st.lists(st.integers(0, 1000), max_size=12),
)
def test_no_text_is_read_differently_in_pieces(name, thoughts, is_open, is_cut, text, places):
    def parser():
        return reader(name, thoughts=REASONING_PARSERS[thoughts], is_open=is_open)

    whole = read(parser(), [text], is_cut=is_cut)
    assert read(parser(), cut(text, places), is_cut=is_cut) == whole
    assert read(parser(), list(text), is_cut=is_cut) == whole


@settings(max_examples=examples(200))
@given(text=st.text(max_size=40), name=st.sampled_from(sorted(TOOL_PARSERS)))
def test_ordinary_text_comes_out_as_it_is(text, name):
    assert read(reader(name), list(text)) == ([Content(text)] if text else [])


def opening(name):
    row = TOOL_PARSERS[name][0]
    return (
        "<|channel|>analysis<|message|>"
        if name == "gpt_oss"
        else (row.section[0] or row.call[0] or row.name[0]).strip().replace("{name}", "f")
    )


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_no_beginning_of_a_marker_is_shown(name):
    parser = reader(name)
    assert [event for character in opening(name) for event in parser.push(character)] == []


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_a_mark_that_has_begun_and_is_cut_is_markup(name):
    for end in range(1, len(opening(name)) + 1):
        cut_off = opening(name)[:end]
        assert read(reader(name), ["Hi", cut_off], is_cut=True) == [Content("Hi")]
        if name != "gpt_oss":  # no text has these marks
            assert read(reader(name), ["Hi", cut_off]) == [Content(f"Hi{cut_off}")]
