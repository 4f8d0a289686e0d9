"""What the attentions over a paged KV cache have in common: argument checks, one XLA loop, one float64 definition."""
