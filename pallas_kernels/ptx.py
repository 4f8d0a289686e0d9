"""Find a hazard in PTX that no compiler reports: registers of a wgmma that are used while it still works.

`wgmma.mma_async` returns at once; `wgmma.wait_group` waits for its sums. For LLVM that wait touches no register, so it
may move an instruction that reads the sums, such as a conversion, above the wait, and ptxas accepts that: the
instruction then reads part of the sum, the same part in each run. Nor may operand A in registers change before: that of
the next turn of a loop has the same registers. `used_in_flight` finds such instructions, on all paths through a kernel.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

_ENTRY = re.compile(r"^\.visible \.entry (\w+?)(?:_mosaic_gpu_kernel)?\(", re.MULTILINE)
_LABEL = re.compile(r"^(\$\w+):")
_BRANCH = re.compile(r"^(@!?%\w+ )?\s*bra(?:\.uni)?\s+(\$\w+);")
_TARGETS = re.compile(r"\.branchtargets([^;]*);")
_WGMMA = re.compile(r"wgmma\.mma_async\S* \{([^}]*)\}((?:, \{([^}]*)\})?.*)")
_WAIT = re.compile(r"wgmma\.wait_group\S*\s+(\d+)")
_REGISTER = re.compile(r"%[a-z]+\d+")
_TARGET = re.compile(r"(?:^|;)[\s{]*(?:@!?%\w+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|%[a-z]+\d+)")
_OPERAND = "operand "
"""Before the name of a register that is only read."""

MAX_GROUPS = 8
"""Maximum number of commit groups in flight; Mosaic's waits use fewer."""


class _Flight(NamedTuple):
    """Registers that are being written, or read as operand A, at some point of a kernel."""

    uncommitted: frozenset[str] = frozenset()
    groups: tuple[frozenset[str], ...] = (frozenset(),) * MAX_GROUPS
    """The newest first."""

    @property
    def registers(self) -> frozenset[str]:
        return self.uncommitted.union(*self.groups)

    def union(self, other: "_Flight") -> "_Flight":
        """Return the state where two paths meet."""
        groups = tuple(a | b for a, b in zip(self.groups, other.groups, strict=True))
        return _Flight(self.uncommitted | other.uncommitted, groups)

    def after(self, line: str) -> "_Flight":
        """Return the state after an instruction."""
        if match := _WGMMA.search(line):
            operands = [_OPERAND + name for name in _REGISTER.findall(match[3] or "")]
            return self._replace(uncommitted=self.uncommitted.union(_REGISTER.findall(match[1]), operands))
        if "wgmma.commit_group" in line:
            *kept, last, oldest = self.groups
            return _Flight(groups=(self.uncommitted, *kept, last | oldest))
        if match := _WAIT.search(line):
            count = int(match[1])
            return self._replace(groups=(*self.groups[:count], *(frozenset() for _ in self.groups[count:])))
        return self


def entries(ptx: str) -> Iterator[tuple[str, str]]:
    """Name and text of each kernel in the PTX of one or more modules."""
    parts = _ENTRY.split(ptx)
    return zip(parts[1::2], parts[2::2], strict=True)


def used_in_flight(entry: str) -> list[str]:
    """Return the instructions of a kernel, in order, that read or change a register which a wgmma may still write, or
    change one that it may still read.

    Other wgmmas may accumulate into the former. Raises ValueError if one of the wgmmas is not reached by any path.
    """
    lines = [line.strip() for line in entry.splitlines()]
    labels = {match[1]: index for index, line in enumerate(lines) if (match := _LABEL.match(line))}
    targets = [labels[name] for names in _TARGETS.findall(entry) for name in re.findall(r"\$\w+", names)]
    used: dict[int, str] = {}
    seen: set[int] = set()
    at_label: dict[int, _Flight] = {}
    waiting = [(0, _Flight())]
    while waiting:
        index, flight = waiting.pop()
        in_flight = flight.registers
        while index < len(lines):
            line = lines[index]
            seen.add(index)
            if _LABEL.match(line):
                before = at_label.get(index)
                flight = flight if before is None else flight.union(before)
                if flight == before:
                    break
                at_label[index] = flight
                in_flight = flight.registers
            elif branch := _BRANCH.match(line):
                if branch[2] in labels:  # else a label within inline assembly
                    waiting.append((labels[branch[2]], flight))
                    if branch[1] is None:
                        break
            elif line.startswith("brx.idx"):
                waiting += [(target, flight) for target in targets]
                break
            elif line.startswith(("ret;", "exit;", "trap;")):
                break
            else:
                if in_flight and _is_used(line, in_flight):
                    used[index] = line
                if "wgmma." in line:
                    flight = flight.after(line)
                    in_flight = flight.registers
            index += 1
    unseen = [line for index, line in enumerate(lines) if "wgmma.mma_async" in line and index not in seen]
    if unseen:
        raise ValueError(f"no path leads to {unseen[0]}")
    return [used[index] for index in sorted(used)]


def _is_used(line: str, in_flight: frozenset[str]) -> bool:
    wgmma = _WGMMA.search(line)
    if not in_flight.isdisjoint(_REGISTER.findall(wgmma[2] if wgmma else line)):
        return True
    changed = [_OPERAND + name for target in _TARGET.findall(line) for name in _REGISTER.findall(target)]
    return not in_flight.isdisjoint(changed)
