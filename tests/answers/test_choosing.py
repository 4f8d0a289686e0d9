"""Which syntax a model's answers are read in: by option, checkpoint, marks, or derived from its chat template."""

import dataclasses
import json
import random
import re

import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers
from chat_templates import KNOWN, MARKED, UNKNOWN
from depths import examples
from llguidance import LLMatcher
from written_answers import message_of

from jaxserve.answers.choosing.choice import choose
from jaxserve.answers.choosing.derive import derive
from jaxserve.answers.choosing.message_style import message_style
from jaxserve.answers.model_syntax import ModelSyntax
from jaxserve.answers.syntaxes.syntax import Syntax, Tags
from jaxserve.answers.syntaxes.table import TOOL_PARSERS
from jaxserve.answers.syntaxes.thought_table import REASONING_PARSERS
from jaxserve.answers.tools.tool import Tool
from jaxserve.errors import ConfigError
from jaxserve.tokenizer import Tokenizer

QUESTION = {"role": "user", "content": "How is the weather?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": properties, "required": []},
        },
    }
    for name, properties in {
        "get_weather": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": "object"},
        },
        "now": {},
    }.items()
]


def tokenizer_with(template, response_template=None):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"},
        chat_templates={} if template is None else {"default": template},
        response_template=response_template,
    )


def written(tokenizer, *, thoughts="", words="", calls=(), header="<|turn|>assistant\n"):
    """Return what the model writes in such a turn, by its chat template: the text after the header of a turn."""
    message = {"role": "assistant", "content": words}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [
            {"id": f"callnum0{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ]
    text = tokenizer.render_chat_template([QUESTION, message], tools=TOOLS, add_generation_prompt=False)
    return text.rpartition(header)[2].removesuffix("<|end|>\n")


def bare(row):
    """Return the texts in a table's row, without white space: reading does not depend on where that is."""

    def stripped(value):
        if isinstance(value, str):
            return "".join(value.split())
        if isinstance(value, tuple):
            return tuple(map(stripped, value))
        return {name: stripped(part) for name, part in value.items()} if isinstance(value, dict) else value

    told = dataclasses.asdict(dataclasses.replace(row, others=(), signs=(), tag_prefix="", ids=row.ids))
    told["head"] = told["call"][0] + told["name"][0]  # where the one ends and the other begins does not matter either
    told["call"], told["name"] = told["call"][1], told["name"][1]
    return {name: stripped(value) for name, value in told.items()}


@pytest.fixture(scope="module", params=KNOWN | UNKNOWN)
def template(request):
    return request.param, tokenizer_with((KNOWN | UNKNOWN)[request.param].template())


NAMES = st.sampled_from([tool["function"]["name"] for tool in TOOLS])
WORD = st.text(
    st.characters(codec="utf-8", exclude_characters="<>[]{}()\\\"'`|◁▷", exclude_categories=("C", "Z")), min_size=1
)
TEXT = st.lists(WORD, min_size=1, max_size=4).map(" ".join)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": TEXT,
        "days": st.integers(-(10**9), 10**9),
        "exact": st.booleans(),
        "where": st.dictionaries(
            st.sampled_from(["a", "b"]),
            st.one_of(TEXT, st.integers(0, 9), st.lists(st.booleans(), max_size=2)),
            max_size=2,
        ),
    },
)


@hypothesis.settings(max_examples=examples(15), suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=st.data())
def test_a_derived_syntax_reads_what_its_template_writes(template, data):
    name, tokenizer = template
    syntax = _derived(name, tokenizer)
    thoughts = data.draw(st.just("") | TEXT)
    calls = [
        (called, data.draw(ARGUMENTS) if called == "get_weather" else {})
        for called in data.draw(st.lists(NAMES, max_size=3))
    ]
    is_bare = syntax.calls.is_bare and bool(calls)  # nothing can precede such a call
    words = "" if is_bare else data.draw(TEXT if not calls else st.just("") | TEXT)
    text = written(tokenizer, thoughts=thoughts, words=words, calls=calls)
    size = data.draw(st.integers(1, 9))
    assert message_of(syntax, text, TOOLS, size=size) == (words, thoughts, calls), text


