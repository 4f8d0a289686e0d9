"""Structural tags: texts with tagged parts, in vLLM's earlier form and as xgrammar's tree of formats."""

import json

import pytest
from byte_grammars import passes

from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import StructuredOutputs
from jaxserve.structured.grammar import make_grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
TEXT = {"type": "any_text"}


def const(text):
    return {"type": "const_string", "value": text}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const_tag(begin, text):
    return tag(begin, const(text), "")


def sequence(*elements):
    return {"type": "sequence", "elements": [*elements]}


def triggered(*tags, trigger, **more):
    return {"type": "triggered_tags", "triggers": [trigger], "tags": [*tags], **more}


def either(*elements):
    return {"type": "or", "elements": [*elements]}


def test_the_earlier_form():
    structures = [{"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}, {"begin": "<g>", "schema": {}, "end": "</g>"}]
    given = {"structures": structures, "triggers": ["<f=", "<g>"]}
    for constraint in (given, json.dumps({"type": "structural_tag", **given})):
        grammar = make_grammar(StructuredOutputs(structural_tag=constraint))
        for text in ("", "hello, a < b", 'hi <f=x>{"a":1}</f> bye', '<g>1</g><f=x>{"a":2}</f>'):
            assert passes(grammar, text), text
        for text in ("<f=y>", '<f=x>{"a":""}</f>', "x<g>1 ", "x<g>1</f>"):
            assert not passes(grammar, text), text


CALL = tag("<t>", JSON, "</t>")
FORMATS = [
    (JSON, ['{"a":1}'], ['{"a":""}', 'x{"a":1}']),
    (const("no"), ["no"], ["", "noo"]),
    ({"type": "regex", "pattern": "[ab]+"}, ["ab"], ["c"]),
    (TEXT, ["", "any < text"], []),
    ({"type": "any_text", "excludes": ["bad", "</"]}, ["ba", "< /"], ["a bad", "</"]),
    (either(JSON, const("no")), ['{"a":1}', "no"], ["yes"]),
    (
        sequence(
            tag("<think>", TEXT, "</think>"), triggered(CALL, trigger="<t>", at_least_one=True)
        ),
        ['<think>a < b</think>hm<t>{"a":1}</t>ok'],
        ["<think>a</think>hm", "x", '<think>a<t>{"a":1}</t>'],
    ),
    (sequence(TEXT, const("END"), JSON), ['abENEND{"a":1}'], ["ab", "abENDx"]),
    (sequence(TEXT, either(const("A:"), CALL), const("!")), ["xA:!", 'x<t>{"a":1}</t>!'], ["xA:", "x!"]),
    (
        triggered(
            tag("<t1>", JSON, "</t>"),
            tag("<t2>", TEXT, ["</t>", "</u>"]),
            trigger="<t",
            stop_after_first=True,
            excludes=["bad"],
        ),
        ["ok", "x<t2>any</u>", '<t1>{"a":1}</t>'],
        ["bad", "x<t2>any</u>more", "<t3>", "x<t2>any"],
    ),
    (tag("<in>", triggered(CALL, trigger="<t>"), "</in>"), ['<in>a<t>{"a":1}</t>b</in>', "<in></in>"], ["<in>a<t>"]),
    (tag("<a>", {"type": "regex", "pattern": ".*"}, "</a>"), ["<a>b</a>"], ["<a>b", "<a>b</a>c"]),
    (
        {"type": "tags_with_separator", "tags": [CALL, const_tag("<a>", "x")], "separator": ",", "at_least_one": True},
        ["<a>x", '<a>x,<t>{"a":1}</t>,<a>x'],
        ["", "<a>x,", "<a>x<a>x"],
    ),
    ({"type": "tags_with_separator", "tags": [CALL], "separator": ",", "stop_after_first": True}, [""], ["<t>"]),
    ({"type": "optional", "content": CALL}, ["", '<t>{"a":1}</t>'], ["x"]),
    ({"type": "star", "content": const("ab")}, ["", "abab"], ["aba"]),
    ({"type": "plus", "content": const("ab")}, ["ab", "abab"], [""]),
    ({"type": "repeat", "content": const("ab"), "min": 1, "max": 2}, ["ab", "abab"], ["", "ababab"]),
]  # fmt: skip


@pytest.mark.parametrize(("given", "right", "wrong"), FORMATS, ids=lambda value: str(value)[:60])
def test_formats(given, right, wrong):
    grammar = make_grammar(StructuredOutputs(structural_tag={"type": "structural_tag", "format": given}))
    assert [text for text in right if not passes(grammar, text)] == []
    assert [text for text in wrong if passes(grammar, text)] == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "needs format"),
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ({"format": 5}, "#/format"),
        ({"format": {"type": "grammar", "grammar": "root ::= x"}}, "'grammar' is not supported"),
        ({"format": sequence(const("a"), {"type": "token", "token": 5})}, "#/format/elements/1"),
        ({"format": JSON | {"style": "qwen_xml"}}, "'qwen_xml' is not supported"),
        ({"format": tag("<a>", {"type": "json_schema", "json_schema": {"uniqueItems": True}}, "x")}, "'uniqueItems'"),
        ({"format": sequence(TEXT, JSON)}, "must be followed by"),
        ({"format": {"type": "star", "content": TEXT}}, "has no end"),
        ({"format": {"type": "tag", "begin": "a", "content": TEXT}}, "#/format/end"),
        ({"format": {"type": "repeat", "content": const("a"), "max": 10**9}}, "#/format/max"),
        ({"structures": [{"begin": "<a>", "schema": {}, "end": "x"}], "triggers": ["<b"]}, "#/tags/0/begin"),
        ({"structures": [], "triggers": ["<b"]}, "#/structures"),
        ({"format": sequence(*[TEXT, either(*map(const, "abcd"))] * 20)}, "too large"),
    ],
)
def test_what_is_not_supported_is_named(given, words):
    with pytest.raises(InvalidRequest) as caught:
        make_grammar(StructuredOutputs(structural_tag=given))
    assert caught.value.param == "structured_outputs.structural_tag"
    assert words in caught.value.message
