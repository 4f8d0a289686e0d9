"""Weights of a model directory that has no weights, as its config describes them: for sizes, and for random values."""

import dataclasses
import pathlib

import jax

from jaxserve.layers.params import Params
from jaxserve.loading.huggingface import SourceWeight
from jaxserve.loading.json_files import read_config
from jaxserve.loading.quantization_files import expected_schemes
from jaxserve.loading.tied_head import is_head
from jaxserve.quantization.method import Expected
from jaxserve.quantization.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class ExpectedWeight(SourceWeight):
    """A weight whose tensors are not there; `expected` tells how they would be stored."""

    expected: Expected | None = None

    def source_schemes(self) -> list[Scheme | str | None]:
        """Return the scheme of each source, of those matrices that checkpoints store as codes."""
        names = self.spec.source
        is_turned = self.spec.is_transposed and self.spec.expert_size is None  # `huggingface` makes floats of its codes
        if self.expected is None or is_turned or not (self.spec.quantize or all(map(is_head, names))):
            return [None] * len(names)
        return [self.expected.scheme(name.removesuffix(".weight"), self.spec.row_size) for name in names]


def expected_weights(path: str | pathlib.Path, specs: Params) -> Params:
    """Return an ExpectedWeight for each of `specs`, as the config of a directory without weights describes them."""
    directory = pathlib.Path(path)
    expected = expected_schemes(directory, read_config(directory / "config.json"))
    return jax.tree.map(lambda spec: ExpectedWeight(spec, {}, expected), specs)
