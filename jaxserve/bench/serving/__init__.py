"""`jaxserve bench serve`: load on any OpenAI-compatible server over HTTP, and what its clients see. No jax.

workloads (what is asked) -> prompts (tokens or text) -> arrivals (when) -> load, client (HTTP) -> summary, plots.
"""
