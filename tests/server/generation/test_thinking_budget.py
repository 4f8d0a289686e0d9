"""thinking_token_budget: thoughts end after so many tokens, whatever follows them, in each syntax of thoughts."""

import contextlib
import functools
import json

import pytest
import tokenizers
from llguidance import LLMatcher
from serving import assert_error, frames, running, serving

from jaxserve.answers.choosing.served_tokenizer import served_tokenizer
from jaxserve.answers.model_syntax import ModelSyntax
from jaxserve.answers.syntaxes.syntax import Syntax
from jaxserve.answers.syntaxes.table import TOOL_PARSERS
from jaxserve.answers.syntaxes.thought_table import REASONING_PARSERS
from jaxserve.answers.tools.tool import Tool
from jaxserve.config import ServerConfig
from jaxserve.engine.frontend import Frontend
from jaxserve.sampling_params import StructuredOutputs
from jaxserve.structured.grammar import limit_of, make_grammar
from jaxserve.structured.vocabulary import grammar_tokenizer
from jaxserve.tokenizer import Tokenizer

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": "hello"}
THINKING = [USER, {"role": "assistant", "content": "<think>Hm"}]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
FORMS = {
    "free": {},
    "regex": {"structured_outputs": {"regex": "[ab]{4}"}},
    "call": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
}


@pytest.fixture(scope="module")
def serve(random_model, random_engine):
    """Servers over the random engine, by the parser of their thoughts."""
    tokenizer = Tokenizer.load(random_model)
    with contextlib.ExitStack() as stack:

        @functools.cache
        def serve(parser):
            frontend = Frontend(random_engine, tokenizer, seed=0)
            parsers = {"reasoning_parser": parser, "tool_call_parser": "hermes"}
            return stack.enter_context(serving(frontend, served_model_name="tiny", **parsers))

        yield serve


def ask(server, budget, **fields):
    """Return the choices of an answer that begins inside thoughts."""
    body = {
        "messages": THINKING,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "n": 3,
        "seed": 3,
        "max_tokens": 120,
        "return_token_ids": True,
        "thinking_token_budget": budget,
        **fields,
    }
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    return answer.json(), body


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_open_thoughts_end_after_the_budget(serve, budget, form):
    server = serve("deepseek_r1")
    answer, body = ask(server, budget, **FORMS[form])
    for choice in answer["choices"]:
        message = choice["message"]
        text = server.tokenizer.decode(choice["token_ids"], skip_special_tokens=False)
        thoughts, mark, _ = text.partition("</think>")
        assert mark
        num_thoughts = next(
            i for i in range(len(text)) if "</think>" in server.tokenizer.decode(choice["token_ids"][: i + 1])
        )
        assert num_thoughts <= budget + len(server.tokenizer.encode("</think>"))
        assert (message.get("reasoning") or "").strip() == thoughts.strip()
        if form == "regex" and choice["finish_reason"] == "stop":
            assert len(message["content"]) == 4
            assert set(message["content"]) <= set("ab")
        if choice["finish_reason"] == "tool_calls":
            assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {}
    if form != "free":
        assert any(choice["finish_reason"] in ("stop", "tool_calls") for choice in answer["choices"])
    reasoning = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert (reasoning > 0) == (budget > 0)
    assert reasoning <= 3 * budget
    *events, last = frames(server.post(CHAT, body | {"stream": True, "stream_options": {"include_usage": True}}))
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == reasoning
    for choice in answer["choices"]:
        deltas = [c["delta"] for event in events for c in event["choices"] if c["index"] == choice["index"]]
        for name in ("content", "reasoning"):
            assert "".join(delta.get(name) or "" for delta in deltas) == (choice["message"].get(name) or "")


def test_a_budget_beyond_the_context(serve):
    """A budget that the context cannot hold limits nothing."""
    server = serve("deepseek_r1")
    free, _ = ask(server, None)
    large, _ = ask(server, 10**6)
    assert [c["token_ids"] for c in free["choices"]] == [c["token_ids"] for c in large["choices"]]