@pytest.mark.parametrize("name", MARKED)
@hypothesis.settings(max_examples=examples(15))
@hypothesis.given(data=st.data())
def test_a_syntax_that_is_known_by_its_marks_reads_what_its_template_writes(name, data):
    tokenizer = tokenizer_with(MARKED[name].template())
    choice = choose(tokenizer)
    assert choice.calls.name == name
    assert choice.thoughts.name in (name, "qwen3", "deepseek_v3")
    thoughts = data.draw(TEXT)
    calls = [
        (called, data.draw(ARGUMENTS) if called == "get_weather" else {})
        for called in data.draw(st.lists(NAMES, max_size=3))
    ]
    words = data.draw(TEXT if not calls else st.just("") | TEXT)
    text = written(tokenizer, thoughts=thoughts, words=words, calls=calls)
    size = data.draw(st.integers(1, 9))
    assert message_of(choice.syntax, text, TOOLS, size=size) == (words, thoughts, calls), text


_SYNTAXES = {}


def _derived(name, tokenizer):
    if name not in _SYNTAXES:
        _SYNTAXES[name] = derive(tokenizer)
    assert _SYNTAXES[name].calls is not None
    assert _SYNTAXES[name].thoughts is not None
    return _SYNTAXES[name]


@pytest.mark.parametrize("name", KNOWN)
def test_a_derived_syntax_is_the_one_of_the_table(name):
    """Except for what no template shows: optional parts, and further marks that a model writes."""
    rows = TOOL_PARSERS.get(name.partition(" ")[0])
    if rows is None:
        pytest.skip("the table has no such syntax")
    derived = derive(tokenizer_with(KNOWN[name].template())).calls
    assert derived is not None
    assert any(same(derived, row) for row in rows), (derived, rows)


def same(derived, row):
    left, right = bare(derived), bare(row)
    optional = {"ids", "is_parallel", "is_bare"} | ({"section"} if row.is_bare else set())
    optional |= set() if derived.is_parallel else {"separator"}
    return {k: v for k, v in left.items() if k not in optional} == {k: v for k, v in right.items() if k not in optional}


@pytest.mark.parametrize(
    ("prompt", "thoughts"),
    [
        ("<think>\n", ("<think>\n", "</think>")),
        ("[REASONING]\n", ("[REASONING]\n", "[/REASONING]")),
        ("◁think▷", ("◁think▷", "◁/think▷")),
        ("<assistant>\n", None),
        ("", None),
    ],
)
def test_thoughts_that_only_the_prompt_begins(prompt, thoughts):
    closing = prompt.strip().replace("<", "</").replace("[", "[/").replace("◁", "◁/")
    header = prompt if thoughts is None else ""
    template = (
        "{% for message in messages %}<|{{ message.role }}|>"
        + header
        + ("{{ message.content.split('" + closing + "')[-1] }}" if closing else "{{ message.content }}")
        + "{% endfor %}{% if add_generation_prompt %}<|assistant|>"
        + prompt
        + "{% endif %}"
    )
    found = derive(tokenizer_with(template)).thoughts
    assert (None if found is None else (found.opening[0], found.closing[0])) == thoughts


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{{ raise_exception('no') }}",
        "{% for message in messages %}{{ message.content }}{% endfor %}",
        "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ message.tool_calls }}\n{% endfor %}",
        "{% for message in messages %}{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}",
        "{% for message in messages %}{{ message | tojson }}{% endfor %}",
        "{{ messages | tojson }}{{ tools | tojson }}",
        "{% for message in messages %}{{ message.content }}{{ message.reasoning_content }}{% endfor %}",
        "{{ 'x' * 100000 }}{% for message in messages %}{{ message.content }}{% endfor %}",
    ],
)
def test_a_template_that_shows_no_syntax(template):
    syntax = derive(tokenizer_with(template))
    if syntax.calls is not None:
        assert '"tool_calls"' in template or "tojson" in template
    assert syntax.thoughts is None


