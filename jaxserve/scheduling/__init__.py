"""Who runs next, with how many tokens, in which blocks: the host's half of a step. NumPy and stdlib only."""
