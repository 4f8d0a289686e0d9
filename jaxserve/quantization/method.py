"""Method: what `quant_method` of a config names, as a value: how its config is read. One is in the file of each format.

The formats of a config's matrices are checked from the config alone, before a download. Where no tensors are there, as
for sizes and random weights, the config also tells by which schemes matrices would be held.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from jaxserve.errors import CheckpointError
from jaxserve.quantization.common import regrouped
from jaxserve.quantization.scheme import Scheme
from jaxserve.quantization.stored import Format

Config = Mapping[str, Any]

HEAD = "lm_head"
_SKIPPED = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")
"""Fields that list modules which stay floats, by parts of their names."""


def _leaves_none(config: Config, module: str) -> bool:  # noqa: ARG001
    return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """How checkpoints of one method are quantized, by their configs.

    Attributes:
        formats: (config, what names it in errors) -> the formats that matrices may have. Raises CheckpointError, naming
            what is not supported. None if no config is needed to read the tensors.
        scheme: (checked config, name of a module) -> how its codes would be held; None if it is stored as floats.
        leaves: (checked config, name of a module) -> true if a list of the method says that it is stored as floats.
        nested: the name of a field that describes everything, in configs that have it.
        has_head: the LM head is a matrix like others; otherwise the config has to name it.
    """

    formats: Callable[[Config, str], tuple[Format, ...]] | None
    scheme: Callable[[Config, str], Scheme | None]
    leaves: Callable[[Config, str], bool] = _leaves_none
    nested: str | None = None
    has_head: bool = False


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a config says of matrices, by the names of their modules."""

    method: Method
    config: Config
    aliases: Callable[[str], tuple[str, ...]] | None = None
    """All names that a module may have in the lists; None if it has one."""

    def scheme(self, module: str, num_inputs: int) -> Scheme | str | None:
        """Return how the codes of a module's matrix could be held, or why not; None if it is stored as floats."""
        method, config = self.method, self.config
        if method.nested is not None:
            config = config.get(method.nested, config)
        names = (module,) if self.aliases is None else self.aliases(module)
        skipped = [name for field in _SKIPPED for name in config.get(field) or ()]
        for name in names:
            if any(is_within(name, other) for other in skipped) or method.leaves(config, name):
                return None
        if module == HEAD and not method.has_head and config.get(HEAD) is not True:
            return None
        schemes = (method.scheme(config, name) for name in names)
        found = next((scheme for scheme in schemes if scheme is not None), None)
        if found is None or found.group_size is None or found.codes == "e2m1":  # whose groups are always the same
            return found
        if found.group_size >= num_inputs:
            return msgspec.structs.replace(found, group_size=None)
        return regrouped(found, num_inputs)


def is_within(module: str, name: str) -> bool:
    """Return true if a name is one or several whole parts of the name of a module."""
    return f".{name}." in f".{module}."


def require(config: Config, where: str, **served: tuple[Any, ...]) -> None:
    """Raise CheckpointError for a field that has none of the values that are served."""
    for name, values in served.items():
        found = config.get(name)
        if isinstance(found, float) or found not in values:
            known = ", ".join(str(value) for value in values if value is not None)
            raise CheckpointError(f"{where}: {name} {found!r:.100} is not supported, only {known}")


def block_of(value: Any, where: str) -> tuple[int, int] | None:
    """Return the outputs and inputs of a block, None if there are no blocks."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(size, int) and size > 0 for size in value):
        raise CheckpointError(f"{where}: the size of a block must be two positive integers, got {value!r:.100}")
    return value[0], value[1]


def group_of(size: Any) -> int | None:
    """Return a size of groups as a config has it, None if an output has one scale."""
    return size if isinstance(size, int) and size > 0 else None


def integers(bits: int, *, is_symmetric: bool, size: int | None, scale_dtype: Any) -> Scheme:
    """Return the scheme of integers of 2, 4 or 8 bits in groups of this size."""
    codes = "int8" if bits == 8 else "int4" if is_symmetric else "uint4"
    return Scheme(codes=codes, group_size=size, scale_dtype=scale_dtype, has_zeros=not is_symmetric)
