"""Code common to the attentions over a paged KV cache: argument checks, one XLA loop, one float64 reference."""
