"""Read PTX for a hazard that neither compiler reports: accumulators that are read while a wgmma still writes them.

`wgmma.mma_async` returns at once; `wgmma.wait_group` says when its sums are there. To LLVM that wait touches no
register, so that it may move what reads the sums, a conversion say, above it, and ptxas lets it stand: what is read
then is some of the sum, the same in each run. `read_in_flight` finds such instructions, on all paths through a kernel.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

_ENTRY = re.compile(r"^\.visible \.entry (\w+?)(?:_mosaic_gpu_kernel)?\(", re.MULTILINE)
_LABEL = re.compile(r"^(\$\w+):")
_BRANCH = re.compile(r"^(@!?%\w+ )?\s*bra(?:\.uni)?\s+(\$\w+);")
_TARGETS = re.compile(r"^\$\w+: \.branchtargets(.*)", re.MULTILINE)
_WGMMA = re.compile(r"wgmma\.mma_async\S* \{([^}]*)\}")
_WAIT = re.compile(r"wgmma\.wait_group\S* (\d+)")
_REGISTER = re.compile(r"%[a-z]+\d+")
_MOVE = re.compile(r"^mov\.\w+\s+(%\w+), (%\w+);$")

MAX_GROUPS = 8
"""Of commit groups in flight; Mosaic's waits name fewer."""


class _Flight(NamedTuple):
    """Registers that are being written at some point of a kernel."""

    uncommitted: frozenset[str] = frozenset()
    groups: tuple[frozenset[str], ...] = (frozenset(),) * MAX_GROUPS
    """The newest first."""

    @property
    def registers(self) -> frozenset[str]:
        return self.uncommitted.union(*self.groups)

    def map(self, change: dict[str, frozenset[str]]) -> "_Flight":
        """`change` says what a register's place is taken by."""

        def changed(names: frozenset[str]) -> frozenset[str]:
            return frozenset().union(*(change.get(name, frozenset([name])) for name in names))

        return _Flight(changed(self.uncommitted), tuple(map(changed, self.groups)))

    def union(self, other: "_Flight") -> "_Flight":
        """Of two paths that meet."""
        groups = tuple(a | b for a, b in zip(self.groups, other.groups, strict=True))
        return _Flight(self.uncommitted | other.uncommitted, groups)


def entries(ptx: str) -> Iterator[tuple[str, str]]:
    """Name and text of each kernel in the PTX of one or more modules."""
    parts = _ENTRY.split(ptx)
    return zip(parts[1::2], parts[2::2], strict=True)


def read_in_flight(entry: str) -> list[str]:
    """The instructions of a kernel that read a register which a wgmma may still write, moves left aside.

    A move of a whole register alone is no read: loops have them for registers that get another name. What it makes is
    taken to be in flight too.
    """
    lines = [line.strip() for line in entry.splitlines()]
    labels = {match[1]: index for index, line in enumerate(lines) if (match := _LABEL.match(line))}
    targets = [labels[name] for names in _TARGETS.findall(entry) for name in re.findall(r"\$\w+", names)]
    found: dict[int, str] = {}
    at_label: dict[int, _Flight] = {}
    waiting = [(0, _Flight())]
    while waiting:
        index, flight = waiting.pop()
        while index < len(lines):
            line = lines[index]
            if _LABEL.match(line):
                before = at_label.get(index)
                flight = flight if before is None else flight.union(before)
                if flight == before:
                    break
                at_label[index] = flight
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
                flight = _after(line, flight)
                if not _MOVE.match(line) and "wgmma" not in line and _reads(line, flight):
                    found[index] = line
            index += 1
    return [found[index] for index in sorted(found)]


def _after(line: str, flight: _Flight) -> _Flight:
    if match := _WGMMA.search(line):
        names = frozenset(_REGISTER.findall(match[1]))
        return flight._replace(uncommitted=flight.uncommitted | names)
    if "wgmma.commit_group" in line:
        return _Flight(groups=(flight.uncommitted, *flight.groups[:-2], flight.groups[-2] | flight.groups[-1]))
    if match := _WAIT.search(line):
        count = int(match[1])
        return flight._replace(groups=(*flight.groups[:count], *(frozenset() for _ in flight.groups[count:])))
    if match := _MOVE.match(line):
        target, source = match.groups()
        copies = {source: frozenset([source, target])} if source in flight.registers else {}
        return flight.map({target: frozenset()}).map(copies)
    return flight


def _reads(line: str, flight: _Flight) -> bool:
    if not flight.registers or line.startswith((".", "//", "{", "}")):
        return False
    return not flight.registers.isdisjoint(_REGISTER.findall(line))
