"""Measurements: workloads, runs in processes of their own, and tables. Nothing here imports jax before it runs."""
