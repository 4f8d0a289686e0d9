"""Convert a request of /v1/messages to the equivalent chat: blocks become messages, and fields are renamed."""

import re
from typing import Any

from jaxserve.decoding import converted
from jaxserve.errors import ContextLengthExceeded, InvalidRequest
from jaxserve.server.anthropic.blocks import (
    CALLS,
    NOT_READ,
    call,
    is_result,
    required,
    result_text,
    system_text,
    text_of,
)
from jaxserve.server.anthropic.context import edits_of
from jaxserve.server.anthropic.protocol import CountRequest, Message, MessagesRequest
from jaxserve.server.anthropic.tools import chat_tool, chat_tool_choice, offer
from jaxserve.server.protocol.chat import ChatRequest
from jaxserve.server.protocol.common import refuse_unless_empty, rename
from jaxserve.server.protocol.messages import Turn

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
_REFUSED = ("mcp_servers", "container", "thread")


def chat_request(body: CountRequest, *, has_thoughts: bool) -> ChatRequest:
    """Return the chat of a request. Raises InvalidRequest, naming fields as they were sent.

    `has_thoughts` says whether it is known how the model writes its thoughts: a budget has no effect on others.
    """
    for name in _REFUSED:
        refuse_unless_empty(name, getattr(body, name, None))
    if isinstance(body, MessagesRequest):
        refuse_unless_empty("compaction", body.compaction)
    chat: dict[str, Any] = {"model": body.model, "messages": [message for _, message in _named_messages(body)]}
    last = chat["messages"][-1] if chat["messages"] else {}
    if last.get("role") == "assistant":
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
        if last.get("tool_calls") or not last["content"]:
            param = f"messages[{len(body.messages) - 1}]"
            what = "the results of its calls are missing" if last.get("tool_calls") else "it has no text to continue"
            raise InvalidRequest(f"{param}: {what}", param=param)
    tools = offer(body).tools
    if tools:
        chat["tools"] = [chat_tool(tool, param) for param, tool in tools]
    if body.tool_choice is not None:
        chat["tool_choice"] = chat_tool_choice(body.tool_choice)
        chat["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.output_config is not None:
        chat["reasoning_effort"] = body.output_config.effort
    form = (body.output_config and body.output_config.format) or body.output_format
    if form is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema}}
    if body.thinking is not None:
        thinks = body.thinking.type != "disabled"
        chat["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks}
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


def ignored(body: CountRequest) -> list[str]:
    """Return what of a request is known and has no effect, for the operator."""
    found = [f"context_management.edits[].type {kind[:40]!r}" for kind in edits_of(body.context_management).unknown]
    found += [f"tools[].type {kind[:40]!r}" for kind in offer(body).left_out]
    if body.output_config is not None and body.output_config.task_budget is not None:
        found.append("output_config.task_budget")
    if any(message.output_config for message in body.messages):
        found.append("messages[].output_config")
    return found


def name_as_sent(error: InvalidRequest, body: CountRequest) -> None:
    """Rename the field of an error about the chat to what the client has sent.

    A prompt that is too long is also told in the words by which Anthropic's clients know it: Claude Code then compacts
    the conversation, or asks for less.
    """
    for name, sent in _NAMES.items():
        rename(error, name, sent)
    if body.output_format is not None and (body.output_config is None or body.output_config.format is None):
        rename(error, "output_config.format", "output_format")
    if isinstance(error, ContextLengthExceeded) and error.lengths is not None:
        num_prompt_tokens, num_output_tokens, limit = error.lengths
        known = f"prompt is too long: {num_prompt_tokens} tokens > {limit} maximum"
        if num_output_tokens:
            known = (
                f"input length and `max_tokens` exceed context limit: {num_prompt_tokens} + {num_output_tokens} > "
                f"{limit}, decrease input length or `max_tokens` and try again"
            )
        error.message = f"{known}. {error.message}"
        error.args = (error.message,)
    if error.param is None:
        return
    if found := re.match(r"tools\[(\d+)\]", error.param):
        sources = [param for param, _ in offer(body).tools]
        if int(found[1]) < len(sources):
            source = sources[int(found[1])]
            rename(error, f"{found[0]}.function.parameters", f"{source}.input_schema")
            rename(error, f"{found[0]}.function", source)
    if found := re.match(r"messages\[(\d+)\]", error.param):
        sources = [name for name, _ in _named_messages(body)]
        rename(error, found[0], sources[min(int(found[1]), len(sources) - 1)])


def _named_messages(body: CountRequest) -> list[tuple[str, dict[str, Any]]]:
    """Return the chat's messages, each with the name of the field that it was made from. Several messages in a row of
    the user are one turn, and so are several of the assistant.
    """
    turns: list[tuple[str, list[dict[str, Any]]]] = []
    system = system_text(body.system or "")
    if system:
        turns.append(("system", [{"role": "system", "content": system}]))
    last_user = max((index for index, each in enumerate(body.messages) if each.role == "user"), default=-1)
    for index, message in enumerate(body.messages):
        param = f"messages[{index}]"
        if message.content is None and message.role != "system":
            raise InvalidRequest(f"{param}.content: this field is required", param=f"{param}.content")
        made = _of_assistant(message, param) if message.role == "assistant" else _of_user(message, param)
        if message.clear_at == "next_user_message" and index < last_user:
            continue
        for each in made:
            if turns and _is_one_turn(turns[-1][1][-1], each):
                turns[-1][1].append(each)
            else:
                turns.append((param, [each]))
    return [(param, _joined(turn)) for param, turn in turns]


def _is_one_turn(message: dict[str, Any], following: dict[str, Any]) -> bool:
    role = message["role"]
    return role == following["role"] and role in ("user", "assistant") and "tool_calls" not in message


def _joined(turn: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the messages of one turn, of which only the last one may have calls, as one."""
    last = turn[-1]
    content = ("\n" if last["role"] == "user" else "").join(each["content"] or "" for each in turn)
    thoughts = "\n".join(each["reasoning_content"] for each in turn if "reasoning_content" in each)
    joined = last | {"content": content or (None if "tool_calls" in last else "")}
    return joined | ({"reasoning_content": thoughts} if thoughts else {})


def _of_user(message: Message, param: str) -> list[dict[str, Any]]:
    """Return the results of tools as messages of their own, before the text."""
    content = message.content or ""
    if isinstance(content, str):
        return [] if message.content is None else [{"role": message.role, "content": content}]
    results, texts = [], []
    for index, block in enumerate(content):
        name = f"{param}.content[{index}]"
        if is_result(block):
            results.append(_result(block, name))
        elif block.get("type") not in NOT_READ:
            texts.append(text_of([block], f"{param}.content", first=index))
    if not texts:
        return results or ([] if content else [{"role": message.role, "content": ""}])
    return [*results, {"role": message.role, "content": "\n".join(texts)}]


def _of_assistant(message: Message, param: str) -> list[dict[str, Any]]:
    """Return the message of a turn; several, if a server has run tools in the midst of it."""
    if isinstance(message.content, str):
        return [{"role": "assistant", "content": message.content}]
    made: list[dict[str, Any]] = []
    turn, previous = Turn(), None
    for index, block in enumerate(message.content or ()):
        name = f"{param}.content[{index}]"
        kind = block.get("type")
        if kind == "thinking":
            turn.thoughts.append(required(block, "thinking", name))
        elif kind in CALLS:
            turn.calls.append(call(block, name))
        elif is_result(block):
            if turn.calls:
                made += turn.close()
            made.append(_result(block, name))
        elif kind not in NOT_READ:
            text = text_of([block], f"{param}.content", first=index)
            if kind == previous:
                turn.words[-1] += text
            else:
                turn.words.append(text)
        previous = kind
    return [*made, *turn.close()] or [{"role": "assistant", "content": ""}]


def _result(block: dict[str, Any], param: str) -> dict[str, Any]:
    call_id = required(block, "tool_use_id", param)
    return {"role": "tool", "tool_call_id": call_id, "content": result_text(block, param)}
