"""The table of paths: which kernels run in each program of a model, and why no faster ones do.

It is logged at start and printed by `jaxserve models`. It is what the parts of a step say of themselves in a trace of
one layer of each kind, in which no kernel is entered.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jaxserve.execution.batch import Bucket
from jaxserve.execution.programs.model import StepModel
from jaxserve.layers.batch import Batch, KVCache, Tables
from jaxserve.layers.context import Kernel, Part, Record
from jaxserve.layers.decoder import consumer_of, run_paths
from jaxserve.layers.embedding import gathered
from jaxserve.layers.layer import Layer
from jaxserve.layers.paths import Kind, LayerShape, Path, choose


@dataclasses.dataclass(frozen=True)
class ProgramPaths:
    """What runs in the programs of a bucket in one stage."""

    stage: int
    num_tokens: int
    is_decode_only: bool
    layers: dict[Kind, tuple[int, str | None]]
    """Number of layers of each kind, and the reason why the first of them has no faster path."""
    record: Record
    """What computes each part that no kernel of a whole layer computes."""

    @property
    def key(self) -> object:
        """What is equal in all programs of a line; they differ in numbers only."""
        kinds = {kind: count for kind, (count, _) in self.layers.items()}
        parts = self.record.products | self.record.others
        return self.is_decode_only, kinds, {name: [part.kernel for part in found] for name, found in parts.items()}

    @property
    def multiplies_by_xla(self) -> bool:
        """True if XLA makes the kernel of a matrix product."""
        by_xla = (Kernel.XLA, Kernel.PAGED_ATTENTION_AND_XLA, Kernel.NONE)
        return any(part.kernel in by_xla for found in self.record.products.values() for part in found)

    @property
    def why_not(self) -> str | None:
        """Why the program cannot run: there is no kernel for a part that needs one. None if it can."""
        parts = itertools.chain.from_iterable((self.record.products | self.record.others).values())
        return next((part.reason for part in parts if part.kernel == Kernel.NONE), None)


def program_paths(
    model: StepModel, layers: Sequence[LayerShape], bucket: Bucket, *, is_decode_only: bool
) -> ProgramPaths:
    """Trace a step of a bucket with one layer of each kind, and return what is recorded. `layers` are those of
    the model's stage.
    """
    record, x = Record(), model.hidden(bucket)
    batch = _batch(model, bucket, is_decode_only=is_decode_only, record=record)
    span = range(len(layers))
    values = [layer.layer for layer in layers]
    last_tokens = model.array((bucket.num_rows * (bucket.num_columns or 1), model.hidden_size), model.dtype)
    logits_peers = None if model.peers is None else model.peers.logits

    def run(params: Any, x: Any, batch: Batch, cache: KVCache, last_tokens: Any, logits_peers: Any) -> None:
        of_layers = model.family.with_layer_inputs(params, model.config, batch)
        run_paths(values, params, x, of_layers, cache, span, traced)
        if model.stage.is_first:
            model.family.embed(params, model.config, batch)
        if model.stage.is_last:
            logits = model.family.head(params, model.config, last_tokens, batch.context)
            gathered(logits, logits_peers, batch.context)

    with model.on_mesh():
        paths = choose(layers, x, batch.context)
        traced = _of_each_kind(layers, values, model.params, paths)
        taken = {index for index, path in traced.items()}
        taken |= {index + 1 for index, path in traced.items() if path.passes_on_qkv}
        weights = [layer.weights if index in taken else None for index, layer in enumerate(layers)]
        pools = tuple(layer.cache if index in traced else None for index, layer in enumerate(layers))
        cache = KVCache(pools=pools, num_blocks=1, block_size=model.block_size)
        jax.eval_shape(run, model.params | {"layers": weights}, x, batch, cache, last_tokens, logits_peers)
    kinds = [path.kind for path in paths]
    found = {
        kind: (kinds.count(kind), next(path.reason for path in paths if path.kind == kind))
        for kind in Kind
        if kind in kinds
    }
    return ProgramPaths(model.stage.index, bucket.num_tokens, is_decode_only, found, record)


def _batch(model: StepModel, bucket: Bucket, *, is_decode_only: bool, record: Record) -> Batch:
    """Return the shapes of a Batch, whose peers are those of sums."""
    sizes = model.table_sizes
    of_tokens, of_rows, scalar = (
        model.array(shape, "int32") for shape in ((bucket.num_tokens,), (bucket.num_rows,), ())
    )
    tables = Tables(of_tokens, model.array((bucket.num_rows, sizes["max_blocks"]), "int32"))
    batch = Batch(
        token_ids=of_tokens,
        positions=of_tokens,
        **tables._asdict(),
        query_starts=model.array((bucket.num_rows + 1,), "int32"),
        seq_lens=of_rows,
        slots=of_rows,
        num_decode_rows=scalar,
        num_rows=scalar,
        is_decode_only=is_decode_only,
        kernels=model.kernels,
        peers=None if model.peers is None else model.peers.sums,
        record=record,
    )
    if (num_groups := sizes["num_groups"]) == 1:
        return batch
    groups, group_of_layer = (tables,) * num_groups, tuple(model.layout.group_of_layer[i] for i in model.span)
    return dataclasses.replace(batch, write_index=None, block_tables=None, groups=groups, group_of_layer=group_of_layer)


def _of_each_kind(
    layers: Sequence[LayerShape], values: Sequence[Layer], params: Any, paths: Sequence[Path]
) -> dict[int, Path]:
    """Return the paths of the layers to trace: the first of each kind.

    One that has an update to add is traced after one that leaves an update, the final norm after one like the last.
    """
    traced: dict[int, Path] = {}
    seen: set[object] = set()
    for index, path in enumerate(paths):
        has_update = index > 0 and paths[index - 1].kind == Kind.UNFUSED
        consumer = consumer_of(values, params, index, range(len(layers)))
        kind = layers[index].key, path, consumer, has_update
        is_needed = index + 1 == len(layers) and path.kind != paths[max(traced, default=index)].kind
        if kind in seen and not is_needed:
            continue
        seen.add(kind)
        if has_update and (not traced or traced[max(traced)].kind != Kind.UNFUSED):
            traced[index - 1] = paths[index - 1]
        traced[index] = path
    return traced


def describe(programs: Iterable[ProgramPaths]) -> list[str]:
    """Return a line for each range of programs in which the same kernels run, by their number of rows. Stages of which
    the same is said share a line; one that is not of all stages begins with theirs.
    """
    by_size = sorted(programs, key=lambda program: (not program.is_decode_only, program.stage, program.num_tokens))
    stages: dict[str, list[str]] = {}
    for (stage, _), alike in itertools.groupby(by_size, key=lambda program: (program.stage, program.key)):
        stages.setdefault(_line(list(alike)), []).append(str(stage))
    num_stages = len({program.stage for program in by_size})
    return [
        line if len(found) == num_stages else f"stage{'s' * (len(found) > 1)} {', '.join(found)}: {line}"
        for line, found in stages.items()
    ]


def _line(programs: Sequence[ProgramPaths]) -> str:
    first, last = programs[0].num_tokens, programs[-1].num_tokens
    size = f"{first}" if first == last else f"{first} to {last}"
    layers, record = programs[0].layers, programs[0].record
    num_layers = sum(count for count, _ in layers.values())
    texts = [
        f"{kind}" + (f" of {count} layers" if count < num_layers else "") + _because(reason)
        for kind, (count, reason) in layers.items()
    ]
    norms = {name: record.others[name] for name in sorted(record.others) if name.endswith("norm")}
    names: dict[str, list[str]] = {}
    for name, found in (record.products | norms | record.others).items():
        names.setdefault(" or ".join(map(_text, found)), []).append(name)
    texts += [f"{', '.join(alike)}: {kernels}" for kernels, alike in names.items()]
    is_decode_only = programs[0].is_decode_only
    return f"{'decode of' if is_decode_only else 'prompts,'} {size} {'rows' if is_decode_only else 'tokens'}: " + (
        "; ".join(texts)
    )


def _text(part: Part) -> str:
    return f"{part.kernel}{_because(part.reason)}"


def _because(reason: str | None) -> str:
    return "" if reason is None else f" ({reason})"
