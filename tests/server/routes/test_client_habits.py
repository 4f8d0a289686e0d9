"""What clients look for in answers and errors, and what they send, beyond the fields of the specifications."""

import pytest
from fake_client import Script
from serving import assert_error, frames, running

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError

USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
COMPLETIONS, CHAT, RESPONSES, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"
LONG = "x" * 600


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": LONG}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 10_000}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 600}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 500, "max_tokens": 50}, "max_tokens"),
        (COMPLETIONS, {"prompt": "x" * 500, "max_completion_tokens": 50}, "max_completion_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (CHAT, {"messages": [USER], "max_tokens": 600}, "max_tokens"),
        (CHAT, {"messages": [USER], "max_completion_tokens": 600}, "max_completion_tokens"),
        (RESPONSES, {"input": LONG}, "input"),
        (RESPONSES, {"input": "hello", "max_output_tokens": 600}, "max_output_tokens"),
        (RESPONSES, {"input": "hello", "max_tokens": 600}, "max_tokens"),
        (EMBEDDINGS, {"input": LONG}, "input"),
        (EMBEDDINGS, {"input": [5] * 600}, "input"),
    ],
)
def test_too_long_is_recognized_by_its_phrases(server, path, body, param):
    answer = server.post(path, body)
    assert_error(answer, 400, param)
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 512 tokens" in error["message"]
    assert "context_length_exceeded" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (EMBEDDINGS, {"input": [[1], [10**6]]}, "input[1]", "input[1]: token id 1000000"),
        (EMBEDDINGS, {"input": []}, "input", "input must not be empty"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"five": 1}}, "logit_bias", "five"),
        (
            COMPLETIONS,
            {"prompt": "a", "logit_bias": {"five": 1, "6": 1, "seven": 1, "-8": 1}},
            "logit_bias",
            "'seven', '-8'",
        ),
        (CHAT, {"messages": [USER], "logit_bias": {"5": "high", "6": [], "7": 1}}, "logit_bias", "'6'"),
        (
            CHAT,
            {"messages": [USER], "logit_bias": {"1000000": 1, "5": 1, "1000007": 1}},
            "logit_bias",
            "1000000, 1000007 are",
        ),
        (CHAT, {"messages": [USER], "logit_bias": {"5": "high"}}, "logit_bias", "5"),
        (CHAT, {"messages": [USER], "logit_bias": {"x": 1, "1000000": 1, "5": 1}}, "logit_bias", "'x'"),
        (CHAT, {"messages": [USER], "logit_bias": {"x": 1, "1000000": 1, "5": 1}}, "logit_bias", ": 1000000"),
        (RESPONSES, {"input": "a", "logit_bias": {"1000000": 1}}, "logit_bias", "1000000"),
        (RESPONSES, {"input": "a", "tool_choice": {"type": "function"}}, "tool_choice.name", "tool_choice.name"),
        (RESPONSES, {"input": "a", "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "g"),
        (RESPONSES, {"input": "a", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        (RESPONSES, {"input": "a", "text": {"verbosity": "loud"}}, "text.verbosity", "loud"),
        (CHAT, {"messages": [USER], "max_completion_tokens": 10**30}, "max_completion_tokens", "max_completion_tokens"),
        (RESPONSES, {"input": "a", "max_completion_tokens": -5}, "max_completion_tokens", "max_completion_tokens"),
    ],
)
def test_errors_name_the_field_as_it_was_sent(server, path, body, param, words):
    answer = server.post(path, body)
    assert_error(answer, 400, param)
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "abc"}), (CHAT, {"messages": [USER]})])
class TestUsageOfStreams:
    def test_continuous_usage_needs_include_usage(self, server, path, body):
        chunks = frames(server.post(path, body | {"stream": True, "stream_options": {"continuous_usage_stats": True}}))
        assert not any("usage" in chunk for chunk in chunks)

    def test_usage_that_the_server_forces(self, tokenizer, path, body):
        with running(tokenizer, enable_force_include_usage=True) as server:
            for more in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": {}}):
                chunks = frames(server.post(path, body | {"stream": True, "max_tokens": 3} | more))
                assert [bool(chunk["usage"]) for chunk in chunks] == [*[False] * (len(chunks) - 1), True]
            assert server.post(path, body).json()["usage"]

    def test_the_first_usage_of_a_chat_counts_no_answer(self, server, path, body):
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = body | {"stream": True, "max_tokens": 3, "logprobs": 1 if path == COMPLETIONS else True}
        long = {"prompt": "abc " * 20} if path == COMPLETIONS else {"messages": [USER | {"content": "abc " * 20}]}
        first, *_ = frames(server.post(path, body | {"stream_options": options} | long))
        logprobs = first["choices"][0]["logprobs"]
        assert first["usage"]["completion_tokens"] == (len(logprobs["tokens"]) if path == COMPLETIONS else 0)
        assert first["usage"]["total_tokens"] > 20

    def test_continuous_usage_counts_up(self, server, path, body):
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = frames(server.post(path, body | {"stream": True, "max_tokens": 3, "stream_options": options}))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 3
        assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)
        assert all(
            chunk["usage"]["total_tokens"] == chunk["usage"]["prompt_tokens"] + chunk["usage"]["completion_tokens"]
            for chunk in chunks
        )
        if path == CHAT:
            assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
            assert counts[0] == 0

    def test_obfuscation_is_refused(self, server, path, body):
        given = body | {"stream": True, "stream_options": {"include_obfuscation": True}}
        assert_error(server.post(path, given), 400, "stream_options.include_obfuscation")
        given["stream_options"]["include_obfuscation"] = False
        assert server.post(path, given).status_code == 200


