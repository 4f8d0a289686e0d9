"""How models write thoughts and tool calls, as values: their types, and a table of those that are known by name."""
