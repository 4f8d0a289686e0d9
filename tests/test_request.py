"""What SamplingParams and StructuredOutputs accept, and their errors for everything else."""

import enum
import fractions
import math
import typing
from collections import OrderedDict, UserDict

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import MAX_STOP_BYTES, MAX_STOP_LENGTH, SamplingParams, StructuredOutputs


class Color(enum.StrEnum):
    RED = "red"


class Size(enum.IntEnum):
    SMALL = 3


HINTS = typing.get_type_hints(SamplingParams)
NUMBERS, INTEGERS, FLAGS = (
    [name for name, hint in HINTS.items() if hint in (kind, kind | None)] for kind in (float, int, bool)
)
ID_LISTS = ("logprob_token_ids", "allowed_token_ids", "stop_token_ids")
TEXT_LISTS = ("bad_words", "stop")
OTHERS = ("logit_bias", "structured_outputs")


def test_the_kinds_are_all_fields():
    named = (*NUMBERS, *INTEGERS, *FLAGS, *ID_LISTS, *TEXT_LISTS, *OTHERS)
    assert sorted(named) == sorted(SamplingParams.__struct_fields__)


def named(value):
    """Return a name for a case that is the same in each process: without the address of an object."""
    return repr(value).partition(" object at ")[0][:40]


NO_NUMBER = ["x", "1", b"1", [1], {}, True, np.True_, 1j, np.array([1, 2]), object]
WRONG = [
    *[(name, value) for name in NUMBERS for value in (*NO_NUMBER, None, math.nan, np.float32("nan"), 10**400, -3)],
    *[(name, value) for name in INTEGERS for value in (*NO_NUMBER, 1.0, np.float32(1), 2**64, -(2**64))],
    *[(name, value) for name in FLAGS for value in ("yes", "", 0, 1, 1.0, [True], None, np.int64(1), b"x")],
    *[
        (name, value)
        for name in ID_LISTS
        for value in (5, "abc", b"abc", {1: 2}, ["1"], [1.0], [True], [None], [[1]], [-1], [2**40], np.array(["a"]))
    ],
    *[(name, value) for name in TEXT_LISTS for value in (5, b"abc", {"a": 1}, [5], [b"a"], [None], [""], ["\ud800"])],
    *[
        ("logit_bias", value)
        for value in (5, "x", [1], {"x": 1}, {1.0: 1}, {1: "x"}, {1: math.nan}, {-1: 1}, {1: None})
    ],
    *[("structured_outputs", value) for value in (5, "x", {"regex": "a"}, [1], StructuredOutputs)],
    ("bad_words", "abc"),
    ("stop", "\udfff"),
    ("stop", "a" * (MAX_STOP_LENGTH + 1)),
    ("stop", ["é" * 512] * (MAX_STOP_BYTES // 1024) + ["a"]),
    ("stop", ["a"] * 129),
    ("n", 0),
    ("max_tokens", 0),
    ("logprobs", 2**31),
    ("logprobs", -2),
    ("logprob_token_ids", [5] * 129),
    ("allowed_token_ids", []),
    ("min_tokens", 17),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=named)
def test_a_wrong_value_is_refused_at_construction_and_its_field_named(field, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "plain"),
    [
        *[(name, kind(1), 1.0) for name in NUMBERS for kind in (int, np.float32, np.float16, np.int8, jnp.float32)],
        *[(name, kind(2), 2) for name in INTEGERS for kind in (np.int64, np.uint8, jnp.int32, np.array)],
        *[(name, kind(True), True) for name in FLAGS for kind in (np.bool_, np.array, jnp.array)],
        *[
            (name, ids, (3, 1))
            for name in ID_LISTS
            for ids in ([3, 1], np.array([3, 1]), jnp.array([3, 1]), {3: 0, 1: 0}.keys())
        ],
        *[(name, texts, ("a", "b")) for name in TEXT_LISTS for texts in (["a", "b"], np.array(["a", "b"]), iter("ab"))],
        ("temperature", fractions.Fraction(1, 2), 0.5),
        ("max_tokens", Size.SMALL, 3),
        ("max_tokens", None, None),
        ("stop", Color.RED, "red"),
        ("stop", np.str_("end"), "end"),
        ("stop", ["é" * 512] * (MAX_STOP_BYTES // 1024), ("é" * 512,) * (MAX_STOP_BYTES // 1024)),
        ("top_p", 0, 0.0),
        ("logit_bias", {"7": 5}, {7: 5.0}),
        ("logit_bias", UserDict({np.int32(7): np.float16(0.5)}), {7: 0.5}),
        ("logit_bias", {1: 1000, 2: -math.inf, 3: -100}, {1: 100.0, 2: -100.0, 3: -100.0}),
    ],
    ids=named,
)
def test_what_stands_for_a_value_becomes_plain(field, value, plain):
    params = SamplingParams(**{field: value})
    got = getattr(params, field)
    assert got == plain
    assert type(got) is type(plain)
    entries = [*got, *got.values()] if isinstance(got, dict) else got if isinstance(got, tuple) else ()
    assert {type(entry) for entry in entries} <= {int, float, str}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"max_token": 3}, "SamplingParams has no field 'max_token'; did you mean 'max_tokens'?"),
        (
            {"temperature": 1.0, "temprature": 1.0},
            "SamplingParams has no field 'temprature'; did you mean 'temperature'?",
        ),
        ({"stop_tokens": [1]}, "SamplingParams has no field 'stop_tokens'; did you mean 'stop_token_ids'?"),
        ({"xyz": 1}, "SamplingParams has no field 'xyz'; there are n, max_tokens, "),
    ],
)
def test_an_unknown_field_is_named_with_the_nearest(fields, complaint):
    with pytest.raises(TypeError) as caught:
        SamplingParams(**fields)
    assert str(caught.value).startswith(complaint)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3, "best_of": 3},
        {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "logits_processors": None},
        {"guided_decoding": None, "output_kind": None, "truncate_prompt_tokens": None, "extra_args": {}},
        {"spaces_between_special_tokens": False, "skip_clone": True, "flat_logprobs": False, "stream_interval": 1},
    ],
)
def test_fields_of_vllm_that_ask_for_nothing_are_taken(fields):
    assert SamplingParams(**fields, top_k=5) == SamplingParams(n=fields.get("n", 1), top_k=5)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"n": 2, "best_of": 3}, "best_of must be equal to n"),
        ({"use_beam_search": True}, "use_beam_search is not supported"),
        ({"length_penalty": 0.5}, "length_penalty is not supported: it is of BeamSearchParams"),
        ({"logits_processors": [print]}, "logits_processors is not supported"),
        ({"guided_decoding": {"json": {}}}, "guided_decoding is not supported: write structured_outputs, such as {'"),
        ({"guided_anything": "a"}, "guided_anything is not supported: write structured_outputs"),
        ({"output_kind": 2}, "output_kind is not supported: generate returns whole texts"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not supported: give the token ids"),
        ({"max_new_tokens": 5, "temprature": 1}, "max_new_tokens is not supported: write max_tokens"),
        ({"extra_args": {"a": 1}}, "extra_args is not supported"),
    ],
)
def test_other_fields_of_vllm_get_the_advice_that_requests_get(fields, complaint):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)
    assert str(caught.value).startswith(complaint)
    assert caught.value.param in fields