@pytest.mark.parametrize("budget", [1, 2, 20])
def test_thoughts_that_end_before_their_budget(serve, budget):
    """The text after them is not cut, even if it is longer than the budget."""
    server = serve("gpt_oss")
    bias = {server.tokenizer.added_token_id("<|end|>"): 20.0}
    fields = {"messages": [USER], "continue_final_message": False, "add_generation_prompt": True, "n": 12}
    answer, _ = ask(server, budget, logit_bias=bias, ignore_eos=True, **fields)
    texts = [server.tokenizer.decode(c["token_ids"], skip_special_tokens=False) for c in answer["choices"]]
    thought = [text for text in texts if text.startswith("<|channel|>analysis") and "<|channel|>final" in text]
    assert thought
    for text in thought:
        assert len(server.tokenizer.encode(text)) > 40
        assert text.count("<|channel|>final") == 1
        assert "<|end|><|end|>" not in text


@pytest.mark.parametrize("budget", [0, 4])
def test_a_response(serve, budget):
    body = {
        "input": [USER, {"role": "assistant", "content": "<think>Hm"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "thinking_token_budget": budget,
        "max_output_tokens": 60,
        "seed": 1,
        "include": ["message.output_text.logprobs"],
        **FORMS["regex"],
    }
    answer = serve("deepseek_r1").post(RESPONSES, body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["output_tokens_details"]["reasoning_tokens"] <= budget
    (message,) = (item for item in answer.json()["output"] if item["type"] == "message")
    (part,) = message["content"]
    written = b"".join(bytes(each["bytes"]) for each in part["logprobs"]).decode()
    assert written.lstrip().startswith(part["text"])  # without the tokens that end the thoughts


@pytest.mark.parametrize("budget", [0, 3])
def test_channels(serve, budget):
    server = serve("gpt_oss")
    fields = {"messages": [USER], "continue_final_message": False, "add_generation_prompt": True, "n": 12}
    answer, _ = ask(server, budget, **fields)
    texts = [server.tokenizer.decode(c["token_ids"], skip_special_tokens=False) for c in answer["choices"]]
    assert any("<|channel|>analysis" in text for text in texts) == (budget > 0)
    for choice in answer["choices"]:
        assert len(server.tokenizer.encode(choice["message"].get("reasoning") or "", add_special_tokens=False)) <= 12
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 12 * budget


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("parser", "budget", "word"),
    [("qwen3", -1, ">= 0"), ("none", 5, "--reasoning-parser"), ("none", 0, "thoughts"), ("qwen3", "5", "int")],
)
def test_refused(tokenizer, path, parser, budget, word):
    with running(tokenizer, reasoning_parser=parser, tool_call_parser="none") as server:
        body = {"messages": [USER]} if path == CHAT else {"input": "hello"}
        answer = server.post(path, body | {"thinking_token_budget": budget})
        assert_error(answer, 400, "thinking_token_budget")
        assert word in answer.json()["error"]["message"]


@functools.cache
def tokenizer_with(*, special=(), added=()):
    """Return a tokenizer with one token per byte, and some more."""
    base = ["<s>", "</s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={t: i for i, t in enumerate(base)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    backend.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in added])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
KINDS = {"text": {}, "special": {"special": MARKS}, "added": {"added": MARKS}}


@functools.cache
def vocabulary_of(tokenizer):
    return grammar_tokenizer(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=())


def followed(tokenizer, grammar, text):
    """Return how much of a text a grammar allows."""
    matcher = LLMatcher(vocabulary_of(tokenizer), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    passed = []
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        if not matcher.consume_token(token_id):
            return tokenizer.decode(passed, skip_special_tokens=False)
        passed.append(token_id)
    return text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("is_open", "text", "passes"),
    [
        (True, "Hm.</think>Yes.", True),
        (True, "</think>\n\nYes <b>, a <thin", True),
        (True, "Hm.</think><think>Hm.", False),
        (True, "Hm.</think> \n<think>Hm.", False),
        (True, "Hm.◁/think▷Yes.", True),
        (False, "<think>Hm.</think>Yes.", True),
        (False, "Yes.", True),
        (False, "\n<think>", False),
        (False, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', True),
        (True, 'Hm.</think><tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', True),
        (True, "Hm.<tool_call>", False),
    ],
)
def test_what_a_limited_answer_may_be(kind, is_open, text, passes):
    tokenizer = tokenizer_with(**KINDS[kind])
    tools = [Tool("now", {"type": "object"})] if "tool_call" in text else []
    syntax = Syntax(TOOL_PARSERS["hermes"][0], REASONING_PARSERS["kimi_k2"])
    model = ModelSyntax(tokenizer, syntax, vocab_size=tokenizer.vocab_size)
    grammar = model.forcing.grammar(tools, is_open=is_open, must_call=False, is_parallel=True, answer=None, budget=5)
    assert (followed(tokenizer, grammar, text) == text) == passes
    limit = limit_of(grammar)
    assert limit is not None
    assert followed(tokenizer, limit.after, "</think>Yes.") == "</think>Yes."
    assert followed(tokenizer, limit.after, "Yes.") == ""


@pytest.mark.parametrize(
    "name", sorted(name for name, row in REASONING_PARSERS.items() if row.closing or "gpt" in name)
)
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("budget", [0, 5])
def test_each_syntax_of_thoughts(name, is_open, budget):
    tokenizer = tokenizer_with(special=("<|channel|>", "<|message|>", "<|end|>", "<|start|>"))
    calls = TOOL_PARSERS["gpt_oss" if "gpt" in name else "hermes"][0]
    thoughts = REASONING_PARSERS[name]
    model = ModelSyntax(tokenizer, Syntax(calls, thoughts), vocab_size=tokenizer.vocab_size)
    is_open &= not model.has_channels
    grammar = model.forcing.grammar([], is_open=is_open, must_call=False, is_parallel=True, answer=None, budget=budget)
    if model.has_channels:
        opening, closing = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
        answer = "<|channel|>final<|message|>Yes."
    else:
        opening, closing, answer = thoughts.opening[0].strip(), thoughts.closing[0].strip(), "Yes."
    written = ("" if is_open else opening) + "Hm." + closing + answer
    assert (followed(tokenizer, grammar, written) == written) == (budget > 0)
    without = (closing if is_open else "") + answer
    assert followed(tokenizer, grammar, without) == without
    limit = limit_of(grammar)
    if not budget:
        assert limit is None
        return
    assert limit is not None
    assert limit.max_tokens == budget
    assert bool(limit.opening) != is_open
    assert is_open or followed(tokenizer, limit.opening, f"{opening}Hm.") == f"{opening}Hm."
    assert followed(tokenizer, limit.during, f"Hm.{closing}").startswith("Hm." + closing[: len("<|end|>")])
    assert followed(tokenizer, limit.after, closing + answer) == closing + answer


@pytest.mark.parametrize("budget", [None, 0, 5])
@pytest.mark.parametrize("tools", [[], [Tool("now", {"type": "object"})]])
def test_a_message_of_channels_that_is_continued_has_no_other_header(tools, budget):
    """The constraint on the answer continues in the final message, where the prompt has ended."""
    tokenizer = tokenizer_with(special=("<|channel|>", "<|message|>", "<|end|>", "<|start|>"))
    syntax = Syntax(TOOL_PARSERS["gpt_oss"][0], REASONING_PARSERS["gpt_oss"])
    model = ModelSyntax(tokenizer, syntax, vocab_size=tokenizer.vocab_size)
    answer = make_grammar(StructuredOutputs(choice=["Yes.", "No."]))
    options = {"is_open": False, "must_call": False, "is_parallel": True, "answer": answer, "budget": budget}
    continued = model.forcing.grammar(tools, **options, continues_message=True)
    assert followed(tokenizer, continued, "Yes.") == "Yes."
    assert followed(tokenizer, continued, "<|channel|>") == ""
    new = model.forcing.grammar(tools, **options)
    assert followed(tokenizer, new, "Yes.") == ""
    assert followed(tokenizer, new, "<|channel|>final<|message|>Yes.") == "<|channel|>final<|message|>Yes."


OFF = {
    "chat_template_kwargs": (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
    "another name": (CHAT, {"chat_template_kwargs": {"thinking": False}}),
    "reasoning_effort": (CHAT, {"reasoning_effort": "none"}),
    "reasoning.effort": (CHAT, {"reasoning": {"effort": "none"}}),
    "responses": (RESPONSES, {"reasoning": {"effort": "none"}}),
    "messages": ("/v1/messages", {"thinking": {"type": "disabled"}}),
}
ON = {"nothing": {}, "kwargs before effort": {"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "none"}}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMA}
TOOL = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
FORCED = {
    CHAT: {
        "messages": [USER],
        "max_tokens": 16,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    RESPONSES: {"input": "hello", "max_output_tokens": 16, "text": {"format": FORMAT}},
    "/v1/messages": {"messages": [USER], "max_tokens": 16, "tools": [TOOL], "tool_choice": {"type": "any"}},
}


@pytest.fixture(scope="module")
def eager(random_model, random_engine):
    """A function that starts a server whose model opens thoughts as soon as its grammar lets it."""
    tokenizer = Tokenizer.load(random_model)
    opening = tokenizer.encode("<think>", add_special_tokens=False)[0]
    defaults = {"logit_bias": {opening: 30.0, tokenizer.encode("{", add_special_tokens=False)[0]: 20.0}}

    def start(**options):
        settings = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"} | options
        served = served_tokenizer(tokenizer, ServerConfig(**settings))
        return serving(Frontend(random_engine, served, seed=0, default_sampling=defaults), **settings)

    return start


def beginning(server, path, fields):
    """Return the first characters of a forced answer, as the engine has written it: "<think" if it may think."""
    written = []
    run = server.frontend.run

    async def record(groups, take):
        def seen(index, delta):
            written.extend(token_id for output in delta.outputs for token_id in output.token_ids)
            take(index, delta)

        await run(groups, seen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.frontend, "run", record)
        answer = server.post(path, FORCED[path] | fields)
    assert answer.status_code == 200, answer.text
    return server.tokenizer.decode(written, skip_special_tokens=False)[:6]


def test_a_forced_answer_without_thinking_opens_no_thoughts(eager):
    """The grammar has no thoughts where the request has turned them off, by any of its fields."""
    with eager() as server:
        for name, fields in ON.items():
            assert beginning(server, CHAT, fields) == "<think", name
        for name, (path, fields) in OFF.items():
            assert beginning(server, path, fields).startswith(("{", "<tool_")), name


def test_an_operator_turns_thinking_off(eager):
    with eager(default_chat_template_kwargs={"enable_thinking": False}) as server:
        assert beginning(server, CHAT, {}).startswith("{")
        assert beginning(server, CHAT, {"reasoning_effort": "low"}) == "<think"


def test_thoughts_that_every_prompt_opens_end_at_once(eager):
    """A template that knows no switch opens them all the same."""
    with eager(chat_template="{{ messages[0].content }}<think>\n") as server:
        assert beginning(server, CHAT, {"reasoning_effort": "none"}) == "</thin"


def test_thoughts_that_the_prompt_has_ended_do_not_begin_again(eager):
    template = "{{ messages[0].content }}<think>\n\n</think>\n\n"
    with eager(chat_template=template) as server:
        assert beginning(server, CHAT, {}).startswith("{")
