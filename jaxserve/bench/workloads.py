"""The workloads of benchmarks: seeded request mixes."""

import math
import random

import msgspec

from jaxserve.errors import ConfigError


class Job(msgspec.Struct, frozen=True):
    """One request of a workload: a prompt of token ids, and the exact number of tokens to generate."""

    prompt_token_ids: list[int]
    output_len: int
    temperature: float = 0.0


class BatchShape(msgspec.Struct, frozen=True):
    """The shape of a batch of equal requests that are submitted together."""

    batch_size: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.batch_size} x {self.input_len} in, {self.output_len} out"

    @classmethod
    def parse(cls, text: str) -> "BatchShape":
        """Parse B:IN:OUT. Raises ConfigError."""
        return cls(*_three_sizes(text, of="--batches", form="B:IN:OUT"))

    @classmethod
    def parse_setting(cls, text: str) -> "BatchShape":
        """Parse IN:OUT:N, with N requests. Raises ConfigError."""
        input_len, output_len, count = _three_sizes(text, of="--settings", form="IN:OUT:N")
        return cls(count, input_len, output_len)

    def jobs(self, *, seed: int, vocab_size: int) -> list[Job]:
        """Make the jobs of one batch, with random prompt tokens."""
        rng = random.Random(seed)
        return [
            Job([rng.randrange(vocab_size) for _ in range(self.input_len)], self.output_len)
            for _ in range(self.batch_size)
        ]


def _three_sizes(text: str, *, of: str, form: str) -> tuple[int, int, int]:
    match text.split(":"):
        case [first, second, third] if all(size.isdecimal() and int(size) > 0 for size in (first, second, third)):
            return int(first), int(second), int(third)
    raise ConfigError(f"{of} takes {form}, three numbers from 1 on, got {text!r}")


def mixed_jobs(count: int, *, mean_input: int, mean_output: int, seed: int, vocab_size: int) -> list[Job]:
    """Make `count` jobs whose prompt and output lengths are log-normal with these means, so that a few are much longer.

    Lengths are between 1 and four times the mean.
    """
    rng = random.Random(seed)

    def length(mean: int) -> int:
        sigma = 0.8
        drawn = rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)  # makes the mean of the distribution `mean`
        return round(min(max(drawn, 1), 4 * mean))

    return [
        Job([rng.randrange(vocab_size) for _ in range(length(mean_input))], length(mean_output)) for _ in range(count)
    ]
