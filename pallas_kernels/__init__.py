"""Attention and other hot operations of an LLM on JAX: each a public function, its reference and its implementations.

One subpackage an operation, which takes and returns arrays and knows nothing of the engine that calls it (`paging` is
what the attentions share); `implementation` names what runs, and nothing falls back silently to something slower.
"""
