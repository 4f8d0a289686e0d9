"""Executes on the device what the scheduler has decided: packed plans, jitted programs with donated state, and their
results.
"""
