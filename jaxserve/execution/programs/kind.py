"""Kind: what every kind of program defines. The kinds are in `passes` and `kinds`.

An instance is plain data that identifies a program among those of one model: it is sent to the processes that lower
programs, and is part of the keys of what is kept on disk.
"""

import abc
import dataclasses
import re
from collections.abc import Callable
from typing import Any, ClassVar, override

import jax
import msgspec
import numpy as np

from jaxserve.execution.batch import Bucket
from jaxserve.execution.programs.model import State, StepModel
from jaxserve.execution.slots import pack_admissions
from jaxserve.execution.step import DrawingRows, Drawn
from jaxserve.sampling.logprobs import Logprobs

LEAF: Any = 0
"""Takes the place of an array where only the structure of a tree matters."""

ROWS = DrawingRows(slots=LEAF, draws=LEAF, num_output_tokens=LEAF, features=LEAF)
ROWS_WITH_DRAFTS = dataclasses.replace(ROWS, num_valid=LEAF, drafts=LEAF)
LOGPROBS = Logprobs(*[LEAF] * len(Logprobs._fields))

_LEFT_TO_CUBLAS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}


class _AbstractStruct(msgspec.StructMeta, abc.ABCMeta):
    """The metaclass of structs with abstract methods."""


class Kind(msgspec.Struct, frozen=True, tag=True, metaclass=_AbstractStruct):
    """What every kind of program defines.

    Attributes:
        takes: the parts of the device's state that a program takes, in this order, before its own arguments.
        gives: the parts that the program replaces, and returns before its other results; they are donated to it.
    """

    takes: ClassVar[tuple[State, ...]]
    gives: ClassVar[tuple[State, ...]]

    @abc.abstractmethod
    def function(self, model: StepModel) -> Callable[..., Any]:
        """Return the function to trace: it maps the state and the program's own arguments to a tuple of state and
        results.
        """

    def part(self, model: StepModel, name: State, whole: Any) -> Any:  # noqa: ARG002
        """Return the part of a state that the program takes."""
        return whole

    def put(self, name: State, whole: Any, part: Any) -> Any:  # noqa: ARG002
        """Return the state with what the program has made of its part."""
        return part

    @abc.abstractmethod
    def arguments(self, model: StepModel) -> tuple[Any, ...]:
        """Return the shapes of the program's own arguments."""

    @abc.abstractmethod
    def made(self, model: StepModel) -> Any:
        """Return a tree with the structure of the results besides the state."""

    def nothing(self, model: StepModel) -> tuple[Any, ...]:
        """Return values of the program's own arguments with which it changes nothing: no row samples or has any
        tokens.
        """
        return tuple(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.arguments(model)))

    def compiler_options(self, model: StepModel) -> dict[str, Any]:
        """Return XLA's options. Few steps run a program with a matrix product that has no layers."""
        return _LEFT_TO_CUBLAS if model.traits.tries_out_matmuls else {}

    def is_tuned(self, model: StepModel) -> bool:
        """Return true if XLA tries out the matrix products of the program, if it has any, on the device while it
        compiles the program.
        """
        return model.traits.tries_out_matmuls and not self.compiler_options(model)

    @property
    def title(self) -> str:
        """Name of programs of the kind, such as "plain decode"."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(self).__name__).lower()

    @property
    def stage(self) -> int:
        """Index of the stage that runs the program; -1: the last one, which draws."""
        return -1

    @property
    def size(self) -> int:
        """Number of tokens or rows that the program is for."""
        return 0


class OfBucket(Kind, frozen=True):
    """A program for the steps of one bucket."""

    bucket: Bucket

    @property
    @override
    def size(self) -> int:
        return self.bucket.num_tokens


def no_results(self: Kind, model: StepModel) -> None:  # noqa: ARG001
    """Return None, as `Kind.made` of programs that change the state and make nothing else."""
    return


def drawn(*, has_logprobs: bool) -> Drawn:
    """Return the structure of what a program that draws returns."""
    return Drawn(token_ids=LEAF, logprobs=LOGPROBS if has_logprobs else None)


def no_admissions(model: StepModel) -> np.ndarray:
    """Return what admits no request."""
    return pack_admissions([], **model.table_sizes)
