"""How a step becomes programs: which there are, what each is made of, and how they are lowered and compiled."""
