"""What the last lines of a server say about engines that have ended."""

from jaxserve.engine.subprocesses import Child, exit_words

LAST_WORDS_TIMEOUT = 2.0
"""Seconds for the engine's process to say why the engine has died; one that was killed says nothing."""

OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "MemoryError")
"""Texts in the errors of a device or of Python that lacks memory."""


async def how_child_ended(child: Child) -> str:
    """Return a sentence about the end of an engine that was ready."""
    reason = await child.last_words(timeout=LAST_WORDS_TIMEOUT)
    return how_it_ended(child.name, reason, child.ended.result() if child.ended.done() else None)


def how_it_ended(name: str, reason: str | None, code: int | None) -> str:
    """Return a sentence about the end of the engine `name`: from the reason that it has given, else from the exit code
    of its process, None while that runs.
    """
    if reason is not None and any(mark in reason for mark in OUT_OF_MEMORY):
        return f"{name} has run out of memory: {reason.splitlines()[0]}"
    if reason is not None:
        return f"{name} has given up: {reason.splitlines()[0]}"
    return f"{name}'s process has {'gone silent' if code is None else exit_words(code)}"
