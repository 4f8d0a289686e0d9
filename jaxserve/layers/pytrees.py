"""Frozen dataclasses that jax takes as pytrees."""

import dataclasses
from typing import Any, dataclass_transform

import jax


def static(*, default: Any = dataclasses.MISSING) -> Any:
    """Declare a field that is part of the tree's structure: a value that programs are compiled for."""
    return dataclasses.field(default=default, metadata={"static": True})


@dataclass_transform(frozen_default=True, field_specifiers=(static,))
def pytree[T](cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose fields, except for `static` ones, are children of a pytree node."""
    made: Any = dataclasses.dataclass(frozen=True)(cls)
    is_static = {field.name: bool(field.metadata.get("static")) for field in dataclasses.fields(made)}
    return jax.tree_util.register_dataclass(
        made,
        data_fields=[name for name, fixed in is_static.items() if not fixed],
        meta_fields=[name for name, fixed in is_static.items() if fixed],
    )
