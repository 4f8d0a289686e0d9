"""Benchmark of `add_rms_norm`, in decode steps and in a prefill: between the blocks of a Llama-3-8B layer, and of a
Gemma-3-4B layer, which normalises updates.
"""

from collections.abc import Callable, Iterator

from pallas_kernels.add_rms_norm.op import add_normed_update, add_rms_norm
from pallas_kernels.timing import Row, compare, floor, num_rotations, on_gpu, ours, random_arrays

_CALLS: dict[str, Callable[..., object]] = {
    "": lambda x, update, weight, _, **options: add_rms_norm(x, update, weight, **options),
    ", normed update": lambda x, update, weight, gain, **options: add_rms_norm(
        x, update, weight, update_gain=gain, **options
    ),
    ", normed update alone": lambda x, update, _, gain, **options: add_normed_update(x, update, gain, **options),
}
"""The operation with each kind of update; alone is one whose sum is not normalised."""


def add_rms_norm_rows() -> Iterator[Row]:
    """Yield a row for each kind of update, number of tokens and implementation."""
    for (case, call), size in zip(_CALLS.items(), (4096, 2560, 4096) if on_gpu() else (512,) * 3, strict=True):
        for num_tokens in (1, 16, 64, 256, 8192) if on_gpu() else (1, 64):
            num_bytes = num_tokens * size * 2 * (3 if case.endswith("alone") else 4)
            shapes = (num_tokens, size), (num_tokens, size), (size,), (size,)
            inputs = [random_arrays(seed, *shapes) for seed in range(num_rotations(num_bytes))]
            bound = floor(num_bytes=num_bytes)
            yield from compare(f"{num_tokens} x {size}{case}", ours(call, eps=1e-5), inputs, bound=bound)
