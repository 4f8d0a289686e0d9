"""Hundreds of schemas through the real engine, on a model of random weights: whatever is completed, validates."""

import collections
import contextlib
import datetime
import decimal
import json
import os
import pathlib
import random
import re

import json_schemas
import jsonschema
import pytest
import tiny_model
from depths import examples

from jaxserve.errors import InvalidRequest
from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams, StructuredOutputs
from jaxserve.structured.grammar import make_grammar

NUM_GENERATED = 250
SUITE = os.environ.get("JSON_SCHEMA_TEST_SUITE") and pathlib.Path(os.environ["JSON_SCHEMA_TEST_SUITE"])
SEED = 20_000
CLOSERS = ['"', '"}', "}", "]", ",", '":', "]}", "}}"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tiny_model.write(tmp_path_factory.mktemp("tiny"))
    with LLM(
        str(path),
        load_format="dummy",
        warmup="none",
        progress=False,
        max_num_seqs=64,
        max_num_batched_tokens=64,
        kv_cache_memory=2**24,
    ) as llm:
        yield llm


FORMATS = jsonschema.FormatChecker(formats=())


@FORMATS.checks("date", raises=ValueError)
def _date(value):
    return not isinstance(value, str) or datetime.date.fromisoformat(value)


@FORMATS.checks("time", raises=ValueError)
def _time(value):
    """RFC 3339: with an offset, and seconds of up to 60."""
    time = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)"
    return not isinstance(value, str) or re.fullmatch(time, value)


@FORMATS.checks("date-time", raises=ValueError)
def _date_time(value):
    return not isinstance(value, str) or (_date(value[:10]) and value[10] in "Tt " and _time(value[11:]))


for _name in ("ipv4", "ipv6", "uuid", "email"):
    FORMATS.checkers[_name] = jsonschema.FormatChecker.checkers[_name]


def validate(text, schema):
    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    value = json.loads(text, parse_constant=refuse)
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    if list(validator.iter_errors(value)):  # 0.3 is a multiple of 0.1, but not in floating point
        exact = json.dumps(schema), text
        schema, value = (json.loads(document, parse_float=decimal.Decimal) for document in exact)
        jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(value)


def follow(llm, schemas):
    """Complete each schema at two temperatures, check the results, and count how answers ended."""
    tokenizer = llm.get_tokenizer()
    bias = {token: 4.0 for closer in CLOSERS for token in tokenizer.encode(closer)}  # otherwise strings never end
    jobs = [(schema, temperature) for schema in schemas for temperature in (0.7, 1.5)]
    params = [
        SamplingParams(
            max_tokens=300,
            temperature=temperature,
            seed=index,
            logit_bias=bias,
            structured_outputs=StructuredOutputs(json=schema if isinstance(schema, bool) else json.dumps(schema)),
        )
        for index, (schema, temperature) in enumerate(jobs)
    ]
    outputs = llm.generate(["x"] * len(jobs), params, use_tqdm=False)
    reasons = collections.Counter()
    for (schema, _), output in zip(jobs, outputs, strict=True):
        (completion,) = output.outputs
        reasons[completion.finish_reason] += 1
        if completion.finish_reason == "stop":
            validate(completion.text, schema)
    assert set(reasons) <= {"stop", "length"}
    assert reasons["stop"] > 0.95 * len(jobs), reasons


@pytest.mark.slow
def test_every_completed_output_validates(llm):
    rng = random.Random(SEED)
    schemas = [*json_schemas.BY_HAND, *(json_schemas.random_schema(rng) for _ in range(examples(NUM_GENERATED)))]
    assert len(schemas) >= examples(300)
    follow(llm, schemas)


