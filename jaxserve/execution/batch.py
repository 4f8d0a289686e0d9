"""Turn a StepPlan into device arrays: one packed int32 upload per step, unpacked inside the jitted step.

Only `Bucket.fields` knows the layout, which the host writes and the device reads.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxserve.execution.slots import Slots
from jaxserve.layers.batch import Batch, Launch, Tables
from jaxserve.layers.context import Kernels
from jaxserve.scheduling.plan import Row, StepPlan


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The padded shape that a step is compiled for: tokens, rows, and how many entries it may add to block tables."""

    num_tokens: int
    num_rows: int
    num_new_blocks: int
    num_columns: int = 0
    """If not 0, each row has so many tokens: the last of its sequence, and drafts or padding."""

    @functools.cached_property
    def fields(self) -> dict[str, tuple[int, int]]:
        """Name -> (offset, length) in the packed upload."""
        lengths = {
            "header": 4,  # num_rows, num_decode_rows, feature bits of the sampler, rows that want prompt logprobs
            # -1: the last token of the row's slot, which the host has not seen yet
            "token_ids": self.num_rows if self.num_columns else self.num_tokens,
            "slots": self.num_rows,
            "num_tokens": self.num_rows,
            "samples": self.num_rows,
            "next_token_ids": self.num_rows,  # the prompt token after the row's last one, for prompt logprobs
            "new_block_index": self.num_new_blocks,  # (group * num_slots + slot) * max_blocks + index in the table
            "new_block_ids": self.num_new_blocks,
        }
        offsets = np.concatenate([[0], np.cumsum(list(lengths.values()))])
        return {name: (int(offset), length) for (name, length), offset in zip(lengths.items(), offsets, strict=False)}

    @property
    def packed_size(self) -> int:
        """Length of the packed upload."""
        offset, length = self.fields["new_block_ids"]
        return offset + length


