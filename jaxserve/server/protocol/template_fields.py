"""Variables of the chat template in a request: any names, but bounded values."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.server.protocol.chat import ChatRequest
from jaxserve.server.protocol.common import Effort
from jaxserve.server.protocol.utility import TokenizeRequest

MAX_VARIABLES = 64
MAX_VARIABLE_BYTES = 32 * 1024
"""Maximum bytes of all variables of a template together, as JSON."""
MAX_VARIABLE_DEPTH = 8
MAX_VARIABLE_NUMBER = 2**31
"""Maximum magnitude of numbers, since a template may count up to them."""
MAX_DOCUMENTS = 1024

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


TemplateFields = ChatRequest | TokenizeRequest
"""A request that becomes a prompt through the chat template."""


def template_variables(body: TemplateFields) -> dict[str, Any]:
    """Return the variables of the chat template; chat_template_kwargs takes precedence.

    An effort of "none" turns thinking off where a template can, any other turns it on. Raises InvalidRequest, naming
    the field.
    """
    variables: dict[str, Any] = {}
    effort = _effort(body)
    if effort is not None:
        variables = {"enable_thinking": effort != "none", "thinking": effort != "none"}
    if effort not in (None, "none"):
        variables["reasoning_effort"] = effort
    if body.verbosity is not None:
        variables["verbosity"] = body.verbosity
    if body.documents:
        if len(body.documents) > MAX_DOCUMENTS:
            raise InvalidRequest(
                f"documents has {len(body.documents)} entries, at most {MAX_DOCUMENTS} are allowed", param="documents"
            )
        variables["documents"] = body.documents
    return variables | _checked(body.chat_template_kwargs or {})


def turns_thinking_off(body: TemplateFields, defaults: Mapping[str, Any]) -> bool:
    """Return true if a request asks for an answer without thoughts, or the operator's `defaults` of the template do.

    The first of chat_template_kwargs, the effort and the defaults that says something decides.
    """
    given, effort = body.chat_template_kwargs or {}, _effort(body)
    asked = {} if effort is None else {"reasoning_effort": effort}
    for variables in (given, asked, defaults):
        switches = [variables[name] for name in ("enable_thinking", "thinking") if name in variables]
        if switches:
            return all(switch is False for switch in switches)
        if "reasoning_effort" in variables:
            return variables["reasoning_effort"] == "none"
    return False


def _effort(body: TemplateFields) -> Effort | None:
    nested = None if body.reasoning is None else body.reasoning.effort
    if body.reasoning_effort is not None and nested not in (None, body.reasoning_effort):
        raise InvalidRequest("reasoning.effort and reasoning_effort contradict each other", param="reasoning.effort")
    return nested if body.reasoning_effort is None else body.reasoning_effort


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    if len(given) > MAX_VARIABLES:
        raise _refusal(f"has {len(given)} entries, at most {MAX_VARIABLES} are allowed")
    for name, value in given.items():
        if _NAME.fullmatch(name) is None:
            raise _refusal(f"{name[:64]!r} is no name of a variable: up to 64 letters, digits and _")
        _check_value(name, value, depth=1)
    if len(msgspec.json.encode(given)) > MAX_VARIABLE_BYTES:
        raise _refusal(f"has more than {MAX_VARIABLE_BYTES} bytes")
    return given


def _check_value(name: str, value: Any, *, depth: int) -> None:
    if depth > MAX_VARIABLE_DEPTH:
        raise _refusal(f"{name} is nested more than {MAX_VARIABLE_DEPTH} deep")
    if isinstance(value, int | float) and not -MAX_VARIABLE_NUMBER <= value <= MAX_VARIABLE_NUMBER:
        raise _refusal(f"{name}: a number is beyond {MAX_VARIABLE_NUMBER}")
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            _check_value(name, entry, depth=depth + 1)


def _refusal(what: str) -> InvalidRequest:
    return InvalidRequest(f"chat_template_kwargs: {what}", param="chat_template_kwargs")
