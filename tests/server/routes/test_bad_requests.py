"""Everything that is refused: status, the field that is named, and that the server goes on."""

import json
import re

import pytest
from depths import examples
from fake_client import echo
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import assert_error, assert_well

from jaxserve.server.protocol.chat import ChatRequest
from jaxserve.server.protocol.completions import CompletionRequest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}
HUGE = 10**30

# (fields besides a good prompt, the field that is named)
BAD_FOR_BOTH = [
    ({"model": 1}, "model"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "n"),
    ({"n": HUGE}, "n"),
    ({"n": "2"}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.5}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": HUGE}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 0.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ["x"] * 129}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [3] * 65}, "stop_token_ids"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "high"}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"1000000": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ({"allowed_token_ids": [5] * 1000}, "allowed_token_ids"),
    ({"bad_words": ["x"] * 65}, "bad_words"),
    ({"bad_words": ["x" * 257]}, "bad_words"),
    ({"bad_words": ["nine tokens"]}, "bad_words"),
    ({"bad_words": [""]}, "bad_words"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"logprob_token_ids": [10**6]}, "logprob_token_ids"),
    ({"logprob_token_ids": [-1]}, "logprob_token_ids"),
    ({"logprob_token_ids": ["a"]}, "logprob_token_ids[0]"),
    ({"logprob_token_ids": 5}, "logprob_token_ids"),
    ({"logprob_token_ids": [5] * 129}, "logprob_token_ids"),
    ({"priority": 2**31}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "x" * 200_000}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a" * 1000] * 200}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: nobody"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "start: <|im_end|>"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": {"type": "string", "format": "iri"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"$ref": "http://localhost/x"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": False}}, "structured_outputs.json"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
    ({"logits_processors": ["os.system"]}, "logits_processors"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"max_tokens": 600}, "max_tokens"),
]
TOOL = {"type": "function", "function": {"name": "f"}}
UNSUPPORTED_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"not": {"const": 1}}}},
    },
}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD_COMPLETIONS = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, 2.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[1], "a", 5]}, "prompt"),
    ({"prompt": ["a", []]}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [HUGE]}, "prompt"),
    ({"prompt": "x" * 600}, "prompt"),
    ({"prompt": "x" * 500, "max_tokens": 50}, "max_tokens"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 20}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"suffix": "the end"}, "suffix"),
]
BAD_CHATS = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [USER] * 4097}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "a wizard", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "", "content": "a"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}
            ]
        },
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [USER, {"role": "tool", "content": "5"}]}, "messages[1].tool_call_id"),
    ({"tools": [TOOL]}, "tools"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
    ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"tools": [UNSUPPORTED_TOOL], "tool_choice": "required"}, "tools[0].function.parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"x" * 65: 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"count": 10**10}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"counts": [{"a": -(10**10)}]}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"text": "x" * 40_000}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"deep": [[[[[[[[[1]]]]]]]]]}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {f"x{i}": 1 for i in range(65)}}, "chat_template_kwargs"),
    ({"documents": [{}] * 1025}, "documents"),
    ({"echo": True}, "echo"),
    ({"verbosity": "loud"}, "verbosity"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
    ({"enable_thinking": False}, "enable_thinking"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 480}], "max_tokens": 50}, "max_tokens"),
]
CASES = [
    *((COMPLETIONS, {"prompt": "a", **fields}, param) for fields, param in BAD_FOR_BOTH + BAD_COMPLETIONS),
    *((CHAT, {"messages": [USER], **fields}, param) for fields, param in BAD_FOR_BOTH + BAD_CHATS),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": None, "messages": None}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [10**6]}, "tokens"),
]


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.sampled_from([2**31, 2**63, -(2**63) - 1, HUGE, 1e308, -0.5, 0.5, 1.5])
    | st.text(max_size=4),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize(
    ("path", "kind", "good"),
    [(COMPLETIONS, CompletionRequest, {"prompt": "a"}), (CHAT, ChatRequest, {"messages": [USER]})],
)
def test_whatever_is_sent_gets_an_answer(shared_server, path, kind, good):
    """Any fields with any values: a result or a refusal, never a fault."""
    names = st.sampled_from(kind.__struct_fields__)

    @settings(max_examples=examples(150))
    @given(fields=st.dictionaries(names, JSON_VALUES, max_size=3))
    def check(fields):
        answer = shared_server.post(path, {**good, "max_tokens": 2, **fields})
        assert answer.status_code in (200, 400, 404), (fields, answer.text)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error["type"] == ("invalid_request_error" if answer.status_code == 400 else "not_found_error")
            assert error["param"] is None or re.match(r"\w+", error["param"])[0] in {*fields, *good, "max_tokens"}

    shared_server.play = echo
    check()
    assert_well(shared_server)


