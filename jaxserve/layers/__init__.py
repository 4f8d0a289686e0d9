"""What models consist of: ParamSpec, and pure functions from arrays to arrays that know how they are sharded."""
