"""Benchmarks: workloads, the processes that run them, and the tables they print. No module imports jax before it
runs.
"""