def name(case):
    path, body, _ = case
    return f"{path.rsplit('/', 1)[-1]} {json.dumps(body)[:60]}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_refused(server, case):
    path, body, param = case
    assert_error(server.post(path, body), 400, param)
    assert not server.client.submitted
    assert_well(server)


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (COMPLETIONS, {"max_tokens": "5"}, "max_tokens must be an integer, got a text"),
        (COMPLETIONS, {"temperature": []}, "temperature must be a number, got a list"),
        (COMPLETIONS, {"seed": 1.5}, "seed must be an integer, got a number"),
        (COMPLETIONS, {"echo": 1}, "echo must be true or false, got an integer"),
        (COMPLETIONS, {"n": True}, "n must be an integer, got a boolean"),
        (COMPLETIONS, {"stop": 5}, "stop must be a text or a list, got an integer"),
        (COMPLETIONS, {"stop": ["a", None]}, "stop[1] must be a text, got null"),
        (CHAT, {"messages": {}}, "messages must be a list, got an object"),
        (CHAT, {"messages": [USER, 5]}, "messages[1] must be an object, got an integer"),
        (CHAT, {"messages": [{"role": 1}]}, "messages[0].role must be a text, got an integer"),
        (
            CHAT,
            {"reasoning_effort": "hard"},
            "reasoning_effort must be one of high, low, max, medium, minimal, none, xhigh, got 'hard'",
        ),
        (CHAT, {"reasoning": {"effort": "a\nb"}}, "reasoning.effort must be one of high, low"),
        (CHAT, {"tools": [{"function": {}}]}, "tools[0].function.name: this field is required"),
        ("/v1/responses", {"input": [{"role": "user", "content": 5}]}, "input[0].content must be a text or a list"),
        ("/v1/responses", {"metadata": {"a": 5}}, "a value of metadata must be a text, got an integer"),
        ("/v1/embeddings", {"endianness": "middle"}, "endianness must be one of big, little, native, got 'middle'"),
        ("/v1/messages", {"max_tokens": "5"}, "max_tokens must be an integer, got a text"),
    ],
)
def test_wrong_types_are_named_in_the_words_of_all_other_errors(server, path, fields, message):
    good = (
        {"messages": [USER]}
        if path in (CHAT, "/v1/messages")
        else {"input" if "completions" not in path else "prompt": "a"}
    )
    error = server.post(path, {**good, **fields}).json()["error"]
    assert error["message"].startswith(message)
    assert "`" not in error["message"]


@pytest.mark.parametrize(("content", "got"), [(b"[]", "a list"), (b"5", "an integer"), (b"null", "null")])
@pytest.mark.parametrize("path", [COMPLETIONS, "/detokenize", "/v1/messages"])
def test_a_body_that_is_no_object(server, path, content, got):
    answer = server.post(path, None, content=content, headers={"content-type": "application/json"})
    assert answer.json()["error"]["message"] == f"the request body must be an object, got {got}"


GOOD = b'"prompt": "a", "messages": [{"role": "user", "content": "a"}]'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"{'prompt': 'a'}",
        b"{%b} more" % GOOD,
        b'{%b, "cache_salt": "\xff"}' % GOOD,
        b'{%b, "cache_salt": "\\ud800"}' % GOOD,
        b'{%b, "temperature": NaN}' % GOOD,
        b'{%b, "x": %b' % (GOOD, b"[" * 100_000),
        b'{%b, "x": %b1%b}' % (GOOD, b'{"a":' * 5_000, b"}" * 5_000),
        b'{%b, "prompt_embeds": %b}' % (GOOD, b"[" * 5_000 + b"]" * 5_000),
        b"\x00\x01\x02",
        b"[]",
        b'"prompt"',
        b"null",
    ],
    ids=lambda content: repr(content[-30:]),
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_malformed_json(server, path, content):
    answer = server.post(path, None, content=content, headers={"content-type": "application/json"})
    assert_error(answer, 400, None)
    assert_well(server)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/embeddings", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", None])
def test_a_body_that_is_not_called_json(server, path, kind):
    """Any web page may make a browser send such a body; the one with the right name, only after a preflight."""
    headers = {} if kind is None else {"content-type": kind}
    answer = server.post(path, None, content=b'{"prompt": "a", "input": "a", "messages": []}', headers=headers)
    assert_error(answer, 415, None)
    assert_well(server)


@pytest.mark.parametrize("number", [b"9" * 10_000, b"1e999", b"-" + b"9" * 400])
@pytest.mark.parametrize("field", [b"seed", b"temperature", b"max_tokens"])
def test_numbers_beyond_all_bounds(server, number, field):
    content = b'{"prompt": "a", "%b": %b}' % (field, number)
    answer = server.post(COMPLETIONS, None, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in (field.decode(), None)
    assert_well(server)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *((path, {"prompt": "a"}) for path in (COMPLETIONS, "/tokenize")),
        *((path, {"input": "a"}) for path in ("/v1/responses", "/v1/embeddings")),
        *((CHAT, {"messages": [USER]}), ("/detokenize", {"tokens": []})),
    ],
)
def test_unknown_model(server, path, body):
    answer = server.post(path, body | {"model": "gpt-9"})
    assert_error(answer, 404, "model", "not_found_error")
    assert answer.json()["error"]["code"] == "model_not_found"
    assert_well(server)
