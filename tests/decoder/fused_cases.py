"""What stands for the kernels of few rows on the CPU: torch, for what the real ones take."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpplan.decoder.cache.store import KERNEL_KINDS, Store
from tpplan.decoder.fast.launches import skinny
from tpplan.decoder.fast.launches.dense import kind_of
from tpplan.decoder.fast.launches.experts import KINDS
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.fast.launches.norms import MOST_ROWS
from tpplan.decoder.layer import experts
from tpplan.decoder.math import rms_norm
from tpplan.decoder.model.gates import ACTIVATIONS, gated

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from tpplan.decoder.fast.launches.attention import NewTokens
    from tpplan.decoder.fast.launches.norms import Norm
    from tpplan.decoder.model.router import Router
    from tpplan.decoder.weights.quantised import Matrix
    from tpplan.decoder.weights.stacked import Projection, Stacked


class FakeChannel:
    """Adds up what all devices have.

    Attributes:
        parts: by device, what is added to, and a part.
    """

    def __init__(self) -> None:
        """Know of nothing."""
        self.parts: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, device: int, to: Tensor, x: Tensor, weight: Tensor) -> None:
        """Take a device's product."""
        self.parts[device] = to, x.float() @ weight.float().mT

    def run(self, launches: Sequence[Callable[[], None]]) -> None:
        """Add up; all devices take part."""
        assert not self.parts
        for launch in launches:
            launch()
        assert len(self.parts) == len(launches)
        parts = [part for _, (_, part) in sorted(self.parts.items())]
        total = sum(parts[1:], parts[0])
        for to, _ in self.parts.values():
            to.copy_(to.float() + total)
        self.parts.clear()


