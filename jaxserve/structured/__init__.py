"""Structured output: from what a caller asks for (a JSON schema, a regex, choices, a grammar) to token bit masks.

`grammar` checks the wish and writes it down as one text, on the caller's side; `matchers` keeps the place of each
request in its grammar, on the engine's side, and says which tokens may come next. No jax here.
"""
