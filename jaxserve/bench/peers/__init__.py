"""Other implementations of the same workload, each run by an interpreter that has it installed."""