class _FakeProducts:
    """Multiplies few rows as torch does, and counts.

    Attributes:
        calls: of all, by method and whether there was a norm.
        names: under which it counts its methods.
    """

    calls: Counter[str]
    names = {"joint": "joint", "linear": "linear", "add": "add"}  # noqa: RUF012 (of all, as said)

    def __init__(self, place: torch.device, dtype: torch.dtype, *, joint: bool = False) -> None:
        """Take any device."""
        assert isinstance(place, torch.device)
        self._dtype, self._is_joint = dtype, joint

    def joint(self, to: Tensor, x: Tensor, weight: Tensor, channel: FakeChannel, device: int) -> None:
        """Multiply, and leave the rest to a channel."""
        assert self._is_joint
        self.calls[self.names["joint"]] += 1
        channel.take(device, to, x, weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Multiply."""
        self.calls[self.names["linear"]] += 1
        found = torch.nn.functional.linear(x, weight, bias)
        return found if out is None else out.copy_(found)

    def add(self, to: Tensor, x: Tensor, weight: Tensor) -> None:
        """Add a product."""
        self.calls[self.names["add"]] += 1
        to.addmm_(x, weight.mT)

    def _takes(self, x: Tensor, weight: Matrix, most: int) -> bool:
        """Tell whether it takes rows, so many at most."""
        return isinstance(weight, Tensor) and len(x) <= most and x.dtype == weight.dtype == self._dtype


class FakeGemv(_FakeProducts):
    """Takes few rows."""

    calls: Counter[str] = Counter()  # noqa: RUF012

    def takes_normed(self, x: Tensor, weight: Matrix, norm: Norm, *, gated: bool = False) -> bool:  # noqa: ARG002
        """Take few rows."""
        return self.takes(x, weight)

    def takes(self, x: Tensor, weight: Matrix, *, gated: bool = False) -> bool:
        """Take few rows, but gates, which are left to the other kernels."""
        return not gated and self._takes(x, weight, MOST_ROWS)

    def adds_up(self, x: Tensor, weight: Matrix) -> bool:
        """Take the same."""
        return self.takes(x, weight)

    def normed(self, x: Tensor, weight: Tensor, norm: Norm, bias: Tensor | None = None) -> Tensor:
        """Multiply rows behind a norm."""
        self.calls["linear of a norm"] += 1
        return torch.nn.functional.linear(rms_norm(x, norm.weight, norm.eps, norm.offset), weight, bias)

    def normed_gated(self, x: Tensor, weight: Tensor, gate: str, norm: Norm, bias: Tensor | None = None) -> Tensor:
        """Multiply halves."""
        self.calls["gated"] += 1
        rows = rms_norm(x, norm.weight, norm.eps, norm.offset)
        gates, ups = torch.nn.functional.linear(rows, weight, bias).chunk(2, dim=-1)
        return ACTIVATIONS[gate](gates).mul_(ups)


class FakeSkinny(_FakeProducts):
    """Takes more of them."""

    calls: Counter[str] = Counter()  # noqa: RUF012
    names = {"joint": "few rows, joint", "linear": "few rows", "add": "few rows, added"}  # noqa: RUF012

    def takes(self, x: Tensor, weight: Matrix, *, gated: bool = False) -> bool:  # noqa: ARG002
        """Take few rows."""
        return self._takes(x, weight, skinny.MOST_ROWS)

    def adds_up(self, x: Tensor, weight: Matrix) -> bool:
        """Take fewer."""
        return self._takes(x, weight, skinny.MOST_JOINT)

    def gated(self, x: Tensor, weight: Tensor, gate: str, bias: Tensor | None = None) -> Tensor:
        """Multiply halves."""
        self.calls["few rows, gated"] += 1
        gates, ups = torch.nn.functional.linear(x, weight, bias).chunk(2, dim=-1)
        return ACTIVATIONS[gate](gates).mul_(ups)


class FakeExperts:
    """Does what torch does with experts where that reads no more of them than a row and one of its own at a time.

    Attributes:
        calls: of all, by method.
        prefix: with which it counts its methods.
    """

    calls: Counter[str] = Counter()  # noqa: RUF012
    prefix = ""

    def __init__(self, place: torch.device, dtype: torch.dtype, activation: str, codes: Collection[str] = ()) -> None:
        """Take any device."""
        assert isinstance(place, torch.device)
        self._codes = {kind for kind in KINDS if kind in codes}
        self._dtype, self._act = dtype, activation

    def choose(self, logits: Tensor, count: int, router: Router, correction: Tensor | None = None) -> Tensor | None:
        """Choose by logits of any dtype that kernels take."""
        if logits.dtype not in {self._dtype, torch.float32}:
            return None
        self.calls["choose"] += 1
        return torch.cat(experts.choose(logits, count, router, correction), dim=1)

    def up(self, x: Tensor, gate: Projection, up: Projection, choice: Tensor) -> Tensor | None:
        """Multiply by matrices of what is chosen."""
        assert x.dtype == self._dtype
        if not self._takes(choice, gate, up):
            return None
        self.calls[f"{self.prefix}up"] += 1
        numbers = choice.chunk(2, dim=1)[1].long()
        return experts.up(x, gate, up, numbers, partial(gated, self._act), fixed=not self.prefix)

    def down(self, h: Tensor, down: Projection, choice: Tensor, to: Tensor | None = None) -> Tensor | None:
        """Multiply by the last ones, and add up."""
        assert h.dtype == self._dtype
        if not self._takes(choice, down):
            return None
        self.calls[f"{self.prefix}down" if to is None or self.prefix else "down and add"] += 1
        weights, numbers = choice.chunk(2, dim=1)
        found = experts.down(h, down, numbers.long(), weights, fixed=not self.prefix)
        return found if to is None else to.add_(found)

    def _takes(self, choice: Tensor, *projections: Projection) -> bool:
        """Tell whether it multiplies what is chosen by such matrices."""
        return choice.numel() <= 2 * len(projections[0]) and all(self._is_known(each.matrix) for each in projections)

    def _is_known(self, matrix: Tensor | Stacked) -> bool:
        """Tell whether there would be a kernel for a matrix: of 16 bits, or if that was asked for of codes."""
        if isinstance(matrix, torch.Tensor):
            assert matrix.dtype == self._dtype
            return True
        return kind_of(matrix.matrix) in self._codes


class FakeGrouped(FakeExperts):
    """Does the same for more pairs than there are experts, if it is told to.

    Attributes:
        is_on: whether it is.
    """

    is_on = False
    prefix = "grouped, "

    def takes_up(self, rows: int, chosen: int, gates: Projection, ups: Projection) -> bool:
        """Tell whether it would."""
        return self.takes_down(rows, chosen, gates) and self._is_known(ups.matrix)

    def takes_down(self, rows: int, chosen: int, downs: Projection) -> bool:
        """Tell whether it would."""
        return self.is_on and self._is_known(downs.matrix) and rows * chosen > len(downs)

    def _takes(self, choice: Tensor, *projections: Projection) -> bool:
        """Tell whether it multiplies what is chosen by such matrices."""
        are_many = choice.numel() > 2 * len(projections[0])
        return self.is_on and are_many and all(self._is_known(each.matrix) for each in projections)


class FakeAttention:
    """Attends row by row, and looks no further than a position."""

    calls: Counter[int] = Counter()  # noqa: RUF012

    def __init__(
        self, place: torch.device, dtype: torch.dtype, head_dim: int, cap: float | None = None, kind: str = "fp16"
    ) -> None:
        """Take any device."""
        assert isinstance(place, torch.device)
        self._dtype, self._head_dim, self._cap, self._kind = dtype, head_dim, cap, kind
        self.appends = kind == "fp16" and head_dim % 16 == 0

    @staticmethod
    def takes(place: torch.device, dtype: torch.dtype, head_dim: int, kind: str = "fp16") -> bool:  # noqa: ARG004
        """Take heads of vectors, of 16 bits."""
        return dtype.itemsize == 2 and head_dim % 8 == 0 and kind in KERNEL_KINDS

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        scales: Sequence[Tensor] = (),
        *,
        scale: float,
        sinks: Tensor | None = None,
        new: NewTokens | None = None,
    ) -> Tensor:
        """Return what they find, with what is new to the cache."""
        assert q.dtype == self._dtype
        if new:
            assert self._kind == "fp16"
            q = self._append(q, k, v, positions, new)
        if sinks is not None:
            assert sinks.dtype == self._dtype
            assert sinks.shape == q.shape[1:2]
            assert sinks.is_contiguous()
        assert k.dtype == {"q8": torch.int8, "fp8": torch.uint8}.get(self._kind, self._dtype)
        assert len(scales) == (2 if self._kind == "q8" else 0)
        k, v = (self._read(*each) for each in zip((k, v), *([scales] if scales else []), strict=True))
        assert positions.dtype is torch.int64
        assert positions.is_contiguous()
        self.calls[self._head_dim] += 1
        rows, (_, heads, length, _) = [], k.shape
        for row, position in enumerate(positions.tolist()):
            seen = min(position + 1, length)
            keys, values = (x[row, :, :seen].float() for x in (k, v))
            queries = torch.unflatten(q[row].float(), 0, (heads, -1))
            scores = queries @ keys.mT * scale
            scores = scores if self._cap is None else torch.tanh(scores / self._cap) * self._cap
            if sinks is not None:
                scores = torch.cat((scores, sinks.float().view(*scores.shape[:2], 1)), dim=-1)
            rows.append((scores.softmax(-1)[..., :seen] @ values).flatten())
        return torch.stack(rows).to(self._dtype)

    def _append(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, new: NewTokens) -> Tensor:
        """Write tokens to a cache as the kernel that turns them does, and return their queries."""
        from tests.decoder.pointwise_cases import FakeLauncher  # noqa: PLC0415 (which has these for its fixture)

        for each in (new.keys, new.values):
            assert each.stride() == q.stride()
            assert each.stride(1) == q.shape[2]
        x, (rows, queries, width), keys = torch.cat((q, new.keys, new.values), dim=1), q.shape, k.shape[1]
        turn = FakeLauncher(f"turn_{DTYPES[self._dtype]}", x.device)
        numbers = torch.arange(rows), positions % k.shape[2]
        turn.run(
            rows, x.shape[1] * width // 16, x.data_ptr(), 2 * x.stride(0), queries, keys, x.shape[1], 2 * width,
            *new.turn, k.data_ptr(), v.data_ptr(), 0, 0, 2 * k.stride(0), 2 * k.stride(1),
            *(word for each in numbers for word in (each.data_ptr(), 8)),
        )  # fmt: skip
        return x[:, :queries]

    def _read(self, *parts: Tensor) -> Tensor:
        store = Store(self._kind, (1, 1, 1, self._head_dim), self._dtype, parts[0].device)
        out = torch.empty(parts[0].shape, dtype=self._dtype)
        store._coded[0][0].decode(parts, out)
        return out