def make_buckets(
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    block_size: int,
    num_groups: int = 1,
    max_drafts: int = 0,
    has_finer_sizes: bool = False,
) -> list[Bucket]:
    """Return every size that a step can have: 1, 4, 16 tokens, then doubling up to the budget; and a token for every
    request.

    With `has_finer_sizes` there are more where steps are bound by arithmetic, because padding then costs as much as
    tokens, and `max_num_seqs` is rounded up to a multiple of 16, since products in FP8 would copy their rows into such.
    Below 16 tokens a step is bound by reading the weights, so finer shapes would cost compile time and gain nothing.

    A row has at least one token, so `min(tokens, max_num_seqs)` rows always suffice; a row of n tokens gets at most 1 +
    n // block_size new blocks in each of `num_groups` tables, and a row of one token as many as one and `max_drafts`
    take: a step that leaves drafts out adds the blocks that were allocated for them.
    """
    if has_finer_sizes and max_num_seqs > 16:
        max_num_seqs = -(-max_num_seqs // 16) * 16
    sizes = [1]
    while sizes[-1] < max_num_batched_tokens:
        sizes.append(min(sizes[-1] * (4 if sizes[-1] < 16 else 2), max_num_batched_tokens))
    max_num_rows = min(max_num_seqs, max_num_batched_tokens)
    sizes = sorted({*sizes, max_num_rows})
    if has_finer_sizes:
        sizes = _finer(sizes, max_num_rows)
    of_row = 1 + max_drafts // block_size
    return [
        Bucket(size, rows := min(size, max_num_seqs), num_groups * (rows * of_row + size // block_size))
        for size in sizes
    ]


def make_verifying_buckets(
    buckets: list[Bucket],
    *,
    num_columns: int,
    max_num_rows: int,
    block_size: int,
    num_groups: int,
    min_num_rows: int = 1,
) -> list[Bucket]:
    """Return the sizes of steps that verify drafts: those of steps with one token a row, with columns for the others,
    from what holds `min_num_rows` on, as far as the largest step has room for their tokens.
    """
    limit = min(max_num_rows, buckets[-1].num_tokens // num_columns)
    sizes = [bucket.num_rows for bucket in buckets if bucket.num_rows == bucket.num_tokens]
    num_rows = sorted({size for size in sizes if min_num_rows <= size < limit} | {min(limit, sizes[-1])} - {0})
    new_blocks = num_groups * (1 + num_columns // block_size)
    return [Bucket(rows * num_columns, rows, rows * new_blocks, num_columns) for rows in num_rows]


def _finer(sizes: list[int], max_num_rows: int) -> list[int]:
    """Return these sizes and some between powers of two: the mean from 512 on, quarters from 4096 on, and the mean of
    128 and 256, and of 256 and 512, as far as there may be more rows, for decode steps.

    A size less than 10% from the largest or from `max_num_rows` is left out: below them it would save little, and above
    `max_num_rows` few steps would use it. Powers of two up to 256 stay, for steps in which rows may have several
    tokens.
    """
    budget = sizes[-1]
    between: list[int] = []
    for power in (size for size in sizes if size >= 128 and size.bit_count() == 1):
        quarters = (5, 6, 7) if power >= 4096 else (6,)
        limit = max_num_rows if power < 512 else budget
        between += [size for quarter in quarters if (size := power * quarter // 4) < limit]

    def is_near_a_limit(size: int) -> bool:
        return any(10 * abs(size - limit) < min(size, limit) for limit in (max_num_rows, budget))

    kept = [size for size in sizes if size <= 256 or size in (max_num_rows, budget)]
    return sorted({*kept, *(size for size in sizes + between if not is_near_a_limit(size))})


def pack_nothing(bucket: Bucket, *, num_slots: int, max_blocks: int, num_groups: int) -> np.ndarray:
    """Return the packed upload of a step that changes nothing, [bucket.packed_size] int32: all rows are padding."""
    packed = np.zeros(bucket.packed_size, np.int32)
    view = _views(packed, bucket)
    view["slots"][:] = num_slots  # padding rows write nowhere
    padding = num_groups * num_slots * max_blocks
    view["new_block_index"][:] = np.arange(padding, padding + bucket.num_new_blocks)  # out of range, and unique
    return packed


def pack(
    plan: StepPlan, bucket: Bucket, *, num_slots: int, max_blocks: int, num_groups: int, features: int
) -> np.ndarray:
    """Return the packed upload of a plan, [bucket.packed_size] int32. The block tables of admitted rows are uploaded
    separately.
    """
    packed = pack_nothing(bucket, num_slots=num_slots, max_blocks=max_blocks, num_groups=num_groups)
    view = _views(packed, bucket)
    rows = slice(0, len(plan.rows))
    requests, slots, starts, counts, samples, new_counts, num_drafts = zip(*plan.rows, strict=True)
    view["slots"][rows] = slots
    view["num_tokens"][rows] = counts
    if bucket.num_columns:
        view["num_tokens"][rows] += np.minimum(num_drafts, bucket.num_columns - 1, dtype=np.int32)
    view["samples"][rows] = samples

    decodes = slice(0, plan.num_decode_rows)
    known = [request.token_ids for request in requests]
    view["token_ids"][decodes] = [
        ids[start] if start < len(ids) else -1 for ids, start in zip(known[decodes], starts[decodes], strict=True)
    ]
    end = plan.num_decode_rows
    for index in range(plan.num_decode_rows, len(plan.rows)):
        first, count = starts[index], counts[index]
        view["token_ids"][end : end + count] = known[index][first : first + count]
        end += count

    new_index: list[int] = []
    new_ids: list[int] = []
    if any(new_counts):
        admitted = {row.slot for row in plan.admitted}
        for request, slot, num_new in zip(requests, slots, new_counts, strict=True):
            if num_new and slot not in admitted:
                for group, table in enumerate(request.block_tables):
                    first = len(table) - num_new
                    start = (group * num_slots + slot) * max_blocks + first
                    new_index += range(start, start + num_new)
                    new_ids += table[first:]
    view["new_block_index"][: len(new_index)] = new_index
    view["new_block_ids"][: len(new_ids)] = new_ids

    num_prompt_logprob_rows = 0
    for index, row in enumerate(plan.rows):
        if _has_prompt_logprobs(row):
            num_prompt_logprob_rows += 1
            following = row.start + row.num_tokens
            if following < row.request.num_prompt_tokens:
                view["next_token_ids"][index] = known[index][following]
    view["header"][:] = (len(plan.rows), plan.num_decode_rows, features, num_prompt_logprob_rows)
    return packed


def wants_prompt_logprobs(plan: StepPlan) -> bool:
    """Return true if some row computes prompt tokens and its request wants their log probabilities."""
    return any(map(_has_prompt_logprobs, plan.rows))


def _has_prompt_logprobs(row: Row) -> bool:
    return row.start < row.request.num_prompt_tokens and row.request.asked.params.prompt_logprobs is not None


def _views(packed: np.ndarray, bucket: Bucket) -> dict[str, np.ndarray]:
    return {name: packed[offset : offset + length] for name, (offset, length) in bucket.fields.items()}


def unpack(packed: Int[Array, " packed"], bucket: Bucket) -> dict[str, Int[Array, " length"]]:
    """Return the named pieces of the packed upload, on the device."""
    return {name: packed[offset : offset + length] for name, (offset, length) in bucket.fields.items()}


class RowLengths(NamedTuple):
    """Where the rows of a step begin, and how far they get."""

    starts: Int[Array, " B"]
    """Position of each row's first token."""
    num_valid: Int[Array, " B"]
    """Tokens of each row that belong to its sequence, or may: all but padding columns. 0 if the request has reached its
    last token, which the host cannot know while drafts are in flight.
    """


def make_batch(
    pieces: dict[str, jax.Array],
    slots: Slots,
    *,
    num_columns: int,
    group_of_layer: tuple[int, ...],
    block_size: int,
    num_blocks: int,
    is_decode_only: bool,
    launch: Launch,
    kernels: Kernels,
) -> tuple[Batch, RowLengths]:
    """Return the Batch of a step, from its uploaded pieces and the slots: each row continues where its slot is. Runs
    inside a program.

    `group_of_layer` matters only if there are several KV groups.
    """
    num_rows = pieces["header"][0]
    slot_ids = pieces["slots"]
    starts = slots.num_computed.at[slot_ids].get(mode="fill", fill_value=0)
    if num_columns:
        tokens = _columns(pieces, slots, num_columns, block_size=block_size)
    else:
        tokens = _ragged(pieces, slots, starts, is_decode_only=is_decode_only)
    index = jnp.arange(tokens.positions.shape[0], dtype=jnp.int32)
    positions, row = tokens.positions, tokens.row

    def of_group(group: int) -> Tables:
        tables = slots.block_tables[group].at[slot_ids].get(mode="fill", fill_value=0)
        if num_columns:
            # Padding behind the last block that is written is in the context, too: others may have left NaN there.
            last = (starts + jnp.maximum(tokens.num_valid, 1) - 1)[:, None] // block_size
            block = jnp.minimum(jnp.arange(tables.shape[1], dtype=jnp.int32)[None], last)
            tables = jnp.take_along_axis(tables, block, axis=1)
        write_index = tables[row, positions // block_size] * block_size + positions % block_size
        return Tables(jnp.where(tokens.is_written, write_index, num_blocks * block_size + index), tables)

    groups = tuple(map(of_group, range(slots.block_tables.shape[0])))
    batch = Batch(
        token_ids=tokens.token_ids,
        positions=positions,
        write_index=groups[0].write_index,
        query_starts=tokens.query_starts,
        seq_lens=starts + (jnp.diff(tokens.query_starts) if num_columns else pieces["num_tokens"]),
        block_tables=groups[0].block_tables,
        slots=slot_ids,
        num_decode_rows=jnp.zeros_like(num_rows) if num_columns else pieces["header"][1],
        num_rows=num_rows,
        is_decode_only=is_decode_only,
        num_columns=num_columns,
        launch=launch,
        kernels=kernels,
    )
    if len(groups) > 1:
        # None, so that a model that does not ask for its layers' views fails when it is traced.
        batch = dataclasses.replace(
            batch, write_index=None, block_tables=None, groups=groups, group_of_layer=group_of_layer
        )
    return batch, RowLengths(starts, tokens.num_valid)


class _Tokens(NamedTuple):
    """The tokens of a step, T of B rows."""

    token_ids: Int[Array, " T"]
    row: Int[Array, " T"]
    positions: Int[Array, " T"]
    is_written: Bool[Array, " T"]
    query_starts: Int[Array, " B+1"]
    num_valid: Int[Array, " B"]


def _ragged(pieces: dict[str, jax.Array], slots: Slots, starts: Int[Array, " B"], *, is_decode_only: bool) -> _Tokens:
    """Return the tokens of rows of any lengths, one row after the other."""
    slot_ids, num_tokens = pieces["slots"], pieces["num_tokens"]
    token = jnp.arange(pieces["token_ids"].shape[0], dtype=jnp.int32)
    query_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(num_tokens, dtype=jnp.int32)])
    is_padding = token >= query_starts[-1]
    if is_decode_only:
        row, positions = token, starts  # 0 in padding rows
    else:
        # By comparison with all, which is one small kernel; a binary search would be a loop.
        row = jnp.searchsorted(query_starts[1:], token, side="right", method="compare_all").astype(jnp.int32)
        row = jnp.where(is_padding, 0, row)
        positions = jnp.where(is_padding, 0, starts[row] + token - query_starts[row])
    token_ids = jnp.where(pieces["token_ids"] < 0, slots.last_tokens[slot_ids[row]], pieces["token_ids"])
    is_written, num_valid = ~is_padding, num_tokens
    if slots.drafts is not None:
        limits = slots.max_total_tokens.at[slot_ids].get(mode="clip")
        num_valid = jnp.where(starts + num_tokens < limits, num_tokens, 0)
        is_written &= num_valid[row] > 0
    return _Tokens(token_ids, row, positions, is_written, query_starts, num_valid)


class ColumnRows(NamedTuple):
    """The rows of a step that verifies drafts."""

    is_row: Bool[Array, " B"]
    starts: Int[Array, " B"]
    last_tokens: Int[Array, " B"]
    num_valid: Int[Array, " B"]
    """Tokens of each row for which there are blocks, and that its request may still have."""


def read_columns(pieces: dict[str, jax.Array], slots: Slots) -> ColumnRows:
    """Return where the rows of a step that verifies drafts begin, and how far they may get. Runs inside a program."""
    slot_ids = pieces["slots"]
    is_row = jnp.arange(slot_ids.shape[0], dtype=jnp.int32) < pieces["header"][0]
    starts = slots.num_computed.at[slot_ids].get(mode="fill", fill_value=0)
    last = jnp.where(pieces["token_ids"] < 0, slots.last_tokens.at[slot_ids].get(mode="clip"), pieces["token_ids"])
    limits = slots.max_total_tokens.at[slot_ids].get(mode="clip")
    num_valid = jnp.minimum(pieces["num_tokens"], limits - 1 - starts)
    return ColumnRows(is_row, starts, last, jnp.where(is_row, num_valid, 0))


def _columns(pieces: dict[str, jax.Array], slots: Slots, num_columns: int, *, block_size: int) -> _Tokens:
    """Return the tokens of rows that verify drafts: each has `num_columns`, the last token of its sequence, its drafts,
    and padding, which repeats the first of them. It is written, too, as far as their last block reaches: a weight of 0
    would not remove NaN that others have left there.
    """
    assert slots.drafts is not None
    slot_ids = pieces["slots"]
    num_rows = slot_ids.shape[0]
    is_row, starts, last, num_valid = read_columns(pieces, slots)
    drafts = slots.drafts.token_ids.at[slot_ids].get(mode="clip")[:, : num_columns - 1]
    num_drafts = slots.drafts.counts.at[slot_ids].get(mode="clip")
    num_valid = jnp.minimum(num_valid, jnp.where(is_row, 1 + num_drafts, 0))
    column = jnp.arange(num_columns, dtype=jnp.int32)[None]
    positions = jnp.where(is_row[:, None], starts[:, None] + column, 0)
    is_valid = column < num_valid[:, None]
    is_in_last_block = positions // block_size == (starts + num_valid - 1)[:, None] // block_size
    query_starts = num_columns * jnp.minimum(jnp.arange(num_rows + 1, dtype=jnp.int32), pieces["header"][0])
    return _Tokens(
        token_ids=jnp.where(is_valid, jnp.concatenate([last[:, None], drafts], axis=1), last[:, None]).reshape(-1),
        row=jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), num_columns),
        positions=positions.reshape(-1),
        is_written=(is_valid | (is_in_last_block & (num_valid > 0)[:, None])).reshape(-1),
        query_starts=query_starts,
        num_valid=num_valid,
    )
