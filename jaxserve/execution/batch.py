"""Turn a StepPlan into device arrays: one packed int32 upload per step, unpacked inside the jitted step.

Only `Bucket.fields` knows the layout, which the host writes and the device reads.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxserve.layers.batch import Batch, Launch, Tables
from jaxserve.layers.context import Kernels
from jaxserve.scheduling.plan import StepPlan


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The padded shape that a step is compiled for: tokens, rows, and how many entries it may add to block tables."""

    num_tokens: int
    num_rows: int
    num_new_blocks: int

    @functools.cached_property
    def fields(self) -> dict[str, tuple[int, int]]:
        """Name -> (offset, length) in the packed upload."""
        lengths = {
            "header": 4,  # num_rows, num_decode_rows, feature bits of the sampler, rows that want prompt logprobs
            "token_ids": self.num_tokens,  # -1: the last token of the row's slot, which the host has not seen yet
            "slots": self.num_rows,
            "starts": self.num_rows,
            "num_tokens": self.num_rows,
            "samples": self.num_rows,
            "num_output_tokens": self.num_rows,  # generated before this step, pending ones included
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
    has_finer_sizes: bool = False,
) -> list[Bucket]:
    """Return every size that a step can have: 1, 4, 16 tokens, then doubling up to the budget; and a token for every
    request.

    With `has_finer_sizes` there are more where steps are bound by arithmetic, because padding then costs as much as
    tokens. Below 16 tokens a step is bound by reading the weights, so finer shapes would cost compile time and gain
    nothing.

    A row has at least one token, so `min(tokens, max_num_seqs)` rows always suffice; a row of n tokens gets at most 1 +
    n // block_size new blocks in each of `num_groups` tables.
    """
    sizes = [1]
    while sizes[-1] < max_num_batched_tokens:
        sizes.append(min(sizes[-1] * (4 if sizes[-1] < 16 else 2), max_num_batched_tokens))
    max_num_rows = min(max_num_seqs, max_num_batched_tokens)
    sizes = sorted({*sizes, max_num_rows})
    if has_finer_sizes:
        sizes = _finer(sizes, max_num_rows)
    return [Bucket(size, rows := min(size, max_num_seqs), num_groups * (rows + size // block_size)) for size in sizes]


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
    requests, slots, starts, counts, samples, new_counts = zip(*plan.rows, strict=True)
    view["slots"][rows] = slots
    view["starts"][rows] = starts
    view["num_tokens"][rows] = counts
    view["samples"][rows] = samples
    num_prompt_tokens = np.array([request.num_prompt_tokens for request in requests], np.int32)
    view["num_output_tokens"][rows] = view["starts"][rows] + view["num_tokens"][rows] - num_prompt_tokens

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
        admitted = {request.slot for request in plan.admitted}
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
    for index in np.flatnonzero(view["starts"][rows] < num_prompt_tokens).tolist():
        if requests[index].request.params.prompt_logprobs is not None:
            num_prompt_logprob_rows += 1
            following = starts[index] + counts[index]
            if following < requests[index].num_prompt_tokens:
                view["next_token_ids"][index] = known[index][following]
    view["header"][:] = (len(plan.rows), plan.num_decode_rows, features, num_prompt_logprob_rows)
    return packed


def wants_prompt_logprobs(plan: StepPlan) -> bool:
    """Return true if some row computes prompt tokens and its request wants their log probabilities."""
    return any(
        row.request.request.params.prompt_logprobs is not None and row.start < row.request.num_prompt_tokens
        for row in plan.rows
    )


def _views(packed: np.ndarray, bucket: Bucket) -> dict[str, np.ndarray]:
    return {name: packed[offset : offset + length] for name, (offset, length) in bucket.fields.items()}


def unpack(packed: Int[Array, " packed"], bucket: Bucket) -> dict[str, Int[Array, " length"]]:
    """Return the named pieces of the packed upload, on the device."""
    return {name: packed[offset : offset + length] for name, (offset, length) in bucket.fields.items()}


def make_batch(
    pieces: dict[str, jax.Array],
    last_tokens: Int[Array, " N"],
    block_tables: Int[Array, "G N M"],
    *,
    group_of_layer: tuple[int, ...],
    block_size: int,
    num_blocks: int,
    is_decode_only: bool,
    launch: Launch,
    kernels: Kernels,
) -> Batch:
    """Return the Batch of a step, from its uploaded pieces and the slots' last tokens and block tables. Runs inside a
    program.

    `group_of_layer` matters only if there are several KV groups.
    """
    num_rows, num_decode_rows = pieces["header"][0], pieces["header"][1]
    token = jnp.arange(pieces["token_ids"].shape[0], dtype=jnp.int32)
    slots, starts = pieces["slots"], pieces["starts"]
    query_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(pieces["num_tokens"], dtype=jnp.int32)])
    is_padding = token >= query_starts[-1]
    if is_decode_only:
        row, positions = token, starts  # 0 in padding rows
    else:
        # By comparison with all, which is one small kernel; a binary search would be a loop.
        row = jnp.searchsorted(query_starts[1:], token, side="right", method="compare_all").astype(jnp.int32)
        row = jnp.where(is_padding, 0, row)
        positions = jnp.where(is_padding, 0, starts[row] + token - query_starts[row])
    token_ids = jnp.where(pieces["token_ids"] < 0, last_tokens[slots[row]], pieces["token_ids"])

    def of_group(group: int) -> Tables:
        tables = block_tables[group].at[slots].get(mode="fill", fill_value=0)
        write_index = tables[row, positions // block_size] * block_size + positions % block_size
        return Tables(jnp.where(is_padding, num_blocks * block_size + token, write_index), tables)

    groups = tuple(map(of_group, range(block_tables.shape[0])))
    batch = Batch(
        token_ids=token_ids,
        positions=positions,
        write_index=groups[0].write_index,
        query_starts=query_starts,
        seq_lens=starts + pieces["num_tokens"],
        block_tables=groups[0].block_tables,
        slots=slots,
        num_decode_rows=num_decode_rows,
        num_rows=num_rows,
        is_decode_only=is_decode_only,
        launch=launch,
        kernels=kernels,
    )
    if len(groups) == 1:
        return batch
    # None, so that a model that does not ask for its layers' views fails when it is traced.
    return dataclasses.replace(batch, write_index=None, block_tables=None, groups=groups, group_of_layer=group_of_layer)
