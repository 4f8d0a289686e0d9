"""The loop that joins scheduler and runner, and what the server and LLM hold of it."""
