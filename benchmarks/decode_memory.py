"""The memory that a model takes of each GPU as it is loaded and run, bucket by bucket, against the plan's ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.decode_rows import Part
    from tpplan.plan import SplitPlan

MIB: Final = 2**20


class Buckets:
    """What torch's allocator has handed out since the last look, by bucket. Virtual devices have no allocator.

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
        """Tell the rows of every device: each bucket and torch's peak against the ledger, and what the driver says."""
        for i, place in self._places.items():
            ledger, found = self._plan.memory[i], self._found[i]
            planned = {
                "weights": ledger.weights_bytes,
                "cache": ledger.cache_bytes,
                "workspace": ledger.workspace_bytes,
            }
            for bucket, size in planned.items():
                _row(part, f"device {i}, {bucket}", found[bucket], size)
            peak, kept = torch.cuda.max_memory_allocated(place), torch.cuda.memory_reserved(place)
            _row(part, f"device {i}, torch's peak", peak, sum(planned.values()), "the limit is the three together")
            free, total = torch.cuda.mem_get_info(place)
            driver = total - free
            _row(part, f"device {i}, the driver's context and libraries", driver - kept, ledger.overhead_bytes)
            _row(part, f"device {i}, all that the driver says is used", driver, ledger.used_bytes)


def requested(place: torch.device) -> int:
    """Return the bytes that tensors on a CUDA device asked for."""
    count: int = torch.cuda.memory_stats(place).get("requested_bytes.all.current", 0)
    return count


def _row(part: Part, what: str, found: int, planned: int, note: str = "") -> None:
    part.row(what, found / MIB, "MiB", limit=planned / MIB, note=note)