def test_an_unknown_field_of_structured_outputs():
    with pytest.raises(TypeError, match="StructuredOutputs has no field 'regexp'; did you mean 'regex'"):
        StructuredOutputs(regexp="a")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("regex", value) for value in (5, b"a", ["a"], "\ud800", True)],
        *[("grammar", value) for value in (5, b"a", "start: \udc00")],
        *[("choice", value) for value in ("abc", [], [""], [5], ["\ud800"], {"a": 1}, 5)],
        *[("json_object", value) for value in (1, "true", {})],
        *[("json", value) for value in (5, [1], 1.5, {1: 2}, {"a": {1, 2}}, {"const": math.nan}, {"const": "\ud800"})],
        ("json", {"\ud800": True}),
        ("json", {"default": object}),
    ],
    ids=named,
)
def test_a_wrong_value_of_structured_outputs(field, value):
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputs(**{field: value})
    assert caught.value.param == f"structured_outputs.{field}"
    assert caught.value.param in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"maximum": np.int64(3), "enum": np.array([1.5]), "required": ("a",)},
        OrderedDict(maximum=np.uint8(3), enum=[np.float32(1.5)], required=[np.str_("a")]),
    ],
)
def test_a_schema_becomes_plain_json(schema):
    plain = StructuredOutputs(json=schema).json
    assert msgspec.json.encode(plain) == b'{"maximum":3,"enum":[1.5],"required":["a"]}'


def test_a_schema_without_end():
    schema = {}
    schema["not"] = schema
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.json is nested too deeply"):
        StructuredOutputs(json=schema)


def test_top_p_of_zero_is_the_most_likely_token():
    assert SamplingParams(top_p=0).is_greedy
    assert not SamplingParams(top_p=0.01).is_greedy
