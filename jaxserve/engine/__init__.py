"""The loop that joins scheduler and runner, and its clients for the server and LLM."""
