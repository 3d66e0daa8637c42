"""The sine and cosine tables of rotary position embeddings (Su et al., "RoFormer", arXiv 2104.09864)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

import torch
from attrs import field, frozen
from attrs.validators import in_

from tpplan.errors import ExecutionError
from tpplan.exec.rope.config import STYLES, Style, read_rope
from tpplan.exec.rope.scaling import Scaling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

#: Elements of a table that are computed together; no more than three times as many float32 are alive at once, 12 MiB.
_CHUNK: Final = 2**20


@frozen
class Rope:
    """How a model turns its queries and keys, as far as the tables go.

    At position p, pair i is turned by the angle p · f(i). The tables hold the sines and the cosines of these angles,
    times the scaling's attention factor, once for each element of a pair.

    Attributes:
        theta: the base of the frequencies.
        dim: the rotary dimension: how many leading elements of a head are turned. An odd one is rounded up.
        scaling: gives the frequencies f and the attention factor.
        style: which elements are a pair. ``neox``: i and i + width / 2, so that a row is f, then f again. ``gptj``: 2i
            and 2i + 1, so that each frequency of a row comes twice in a row.
    """

    theta: float
    dim: int
    scaling: Scaling
    style: Style = field(default="neox", validator=in_(STYLES))

    @property
    def width(self) -> int:
        """The columns of a table."""
        return self.dim + self.dim % 2

    @classmethod
    def from_config(cls, config: Mapping[str, object], layer_type: str | None = None) -> Self:
        """Read a model's config.json as transformers does, in its old form (``rope_scaling``) or the new one.

        Args:
            config: the object in the file.
            layer_type: of the layers that the tables are for, such as ``sliding_attention``. Only models whose layers
                differ in their RoPE need it; for others any will do.

        Raises:
            ModelError: the model has no RoPE, its kind is unknown, or a key is missing, of the wrong type or out of
                range.
        """
        return cls(*read_rope(config, layer_type))

    def tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return the sines and the cosines for positions 0 to ``positions - 1``.

        They equal those of transformers on a CPU to the bit, for a sequence of that length: with dynamic scaling and
        LongRoPE the same position differs between sequences of different length.

        Args:
            positions: rows of each table, in tokens.

        Returns:
            Two float32 tensors of shape [positions, width], on the CPU.

        Raises:
            ExecutionError: ``positions`` is below 0.
        """
        if positions < 0:
            raise ExecutionError(f"RoPE tables for {positions} positions", "ask for 0 or more")
        sin, cos = (torch.empty(positions, self.width, dtype=torch.float32, device="cpu") for _ in range(2))
        self.fill(sin, cos)
        return sin, cos

    def fill(self, sin: Tensor, cos: Tensor) -> None:
        """Write the tables for as many positions as ``sin`` and ``cos`` have rows, cast to their dtype.

        They are computed in float32 on the CPU, a part at a time, so that little memory is needed next to theirs.
        Copies are issued on the devices' current streams; all are done when the call returns.

        Args:
            sin: a floating-point tensor of shape [positions, width], on any device.
            cos: another, of the same shape.

        Raises:
            ExecutionError: the shapes or dtypes are others; nothing has been written then.
        """
        for name, out in (("sin", sin), ("cos", cos)):
            if out.dim() != 2 or out.shape[1] != self.width or not out.is_floating_point():  # noqa: PLR2004 - a matrix
                problem = f"{name} is {out.dtype} of shape {list(out.shape)}"
                raise ExecutionError(problem, f"RoPE tables here are floating-point of shape [positions, {self.width}]")
        if sin.shape != cos.shape:
            raise ExecutionError(f"sin has {sin.shape[0]} positions and cos {cos.shape[0]}", "pass two of equal shape")
        positions = sin.shape[0]
        frequencies = self.scaling.frequencies(self.theta, self.dim, positions)
        rows = max(1, _CHUNK // self.width)
        for start in range(0, positions, rows):
            part = slice(start, min(start + rows, positions))
            angles = torch.arange(part.start, part.stop, dtype=torch.int64, device="cpu")[:, None].float() * frequencies
            angles = angles.repeat(1, 2) if self.style == "neox" else angles.repeat_interleave(2, dim=1)
            sin[part].copy_(angles.sin().mul_(self.scaling.attention))
            cos[part].copy_(angles.cos_().mul_(self.scaling.attention))