@pytest.mark.parametrize("seed", range(40))
def test_a_broken_template_yields_a_syntax_that_reads_it_or_none(seed):
    """Some of a template's statements are lost, or occur twice."""
    chance = random.Random(seed)
    parts = re.split(
        r"(\{[{%].*?[}%]\})", (KNOWN | UNKNOWN)[chance.choice(sorted(KNOWN | UNKNOWN))].template(), flags=re.DOTALL
    )
    tokenizer = tokenizer_with("".join(part * chance.choices([0, 1, 2], [4, 93, 3])[0] for part in parts))
    syntax = derive(tokenizer)
    if syntax.calls is None or syntax.calls.is_bare:  # what precedes a bare call is not known here
        return
    arguments = {"city": "Bern", "days": 3}
    shown = json.dumps(arguments) if message_style(tokenizer).arguments_are_text else arguments
    text = written(tokenizer, calls=[("get_weather", shown)], header=QUESTION["content"])
    assert message_of(syntax, text, TOOLS)[2] == [("get_weather", arguments)], text


@pytest.mark.parametrize("name", KNOWN | UNKNOWN)
def test_calls_can_be_forced_in_a_derived_syntax(name, tokenizer):
    syntax = _derived(name, tokenizer_with((KNOWN | UNKNOWN)[name].template()))
    derived = ModelSyntax(tokenizer, syntax, vocab_size=tokenizer.vocab_size)
    tools = [Tool(tool["function"]["name"], tool["function"]["parameters"]) for tool in TOOLS]
    grammar = derived.forcing.grammar(tools, is_open=False, must_call=True, is_parallel=True, answer=None)
    assert LLMatcher.validate_grammar(grammar) == ""


# The order of choosing.

