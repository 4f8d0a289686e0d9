"""The progress bar of `LLM.generate`."""

import time

from jaxserve.engine.output import RequestGroup
from jaxserve.request import EngineOutput

_RATE_INTERVAL = 0.2  # seconds between two updates of the rates


class Progress:
    """A bar of finished prompts, with the input and output tokens per second."""

    def __init__(self, num_prompts: int, *, is_shown: bool):
        from tqdm import tqdm

        self._bar = tqdm(total=num_prompts, desc="generating", unit="prompt", dynamic_ncols=True, disable=not is_shown)
        self._is_shown = is_shown
        self._start = self._last = time.perf_counter()
        self._num_in = self._num_out = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._show_rates(time.perf_counter())
        self._bar.close()

    def update(self, group: RequestGroup, news: list[EngineOutput]) -> None:
        """Count what a prompt has taken."""
        if not self._is_shown:
            return
        self._num_out += sum(len(output.new_token_ids) for output in news)
        if group.is_finished:
            self._num_in += len(group.prompt_token_ids)
            self._bar.update()
        now = time.perf_counter()
        if now - self._last >= _RATE_INTERVAL:
            self._last = now
            self._show_rates(now)

    def _show_rates(self, now: float) -> None:
        seconds = max(now - self._start, 1e-9)
        self._bar.set_postfix_str(f"in {self._num_in / seconds:.0f} tok/s, out {self._num_out / seconds:.0f} tok/s")
