"""Parses what a model writes into reasoning, tool calls and other text, however the text is cut into pieces."""
