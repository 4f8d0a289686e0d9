"""Decide who runs next, with how many tokens and in which blocks: the host's half of a step. NumPy and stdlib only."""
