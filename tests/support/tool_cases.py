"""The tools that tests of chats offer, and the calls of an answer."""

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/place"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "string"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Look.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"get_weather": PARAMETERS, "now": {"type": "object", "properties": {}}}


def functions(message):
    return [call["function"] for call in message["tool_calls"]]


def without_ids(message):
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning", ""),
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": calls,
    }


def join(events):
    """Join the chunks of a stream to a message."""
    texts = {"content": "", "reasoning": "", "reasoning_content": ""}
    calls, finish_reasons = [], []
    for event in events:
        (choice,) = event["choices"]
        delta = choice["delta"]
        for name in texts:
            texts[name] += delta.get(name) or ""
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                assert piece["index"] == len(calls)
                assert piece["type"] == "function"
                calls.append({"name": piece["function"]["name"], "arguments": ""})
            else:
                assert piece["index"] == len(calls) - 1
                assert "name" not in piece["function"]
            calls[-1]["arguments"] += piece["function"].get("arguments", "")
        finish_reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(finish_reasons) == 1
    return texts | {"calls": calls}, finish_reasons[0]
