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

#: Table elements computed at a time; temporaries take at most three float32 for each, 12 MiB.
_CHUNK: Final = 2**20


@frozen
class Rope:
    """The RoPE of a model: the parameters of its sine and cosine tables.

    At position p, pair i is rotated by the angle p · f(i). The tables hold the sines and the cosines of these angles,
    times the scaling's attention factor, once for each element of a pair.

    Attributes:
        theta: the base of the frequencies.
        dim: the rotary dimension: the number of leading elements of a head that are rotated. Odd values are rounded up.
        scaling: method that gives the frequencies f and the attention factor.
        style: which elements form pair i. ``neox``: i and i + width / 2, so a row holds all frequencies, then all
            again. ``gptj``: 2i and 2i + 1, so a row holds each frequency twice in succession.
        beside: RoPE of other layers, whose values a row holds in its second half, in place of the repetition; None if
            there is none. Both are of style ``neox`` and of the same dimension.
    """

    theta: float
    dim: int
    scaling: Scaling
    style: Style = field(default="neox", validator=in_(STYLES))
    beside: Rope | None = field(default=None)

    @beside.validator
    def _check_beside(self, _attribute: object, other: Rope | None) -> None:
        if other and ((self.dim, self.style) != (other.dim, other.style) or self.style != "neox" or other.beside):
            message = f"RoPE of {other.dim} rotary dimensions, style {other.style}, beside {self.dim}, {self.style}"
            raise ExecutionError(message, "only two of style neox and of the same dimension share tables")

    @property
    def width(self) -> int:
        """Number of columns of a table."""
        return self.dim + self.dim % 2

    @classmethod
    def from_config(cls, config: Mapping[str, object], layer_type: str | None = None) -> Self:
        """Read a model's config.json as transformers does, in its old form (``rope_scaling``) or the new one.

        Args:
            config: the object in the file.
            layer_type: type of the layers that use the tables, such as ``sliding_attention``. Needed only for models
                whose layers differ in their RoPE; ignored for others.

        Raises:
            ModelError: the model has no RoPE, its kind is unknown, or a key is missing, of the wrong type or out of
                range.
        """
        return cls(*read_rope(config, layer_type))

    def tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return the sines and the cosines for positions 0 to ``positions - 1``.

        They are bit-identical to those of transformers on a CPU for a sequence of that length. With dynamic scaling and
        LongRoPE, the values at a position depend on the length of the sequence.

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

        They are computed in float32 on the CPU, a chunk at a time, to limit temporary memory.
        Copies are issued on the devices' current streams; all are done when the call returns.

        Args:
            sin: floating-point tensor of shape [positions, width], on any device.
            cos: floating-point tensor of the same shape.

        Raises:
            ExecutionError: the shapes or dtypes are wrong; nothing is written.
        """
        for name, out in (("sin", sin), ("cos", cos)):
            if out.dim() != 2 or out.shape[1] != self.width or not out.is_floating_point():  # noqa: PLR2004 - a matrix
                problem = f"{name} is {out.dtype} of shape {list(out.shape)}"
                raise ExecutionError(problem, f"RoPE tables here are floating-point of shape [positions, {self.width}]")
        if sin.shape != cos.shape:
            raise ExecutionError(f"sin has {sin.shape[0]} positions and cos {cos.shape[0]}", "pass two of equal shape")
        positions = sin.shape[0]
        frequencies, factors = self._columns(positions)
        rows = max(1, _CHUNK // self.width)
        for start in range(0, positions, rows):
            part = slice(start, min(start + rows, positions))
            angles = torch.arange(part.start, part.stop, dtype=torch.int64, device="cpu")[:, None].float() * frequencies
            sin[part].copy_(angles.sin().mul_(factors))
            cos[part].copy_(angles.cos_().mul_(factors))

    def _columns(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return the frequency and the attention factor of every column, in float32 on the CPU."""
        found = []
        for rope in (self, self.beside or self):
            frequencies = rope.scaling.frequencies(rope.theta, rope.dim, positions)
            found.append(torch.stack((frequencies, torch.full_like(frequencies, rope.scaling.attention))))
        frequencies, factors = torch.cat(found, dim=1) if self.style == "neox" else torch.stack(found, dim=2).flatten(1)
        return frequencies, factors