@pytest.mark.skipif(not SUITE, reason="JSON_SCHEMA_TEST_SUITE names no folder: make schemas")
def test_json_schemas_own_test_suite(llm):
    """Each of its schemas is followed or refused. Where it has Python's `re` read `\\p`, digits are meant."""
    groups = [group for path in sorted(SUITE.rglob("*.json")) for group in json.loads(path.read_text())]
    followed = []
    for schema in (group["schema"] for group in groups):
        form = StructuredOutputs(json=schema if isinstance(schema, bool) else json.dumps(schema))
        with contextlib.suppress(InvalidRequest):
            make_grammar(form)
            followed.append(schema)
    assert len(groups) > 400
    assert len(followed) > 190
    follow(llm, [json.loads(json.dumps(schema).replace(r"\\p{digit}", "[0-9]")) for schema in followed])


@pytest.mark.parametrize(("schema", "word"), json_schemas.UNSUPPORTED, ids=lambda value: str(value)[:40])
def test_a_schema_that_cannot_be_followed_is_refused_by_name(schema, word):
    with pytest.raises(InvalidRequest, match=re.escape(word)) as caught:
        make_grammar(StructuredOutputs(json=schema))
    assert caught.value.param == "structured_outputs.json"
    assert "\n" not in caught.value.message


REGEXES = [
    *(r"[a-c]{3}", r"(foo|bar)-\d{2,4}", r"\d+\.\d{2}", r"[^\x00-\x1f]{5}", r"(?i)hello( world)?", r"é+漢?", r"a{0}b"),
]
GRAMMARS = [
    ('start: "<" /[a-z]+/ ">"', r"<[a-z]+>"),
    (
        'start: pair ("," pair)*\npair: /[a-z]{2}/ "=" NUMBER\nNUMBER: /[0-9]{1,3}/',
        r"[a-z]{2}=\d{1,3}(,[a-z]{2}=\d{1,3})*",
    ),
    ('root ::= "a" [0-9]{2} tail\ntail ::= ("x" | "y")+', r"a\d{2}[xy]+"),
    ('root   ::= term ("+" term)*\nterm   ::= [a-b] | "(" [c-d] ")"', r"([ab]|\([cd]\))(\+([ab]|\([cd]\)))*"),
    ('start: %json {"type": "boolean"}', r"true|false"),
]


def test_regex_choice_and_grammar(llm):
    choices = [["yes", "no"], ["a", "ab", "abc"], ['"quoted"', "back\\slash", "line\nfeed", "漢字"], ["only"]]
    wishes = [
        *((StructuredOutputs(regex=regex), regex) for regex in REGEXES),
        *((StructuredOutputs(choice=texts), "|".join(map(re.escape, texts))) for texts in choices),
        *((StructuredOutputs(grammar=grammar), regex) for grammar, regex in GRAMMARS),
    ]
    params = [
        SamplingParams(max_tokens=100, n=4, temperature=1.2, seed=i, structured_outputs=wish)
        for i, (wish, _) in enumerate(wishes)
    ]
    num_stopped = 0
    for output, (_, regex) in zip(llm.generate(["x"] * len(wishes), params, use_tqdm=False), wishes, strict=True):
        for completion in output.outputs:
            if completion.finish_reason == "stop":
                num_stopped += 1
                assert re.fullmatch(regex, completion.text), (regex, completion.text)
    assert num_stopped > 3.5 * len(wishes)


def test_streaming_with_logprobs_and_a_stop_string(llm):
    wish = StructuredOutputs(regex=r"[ab]{10}-[cd]{10}")
    params = SamplingParams(max_tokens=50, temperature=1.0, seed=1, structured_outputs=wish, stop=["-"], logprobs=2)
    deltas = list(llm.stream("x", params))
    text = "".join(delta.outputs[0].text for delta in deltas)
    assert re.fullmatch(r"[ab]{10}", text)
    assert deltas[-1].outputs[0].finish_reason == "stop"
    assert len(deltas) > 5
    assert sum(len(delta.outputs[0].logprobs) for delta in deltas) == 11


