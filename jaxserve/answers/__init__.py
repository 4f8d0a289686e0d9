"""How models write thoughts and tool calls: syntaxes, readers and grammars of answers. Nothing here knows HTTP."""
