"""A plan as text for people."""

from jaxserve.planning.plan import Plan, Speed, Split
from jaxserve.planning.sizes import Sizes
from jaxserve.tables import aligned, size_text


def plan_text(plan: Plan) -> str:
    """Format a plan, one line per fact."""
    load = plan.load
    devices = plan.device if plan.num_devices == 1 else f"{plan.num_devices} x {plan.device}; bytes are of each"
    rows = [["model", plan.model], ["device", f"{devices}; not used: this is a plan"]]
    target = "" if load.target_tpot is None else f", at most {load.target_tpot:g} ms a token"
    if load.input_len and load.output_len:
        rows.append(["load", f"{load.input_len:,} tokens in, {load.output_len:,} out{target}"])
    rows.append(["fits", "yes" if plan.fits else f"no: {plan.why_not}"])
    if plan.sizes is not None:
        rows += _size_rows(plan, plan.sizes, total=(load.input_len or 0) + (load.output_len or 0))
    rows += [["kernels" if index == 0 else "", line] for index, line in enumerate(plan.paths)]
    if plan.chosen is not None:
        rows += _speed_rows(plan, plan.chosen)
    parts = [aligned(rows)]
    if plan.speeds:
        parts.append(aligned([["at once", "ms a token", "+-", "work", "x", "TTFT ms", "output tok/s", "+-"],
                              *map(_speed_row, plan.speeds)]))  # fmt: skip
    if plan.splits:
        most = max(split.tensor_parallel_size * split.pipeline_parallel_size * split.replicas for split in plan.splits)
        title = f"ways to use {most} of them, fastest first:"
        header = ["-tp", "-pp", "-ep", "replicas", "at once", "ms a token", "output tok/s", ""]
        parts.append(f"{title}\n{aligned([header, *map(_split_row, plan.splits)])}")
    return "\n\n".join(parts)


def _size_rows(plan: Plan, sizes: Sizes, *, total: int) -> list[list[str]]:
    steps = f"{size_text(sizes.slot_bytes)} of it for slots"
    if sizes.state_bytes:
        steps += f", {size_text(sizes.state_bytes)} for states of layers"
    if sizes.peer_bytes:
        steps += f", {size_text(sizes.peer_bytes)} for rows of other devices"
    rows = [
        ["memory", f"{size_text(sizes.memory_bytes)}, of which {size_text(sizes.usable_bytes)} may be used"],
        ["  weights", f"{size_text(sizes.weight_bytes)}; what is not quantized is in {plan.dtype}"],
        ["  steps", f"{size_text(sizes.step_bytes)}, {steps}; {plan.how_sized}"],
        ["  reserve", size_text(sizes.reserve_bytes)],
        [
            "  KV cache",
            f"{size_text(sizes.kv_bytes)}: {sizes.num_blocks:,} blocks of {sizes.block_size} tokens, "
            f"{sizes.kv_bytes_per_token:,} bytes a token on all devices",
        ],
        ["requests", f"{plan.num_requests:,} of {total:,} tokens at once, at most {sizes.max_num_seqs:,} run"],
        ["", f"{sizes.num_full_requests:,} of {sizes.max_model_len:,} tokens, the longest context"],
    ]
    for index, stage in enumerate(sizes.stages):
        text = f"layers {stage.first_layer} to {stage.first_layer + stage.num_layers - 1}: "
        text += f"{size_text(stage.weight_bytes)} of weights, {size_text(stage.kv_bytes)} of KV"
        if plan.chosen is not None:
            text += f", {plan.chosen.stage_ms[index]:.2f} ms"
        rows.append([f"stage {index}", text])
    for index, program in enumerate(sizes.programs):
        spills = sum(kernel.spill_bytes for kernel in program.kernels)
        names = ", ".join(dict.fromkeys(kernel.name for kernel in program.kernels))
        text = f"{program.name}: {size_text(program.temporary_bytes)} of temporaries, {program.num_launches} launches"
        if program.kernels:
            text += f"; new kernels: {names}; {f'{spills} bytes spilled' if spills else 'no spills'}"
        rows.append(["compiled" if index == 0 else "", text])
    return rows


def _speed_rows(plan: Plan, speed: Speed) -> list[list[str]]:
    rooms = "that fit" if plan.load.target_tpot is None else "that fit and meet the target"
    return [
        [
            "speed",
            f"{speed.num_requests:,} requests at once, the most {rooms}: {speed.step_ms:.2f} ms a token "
            f"(+-{speed.step_error:.0%}), {speed.output_tokens_per_second:,.0f} tokens a second (+-{speed.error:.0%})",
        ],
        ["", f"its work {speed.work_ms:.2f} ms x {speed.factor:.2f}, measured: {speed.source}"],
        *([["", f"stages wait {speed.bubble:.0%} of the time for each other"]] if speed.stage_ms else []),
    ]


def _speed_row(speed: Speed) -> list[str]:
    return [
        f"{speed.num_requests:,}",
        f"{speed.step_ms:.2f}",
        f"{speed.step_error:.0%}",
        f"{speed.work_ms:.2f}",
        f"{speed.factor:.2f}",
        f"{speed.ttft_ms:.1f}",
        f"{speed.output_tokens_per_second:,.0f}",
        f"{speed.error:.0%}",
    ]


def _split_row(split: Split) -> list[str]:
    sizes = str(split.tensor_parallel_size), str(split.pipeline_parallel_size)
    start = [*sizes, "yes" if split.enable_expert_parallel else "", str(split.replicas)]
    if split.speed is None:
        return [*start, "-", "-", "-", split.why_not or ""]
    return [
        *start,
        f"{split.num_requests:,}",
        f"{split.speed.step_ms:.2f}",
        f"{split.output_tokens_per_second:,.0f}",
        f"+-{split.speed.error:.0%}",
    ]
