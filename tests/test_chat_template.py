"""Chat templates are rendered as transformers' `apply_chat_template` renders them, and fail where it does."""

import dataclasses
import enum

import numpy as np
import pytest
import tokenizers
import transformers

from jaxserve.chat_template import render, with_parts

USER = {"role": "user", "content": "hi  "}
ANSWER = {"role": "assistant", "content": "Well, \n"}
PARTS = {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}, {"type": "x"}]}
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last %}</>{% endif %}\n{% endfor %}"
STRIPPED = PLAIN.replace("m.content", "m.content | trim")
FIELDS = "{% for m in messages %}{% for key in m %}{{ key }}={{ m[key] }};{% endfor %}{% endfor %}"
OF_PARTS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}end{% endfor %}"


class Mood(enum.StrEnum):
    GOOD = "good"


@dataclasses.dataclass
class Point:
    x: int
    y: tuple[float, ...]


class Dumped:
    def model_dump(self):
        return {"a": Point(1, (2.0,))}


class Harmful:
    def save(self):
        raise AssertionError("a template must not call methods of objects")


CASES = {
    "plain": (PLAIN, [USER, ANSWER], {}),
    "generation prompt": ("{{ messages | length }}{% if add_generation_prompt %}GO{% endif %}", [USER], {}),
    "no generation prompt": ("{% if add_generation_prompt %}GO{% endif %}", [USER], {"add_generation_prompt": False}),
    "keys without a value": (FIELDS, [{"role": "user", "content": None, "tool_calls": None, "name": ""}], {}),
    "values within": (FIELDS, [{"role": "user", "content": [{"a": None, "b": True}]}], {}),
    **{
        f"reasoning: {fields}": (FIELDS, [USER | fields], {})
        for fields in (
            {"reasoning": "r"},
            {"thinking": "t"},
            {"reasoning_content": "c"},
            {"thinking": "t", "reasoning_content": "c"},
            {"reasoning": "", "thinking": "t"},
            {"reasoning_content": None, "reasoning": "r"},
        )
    },
    "undefined": ("{{ nothing }}{{ tools }}{{ documents }}{{ nothing is defined }}{{ tools is none }}", [USER], {}),
    "undefined within": ("{{ messages[0].x.y }}", [USER], {}),
    "special tokens": ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", [USER], {}),
    "special tokens that are given": ("{{ bos_token }}", [USER], {"bos_token": "<other>"}),
    "json": (
        "{{ messages | tojson }}{{ x | tojson(indent=2) }}{{ x | tojson(sort_keys=True, separators=(',', ':')) }}",
        [USER | {"content": "<é>&'"}],
        {"x": {"b": 1.5, "a": ["漢", None]}},
    ),
    "ascii json": ("{{ messages | tojson(ensure_ascii=True) }}", [USER | {"content": "é"}], {}),
    "tools": ("{% for t in tools %}{{ t.name }}{{ t | tojson }}{% endfor %}", [USER], {"tools": [{"name": "f"}]}),
    "documents": ("{{ documents[0].title }}", [USER], {"documents": [{"title": "t", "text": "x"}]}),
    "documents that are none": ("{{ documents }}", [USER], {"documents": ["t"]}),
    "loop controls": ("{% for i in range(9) %}{% if i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", [USER], {}),
    "blocks are trimmed": ("a\n  {% if true %}\n  b\n  {% endif %}\nc\n", [USER], {}),
    "generation": (
        "{% set x = 1 %}{% generation %}{% set x = 2 %}a{{ x }}{% endgeneration %}{{ x }}\n"
        "{%- generation -%} b {%- endgeneration -%}",
        [USER],
        {},
    ),
    "namespace": (
        "{% set ns = namespace(found=false, self=1) %}{% for m in messages %}{% set ns.found = m.role %}{% endfor %}"
        "{{ ns.found }}{{ ns.self }}",
        [USER],
        {},
    ),
    "namespace of a dict": ("{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a }}{{ ns.b }}", [USER], {}),
    "private names": ("{% set ns = namespace() %}{% set ns.__x = 1 %}", [USER], {}),
    "private names given": ("{% set ns = namespace(__class__=1) %}", [USER], {}),
    "dict": ("{{ dict(a=1, **{'b': 2}) }}{{ dict.fromkeys(['x']) }}", [USER], {}),
    "the class dict": ("{{ dict.mro() }}", [USER], {}),
    "today": ("{{ strftime_now('%Y') }}", [USER], {}),
    "raised": ("{{ raise_exception('no') }}", [USER], {}),
    "no syntax": ("{% for %}", [USER], {}),
    "no type": ("{{ 1 + 'a' }}", [USER], {}),
    "mutation": ("{{ messages.append(1) }}", [USER], {}),
    "escape": ("{{ ''.__class__.__mro__ }}", [USER], {}),
    "objects": (
        "{{ a }}{{ b }}{{ c }}{{ d }}{{ e }}{{ f }}{{ g | tojson }}",
        [USER],
        {"a": Mood.GOOD, "b": np.float32(1.5), "c": np.bool_(False), "d": Point(1, (2.0,)), "e": Dumped(),
         "f": object(), "g": {1: np.int64(3)}},
    ),
    "methods of objects": ("{{ x.save() }}", [USER], {"x": Harmful()}),
    **{
        f"continued {index}": (template, messages, {"continue_final_message": True, "add_generation_prompt": False})
        for index, (template, messages) in enumerate(
            [
                (PLAIN, [USER, ANSWER]),
                (STRIPPED, [USER, ANSWER]),
                (STRIPPED, [USER, ANSWER | {"content": "Well, "}]),
                (PLAIN, [ANSWER, ANSWER]),
                (PLAIN, [USER, ANSWER | {"content": ""}]),
                (PLAIN, [USER, ANSWER | {"content": None}]),
                (PLAIN, [USER, {"role": "assistant"}]),
                (OF_PARTS, [PARTS]),
                (OF_PARTS, [PARTS | {"content": [{"type": "x"}]}]),
                ("{{ messages[0].content }}", [USER, ANSWER]),
                ("nothing of it", [USER, ANSWER]),
                ("{{ messages[-1].content.split(',')[1] }}", [ANSWER]),
                (PLAIN, [USER, ANSWER | {"reasoning_content": "r"}]),
            ]
        )
    },
    "both": (PLAIN, [USER, ANSWER], {"continue_final_message": True, "add_generation_prompt": True}),
}  # fmt: skip


