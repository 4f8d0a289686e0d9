"""`python -m pallas_kernels.bench [OPERATION]`: tables of what the operations cost on the default device.

Each operation's own bench.py, or that of `peers`, yields the rows, of our implementations and of others, with the lower
bound set by an H200's memory and tensor cores. Without a GPU the cases are small and have no bound: they show that the
operation runs, and how fast XLA runs it.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import jax

from pallas_kernels.add_rms_norm.bench import add_rms_norm_rows
from pallas_kernels.expert_routing.bench import expert_routing_rows
from pallas_kernels.gated_linear_unit.bench import gated_linear_unit_rows
from pallas_kernels.grouped_codes.bench import grouped_codes_rows
from pallas_kernels.grouped_matmul.bench import grouped_matmul_rows
from pallas_kernels.kv_write.bench import rope_and_write_kv_rows
from pallas_kernels.latent_attention.bench import latent_attention_rows
from pallas_kernels.layer_matmuls.bench import decode_layer_rows, layer_matmuls_rows
from pallas_kernels.paged_attention.bench import paged_attention_rows
from pallas_kernels.peers.bench import all_gather_rows, all_reduce_rows
from pallas_kernels.quantized_matmuls.bench import quantized_matmuls_rows
from pallas_kernels.ragged_prefill_attention.bench import ragged_prefill_attention_rows
from pallas_kernels.recurrent_chunks.bench import recurrent_chunks_rows
from pallas_kernels.recurrent_step.bench import recurrent_step_rows
from pallas_kernels.row_quantization.bench import row_quantization_rows
from pallas_kernels.sampling.bench import sampling_rows
from pallas_kernels.scaled_matmul.bench import rounded_layer_rows, scaled_matmul_rows
from pallas_kernels.small_matmul.bench import small_matmul_rows
from pallas_kernels.timing import Row, on_gpu

OPERATIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "add_rms_norm": add_rms_norm_rows,
    "all_gather": all_gather_rows,
    "all_reduce": all_reduce_rows,
    "decode_layer": decode_layer_rows,
    "expert_routing": expert_routing_rows,
    "gated_linear_unit": gated_linear_unit_rows,
    "grouped_codes": grouped_codes_rows,
    "grouped_matmul": grouped_matmul_rows,
    "kv_write": rope_and_write_kv_rows,
    "latent_attention": latent_attention_rows,
    "layer_matmuls": layer_matmuls_rows,
    "paged_attention": paged_attention_rows,
    "quantized_matmuls": quantized_matmuls_rows,
    "ragged_prefill_attention": ragged_prefill_attention_rows,
    "recurrent_chunks": recurrent_chunks_rows,
    "recurrent_step": recurrent_step_rows,
    "rounded_layer": rounded_layer_rows,
    "row_quantization": row_quantization_rows,
    "sampling": sampling_rows,
    "scaled_matmul": scaled_matmul_rows,
    "small_matmul": small_matmul_rows,
}


def print_table(operation: str, rows: Iterator[Row]) -> None:
    """Print one line per row, as soon as it is measured. `of floor` is 100% where nothing can be faster."""
    print(f"\n{operation}\n{'case':44}{'implementation':24}{'us':>12}{'floor us':>10}{'of floor':>10}")
    for row in rows:
        took = "-" if row.microseconds is None else f"{row.microseconds:.1f}"
        floor, of_it = "-", "-"
        if row.floor_microseconds is not None:
            floor = f"{row.floor_microseconds:.1f}"
            if row.microseconds is not None:
                of_it = f"{row.floor_microseconds / row.microseconds:.0%}"
        print(f"{row.case:44}{row.implementation:24}{took:>12}{floor:>10}{of_it:>10}  {row.note}".rstrip(), flush=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    parser.add_argument("operation", nargs="?", choices=OPERATIONS, help="default: all of them")
    operation = parser.parse_args().operation
    device = jax.devices()[0]
    size = "full sizes, floors of an H200" if on_gpu() else "small sizes, no floors: this is not a GPU"
    print(f"{time.strftime('%Y-%m-%d')}, {device.device_kind}, jax {jax.__version__}: {size}")
    for name in [operation] if operation else OPERATIONS:
        print_table(name, OPERATIONS[name]())


if __name__ == "__main__":
    main()
