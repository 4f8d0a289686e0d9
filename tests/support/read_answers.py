"""Reading whole answers in tests."""

import json

from jaxserve.answers.parsing.events import CallArguments, CallStart, Content, Reasoning
from jaxserve.answers.parsing.reader import Reader


def message_of(syntax, text, tools, *, size=4096, **options):
    """Return the words, the thoughts and the calls in an answer, whose text is pushed in pieces of `size`
    characters.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    reader = Reader(syntax, schemas, **options)
    events = [event for start in range(0, len(text), size) for event in reader.push(text[start : start + size])]
    events += reader.finish()
    calls = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    words, thoughts = (
        "".join(event.text for event in events if isinstance(event, kind)) for kind in (Content, Reasoning)
    )
    return words, thoughts, [(name, json.loads(arguments)) for name, arguments in calls]