def test_what_was_not_asked_for_is_null(server):
    chat = server.post(CHAT, {"messages": [USER]}).json()
    assert chat["prompt_logprobs"] is None
    assert chat["prompt_token_ids"] is None
    (choice,) = server.post(COMPLETIONS, {"prompt": "a"}).json()["choices"]
    assert choice["prompt_logprobs"] is None
    assert choice["prompt_token_ids"] is None


def test_fingerprint(server):
    told = set()
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [USER]})):
        told.add(server.post(path, body).json()["system_fingerprint"])
        told |= {chunk["system_fingerprint"] for chunk in frames(server.post(path, body | {"stream": True}))}
    (fingerprint,) = told
    assert fingerprint.startswith("fp_")


def test_tokens_are_the_vocabularys_own(server):
    answer = server.post("/tokenize", {"prompt": " h\u00e9", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["<s>", "\u0120", "h", "\u00c3", "\u00a9"]
    assert len(answer["token_strs"]) == answer["count"]


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_an_echo_of_token_ids_shows_special_tokens(server, max_tokens):
    prompt = [*server.tokenizer.encode("hi"), 3, *server.tokenizer.encode("a", add_special_tokens=False)]
    body = {"prompt": [prompt, "hi"], "echo": True, "max_tokens": max_tokens, "logprobs": 0}
    server.play = lambda request: Script(token_ids=[70, 71][:max_tokens] or [70])
    by_ids, by_text = server.post(COMPLETIONS, body).json()["choices"]
    assert by_ids["text"].startswith("<s>hi<|im_start|>a")
    assert by_ids["logprobs"]["text_offset"][:5] == [0, 3, 4, 5, 17]
    assert by_text["text"].startswith("hi")
    assert by_text["logprobs"]["text_offset"][:3] == [0, 0, 1]


@pytest.mark.parametrize("skips", [True, False])
def test_an_echo_of_a_text_shows_the_special_tokens_in_it(server, skips):
    body = {"prompt": "hi<|im_start|>a", "echo": True, "max_tokens": 1, "logprobs": 0, "skip_special_tokens": skips}
    (choice,) = server.post(COMPLETIONS, body).json()["choices"]
    assert choice["text"].startswith(body["prompt"])
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 14, 15]


def test_lists_mix_texts_and_token_ids(server):
    answer = server.post(COMPLETIONS, {"prompt": ["ab", [70, 71]], "max_tokens": 1}).json()
    assert len(answer["choices"]) == 2
    assert len(server.post(EMBEDDINGS, {"input": ["ab", [70, 71], "c"]}).json()["data"]) == 3


@pytest.mark.parametrize("role", ["ipython", "function", "tool_result", "observer-2"])
def test_roles_that_the_template_takes(server, role):
    message = {"role": role, "content": "5 degrees"}
    for path, body in ((CHAT, {"messages": [USER, message]}), (RESPONSES, {"input": [USER, message]})):
        server.client.submitted.clear()
        assert server.post(path, body | {"max_tokens": 1}).status_code == 200
        read = server.prompt(0)
        assert f"{role}\n5 degrees" in read


def test_roles_that_the_template_leaves_out_are_refused(tokenizer):
    template = "{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.content }};{% endfor %}"
    with running(tokenizer.with_chat_template(template)) as server:
        body = {"messages": [USER, {"role": "ipython", "content": "5 degrees"}], "max_tokens": 1}
        assert_error(server.post(CHAT, body), 400, "messages[1].role")
        body["messages"][1]["role"] = "assistant"
        assert server.post(CHAT, body).status_code == 200


@pytest.mark.parametrize("value", ["none", "auto", None])
def test_function_call_that_asks_for_nothing(server, value):
    assert server.post(CHAT, {"messages": [USER], "max_tokens": 1, "function_call": value}).status_code == 200


def test_keys_and_preflights(tokenizer):
    with running(tokenizer, api_key=["secret"], allowed_origins=["https://example.org"]) as server:
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"X-Api-Key": "wrong"}, 401),
            ({"authorization": "Bearer secret"}, 200),
            ({"authorization": "Bearer wrong", "x-api-key": "secret"}, 401),
            ({}, 401),
        ):
            assert server.get("/v1/models", headers=headers).status_code == status, headers
        asked = {
            "origin": "https://example.org",
            "access-control-request-method": "POST",
            "access-control-request-private-network": "true",
        }
        answer = server.request("OPTIONS", CHAT, headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-private-network"] == "true"


def test_the_root_of_a_model_is_what_was_loaded(tokenizer):
    with running(tokenizer, served_model_name="other") as server:
        (model,) = server.get("/v1/models").json()["data"]
        assert (model["id"], model["root"]) == ("other", "fake")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', None),
        ('Wait.<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', ""),
        ("No call.", ""),
    ],
)
def test_the_first_chunk_of_a_call_has_no_content(tokenizer, text, content, stream):
    with running(tokenizer, tool_call_parser="hermes") as server:
        server.says(text)
        body = {"messages": [USER], "tools": [TOOL], "stream": stream, "n": 2}
        if not stream:
            for choice in server.post(CHAT, body).json()["choices"]:
                assert (choice["message"]["content"] is None) == (content is None)
            return
        firsts = {}
        for chunk in frames(server.post(CHAT, body)):
            for choice in chunk["choices"]:
                firsts.setdefault(choice["index"], choice["delta"])
        assert list(firsts.values()) == [{"role": "assistant", "content": content}] * 2


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": [USER]}, "chat.completion"),
        ({"prompt": "a"}, "text_completion"),
        ({"input": "a"}, "list"),
        ({"text_1": "a", "text_2": "b"}, "list"),
    ],
)
def test_invocations_are_what_their_body_says(server, body, kind):
    assert server.post("/invocations", body).json()["object"] == kind
    assert_error(server.post("/invocations", {"temperature": 1}), 400, "messages")
    if kind != "list":
        assert frames(server.post("/invocations", body | {"stream": True}))


def test_a_server_behind_a_proxy_that_keeps_its_path(tokenizer):
    with running(tokenizer, root_path="/llm/a", api_key=["secret"]) as server:
        key = {"x-api-key": "secret"}
        for root in ("", "/llm/a"):
            assert server.get(f"{root}/live").status_code == 200
            assert server.get(f"{root}/v1/models").status_code == 401
            assert server.get(f"{root}/v1/models", headers=key).json()["data"][0]["id"] == "fake"
            assert server.post(f"{root}{CHAT}", {"messages": [USER], "max_tokens": 1}, headers=key).status_code == 200
        assert server.get("/llm/ab/live", headers=key).status_code == 404
        assert server.get("/llm/live", headers=key).status_code == 404


@pytest.mark.parametrize("root_path", ["llm", "/", "/llm/"])
def test_a_root_path_that_is_none(root_path):
    with pytest.raises(ConfigError, match="root_path"):
        ServerConfig(root_path=root_path)
