"""The memory that a model takes of each GPU as it is loaded and run, bucket by bucket, against the plan's ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

import torch
from attrs import frozen

from tpplan.core.workspace import areas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.decode_rows import Part
    from tpplan.core.plan import SplitPlan

MIB: Final = 2**20


class Buckets:
    """What tensors have asked torch's allocator for since the last look, by bucket. Virtual devices have no allocator.

    The GPUs have to be this process's own, for what the driver says is of all processes together.
    """

    def __init__(self, plan: SplitPlan, places: Sequence[torch.device]) -> None:
        """Look at what is there before."""
        self._plan = plan
        self._places = {i: place for i, place in enumerate(places) if place.type == "cuda"}
        self._before = {i: requested(place) for i, place in self._places.items()}
        self._found: dict[int, dict[str, int]] = {i: {} for i in self._places}

    def look(self, bucket: str) -> None:
        """Note that what has come since the last look is of a bucket."""
        for i, place in self._places.items():
            now = requested(place)
            self._found[i][bucket] = now - self._before[i]
            self._before[i] = now

    def start(self) -> None:
        """Forget the peak so far."""
        for place in self._places.values():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(place)

    def tell(self, part: Part) -> None:
        """Tell each device's rows: the ledger's buckets, and what of the ledger's overhead is where.

        What the libraries have in torch's memory is given back to be known: captured graphs cannot run after that.
        """
        looks = {i: _Look.at(place) for i, place in self._places.items()}
        if looks:
            torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 (there is no other way)
        divided = areas(self._plan.splits, self._plan.model.dtype, self._plan.request)
        for i, place in self._places.items():
            ledger, found, look = self._plan.memory[i], self._found[i], looks[i]
            libraries = look.now - requested(place)
            held, scratch = sum(found.values()), divided[i].scratch_bytes
            activations = look.peak - libraries - held
            planned = {
                "weights": ledger.weights_bytes,
                "cache": ledger.cache_bytes,
                "workspace": ledger.workspace_bytes - scratch,
            }
            for bucket, size in planned.items():
                note = "without the scratch" if bucket == "workspace" else ""
                _row(part, f"device {i}, {bucket}", found[bucket], size, note)
            note = f"at the peak; {_mib(look.now - libraries - held)} of them stay"
            _row(part, f"device {i}, activations, for which the plan has scratch", activations, scratch, note)
            note = (
                f"driver's context and libraries {_mib(look.taken - look.reserved)}, libraries in torch's memory "
                f"{_mib(libraries)}, what torch keeps beyond the peak {_mib(look.reserved - look.peak)}"
            )
            _row(part, f"device {i}, overhead", look.taken - held - activations, ledger.overhead_bytes, note)
            _row(part, f"device {i}, all that the driver says is used", look.taken, ledger.used_bytes)


@frozen
class _Look:
    """What is in use on a CUDA device, in bytes.

    Attributes:
        now: what tensors and libraries have asked torch for.
        peak: the most of that.
        reserved: what torch has of the driver.
        taken: what all have of the driver.
    """

    now: int
    peak: int
    reserved: int
    taken: int

    @classmethod
    def at(cls, place: torch.device) -> Self:
        """Look."""
        free, total = torch.cuda.mem_get_info(place)
        return cls(requested(place), requested(place, "peak"), torch.cuda.memory_reserved(place), total - free)


def requested(place: torch.device, when: str = "current") -> int:
    """Return the bytes that a CUDA device's torch allocator is asked for: now, or the most with ``peak``."""
    count: int = torch.cuda.memory_stats(place).get(f"requested_bytes.all.{when}", 0)
    return count


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"


def _row(part: Part, what: str, found: int, planned: int, note: str = "") -> None:
    part.row(what, found / MIB, "MiB", limit=planned / MIB, note=note)
