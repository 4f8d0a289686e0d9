"""Attention and other hot operations of an LLM on JAX: each a public function, its reference and its implementations.

One subpackage an operation (`paged_attention`). An operation takes and returns arrays and knows nothing of the engine
that calls it; `implementation` names what runs, and nothing falls back silently to something slower.
"""
