"""Structured output: from a caller's constraint (a JSON schema, a regex, choices, a grammar) to token bit masks.

On the caller's side, `grammar` checks the constraint and writes it as one grammar text; on the engine's side,
`matchers` tracks the state of each request in its grammar and computes the tokens that may come next. No jax here.
"""
