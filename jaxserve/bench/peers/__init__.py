"""Other ways to generate the same tokens, each run by an interpreter that has it installed."""
