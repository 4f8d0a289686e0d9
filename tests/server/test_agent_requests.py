"""Requests of agents, as they send them: Claude Code, Codex, and OpenAI's and Anthropic's clients (`requests/`).

A file has the request, what the model says (`says`), what it must have read, in order (`reads`), and not
(`does_not_read`), and what the client gets (`answers`), which is the same in a stream.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from serving import frames, response_events, running

REQUESTS = sorted((Path(__file__).parent / "requests").glob("*.json"))
TEMPLATE = (
    "{% for t in tools or [] %}({{ t.function.name }}: {{ t.function.description }})\n{% endfor %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.reasoning_content or '' }} {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}|{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}{% if enable_thinking is true %}{% endif %}"
)


@pytest.fixture
def server(tokenizer):
    with running(
        tokenizer.with_chat_template(TEMPLATE),
        client_options={"max_model_len": 2**16},
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    ) as server:
        yield server


@pytest.mark.parametrize("file", REQUESTS, ids=lambda file: file.stem)
def test_a_request_of_an_agent(server, file, caplog):
    case = json.loads(file.read_text(encoding="utf-8"))
    server.says(case["says"], tokens_per_step=7)
    body = case["body"]
    with caplog.at_level(logging.WARNING):
        whole = server.post(case["path"], body | {"stream": False}, headers=case["headers"])
        assert whole.status_code == 200, whole.text
        stream = server.post(case["path"], body | {"stream": True}, headers=case["headers"])
    told = [record.getMessage() for record in caplog.records if record.name.endswith("unknown_fields")]
    assert not [line for line in told if line.startswith("unknown")]
    assert [kind for kind in case.get("ignores", ()) if not any(f"'{kind}'" in line for line in told)] == []
    assert len(told) == len(set(told))

    prompts = [server.tokenizer.decode(request.prompt_token_ids) for request in server.client.submitted]
    assert prompts[0] == prompts[1]
    position = 0
    for text in case["reads"]:
        assert text in prompts[0][position:], (text, prompts[0])
        position = prompts[0].index(text, position)
    assert [text for text in case["does_not_read"] if text in prompts[0]] == []
    assert prompts[0].endswith(case.get("ends", ""))

    read, joined = _READERS[case["path"].partition("?")[0]]
    expected = [list(each) for each in case["answers"]]
    assert read(whole.json()) == expected
    assert read(joined(stream)) == expected
    for answer in (whole.json(), joined(stream)):
        edits = answer.get("context_management", {}).get("applied_edits", [])
        for edit, wanted in zip(edits, case.get("edits", ()), strict=True):
            assert edit.pop("cleared_input_tokens") > 0
            assert edit == wanted


def test_the_edited_conversation_is_counted(server):
    case = json.loads((Path(__file__).parent / "requests/anthropic_context_edits.json").read_text(encoding="utf-8"))
    body = {name: value for name, value in case["body"].items() if name != "max_tokens"}
    counted = server.post("/v1/messages/count_tokens?beta=true", body).json()
    plain = server.post("/v1/messages/count_tokens", body | {"context_management": None}).json()
    answer = server.post(case["path"], case["body"]).json()
    cleared = sum(edit["cleared_input_tokens"] for edit in answer["context_management"]["applied_edits"])
    assert counted["input_tokens"] == answer["usage"]["input_tokens"] == plain["input_tokens"] - cleared
    assert counted["context_management"]["original_input_tokens"] == plain["input_tokens"]
    assert "context_management" not in plain


# What a client gets, by the route: pairs of a kind and a text, or what a tool is called with.


def _of_message(answer: Any) -> list[list[Any]]:
    found = []
    for block in answer["content"]:
        call = {"name": block.get("name"), "input": block.get("input")}
        found.append([block["type"], call if block["type"] == "tool_use" else block[block["type"]].strip("\n")])
    return found


def _joined_message(stream: Any) -> Any:
    assert stream.status_code == 200, stream.text
    message: Any = None
    given = ""
    for frame in stream.text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
                given = ""
            case "content_block_delta":
                delta = event["delta"]
                kind = delta["type"].removesuffix("_delta")
                if kind == "input_json":
                    given += delta["partial_json"]
                elif kind != "signature":
                    message["content"][-1][kind] += delta[kind]
            case "content_block_stop" if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = json.loads(given or "{}")
            case "message_delta":
                message |= event["delta"] | {key: event[key] for key in ("context_management",) if key in event}
    return message


def _of_response(answer: Any) -> list[list[Any]]:
    found: list[list[Any]] = []
    for item in answer["output"]:
        match item["type"]:
            case "function_call":
                call = {name: item[name] for name in ("name", "namespace") if name in item}
                found.append([item["type"], call | {"arguments": json.loads(item["arguments"])}])
            case "custom_tool_call":
                found.append([item["type"], {"name": item["name"], "input": item["input"]}])
            case kind:
                found.append([kind, item["content"][0]["text"].strip("\n")])
    return found


def _joined_response(stream: Any) -> Any:
    events = response_events(stream)
    output = events[-1]["response"]["output"]
    for index, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == index]
        deltas = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        given = item.get("input", item.get("arguments"))
        assert deltas == (item["content"][0]["text"] if given is None else given)
        if item["type"] == "custom_tool_call":
            done = [event for event in own if event["type"] == "response.custom_tool_call_input.done"]
            assert [event["input"] for event in done] == [given]
    return events[-1]["response"]


def _of_chat(answer: Any) -> list[list[Any]]:
    found: list[list[Any]] = []
    for call in answer["choices"][0]["message"]["tool_calls"]:
        given = dict(call[call["type"]])
        if "arguments" in given:
            given["arguments"] = json.loads(given["arguments"])
        found.append([call["type"], given])
    return found


def _joined_chat(stream: Any) -> Any:
    calls: list[Any] = []
    for chunk in frames(stream):
        for delta in chunk["choices"][0]["delta"].get("tool_calls", ()):
            if delta["index"] == len(calls):
                calls.append({"type": delta["type"], delta["type"]: {}})
            call = calls[delta["index"]]
            for name, text in delta.get(call["type"], {}).items():
                call[call["type"]][name] = call[call["type"]].get(name, "") + text
    return {"choices": [{"message": {"tool_calls": calls}}]}


_READERS = {
    "/v1/messages": (_of_message, _joined_message),
    "/v1/responses": (_of_response, _joined_response),
    "/v1/chat/completions": (_of_chat, _joined_chat),
}
