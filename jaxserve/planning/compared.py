"""What a plan says of an engine that was measured, beside the measurement."""

from collections.abc import Callable, Iterator

from jaxserve.bench.latency import LatencyRun
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.gpus import Gpu
from jaxserve.planning.absent import can_compile
from jaxserve.planning.plan import SizedLoad, speed_of
from jaxserve.planning.sizes import declare, decode_program, sizes_of
from jaxserve.tables import aligned

HEADER = ["", "planned", "measured", "error", "stated"]


def compared(
    run: LatencyRun,
    config: EngineConfig,
    gpu: Gpu,
    *,
    is_compiled: bool,
    progress: Callable[[str], object] = str,
) -> str:
    """Return a table of sizes and times. `config` is that of the run, with a model that can be read here; `is_compiled`
    asks for programs as the engine compiled them, which decide how many KV blocks there are.

    Raises ConfigError if the run is of another device, and StartupError as plans do.
    """
    if gpu.kind not in run.device:
        raise ConfigError(f"the engine was measured on {run.device}, not on {gpu.kind}")
    is_compiled = is_compiled and can_compile()
    engine = declare(config, gpu, to_compile=is_compiled)
    programs = [decode_program(engine, engine.plan.builder.spec.max_num_seqs)] if is_compiled else ()
    sizes = sizes_of(engine, compiled=programs, progress=progress)
    info = engine.info(sizes.num_blocks)

    def rows() -> Iterator[list[str]]:
        yield _row("weights, bytes", info.total_weight_bytes, run.weight_bytes)
        yield _row("KV blocks", sizes.num_blocks, run.num_blocks)
        yield _row("KV cache, bytes", info.kv_cache_bytes, run.kv_cache_bytes)
        if run.bytes_in_use is not None:
            in_use = sizes.weight_bytes + sizes.kv_bytes + sizes.slot_bytes + sizes.state_bytes + sizes.peer_bytes
            yield _row("in use on a device, bytes", in_use, run.bytes_in_use)
        for batch in run.batches:
            load = SizedLoad(input_len=batch.input_len, output_len=batch.output_len)
            speed = speed_of(engine, info, load, num_requests=batch.num_requests)
            name = f"{batch.num_requests} x {batch.input_len}, {batch.output_len}"
            num_tokens = batch.num_requests * batch.input_len
            prefill = 1e3 * num_tokens / speed.prefill_tokens_per_second
            yield _row(f"{name}: prefill, ms", prefill, 1e3 * batch.prefill)
            if batch.per_token is not None:
                yield _row(f"{name}: a token, ms", speed.step_ms, 1e3 * batch.per_token, stated=speed.step_error)

    title = f"{run.shape or run.engine.model}, {run.engine.quantization or info.kv_dtype} on {run.device}"
    return f"{title}; sizes {'of compiled programs' if is_compiled else 'computed'}\n{aligned([HEADER, *rows()])}"


def _row(name: str, planned: float, measured: float, *, stated: float | None = None) -> list[str]:
    digits = 0 if isinstance(measured, int) else 2
    figures = f"{planned:,.{digits}f}", f"{measured:,.{digits}f}"
    error = f"{planned / measured - 1:+.2%}" if measured else ""  # layers with states alone have no KV cache
    return [name, *figures, error, "" if stated is None else f"+-{stated:.0%}"]
