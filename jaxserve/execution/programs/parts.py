"""Split a program into two that are launched one after the other: while a GPU runs the first, the host prepares the
second.

XLA visits each kernel of a program before it launches the first one, which takes a millisecond for 32 layers, and jax
visits each array. Where steps overlap that time is hidden, but a lone prompt waits for it. The function is traced as a
whole and cut where `layers.launch` has marked it, so models do not know of it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import msgspec
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxserve.layers.launch import is_boundary


class Crossing(msgspec.Struct, frozen=True):
    """An array that the first part computes for the second: its index in `made`, its shape, dtype and partition
    spec.
    """

    place: int
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[str | None, ...]
    """The mesh axis of each dimension."""


class Cut(msgspec.Struct, frozen=True):
    """Which arrays go to which part. `leaves` are the flat arguments of the whole program, `made` the results of the
    first part.
    """

    first_inputs: tuple[int, ...]
    """Indices into `leaves`."""
    second_inputs: tuple[int, ...]
    """Indices into `leaves`; after them the second part takes `crossing`."""
    crossing: tuple[Crossing, ...]
    outputs: tuple[int, ...]
    """Indices into `made` followed by the results of the second part."""
    first_donated: tuple[int, ...]
    """Indices into the inputs of the first part."""
    second_donated: tuple[int, ...]
    """Indices into the inputs of the second part."""

    @property
    def donated(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The donated inputs of both parts."""
        return self.first_donated, self.second_donated

    def inputs(self, leaves: Sequence[Any], mesh: Mesh | AbstractMesh) -> tuple[list[Any], list[Any]]:
        """Return the shapes of the inputs of both parts, given those of `leaves`."""
        crossing = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*x.spec)))
            for x in self.crossing
        ]
        return [leaves[index] for index in self.first_inputs], [
            *(leaves[index] for index in self.second_inputs),
            *crossing,
        ]


class Halves(NamedTuple):
    """A function in two parts, of flat arguments and results."""

    first: core.Jaxpr
    second: core.Jaxpr
    cut: Cut

    @property
    def functions(self) -> tuple[Callable[..., list[Any]], Callable[..., list[Any]]]:
        """Both parts as functions, whose names traces show."""

        def first(*arguments: Any) -> list[Any]:
            return core.jaxpr_as_fun(self.first)(*arguments)

        def second(*arguments: Any) -> list[Any]:
            return core.jaxpr_as_fun(self.second)(*arguments)

        return first, second


def cut_in_two(jaxpr: core.Jaxpr, *, donated: Sequence[int]) -> Halves | None:
    """Cut a program after its boundary; None if it has none, or if partial sums would have to cross. `donated` inputs
    are donated by the last part that uses them.
    """
    marked = next((index for index, eqn in enumerate(jaxpr.eqns) if is_boundary(eqn)), None)
    if marked is None:
        return None
    given = set(jaxpr.invars)
    results = [var for var in jaxpr.outvars if isinstance(var, core.Var)]
    for place in range(marked + 1, len(jaxpr.eqns)):
        before, after = jaxpr.eqns[:place], jaxpr.eqns[place:]
        made = _in_order([var for eqn in before for var in eqn.outvars])
        read_after = {var for eqn in after for var in eqn.invars if isinstance(var, core.Var)}
        crossing = [var for var in made if var in read_after]
        if not any(_is_share(var) for var in crossing):
            break
    else:
        return None
    read_before = {var for eqn in before for var in eqn.invars if isinstance(var, core.Var)}
    # In the order of the results, because jax pairs donated arrays with results of their shape in the order of both. An
    # input that is returned unchanged is returned by the second part.
    kept = _in_order([*(var for var in results if var in set(made)), *crossing])
    late_results = _in_order([var for var in results if var not in set(made)])
    read_late = read_after | {var for var in late_results if var in given}
    early = [index for index, var in enumerate(jaxpr.invars) if var in read_before]
    late = [index for index, var in enumerate(jaxpr.invars) if var in read_late]
    everything = [*kept, *late_results]
    assert len(results) == len(jaxpr.outvars), "a result that does not depend on anything"
    is_donated = set(donated)
    cut = Cut(
        first_inputs=tuple(early),
        second_inputs=tuple(late),
        crossing=tuple(
            Crossing(kept.index(var), var.aval.shape, str(var.aval.dtype), tuple(var.aval.sharding.spec))
            for var in crossing
        ),
        outputs=tuple(everything.index(var) for var in results),
        first_donated=tuple(place for place, index in enumerate(early) if index in is_donated - set(late)),
        second_donated=tuple(place for place, index in enumerate(late) if index in is_donated),
    )

    def part(eqns: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> core.Jaxpr:
        debug_info = jaxpr.debug_info.with_unknown_names()
        return jaxpr.replace(eqns=list(eqns), invars=list(inputs), outvars=list(outputs), debug_info=debug_info)

    return Halves(
        part(before, [jaxpr.invars[index] for index in early], kept),
        part(after, [*(jaxpr.invars[index] for index in late), *crossing], late_results),
        cut,
    )


class LoweredInTwo(NamedTuple):
    """Takes the place of a `jax.stages.Lowered`."""

    first: jax.stages.Lowered
    second: jax.stages.Lowered
    cut: Cut
    results: Any
    """The structure of the whole program's results."""

    def compile(self, compiler_options: dict[str, Any] | None = None) -> "CompiledInTwo":
        """Both parts."""
        first, second = (lowered.compile(compiler_options) for lowered in (self.first, self.second))
        return CompiledInTwo(first, second, self.cut, self.results)


class Memory(NamedTuple):
    """The fields of `jax.stages.Compiled.memory_analysis` that are used here."""

    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int


class CompiledInTwo(NamedTuple):
    """Takes the place of a `jax.stages.Compiled`."""

    first: jax.stages.Compiled
    second: jax.stages.Compiled
    cut: Cut
    results: Any

    def __call__(self, *arguments: Any) -> Any:
        """Launch both."""
        leaves, cut = jax.tree.leaves(arguments), self.cut
        made = self.first(*[leaves[index] for index in cut.first_inputs])
        late = self.second(*[leaves[index] for index in cut.second_inputs], *[made[x.place] for x in cut.crossing])
        everything = [*made, *late]
        return jax.tree.unflatten(self.results, [everything[index] for index in cut.outputs])

    def memory_analysis(self) -> Memory:
        """Return the memory of both parts, which do not run at the same time; arrays that cross count as outputs."""
        parts = [memory for part in (self.first, self.second) if (memory := part.memory_analysis()) is not None]
        assert len(parts) == 2, "XLA always has one"
        return Memory(
            sum(part.output_size_in_bytes for part in parts),
            sum(part.alias_size_in_bytes for part in parts),
            max(part.temp_size_in_bytes for part in parts),
        )


Lowered = jax.stages.Lowered | LoweredInTwo
Compiled = jax.stages.Compiled | CompiledInTwo


def parts_of(lowered: Lowered) -> tuple[jax.stages.Lowered, ...]:
    """Return the programs that a lowered step consists of."""
    return (lowered.first, lowered.second) if isinstance(lowered, LoweredInTwo) else (lowered,)


def _in_order(variables: list[Any]) -> list[Any]:
    """Without repetitions."""
    return list(dict.fromkeys(variables))


def _is_share(variable: Any) -> bool:
    return bool(variable.aval.sharding.spec.unreduced)
