"""How a step becomes programs: their kinds, their inputs and results, and how they are lowered and compiled."""
