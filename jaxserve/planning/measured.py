"""Measured steps, with which times are predicted: the figures of docs/benchmarks.md. Plain data.

Each group is of one machine and of the command `jaxserve bench latency --shape SHAPE OPTIONS --warmup full` with the
prefix cache off. Beside each time is that of the work (`work.Work.seconds`), as plans of the same batches have it; a
test computes it again.
"""

import dataclasses
from typing import NamedTuple


class Run(NamedTuple):
    """One batch of equal requests. Times are in milliseconds; a prefill that was not measured is None."""

    num_rows: int
    input_len: int
    output_len: int
    step: float
    work: float
    prefill: float | None
    prefill_work: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batches:
    """Runs of one model on one machine."""

    gpu: str
    shape: str
    options: str
    model_type: str
    num_layers: int
    runs: tuple[Run, ...]
    date: str
    """The last day on which they were measured, in ISO form."""
    weights: str = "16 bits"
    """How most of them are held: "16 bits", or the codes."""
    num_devices: int = 1
    kernels: str = "sm90"
    has_experts: bool = False
    has_states: bool = False
    """True if some layers keep a state of each request in place of keys and values."""
    num_stages: int = 1


# fmt: off
MEASURED: tuple[Batches, ...] = (
    Batches(gpu="h200", shape="llama-3-8b", options="--max-num-seqs 512",
            model_type="llama", num_layers=32, date="2026-11-24", runs=(
        Run(1, 128, 256, 3.8, 3.518, 7.2, 5.75),
        Run(16, 512, 128, 4.25, 4.081, 178.4, 149.37),
        Run(64, 1024, 256, 6.61, 7.001, 1468.7, 1206.02),
        Run(256, 1024, 256, 15.98, 17.53, 5839.7, 4824.09),
        Run(512, 512, 256, 22.98, 23.405, 5785.3, 4779.98),
        Run(1, 8000, 8, 3.95, 3.759, 203.6, 165.78),
    )),
    Batches(gpu="h100", shape="llama-3-8b", options="",
            model_type="llama", num_layers=32, date="2026-11-28", runs=(
        Run(1, 128, 64, 5.24, 5.029, 9.4, 7.27),
        Run(16, 512, 64, 5.67, 5.693, 182.7, 150.89),
        Run(64, 1024, 32, 9.13, 9.169, 1436.8, 1218.12),
    )),
    Batches(gpu="h200", shape="llama-3-8b", options="--quantization fp8",
            model_type="llama", num_layers=32, date="2026-11-26", weights="fp8", runs=(
        Run(1, 128, 256, 3.07, 1.896, 5.6, 3.0),
        Run(16, 512, 128, 3.7, 2.459, 116.8, 74.81),
        Run(64, 1024, 256, 5.91, 4.747, 944.1, 603.97),
        Run(256, 1024, 128, 13.76, 12.878, 3763.8, 2415.88),
    )),
    Batches(gpu="h200", shape="llama-3-8b", options="--quantization int4",
            model_type="llama", num_layers=32, date="2026-11-26", weights="int4", runs=(
        Run(1, 128, 256, 2.5, 1.108, 8.2, 3.35),
        Run(16, 512, 128, 3.23, 1.672, 161.9, 146.97),
        Run(64, 1024, 256, 6.99, 4.591, 1265.8, 1186.75),
        Run(256, 512, 32, 12.5, 10.146, 2509.5, 2351.44),
        Run(256, 1024, 128, 16.22, 14.611, 6013.0, 4746.99),
    )),
    Batches(gpu="h200", shape="gpt-oss-20b", options="--max-num-seqs 512 --max-model-len 4096",
            model_type="gpt_oss", num_layers=24, date="2026-11-30", weights="mxfp4", has_experts=True, runs=(
        Run(1, 128, 64, 2.29, 0.873, 11.7, 3.92),
        Run(16, 512, 48, 5.39, 2.861, 103.1, 66.41),
        Run(64, 1024, 32, 7.61, 3.96, 813.9, 535.45),
        Run(256, 256, 32, 11.81, 5.876, 811.9, 529.08),
    )),
    Batches(gpu="h200", shape="gpt-oss-120b", options="--max-num-seqs 64 --max-model-len 4096",
            model_type="gpt_oss", num_layers=36, date="2026-11-30", weights="mxfp4", has_experts=True, runs=(
        Run(1, 128, 64, 3.28, 1.18, 24.5, 16.14),
        Run(16, 512, 48, 11.11, 6.678, 182.7, 110.31),
        Run(64, 1024, 32, 20.39, 14.553, 1471.3, 888.84),
    )),
    Batches(gpu="h200", shape="qwen3-30b-a3b-fp8", options="--max-num-seqs 64",
            model_type="qwen3_moe", num_layers=48, date="2026-11-27", weights="fp8", has_experts=True, runs=(
        Run(1, 128, 256, 3.95, 0.816, 18.2, 7.76),
        Run(16, 512, 128, 9.45, 5.188, 118.8, 36.63),
        Run(64, 1024, 64, 14.24, 9.034, 910.0, 301.34),
    )),
    Batches(gpu="h200", shape="qwen3-30b-a3b", options="--max-num-seqs 64 --quantization int4",
            model_type="qwen3_moe", num_layers=48, date="2026-11-27", weights="int4", has_experts=True, runs=(
        Run(1, 128, 256, 3.47, 0.49, 12.3, 4.63),
        Run(16, 512, 128, 7.37, 2.841, 110.1, 62.36),
        Run(64, 1024, 64, 11.4, 5.784, 854.5, 515.47),
    )),
    Batches(gpu="h200", shape="qwen3-30b-a3b", options="",
            model_type="qwen3_moe", num_layers=48, date="2026-11-27", has_experts=True, runs=(
        Run(1, 128, 128, 3.32, 1.427, 9.0, 14.94),
        Run(16, 512, 64, 11.51, 9.585, 108.7, 72.68),
        Run(64, 1024, 64, 18.08, 15.944, 844.1, 598.03),
        Run(256, 1024, 256, 25.59, 23.059, 3371.0, 2392.12),
    )),
    Batches(gpu="h100", shape="llama-3-8b", options="--quantization int4 --tensor-parallel-size 2",
            model_type="llama", num_layers=32, date="2026-11-26", weights="int4", num_devices=2, runs=(
        Run(1, 128, 128, 2.66, 1.494, 8.7, 2.76),
        Run(16, 512, 64, 2.95, 1.842, 115.0, 83.97),
    )),
    Batches(gpu="h100", shape="qwen3-30b-a3b-fp8", options="--tensor-parallel-size 2",
            model_type="qwen3_moe", num_layers=48, date="2026-11-26",
            weights="fp8", num_devices=2, has_experts=True, runs=(
        Run(1, 128, 128, 4.41, 1.639, 11.2, 6.64),
        Run(16, 512, 64, 7.03, 4.751, 105.8, 28.12),
    )),
    Batches(gpu="h200", shape="llama-3-8b", options="--tensor-parallel-size 2",
            model_type="llama", num_layers=32, date="2026-11-24", num_devices=2, runs=(
        Run(1, 128, 256, 2.82, 2.464, 6.5, 3.73),
        Run(64, 1024, 256, 4.46, 4.279, 843.3, 685.0),
        Run(256, 1024, 256, 9.57, 9.767, 3390.8, 2739.99),
    )),
    Batches(gpu="h200", shape="llama-3-70b", options="--tensor-parallel-size 2 --max-num-seqs 64 --max-model-len 4096",
            model_type="llama", num_layers=80, date="2026-11-24", num_devices=2, runs=(
        Run(1, 128, 128, 18.8, 18.025, 26.0, 29.75),
        Run(64, 1024, 128, 23.7, 26.685, 7328.2, 6248.51),
    )),
    Batches(gpu="h200", shape="gemma-3-4b", options="--max-num-seqs 64",
            model_type="gemma3_text", num_layers=34, date="2026-11-27", runs=(
        Run(1, 128, 96, 2.83, 1.821, None, None),
        Run(16, 512, 64, 3.43, 2.247, None, None),
        Run(64, 1024, 48, 5.47, 4.586, None, None),
    )),
    Batches(gpu="h200", shape="olmo-2-7b", options="--max-num-seqs 64",
            model_type="olmo2", num_layers=32, date="2026-11-27", runs=(
        Run(1, 128, 96, 4.51, 3.243, None, None),
        Run(16, 512, 64, 5.65, 4.549, None, None),
        Run(64, 1024, 48, 13.5, 12.54, None, None),
    )),
    Batches(gpu="h200", shape="smollm3-3b", options="--max-num-seqs 16",
            model_type="smollm3", num_layers=36, date="2026-11-27", runs=(
        Run(1, 128, 96, 2.16, 1.441, None, None),
        Run(16, 512, 64, 2.42, 1.707, None, None),
    )),
    Batches(gpu="h200", shape="llama-3-8b", options="--kernels xla --max-num-seqs 16",
            model_type="llama", num_layers=32, date="2026-11-25", kernels="xla", runs=(
        Run(1, 128, 128, 8.95, 3.516, 20.5, 5.75),
        Run(16, 512, 64, 12.55, 4.065, 457.3, 149.37),
    )),
    Batches(gpu="h200", shape="lfm2-8b-a1b", options="--max-num-seqs 64 --max-model-len 4096",
            model_type="lfm2_moe", num_layers=24, date="2026-11-29", has_experts=True, has_states=True, runs=(
        Run(1, 128, 96, 1.81, 0.729, 7.6, 4.34),
        Run(16, 512, 64, 4.46, 3.544, 46.8, 33.48),
        Run(64, 1024, 48, 5.11, 4.335, 353.5, 268.87),
    )),
    Batches(gpu="h200", shape="nemotron-h-8b", options="--max-num-seqs 64 --max-model-len 4096",
            model_type="nemotron_h", num_layers=28, date="2026-11-29", has_states=True, runs=(
        Run(1, 128, 96, 4.76, 3.587, 13.3, 5.79),
        Run(16, 512, 64, 6.02, 4.629, 225.3, 149.17),
        Run(64, 1024, 48, 10.34, 8.087, 1769.0, 1194.67),
    )),
    Batches(gpu="h200", shape="qwen3-next-80b-a3b", options="--quantization fp8 --max-num-seqs 64 --max-model-len 4096",
            model_type="qwen3_next", num_layers=48, date="2026-11-29",
            weights="fp8", has_experts=True, has_states=True, runs=(
        Run(1, 128, 96, 6.65, 0.985, 36.6, 18.16),
        Run(16, 512, 64, 13.02, 6.378, 204.8, 53.05),
        Run(64, 1024, 48, 25.05, 16.903, 1550.9, 426.42),
    )),
    Batches(gpu="h200", shape="glm-4.5-air", options="--quantization fp8 --max-num-seqs 64 --max-model-len 4096",
            model_type="glm4_moe", num_layers=46, date="2026-11-29", weights="fp8", has_experts=True, runs=(
        Run(1, 128, 96, 6.87, 3.172, 33.7, 26.87),
        Run(16, 512, 64, 22.85, 17.552, 334.4, 153.98),
    )),
    Batches(gpu="h200", shape="deepseek-v2-lite", options="--max-num-seqs 64 --max-model-len 4096",
            model_type="deepseek_v2", num_layers=27, date="2026-11-29", has_experts=True, runs=(
        Run(1, 128, 96, 2.91, 1.148, None, None),
    )),
    Batches(gpu="h200", shape="qwen2.5-7b", options="--max-num-seqs 64 --max-model-len 4096",
            model_type="qwen2", num_layers=28, date="2026-11-29", runs=(
        Run(1, 128, 96, 3.75, 3.309, None, None),
        Run(16, 512, 64, 4.07, 3.695, None, None),
        Run(64, 1024, 48, 5.47, 5.361, None, None),
    )),
    Batches(gpu="h200", shape="phi-4", options="--max-num-seqs 64 --max-model-len 4096",
            model_type="phi3", num_layers=40, date="2026-11-29", runs=(
        Run(1, 128, 96, 7.12, 6.624, None, None),
        Run(16, 512, 64, 8.01, 7.575, None, None),
        Run(64, 1024, 48, 12.2, 12.131, None, None),
    )),
    Batches(gpu="h200", shape="command-r7b", options="--max-num-seqs 64 --max-model-len 4096",
            model_type="cohere2", num_layers=32, date="2026-11-29", runs=(
        Run(1, 128, 96, 4.62, 3.76, None, None),
        Run(16, 512, 64, 5.01, 4.33, None, None),
        Run(64, 1024, 48, 8.06, 7.121, None, None),
    )),
    Batches(gpu="h200", shape="llama-3-8b", options="--max-num-seqs 256 --max-model-len 4096",
            model_type="llama", num_layers=32, date="2026-11-29", runs=(
        Run(1, 128, 64, 3.8, 3.515, None, None),
        Run(16, 512, 48, 4.15, 4.061, None, None),
        Run(64, 1024, 32, 7.03, 6.777, None, None),
    )),
    Batches(gpu="h200", shape="llama-3-8b", options="-tp 2 --max-num-seqs 256 --max-model-len 4096",
            model_type="llama", num_layers=32, date="2026-11-29", num_devices=2, runs=(
        Run(1, 128, 64, 2.83, 2.462, None, None),
        Run(16, 512, 48, 2.98, 2.753, None, None),
        Run(64, 1024, 32, 4.66, 4.167, None, None),
    )),
    Batches(gpu="h200", shape="llama-3-8b", options="-pp 2 --max-num-seqs 256 --max-model-len 4096",
            model_type="llama", num_layers=32, date="2026-11-29", num_stages=2, runs=(
        Run(1, 128, 64, 3.87, 3.555, None, None),
        Run(16, 512, 48, 4.83, 4.031, None, None),
        Run(64, 1024, 32, 6.49, 5.421, None, None),
    )),
)
# fmt: on
