"""Reading what a model writes: reasoning, tool calls, and the rest, in any pieces."""
