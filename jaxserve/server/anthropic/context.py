"""Edit a conversation as `context_management` asks, before the model reads it: old results of tools, old thoughts.

The client keeps the whole conversation and sends it each time; an edit is applied to what it has sent.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from jaxserve.decoding import converted
from jaxserve.errors import InvalidRequest
from jaxserve.server.anthropic.protocol import AppliedEdit, Block, ContextManagement, Message
from jaxserve.server.protocol.common import NotNegative, Positive

CLEARED = "[Old tool result content cleared]"
"""The text in place of a result that was cleared."""
MAX_EDITS = 16
"""Edits of a request. Each of them may tokenize the whole prompt twice."""

Count = Callable[[Sequence[Message]], int]
"""Returns the tokens of the whole prompt, with these messages."""


class Trigger(msgspec.Struct, kw_only=True):
    """The edit is applied to prompts of more than `value` tokens, or of more than `value` calls."""

    type: Literal["input_tokens", "tool_uses"]
    value: NotNegative


class ToolUses(msgspec.Struct, kw_only=True):
    """A number of calls."""

    type: Literal["tool_uses"] = "tool_uses"
    value: NotNegative


class InputTokens(msgspec.Struct, kw_only=True):
    """A number of tokens."""

    type: Literal["input_tokens"] = "input_tokens"
    value: NotNegative


class Turns(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking_turns"):
    """A number of the assistant's turns."""

    value: Positive


class AllTurns(msgspec.Struct, tag_field="type", tag="all"):
    """All of the assistant's turns."""


class ClearToolUses(msgspec.Struct, kw_only=True):
    """Replace the results of all calls but the last ones by a short text; `clear_tool_inputs`: their arguments, too."""

    type: str
    trigger: Trigger | None = None
    keep: ToolUses | None = None
    clear_at_least: InputTokens | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None

    def apply(self, messages: list[Message], count: Count) -> tuple[list[Message], AppliedEdit | None]:
        """Return the messages, edited unless there is too little to clear."""
        trigger = self.trigger or Trigger(type="input_tokens", value=100_000)
        calls = list(_calls(messages))
        num_kept = 3 if self.keep is None else self.keep.value
        excluded = frozenset(self.exclude_tools or ())
        chosen = {call["id"]: call["name"] for call in calls[: max(0, len(calls) - num_kept)]}
        chosen = {call_id: name for call_id, name in chosen.items() if name not in excluded}
        if not chosen or (trigger.type == "tool_uses" and len(calls) <= trigger.value):
            return messages, None
        before = count(messages)
        if trigger.type == "input_tokens" and before <= trigger.value:
            return messages, None
        edited = [_with_blocks(message, lambda block: self._cleared(block, chosen)) for message in messages]
        cleared = max(0, before - count(edited))
        if edited == messages or (self.clear_at_least is not None and cleared < self.clear_at_least.value):
            return messages, None
        return edited, AppliedEdit(type=self.type, cleared_input_tokens=cleared, cleared_tool_uses=len(chosen))

    def _cleared(self, block: Block, chosen: dict[str, str]) -> Block:
        if block.get("type") == "tool_result" and block.get("tool_use_id") in chosen:
            return block | {"content": CLEARED}
        if block.get("type") == "tool_use" and block.get("id") in chosen:
            inputs = self.clear_tool_inputs
            if inputs is True or (isinstance(inputs, list) and block.get("name") in inputs):
                return block | {"input": {}}
        return block


class ClearThinking(msgspec.Struct, kw_only=True):
    """Leave out the thoughts of all of the assistant's turns but the last ones.

    A turn ends when the user speaks, but not with results of tools, which may have reminders beside them.
    """

    type: str
    keep: Literal["all"] | Turns | AllTurns | None = None

    def apply(self, messages: list[Message], count: Count) -> tuple[list[Message], AppliedEdit | None]:
        """Return the messages, edited if there are thoughts to clear."""
        keep = self.keep or Turns(value=1)
        if not isinstance(keep, Turns):
            return messages, None
        turns: list[list[int]] = [[]]  # indices of messages with thoughts
        for index, message in enumerate(messages):
            if message.role == "assistant":
                turns[-1] += [index] if any(map(_is_thought, message.blocks)) else []
            elif message.role == "user" and not _has_results(message):
                turns.append([])
        cleared = [turn for turn in turns if turn][: -keep.value]
        if not cleared:
            return messages, None
        indices = {index for turn in cleared for index in turn}
        edited = [
            _with_blocks(message, lambda block: None if _is_thought(block) else block) if index in indices else message
            for index, message in enumerate(messages)
        ]
        num_tokens = max(0, count(messages) - count(edited))
        return edited, AppliedEdit(type=self.type, cleared_input_tokens=num_tokens, cleared_thinking_turns=len(cleared))


Edit = ClearToolUses | ClearThinking
_KINDS: tuple[tuple[str, type[Edit]], ...] = (("clear_tool_uses_", ClearToolUses), ("clear_thinking_", ClearThinking))
"""The edits that are followed, by the beginning of their types, which end with a date."""


class Edits(NamedTuple):
    """The edits of a request, and the types of those that are not known."""

    known: list[Edit]
    unknown: list[str]


def edits_of(management: ContextManagement | None) -> Edits:
    """Return the edits of a request. Raises InvalidRequest, naming the field."""
    edits = Edits([], [])
    all_given = (management and management.edits) or []
    if len(all_given) > MAX_EDITS:
        param = "context_management.edits"
        raise InvalidRequest(f"{param} has {len(all_given)} entries, at most {MAX_EDITS} are allowed", param=param)
    for index, given in enumerate(all_given):
        param = f"context_management.edits[{index}]"
        name = given.get("type")
        if not isinstance(name, str):
            raise InvalidRequest(f"{param}.type must be a text", param=f"{param}.type")
        kind = next((kind for beginning, kind in _KINDS if name.startswith(beginning)), None)
        if kind is None:
            edits.unknown.append(name)
            continue
        edits.known.append(converted(given, kind, param))
    return edits


def edited(messages: list[Message], edits: Sequence[Edit], count: Count) -> tuple[list[Message], list[AppliedEdit]]:
    """Return the messages after all edits, and the edits that have removed something."""
    applied = []
    for edit in edits:
        messages, done = edit.apply(messages, count)
        applied += [] if done is None else [done]
    return messages, applied


def _calls(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    for message in messages:
        if message.role == "assistant":
            yield from (block for block in message.blocks if block.get("type") == "tool_use")


def _is_thought(block: Block) -> bool:
    return block.get("type") in ("thinking", "redacted_thinking")


def _has_results(message: Message) -> bool:
    return any(block.get("type") == "tool_result" for block in message.blocks)


def _with_blocks(message: Message, change: Callable[[Block], Block | None]) -> Message:
    """Return a message with each of its blocks changed, or left out."""
    if not isinstance(message.content, list):
        return message
    blocks = [changed for block in message.content if (changed := change(block)) is not None]
    return msgspec.structs.replace(message, content=blocks)
