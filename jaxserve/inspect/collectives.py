"""Find what devices send each other in a compiled program, by its HLO."""

import collections
import dataclasses
import math
import re

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

_INSTRUCTION = re.compile(rf"= (?P<result>\(.*?\)|\S+) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b(?P<kind>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<shape>[\d,]*)\]")
_NAMED_GROUPS = re.compile(r"replica_groups=mesh\[(?P<sizes>[^\]]*)\] \{(?P<axes>[^}]*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(?P<sizes>[\d,]+)\]<=")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{(?P<first>[\d,]+)\}")
_PLACE = re.compile(r'op_name="(?P<name>[^"]*)"')
_LAYER = re.compile(r"layer_\d+")
_UNNAMED = {"shard_map", "dot_general", "psum", "all_gather", "all_to_all", "reduce_scatter"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """The collectives of one kind, of one size, at one place of the model.

    Attributes:
        kind: the name in HLO, such as "all-reduce".
        place: the part of the model, such as "attention"; "" if the compiler does not say.
        count: how often a run of the program does it.
        num_bytes: bytes of the result on each device, of one of them.
        group_size: number of devices that take part.
    """

    kind: str
    place: str
    count: int
    num_bytes: int
    group_size: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends for one of them if they go round in a ring: of n devices, an all-reduce sends
        2 (n - 1) / n of its result, an all-gather (n - 1) / n, a reduce-scatter n - 1 times its smaller result.
        """
        others = self.group_size - 1
        if self.kind == "all-reduce":
            return 2 * others / self.group_size * self.num_bytes
        if self.kind == "reduce-scatter":
            return others * self.num_bytes
        return self.num_bytes if self.kind == "collective-permute" else others / self.group_size * self.num_bytes


def find_collectives(hlo: str) -> list[Collective]:
    """Return the collectives of a compiled program's text (`Compiled.as_text`), alike ones together.

    An instruction counts once, so that those in a loop count too little. What our own kernels send is not among them.
    """
    found: collections.Counter[tuple[str, str, int, int]] = collections.Counter()
    for line in hlo.splitlines():
        if (match := _INSTRUCTION.search(line)) is None:
            continue
        sizes = [_num_bytes(array) for array in _ARRAY.finditer(match["result"])]
        # The result of an instruction that only starts is (operands, results), but for all-reduce-start.
        has_operands = match["start"] and match["kind"] != "all-reduce" and len(sizes) > 1
        num_bytes = sum(sizes[len(sizes) // 2 :] if has_operands else sizes)
        found[match["kind"], _place(line), num_bytes, _group_size(line)] += 1
    return [
        Collective(kind=kind, place=place, count=count, num_bytes=num_bytes, group_size=group_size)
        for (kind, place, num_bytes, group_size), count in found.items()
    ]


def _num_bytes(array: re.Match[str]) -> int:
    bits = 8 if array["kind"] == "pred" else int(array["bits"])
    return math.prod(int(length) for length in array["shape"].split(",") if length) * bits // 8


def _group_size(line: str) -> int:
    if named := _NAMED_GROUPS.search(line):
        sizes = dict(pair.split("=") for pair in named["sizes"].split(","))
        return math.prod(int(sizes[axis.strip()]) for axis in named["axes"].split(","))
    if iota := _IOTA_GROUPS.search(line):
        return int(iota["sizes"].split(",")[-1])
    listed = _LISTED_GROUPS.search(line)
    return len(listed["first"].split(",")) if listed else 2


def _place(line: str) -> str:
    """Return the innermost named scope of an instruction."""
    match = _PLACE.search(line)
    if match is None:
        return ""
    names = [name for name in match["name"].split("/") if "(" not in name and not _LAYER.fullmatch(name)]
    return next((name for name in reversed(names) if name not in _UNNAMED), "")