CALLS = {
    "open": "<own>",
    "close": "</own>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
OWN = {
    "start_anchor": "<|turn|>assistant\n",
    "fields": {"thinking": {"open": "<hm>", "close": "</hm>"}, "content": {}, "tool_calls": CALLS},
}


def test_an_option_comes_first():
    tokenizer = tokenizer_with(KNOWN["hermes"].template(), OWN)
    choice = choose(tokenizer, tool_call_parser="glm45", reasoning_parser="deepseek_r1")
    assert isinstance(choice.syntax.calls.arguments, Tags)
    assert choice.syntax.thoughts == REASONING_PARSERS["deepseek_r1"]
    assert choice.rows() == [["tool calls", "glm45, by the option"], ["reasoning", "deepseek_r1, by the option"]]


def test_an_option_turns_it_off():
    tokenizer = tokenizer_with(KNOWN["hermes"].template(), OWN)
    choice = choose(tokenizer, tool_call_parser="none", reasoning_parser="none")
    assert choice.syntax == Syntax()
    assert choice.rows() == [["tool calls", "none, by the option"], ["reasoning", "none, by the option"]]


def test_then_what_the_checkpoint_says():
    choice = choose(tokenizer_with(KNOWN["hermes"].template(), OWN))
    assert choice.syntax.calls.call == ("<own>", "</own>")
    assert choice.syntax.thoughts.opening == ("<hm>",)
    assert choice.calls.by == choice.thoughts.by == "as the checkpoint's response_template says"


def test_what_the_checkpoint_says_is_spaced_as_its_template_does():
    """Patterns allow for any white space; a call that is forced is written as the model has learned it."""
    spec = OWN | {"fields": {"content": {}, "tool_calls": CALLS | {"open": "<tool_call>", "close": "</tool_call>"}}}
    choice = choose(tokenizer_with(KNOWN["hermes"].template(), spec))
    assert choice.calls == ("", "as the checkpoint's response_template says")
    assert choice.syntax.calls.call == ("<tool_call>\n", "\n</tool_call>")
    assert choice.syntax.calls.separator == "\n"


def test_what_the_checkpoint_says_and_cannot_be_followed_is_reported():
    broken = OWN | {"fields": OWN["fields"] | {"tool_calls": CALLS | {"content": "kv-lines"}}}
    choice = choose(tokenizer_with(KNOWN["hermes"].template(), broken))
    assert choice.calls == ("hermes", "by marks of the chat template")
    assert choice.rows()[-1] == [
        "not followed",
        "response_template.fields.tool_calls.content is not 'json', and no name is in open_pattern",
    ]


def test_then_marks_then_turns():
    choice = choose(tokenizer_with(KNOWN["qwen3_coder"].template()))
    assert choice.calls == ("qwen3_coder", "by marks of the chat template")
    choice = choose(tokenizer_with(UNKNOWN["attributes"].template()))
    assert choice.calls == ("", "as the chat template writes turns")
    assert choice.syntax.calls.section == ("<fns>", "</fns>")
    choice = choose(tokenizer_with("{% for message in messages %}{{ message.content }}{% endfor %}"))
    assert choice.syntax == Syntax()
    unknown = "not parsed, no known syntax in the chat template"
    assert choice.rows() == [["tool calls", unknown], ["reasoning", unknown]]
    assert choose(None).syntax == Syntax()


@pytest.mark.parametrize("name", [name for name, rows in TOOL_PARSERS.items() if any(row.signs for row in rows)])
def test_the_signs_of_a_row_choose_it(name):
    """No row before it is chosen by less."""
    for row in TOOL_PARSERS[name]:
        assert choose(tokenizer_with(" ".join(row.signs))).syntax.calls is row


@pytest.mark.parametrize("name", [name for name, row in REASONING_PARSERS.items() if row.signs and row.closing])
def test_the_signs_of_thoughts_choose_them(name):
    assert choose(tokenizer_with(" ".join(REASONING_PARSERS[name].signs))).syntax.thoughts is REASONING_PARSERS[name]


@pytest.mark.parametrize("word", ["hf", "response_template"])
def test_the_checkpoint_s_own_syntax_may_be_demanded(word):
    options = {"tool_call_parser": word, "reasoning_parser": word}
    choice = choose(tokenizer_with(KNOWN["hermes"].template(), OWN), **options)
    assert choice.syntax.calls.call == ("<own>", "</own>")
    assert choice.syntax.thoughts.opening == ("<hm>",)
    for param in options:
        with pytest.raises(ConfigError, match=f"{param} '{word}' reads the answer by response_template"):
            choose(tokenizer_with(KNOWN["hermes"].template()), **{param: word})


@pytest.mark.parametrize(
    "options", [{param: name} for param in ("tool_call_parser", "reasoning_parser") for name in ("gpt_oss", "gpt-oss")]
)
def test_channels_carry_calls_and_thoughts(options):
    choice = choose(tokenizer_with(KNOWN["hermes"].template()), **options)
    assert choice.calls == choice.thoughts == ("gpt_oss", "by the option")
    assert choice.syntax.calls is TOOL_PARSERS["gpt_oss"][0]


@pytest.mark.parametrize("param", ["tool_call_parser", "reasoning_parser"])
def test_a_name_that_is_none(param):
    with pytest.raises(ConfigError, match=f"{param} must be auto, none or one of .*, not 'hermit'"):
        choose(None, **{param: "hermit"})


@pytest.fixture(scope="module")
def published(test_data):
    folder = test_data / "tokenizers" / "templates"
    return {path.stem: tokenizer_with(path.read_text()) for path in folder.glob("*.jinja")}


# Some templates write no turn with a call to derive from, another one writes messages with headers.
NOT_DERIVED = {
    *("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "ibm-granite-granite-3.3-2B-Instruct", "openai-gpt-oss-120b"),
}


def test_published_templates_are_derived_as_the_table_has_them(published):
    for name, tokenizer in published.items():
        chosen = choose(tokenizer)
        derived = derive(tokenizer)
        if chosen.calls.by != "by marks of the chat template":
            continue
        if name in NOT_DERIVED:
            assert derived.calls is None
        else:
            assert derived.calls is not None, name
            assert same(derived.calls, chosen.syntax.calls), (name, derived.calls, chosen.syntax.calls)


def test_published_templates_read_back(published):
    for name, tokenizer in published.items():
        derived = derive(tokenizer)
        if derived.calls is None:
            continue
        arguments = {"city": "Brünn \"q\" 'x' <b>", "days": -2, "exact": True, "where": {"a": [1, None, "ü"], "b": {}}}
        calls = [("get_weather", arguments), ("now", {})][: 2 if derived.calls.is_parallel else 1]
        message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": f"callnum0{i}", "type": "function", "function": {"name": called, "arguments": args}}
                for i, (called, args) in enumerate(calls)
            ],
        }
        text = tokenizer.render_chat_template([QUESTION, message], tools=TOOLS, add_generation_prompt=False)
        prompt = tokenizer.render_chat_template([QUESTION], tools=TOOLS, add_generation_prompt=True)
        answer = text[len(prompt) :] if text.startswith(prompt) else text.rpartition(QUESTION["content"])[2]
        assert message_of(derived, answer, TOOLS, size=5)[2] == calls, name
