"""Convert a request of /v1/messages to the equivalent chat: blocks become messages, and fields are renamed."""

import re
from typing import Any

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.server.anthropic.protocol import Block, CountRequest, Message, MessagesRequest, ToolChoice, ToolDefinition
from jaxserve.server.protocol.chat import ChatRequest
from jaxserve.server.protocol.common import not_supported, refuse_unless_empty, rename
from jaxserve.server.protocol.decoding import converted

# The chat's name of a field -> its name here, for errors.
_NAMES = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "tool_choice.function": "tool_choice",
}


def chat_request(body: CountRequest, *, has_thoughts: bool) -> ChatRequest:
    """Return the chat of a request. Raises InvalidRequest, naming fields as they were sent.

    `has_thoughts` says whether it is known how the model writes its thoughts: a budget has no effect on others.
    """
    for name in ("mcp_servers", "container", "context_management"):
        refuse_unless_empty(name, getattr(body, name, None))
    chat: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    if body.tools:
        chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(body.tool_choice)
        chat["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.output_config is not None:
        chat["reasoning_effort"] = body.output_config.effort
        if body.output_config.format is not None:
            schema = body.output_config.format.schema
            chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if body.thinking is not None:
        thinks = body.thinking.type != "disabled"
        chat["chat_template_kwargs"] = {"enable_thinking": thinks}
        if thinks and body.thinking.budget_tokens is not None and has_thoughts:
            chat["thinking_token_budget"] = body.thinking.budget_tokens
    if isinstance(body, MessagesRequest):
        chat |= {
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stream": body.stream,
        }
    return converted({name: value for name, value in chat.items() if value is not None}, ChatRequest)


def name_as_sent(error: InvalidRequest, body: CountRequest) -> None:
    """Rename the field of an error about the chat to what the client has sent."""
    for name, sent in _NAMES.items():
        rename(error, name, sent)
    if error.param is None:
        return
    if found := re.match(r"tools\[\d+\]", error.param):
        rename(error, f"{found[0]}.function.parameters", f"{found[0]}.input_schema")
        rename(error, f"{found[0]}.function", found[0])
    if found := re.match(r"messages\[(\d+)\]", error.param):
        sources = [name for name, _ in _named_messages(body)]
        rename(error, found[0], sources[min(int(found[1]), len(sources) - 1)])


def _messages(body: CountRequest) -> list[dict[str, Any]]:
    return [message for _, message in _named_messages(body)]


def _named_messages(body: CountRequest) -> list[tuple[str, dict[str, Any]]]:
    """Return the chat's messages, each with the name of the field that it was made from."""
    found: list[tuple[str, dict[str, Any]]] = []
    system = _text(body.system or "", "system")
    if system:
        found.append(("system", {"role": "system", "content": system}))
    for index, message in enumerate(body.messages):
        param = f"messages[{index}]"
        made = _of_assistant(message, param) if message.role == "assistant" else _of_user(message, param)
        found += [(param, each) for each in made]
    return found


def _of_user(message: Message, param: str) -> list[dict[str, Any]]:
    """Return the results of tools as messages of their own, before the text."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, texts = [], []
    for index, block in enumerate(message.content):
        name = f"{param}.content[{index}]"
        if block.get("type") == "tool_result":
            call_id = _required(block, "tool_use_id", name)
            text = _text(block.get("content") or "", f"{name}.content")
            results.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            texts.append(_text([block], f"{param}.content", first=index))
    if not texts:
        return results or [{"role": message.role, "content": ""}]
    return [*results, {"role": message.role, "content": "\n".join(texts)}]


def _of_assistant(message: Message, param: str) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": "assistant", "content": message.content}]
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(message.content):
        name = f"{param}.content[{index}]"
        match block.get("type"):
            case "thinking":
                thoughts.append(_required(block, "thinking", name))
            case "redacted_thinking":
                pass  # encrypted: only its author can read it
            case "tool_use":
                arguments = block.get("input") or {}
                if not isinstance(arguments, dict):
                    raise InvalidRequest(f"{name}.input must be an object", param=f"{name}.input")
                function = {
                    "name": _required(block, "name", name),
                    "arguments": msgspec.json.encode(arguments).decode(),
                }
                calls.append({"id": _required(block, "id", name), "type": "function", "function": function})
            case _:
                texts.append(_text([block], f"{param}.content", first=index))
    made: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    if "".join(thoughts):
        made["reasoning_content"] = "\n".join(thoughts)
    return [made | ({"tool_calls": calls} if calls else {})]


def _text(content: object, param: str, *, first: int = 0) -> str:
    """Return the text of blocks. Raises InvalidRequest for other blocks; `first` is the index of the first one."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{param} must be a text or a list of blocks", param=param)
    texts = []
    for index, block in enumerate(content, start=first):
        name = f"{param}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        source = block.get("source") if kind == "document" else None
        if isinstance(source, dict) and source.get("type") == "text":
            texts.append(_required(source, "data", f"{name}.source"))
        elif kind == "text":
            texts.append(_required(block, "text", name))
        else:
            raise not_supported(f"{name}.type", f"content of type {str(kind)[:40]!r}")
    return "\n".join(texts)


def _required(block: Block, field: str, param: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise InvalidRequest(f"{param}.{field} must be a text", param=f"{param}.{field}")
    return value


def _tool(tool: ToolDefinition, param: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise not_supported(f"{param}.type", f"a tool of type {tool.type[:40]!r}, which the server would run,")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("tool_choice.name is missing", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
