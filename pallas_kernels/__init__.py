"""Attention and other performance-critical operations of an LLM on JAX.

There is one subpackage per operation, with a public function, its reference and its implementations (`paging` is common
to the attentions). An operation takes and returns arrays and knows nothing of the engine that calls it.
`implementation` names what runs; nothing falls back silently to something slower.
"""
