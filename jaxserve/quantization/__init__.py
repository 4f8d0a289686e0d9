"""How weights are quantized: schemes of codes, formats of checkpoints, and the methods that configs name. No jax."""