@pytest.fixture(scope="module")
def reference():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(reference, name):
    template, messages, options = CASES[name]
    options = {"add_generation_prompt": True, "continue_final_message": False, "tools": None} | options
    call = {"chat_template": template, "tokenize": False}
    try:
        expected = reference.apply_chat_template(messages, **call, **options)
    except Exception as error:
        expected = error
    ours = {key: options.pop(key) for key in ("add_generation_prompt", "continue_final_message", "tools")}
    variables = {"bos_token": "<s>", "eos_token": "</s>", **options}
    if isinstance(expected, Exception):
        with pytest.raises(Exception) as caught:  # noqa: PT011 (whatever a template raises)
            render(template, messages, **ours, variables=variables)
        assert not isinstance(caught.value, AssertionError)
    else:
        assert render(template, messages, **ours, variables=variables) == expected


def test_the_messages_of_the_caller_stay_as_they_are():
    message = {"role": "assistant", "content": [{"type": "text", "text": "a"}], "thinking": "t"}
    before = repr(message)
    render(OF_PARTS, [message], tools=None, add_generation_prompt=False, continue_final_message=True, variables={})
    assert repr(message) == before


LLAVA = (
    "{% for m in messages %}{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "is_of_parts"),
    [
        *((template + "{% endfor %}", True) for template in (LLAVA,)),
        (OF_PARTS, True),
        *((template, False) for template in (PLAIN, STRIPPED, EITHER + "{% endfor %}", "constant", "{{ fails(")),
    ],
)
def test_a_template_that_shows_parts_only_gets_parts(template, is_of_parts):
    given = [USER, ANSWER | {"content": None}, PARTS]
    text = USER["content"]
    expected = [{"type": "text", "text": text}] if is_of_parts else text
    assert with_parts(template, given) == [USER | {"content": expected}, *given[1:]]
    assert given[0]["content"] == text
