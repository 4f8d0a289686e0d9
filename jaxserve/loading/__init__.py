"""From a model directory to a config and a sharded tree of weights."""
