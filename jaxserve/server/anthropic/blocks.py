"""Read content blocks of /v1/messages as text, and calls of tools with their results."""

import re
from typing import Any

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.server.anthropic.protocol import Block
from jaxserve.server.protocol.common import content_not_supported, not_supported

# Tuples: the type that a client has sent may be anything, also what cannot be hashed.
NOT_READ = ("redacted_thinking", "fallback", "mcp_tool_listing", "tool_addition", "tool_removal")
"""Blocks that hold no text for the model: encrypted, or read elsewhere (`tools`)."""
CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
"""Blocks that call a tool; all but the first were run by a server in the midst of the assistant's turn."""
_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
_TOLD = ("title", "url", "text", "stdout", "stderr", "return_code", "error_code", "tool_name", "data")
"""Fields of the results of other servers' tools that a model can read."""


def is_result(block: Block) -> bool:
    """Return true for the result of a tool, whoever has run it."""
    return str(block.get("type")).endswith("tool_result")


def text_of(content: object, param: str, *, first: int = 0) -> str:
    """Return the text of blocks. Raises InvalidRequest for other blocks; `first` is the index of the first one."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{param} must be a text or a list of blocks", param=param)
    texts = [_block_text(block, f"{param}[{index}]") for index, block in enumerate(content, start=first)]
    return "\n".join(text for text in texts if text is not None)


def system_text(content: str | list[Block]) -> str:
    """Return the system prompt, without Claude Code's line for billing, which differs in each request: with it no
    prefix would be found in the cache again.
    """
    text = text_of(content, "system")
    return _BILLING.sub("", text, count=1) if _BILLING.match(text) else text


def result_text(block: Block, param: str) -> str:
    """Return the text of a tool's result. An error says that it is one."""
    content = block.get("content") or ""
    if block.get("type") in ("tool_result", "mcp_tool_result"):
        text = text_of(content, f"{param}.content")
    else:
        text = "\n".join(_told(content))
    return f"Error: {text}" if block.get("is_error") and "error" not in text.lower() else text


def call(block: Block, param: str) -> dict[str, Any]:
    """Return a call as a chat has it. Raises InvalidRequest, naming the field."""
    arguments = block.get("input") or {}
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{param}.input must be an object", param=f"{param}.input")
    function = {"name": required(block, "name", param), "arguments": msgspec.json.encode(arguments).decode()}
    return {"id": required(block, "id", param), "type": "function", "function": function}


def required(block: Block, field: str, param: str) -> str:
    """Return a text that a block must have. Raises InvalidRequest, naming the field."""
    value = block.get(field)
    if not isinstance(value, str):
        raise InvalidRequest(f"{param}.{field} must be a text", param=f"{param}.{field}")
    return value


def _block_text(block: object, param: str) -> str | None:
    if not isinstance(block, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    match block.get("type"):
        case "text":
            return required(block, "text", param)
        case "document":
            return _document(block, param)
        case "search_result":
            head = [required(block, name, param) for name in ("title", "source")]
            return "\n".join([*head, text_of(block.get("content"), f"{param}.content")])
        case "tool_reference":
            return f"The tool {required(block, 'tool_name', param)} can be called now."
        case "compaction":
            return None if block.get("content") is None else required(block, "content", param)
        case kind if kind in NOT_READ:
            return None
        case kind:
            raise content_not_supported(f"{param}.type", kind)


def _document(block: Block, param: str) -> str:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(source, dict) and kind == "text":
        text = required(source, "data", f"{param}.source")
    elif isinstance(source, dict) and kind == "content":
        text = text_of(source.get("content"), f"{param}.source.content")
    else:
        raise not_supported(f"{param}.type", f"content of type 'document' whose source is {str(kind)[:40]!r}")
    head = [str(block[name]) for name in ("title", "context") if block.get(name)]
    return "\n".join([*head, text])


def _told(content: Any) -> list[str]:
    """Return the texts in the result of another server's tool, in order."""
    if isinstance(content, list):
        return [text for each in content for text in _told(each)]
    if not isinstance(content, dict):
        return [str(content)] if content else []
    if content.get("type") == "base64":
        return []
    texts = [str(content[name]) for name in _TOLD if content.get(name) and isinstance(content[name], str | int)]
    return texts + [text for each in content.values() if isinstance(each, dict | list) for text in _told(each)]