def test_unconstrained_requests_beside_constrained_ones_say_the_same(llm):
    free = SamplingParams(max_tokens=40, temperature=1.0, seed=5)
    bound = SamplingParams(max_tokens=40, temperature=1.0, seed=5, structured_outputs=StructuredOutputs(regex="[a-z]+"))
    (alone,) = llm.generate(["abc"], free, use_tqdm=False)
    together = llm.generate(["abc", "abc", "x"], [bound, free, bound], use_tqdm=False)
    assert together[1].outputs[0].token_ids == alone.outputs[0].token_ids
    assert together[0].outputs[0].text.isalpha()


def test_a_text_that_is_cut_keeps_to_the_grammar(llm):
    wish = StructuredOutputs(json={"const": "abcdefghij"})
    (output,) = llm.generate(["x"], SamplingParams(max_tokens=4, structured_outputs=wish), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert '"abcdefghij"'.startswith(output.outputs[0].text)
    assert output.outputs[0].text


def test_a_grammar_that_becomes_too_complex(llm):
    """Only the caller's own request is affected. The text so far is returned, and other requests complete."""
    wish = StructuredOutputs(grammar="start: s\ns: s s s s s | s s | /[a-z]/ | ")
    params = SamplingParams(max_tokens=200, ignore_eos=True, seed=1, structured_outputs=wish)
    free = SamplingParams(max_tokens=20, temperature=0)
    (alone,) = llm.generate("x", free, use_tqdm=False)
    texts = []
    with pytest.raises(InvalidRequest, match="cannot be followed further") as caught:
        texts.extend(delta.outputs[0].text for delta in llm.stream("x", params))
    assert (caught.value.param, caught.value.code) == ("structured_outputs", "unsupported_grammar")
    assert re.fullmatch("[a-z]{10,}", "".join(texts))
    beside = llm.generate(["x", "x"], [params, free], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in beside] == ["error", alone.outputs[0].finish_reason]
    assert beside[1].outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "grammar": "b"}, "structured_outputs"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "abc"}, "structured_outputs.choice"),
        ({"choice": ["a", 1]}, "structured_outputs.choice"),
    ],
)
def test_invalid_options_are_refused(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputs(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "a" * 200_000}, "200000 characters"),
        ({"json": False}, "nothing satisfies"),
        ({"regex": "[^\\x00-\\U0010ffff]"}, None),
        ({"grammar": "start: nobody"}, "nobody"),
        ({"grammar": "start: start"}, "nothing satisfies"),
        ({"grammar": "root ::= ("}, "Expected"),
        ({"grammar": "no grammar at all"}, None),
        ({"grammar": "start: <|im_end|>"}, "special token"),
        ({"json": "{"}, "not a JSON schema"),
        ({"json": "[1]"}, "object"),
        ({"json": {"a": object()}}, "not JSON"),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "not"),
    ],
)
def test_grammars_that_are_refused(fields, match):
    with pytest.raises(InvalidRequest, match=match) as caught:
        make_grammar(StructuredOutputs(**fields))
    assert caught.value.param == f"structured_outputs.{next(iter(fields))}"


def chain(length, link):
    """Definitions of which each refers to the next."""
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$defs": definitions | {f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "wish",
    [
        {"json": chain(2500, lambda ref: ref)},
        {"json": chain(2000, lambda ref: {"allOf": [ref]})},
        {"json": chain(1500, lambda ref: {"properties": {"a": ref}, "required": ["a"]})},
        {"grammar": "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(4000)) + 'r4000: "b"'},
        {"grammar": "start: R0\n" + "".join(f'R{i}: "a" R{i + 1}\n' for i in range(4000)) + 'R4000: "b"'},
        {"grammar": "root ::= " + "(" * 50_000},
        {"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
        {"regex": "(" * 50_000 + "a" + ")" * 50_000},
        {"json": '{"not":' * 20_000},
    ],
    ids=range(9),
)
def test_deep_grammars_are_compiled_or_refused(wish):
    """Recursion that outgrew its stack would end the process."""
    with contextlib.suppress(InvalidRequest):
        make_grammar(StructuredOutputs(**wish))
