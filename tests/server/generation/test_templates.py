"""Chats through the templates of real models: as transformers renders them, from what OpenAI's clients send."""

import copy
import json
import re

import jinja2
import msgspec
import pytest
import tokenizers
import transformers

from jaxserve.answers.choosing.choice import choose
from jaxserve.answers.choosing.message_style import message_style
from jaxserve.answers.choosing.served_tokenizer import served_tokenizer
from jaxserve.answers.model_syntax import ModelSyntax
from jaxserve.answers.syntaxes.table import TOOL_PARSERS
from jaxserve.answers.syntaxes.thought_table import REASONING_PARSERS
from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.server.generation.template import may_think, render_chat
from jaxserve.server.protocol.chat import ChatRequest
from jaxserve.tokenizer import Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a place.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where."},
                    "days": {"type": "integer", "description": "How many."},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
    },
]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "How is the weather in Brünn?"}
ANSWER = {"role": "assistant", "content": "Fine, <b>really</b>."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Brünn", "days": 2}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"sky": "blue"}'}
MORE = {"role": "user", "content": "And tomorrow?"}

CONVERSATIONS = {
    "one turn": ([USER], None),
    "system": ([SYSTEM, USER], None),
    "two turns": ([USER, ANSWER, MORE], None),
    "tools": ([SYSTEM, USER], TOOLS),
    "call": ([USER, CALL, RESULT], TOOLS),
    "call and answer": ([USER, CALL, RESULT, ANSWER, MORE], TOOLS),
    "calls without tools": ([SYSTEM, USER, CALL, RESULT, ANSWER, MORE], None),
    "roles that do not alternate": ([USER, USER], None),
}

# The syntax of calls and of thoughts that each template shows.
KNOWN = {
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_v3", "qwen3"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "qwen3"),
    "google-gemma-2-2b-it": (None, None),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "granite"),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "openai-gpt-oss-120b": ("gpt_oss", "gpt_oss"),
}


@pytest.fixture(scope="module")
def load(test_data):
    def load(name):
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
        backend.decoder = tokenizers.decoders.ByteLevel()
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
        fast.chat_template = (test_data / "tokenizers" / "templates" / f"{name}.jinja").read_text()
        return fast

    return load


def tokenizer_of(fast):
    """Return our tokenizer of one of transformers."""
    return Tokenizer(
        fast.backend_tokenizer,
        special_tokens=fast.special_tokens_map,
        chat_templates={"default": fast.chat_template},
    )


