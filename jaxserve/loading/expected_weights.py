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

PROJECTION = ("_proj.weight", ".kv_a_proj_with_mqa.weight")
"""Ends of the names of matrices that quantizers round, whether `--quantization` does or not; routers and small gates
have other names.
"""


@dataclasses.dataclass(frozen=True)
class ExpectedWeight(SourceWeight):
    """A weight whose tensors are not there; `expected` tells how they would be stored."""

    expected: Expected | None = None

    def source_schemes(self) -> list[Scheme | str | None]:
        """Return the scheme of each source, of those matrices that checkpoints store as codes."""
        names = self.spec.source
        is_turned = self.spec.is_transposed and self.spec.expert_size is None  # `huggingface` makes floats of its codes
        is_matrix = self.spec.quantize or all(is_head(name) or name.endswith(PROJECTION) for name in names)
        if self.expected is None or is_turned or not is_matrix:
            return [None] * len(names)
        return [self.expected.scheme(name.removesuffix(".weight"), self.spec.row_size) for name in names]


def expected_weights(path: str | pathlib.Path, specs: Params) -> Params:
    """Return an ExpectedWeight for each of `specs`, as the config of a directory without weights describes them."""
    directory = pathlib.Path(path)
    expected = expected_schemes(directory, read_config(directory / "config.json"))
    return jax.tree.map(lambda spec: ExpectedWeight(spec, {}, expected), specs)
