"""What models are made of: ParamSpec, and pure functions from arrays to arrays that know how they are sharded."""
