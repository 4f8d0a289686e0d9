"""POST /v1/chat/completions without streaming."""

import pytest
from serving import assert_error

USER = {"role": "user", "content": "hello"}


def test_answer(server, openai_client):
    server.says("good day")
    answer = openai_client.chat.completions.create(model="fake", messages=[USER])
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert len(answer.choices) == 1
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "good day", "stop")
    assert choice.message.tool_calls is None
    assert answer.usage.completion_tokens == 8
    assert server.prompt() == "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert answer.usage.prompt_tokens == len(server.client.submitted[0].prompt_token_ids)


def test_output_may_fill_the_context(server, openai_client):
    server.says("x")
    openai_client.chat.completions.create(model="fake", messages=[USER])
    request = server.client.submitted[0]
    assert request.max_tokens == server.client.info.max_model_len - len(request.prompt_token_ids)


def test_the_models_limit_is_the_default(server, monkeypatch):
    monkeypatch.setitem(server.frontend.default_sampling, "max_tokens", 5)
    for limit in ({}, {"max_tokens": 7}):
        server.post("/v1/chat/completions", {"messages": [USER], **limit})
    assert [request.max_tokens for request in server.client.submitted] == [5, 7]


def test_a_default_limit_is_cut_to_what_the_context_holds(server, monkeypatch):
    monkeypatch.setitem(server.frontend.default_sampling, "max_tokens", 10_000)
    assert server.post("/v1/chat/completions", {"messages": [USER]}).json()["usage"]["total_tokens"] == 512


def test_roles_and_content_parts(server, openai_client):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    openai_client.chat.completions.create(
        model="fake",
        max_tokens=1,
        messages=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": parts, "name": "ann"},
            {"role": "assistant", "content": "yes"},
            USER,
        ],
    )
    assert server.prompt() == (
        "<s><|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_continue_final_message(server):
    messages = [USER, {"role": "assistant", "content": "I think"}]
    body = {"messages": messages, "max_tokens": 1, "continue_final_message": True}
    assert server.post("/v1/chat/completions", body).status_code == 200
    assert server.prompt().endswith("<|im_start|>assistant\nI think")


def test_without_generation_prompt(server):
    server.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 1, "add_generation_prompt": False})
    assert server.prompt().endswith("hello<|im_end|>\n")


def test_special_tokens_of_the_template_are_tokens(server):
    server.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 1})
    assert server.client.submitted[0].prompt_token_ids[:2] == [1, 3]


def test_n_answers(openai_client):
    answer = openai_client.chat.completions.create(model="fake", messages=[USER], n=3, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 6


def test_logprobs(server, openai_client):
    server.says("é")
    answer = openai_client.chat.completions.create(model="fake", messages=[USER], logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert bytes(byte for token in content for byte in token.bytes).decode() == "é"
    assert [token.logprob for token in content] == [-1.5, -1.5]
    assert [top.logprob for top in content[0].top_logprobs] == [-0.5, -1.5, -2.5]
    assert content[0].top_logprobs[1].bytes == content[0].bytes


@pytest.mark.parametrize("num_top", [None, 0, 1])
def test_the_token_is_among_the_most_likely_only_by_rank(server, openai_client, num_top):
    server.says("a")
    more = {} if num_top is None else {"top_logprobs": num_top}
    answer = openai_client.chat.completions.create(model="fake", messages=[USER], logprobs=True, **more)
    (token,) = answer.choices[0].logprobs.content
    assert (token.token, token.logprob) == ("a", -1.5)
    assert [top.token for top in token.top_logprobs] == (["b"] if num_top == 1 else [])


def test_return_token_ids_and_prompt_logprobs(server):
    server.says("ok")
    answer = server.post(
        "/v1/chat/completions", {"messages": [USER], "return_token_ids": True, "prompt_logprobs": 0}
    ).json()
    ids = server.client.submitted[0].prompt_token_ids
    assert answer["prompt_token_ids"] == ids
    assert len(answer["prompt_logprobs"]) == len(ids)
    assert answer["choices"][0]["token_ids"] == server.tokenizer.encode("ok", add_special_tokens=False)


def test_fields_without_meaning_are_no_reason_to_refuse(server):
    body = {
        "messages": [USER],
        "max_tokens": 1,
        "tools": None,
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "reasoning_effort": None,
        "logprobs": False,
        "top_logprobs": 0,
        "user": "ann",
        "store": False,
        "metadata": {"a": "b"},
    }
    assert server.post("/v1/chat/completions", body).status_code == 200


CHAT = "/v1/chat/completions"
BATCH = f"{CHAT}/batch"


def test_several_conversations_in_one_request(server):
    conversations = [[USER], [{"role": "user", "content": "something else"}], [USER]]
    body = {"max_tokens": 4, "logprobs": True, "return_token_ids": True, "response_format": {"type": "text"}}
    answer = server.post(BATCH, body | {"messages": conversations}).json()
    assert answer["object"] == "chat.completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    singles = [server.post(CHAT, body | {"messages": messages}).json() for messages in conversations]
    for choice, single in zip(answer["choices"], singles, strict=True):
        assert choice.pop("prompt_token_ids") == single["prompt_token_ids"]
        assert choice | {"index": 0} == single["choices"][0]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(single["usage"][name] for single in singles)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [USER]}, "messages[0]"),
        ({"messages": [[USER], [{"role": "user"}]]}, "messages[1][0].content"),
        ({"messages": [[USER], [USER | {"content": "a " * 10_000}]]}, "messages[1]"),
        ({"messages": [[USER]] * 1025}, "messages"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"temperature": -1}, "temperature"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_batches_that_are_refused(server, more, param):
    assert_error(server.post(BATCH, {"messages": [[USER]], "max_tokens": 4} | more), 400, param)