def natively(fast, messages, tools):
    """Render the conversation with transformers, with calls in the form that the templates' authors intended."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls", ()):
            message["content"] = ""
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return fast.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize("name", KNOWN)
def test_a_conversation_is_rendered_as_transformers_renders_it(load, name):
    fast = load(name)
    tokenizer = tokenizer_of(fast)
    style = message_style(tokenizer)
    for title, (messages, tools) in CONVERSATIONS.items():
        body = {"messages": messages} | ({} if tools is None else {"tools": tools})
        request = msgspec.json.decode(json.dumps(body), type=ChatRequest)
        try:
            expected = natively(fast, messages, tools)
        except (jinja2.TemplateError, TypeError):
            with pytest.raises(InvalidRequest, match="chat template"):
                render_chat(tokenizer, style, request)
        else:
            assert render_chat(tokenizer, style, request) == expected, title


def test_the_list_of_templates_is_complete(test_data):
    assert {path.stem for path in (test_data / "tokenizers" / "templates").iterdir()} == KNOWN.keys()


@pytest.mark.parametrize(("name", "known"), KNOWN.items())
def test_the_syntax_is_read_off_the_template(load, name, known):
    tools, thoughts = known
    choice = choose(tokenizer_of(load(name)))
    assert (choice.calls.name, choice.thoughts.name) == (tools or "not parsed", thoughts or "not parsed")
    if tools is not None:
        assert choice.syntax.calls in TOOL_PARSERS[tools]
    assert choice.syntax.thoughts == (None if thoughts is None else REASONING_PARSERS[thoughts])


# DeepSeek-R1's template shows calls only next to a content of null, which transformers omits; Granite 3.3's only those
# of a role of its own.
SHOW_NO_CALLS = ("R1", "granite-3.3")
SHOW_CALLS = [
    name for name, (tools, _) in KNOWN.items() if tools is not None and not any(part in name for part in SHOW_NO_CALLS)
]


@pytest.mark.parametrize("name", SHOW_CALLS)
def test_a_call_of_an_earlier_turn_is_shown(load, name):
    tokenizer = tokenizer_of(load(name))
    body = {"messages": [USER, CALL, RESULT], "tools": TOOLS}
    text = render_chat(tokenizer, message_style(tokenizer), msgspec.json.decode(json.dumps(body), type=ChatRequest))
    assert "get_weather" in text
    shown = "<parameter=city>\nBrünn\n</parameter>" if name == "Qwen3-Coder" else '{"city": "Brünn", "days": 2}'
    assert shown in text
    assert "blue" in text


def render(tokenizer, **fields):
    body = {"messages": [USER], **fields}
    return render_chat(tokenizer, message_style(tokenizer), msgspec.json.decode(json.dumps(body), type=ChatRequest))


def test_reasoning_of_earlier_turns_and_effort(load):
    qwen = tokenizer_of(load("Qwen-Qwen3-0.6B"))
    assert render(qwen, reasoning_effort="none").endswith("<think>\n\n</think>\n\n")
    assert not render(qwen, reasoning_effort="low").endswith("</think>\n\n")
    assert render(qwen, chat_template_kwargs={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")
    thought = {"role": "assistant", "content": "Yes.", "reasoning": "Hm, so."}
    conversation = [USER, thought | CALL | {"content": None}, RESULT]
    assert "<think>\nHm, so.\n</think>" in render(qwen, messages=conversation)

    gpt_oss = tokenizer_of(load("openai-gpt-oss-120b"))
    assert "Reasoning: high" in render(gpt_oss, reasoning_effort="high")
    assert "Reasoning: medium" in render(gpt_oss)
    text = render(gpt_oss, messages=conversation)
    assert "<|channel|>analysis<|message|>Hm, so.<|end|>" in text
    conversation[1]["content"] = "I shall look."  # the format has room for one of them
    text = render(gpt_oss, messages=conversation)
    assert "<|channel|>analysis<|message|>Hm, so.<|end|>" in text
    assert "I shall look." in render(qwen, messages=conversation)

    deepseek = tokenizer_of(load("deepseek-ai-DeepSeek-V3.1"))
    assert render(deepseek).endswith("</think>")
    assert render(deepseek, chat_template_kwargs={"thinking": True}).endswith("<think>")


def test_tools_that_may_not_be_called_are_not_shown(load):
    qwen = tokenizer_of(load("Qwen-Qwen3-0.6B"))
    assert "get_weather" in render(qwen, tools=TOOLS)
    assert "get_weather" not in render(qwen, tools=TOOLS, tool_choice="none")


def test_tools_without_description_and_parameters(load):
    for name in KNOWN:
        render(tokenizer_of(load(name)), tools=[{"type": "function", "function": {"name": "f"}}])


def test_the_operators_template(load, tmp_path):
    file = tmp_path / "template.jinja"
    turns = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    file.write_text(f"{turns}<tool_call> arguments </tool_call>")
    tokenizer = tokenizer_of(load("Qwen-Qwen2.5-7B-Instruct"))
    for given in (str(file), file.read_text()):
        served = served_tokenizer(tokenizer, ServerConfig(chat_template=given))
        assert render(served).startswith("[How is")
        assert choose(served).calls.name == "hermes"
    assert served_tokenizer(tokenizer, ServerConfig()) is tokenizer
    assert not render(tokenizer).startswith("[")


def test_the_operators_variables_of_the_template(load):
    tokenizer = tokenizer_of(load("Qwen3-Coder")).with_chat_template("{{ a }} {{ b }} {{ enable_thinking }}")
    config = ServerConfig(default_chat_template_kwargs={"a": 1, "enable_thinking": False})
    served = served_tokenizer(tokenizer, config)
    assert render(served) == "1  False"
    assert render(served, chat_template_kwargs={"a": 2, "b": 3}) == "2 3 False"
    assert render(served, reasoning_effort="high") == "1  True"
    assert render(tokenizer) == "  "
    with pytest.raises(ConfigError, match="not a variable of a chat template: tokenize"):
        served_tokenizer(tokenizer, ServerConfig(default_chat_template_kwargs={"tokenize": True}))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("nowhere.jinja", "cannot read chat_template nowhere.jinja: "),
        ("a\n{% if %}", "chat_template, line 2: "),
        ("{{ a | nothing }}", "chat_template, line 1: No filter named 'nothing'"),
    ],
)
def test_a_template_that_is_none(load, template, message):
    tokenizer = tokenizer_of(load("Qwen3-Coder"))
    with pytest.raises(ConfigError, match=re.escape(message)):
        served_tokenizer(tokenizer, ServerConfig(chat_template=template))
    served_tokenizer(tokenizer, ServerConfig(chat_template="{{ raise_exception('no system message') }}"))


LATE = {"role": "developer", "content": "A late rule."}


@pytest.mark.parametrize("name", [name for name in KNOWN if not name.startswith(("google", "NousResearch"))])
@pytest.mark.parametrize("messages", [[SYSTEM, LATE, USER], [SYSTEM, USER, ANSWER, LATE, MORE], [SYSTEM, USER, LATE]])
def test_no_system_message_is_left_out(load, name, messages):
    """Templates of gpt-oss and DeepSeek R1 show one system message, Mistral's refuses others, as Codex sends them."""
    tokenizer = tokenizer_of(load(name))
    request = msgspec.convert({"messages": messages}, ChatRequest)
    text = render_chat(tokenizer, message_style(tokenizer), request)
    assert [message["content"] for message in messages if message["content"] not in text] == []
    if message_style(tokenizer).shows_late_system:
        as_system = [message | {"role": message["role"].replace("developer", "system")} for message in messages]
        assert text == natively(load(name), as_system, None)


@pytest.mark.parametrize(
    ("name", "end", "expected"),
    [
        ("hyperclovax", "Hi.<|im_end|>\n<|im_start|>assistant", True),  # the mark that ends thoughts begins any message
        ("deepseek_r1", "<|assistant|><think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<|assistant|>", True),
    ],
)
def test_a_prompt_that_has_ended_thoughts_leaves_no_room_for_them(name, end, expected):
    syntax, tokenizer = object.__new__(ModelSyntax), object.__new__(Tokenizer)
    syntax.thoughts, tokenizer._template_defaults = REASONING_PARSERS[name], {}
    body = msgspec.convert({"messages": [USER]}, ChatRequest)
    assert may_think(tokenizer, body, prompt=end, syntax=syntax) is expected
