"""What the scheduler has decided, done on the device: one jitted, donated step."""
