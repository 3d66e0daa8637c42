"""What devices did in a stretch of time, as torch's profiler has seen it, and how much of the time each kind took."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

OWN: Final = "tpplan's data movement"
REST: Final = "norms and pointwise"
#: Names of kernels and of operators by kind, the first that fits: attention's kernels are made of CUTLASS's too.
KINDS: Final = {
    OWN: re.compile(r"(frame|landing|packet|slot|straight)_(move|sum_b?f\d+)|sum_b?f\d+|tpplan\..*"),
    "attention": re.compile(r".*(flash|fmha|cudnn|sdpa|attention).*"),
    "matrices": re.compile(
        r".*(gemm|gemv|skinny|cutlass|cublas|nvjet|splitk|aten\.(addmm|baddbmm|bmm|linear|mm)_?$).*"
        r"|(coded_product|dense|experts_product|packed|wide)_.*"
    ),
    "copies and fills": re.compile(
        r".*(copy|fill|memcpy|memset|catarray|aten\.(cat|clone|stack|(new_)?zeros|zero_)).*"
    ),
    REST: re.compile(r".*"),
}
#: Kernels of the list, and characters of their names.
_LISTED, _NAME = 10, 90
#: What a trace calls work of a device.
_CATEGORIES: Final = ("kernel", "gpu_memcpy", "gpu_memset")


@frozen
class Work:
    """A kernel, a copy or a fill.

    Attributes:
        name: of it.
        device: that did it.
        start: in µs, from any moment that is the same for all.
        end: in µs; the start if it was not timed.
    """

    name: str
    device: int
    start: float = 0.0
    end: float = 0.0

    @property
    def kind(self) -> str:
        """Of :data:`KINDS`."""
        return next(kind for kind, names in KINDS.items() if names.fullmatch(self.name.lower()))


def works_of(trace: Mapping[str, Any]) -> list[Work]:
    """Return what devices did by a trace of torch's profiler, the document that Chrome takes."""
    return [
        Work(event["name"], event["args"]["device"], event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("cat") in _CATEGORIES
    ]


def busy(works: Iterable[Work]) -> float:
    """Return the µs in which any of some works was done; times at which several were count once."""
    total, until = 0.0, float("-inf")
    for work in sorted(works, key=lambda work: work.start):
        total += max(0.0, work.end - max(work.start, until))
        until = max(until, work.end)
    return total


def tables(works: Sequence[Work], what: str, times: int, layers: int) -> Iterator[str]:
    """Yield the lines of two tables for each device: of kinds, and of the kernels that took most time.

    Shares are of the time from the first work of any device to the last. What overlaps counts once in a kind, and once
    in all of them. Where nothing was timed there are only numbers, and the kernels that came most often.

    Args:
        works: of all devices.
        what: was done.
        times: that it was done.
        layers: of the model.
    """
    if not works:
        yield f"{what}: the profiler has seen no work of any device"
        return
    whole = max(work.end for work in works) - min(work.start for work in works)
    for device in sorted({work.device for work in works}):
        own = [work for work in works if work.device == device]
        yield f"\nDevice {device}, {what}, of {times}:\n"
        yield "| kind | kernels | by layers | µs | share |\n|---|---|---|---|---|"
        for kind in KINDS:
            some = [work for work in own if work.kind == kind]
            yield _row(kind, len(some) / times, layers, _time(busy(some), times), _share(busy(some), whole))
        yield _row("all", len(own) / times, layers, _time(busy(own), times), _share(busy(own), whole))
        gaps = whole - busy(own)
        yield f"| gaps, in which the device has nothing | | | {_time(gaps, times)} | {_share(gaps, whole)} |"
        yield f"| from the first to the last of any device | | | {_time(whole, times)} | |\n"
        yield from _longest(own, times)


def _longest(works: Sequence[Work], times: int) -> Iterator[str]:
    """Yield a table of the kernels with most time."""
    counts, micros = Counter(work.name for work in works), defaultdict[str, float](float)
    for work in works:
        micros[work.name] += work.end - work.start
    yield "| kernel | times | µs each | µs |\n|---|---|---|---|"
    for name in sorted(counts, key=lambda name: (-micros[name], -counts[name]))[:_LISTED]:
        short = name.replace("|", "/")
        short = short if len(short) <= _NAME else f"{short[:_NAME]}…"
        each, total = _time(micros[name], counts[name]), _time(micros[name], times)
        yield f"| `{short}` | {counts[name] / times:,.1f} | {each} | {total} |"


def _row(kind: str, count: float, layers: int, time: str, share: str) -> str:
    return f"| {kind} | {count:,.1f} | {count / layers:.2f} | {time} | {share} |"


def _time(micros: float, times: int) -> str:
    return f"{micros / times:,.1f}" if micros else "–"


def _share(micros: float, whole: float) -> str:
    return f"{micros / whole:.1%}" if whole else "–"
