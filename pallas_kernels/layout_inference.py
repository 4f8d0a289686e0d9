"""Mosaic's inference of layouts in a third of its time, which is a third of the time in which a step is lowered.

It finds the same layouts. Written for the version of jax that `jax_internals` names.
"""

from typing import Any

from jax.experimental.mosaic.gpu import constraints

JAXS = {
    (constraints.Variable, "__hash__"): constraints.Variable.__hash__,
    (constraints, "compute_transitively_equal_vars"): constraints.compute_transitively_equal_vars,
    (constraints, "_reduce_system_once"): constraints._reduce_system_once,
}
"""The functions that are replaced, by their owners and names."""


def infer_layouts_faster() -> None:
    """Replace the parts of the inference that take most of its time, in this process.

    After each layout that it tries, jax reduces every constraint again, also those of which it has learned nothing. It
    hashes a variable with the operation that it belongs to, each time. And it sorts variables by their operations as
    they are printed, for each of which MLIR numbers the values of the whole kernel.
    """
    constraints.Variable.__hash__ = lambda self: self.__dict__.get("_hash") or _keep_hash(self)
    constraints.compute_transitively_equal_vars = _equal_variables
    constraints._reduce_system_once = _reduce_once


def _keep_hash(variable: Any) -> int:
    return variable.__dict__.setdefault("_hash", JAXS[constraints.Variable, "__hash__"](variable))


def _equal_variables(system: Any) -> dict[Any, list[Any]]:
    """Return the other variables that each variable is equal to, also by way of others, in the order in which
    constraints name them.
    """
    groups: dict[Any, list[Any]] = {}
    for constraint in system.constraints:
        match constraint:
            case constraints.Equals(lhs=constraints.Variable() as first, rhs=constraints.Variable() as second):
                group, other = (groups.setdefault(variable, [variable]) for variable in (first, second))
                if group is not other:
                    group += other
                    groups |= dict.fromkeys(other, group)
    return {variable: [other for other in group if other != variable] for variable, group in groups.items()}


def _reduce_once(system: Any) -> Any:
    """Reduce the constraints of which something is known that was not when they were last reduced.

    Returns what jax's own function does: None if nothing changes, Unsatisfiable, or the new system.
    """
    kept: list[Any] = []
    is_changed, known = False, system.assignments.keys()
    for constraint in system.constraints:
        unknown = vars(constraint).get("_unknown")  # the variables of one that cannot be reduced before one is known
        if unknown is not None and known.isdisjoint(unknown):
            kept.append(constraint)
            continue
        alone = constraints.ConstraintSystem(system.assignments, [constraint])
        match JAXS[constraints, "_reduce_system_once"](alone):  # adds to the assignments, which the following ones see
            case None:
                vars(constraint)["_unknown"] = alone.unknowns()
                kept.append(constraint)
            case constraints.ConstraintSystem() as reduced:
                is_changed = True
                kept += reduced.constraints
            case unsatisfiable:
                return unsatisfiable
    merged = constraints._merge_all_divides_constraints(kept)
    if constraints._has_relayout_of_non_splat_to_splat(merged):
        return constraints.Unsatisfiable()
    if is_changed or len(merged) < len(kept):
        return constraints.ConstraintSystem(system.assignments, merged)
    return None
