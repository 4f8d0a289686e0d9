"""`jaxserve plan` and `jaxserve compile`: engines for GPUs that are not there."""
