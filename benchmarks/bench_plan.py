"""Measure planning and loading within one process on this machine, against their aims.

The last line is the slowest of many plans on random cards of the catalogue: models, strategies, layouts and contexts
vary, and many of them do not fit. It is CPU time, and each is planned once.

Peak memory is what Python allocates during one run that is not timed, because tracing slows it.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import tpplan
from benchmarks.common.rows import GPUS, MODEL, PLANS, TOKENS, Row, measure, rounds_wanted
from tpplan.core.plan import CACHE_KINDS, KV_MODES, LAYOUTS, STRATEGIES
from tpplan.core.sizes import format_bytes
from tpplan.hardware import catalogue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpplan.core.model import ModelSpec

#: Random tasks.
MIXES = 2000
CROWDS = (16, 32, 64, 128, 256, 512, 1024)


def row(name: str, work: Callable[[], object], aim: float = 0) -> Row:
    """Return the line for ``work``, its peak of memory measured."""
    work()  # imports are not counted
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    def run() -> int:
        work()
        return peak

    return Row(name, run, aim)


def planning(model: ModelSpec, spec: str, **asked: Any) -> Callable[[], object]:
    """Return a function that plans ``model`` on the devices of ``spec``; reading both is not part of it."""
    devices = tpplan.parse_devices(spec)
    options: dict[str, Any] = {"cache": tpplan.Cache("q8", tokens=TOKENS), "layout": "reduce"} | asked

    def work() -> None:
        with suppress(tpplan.InfeasibleError):
            tpplan.plan(model, devices, **options)

    return work


def random_mix(models: Sequence[ModelSpec], rng: random.Random) -> tuple[str, Callable[[], object]]:
    """Return a random task in words, and a function that plans it."""
    model, kinds = rng.choice(models), rng.sample(catalogue.gpus(), rng.randint(1, 4))
    spec = ",".join(f"{rng.randint(1, 4)}x{kind.name}" for kind in kinds)
    tokens = min(model.max_context, rng.choice((2048, 16384, 131072)))
    asked: dict[str, Any] = {
        "strategy": rng.choice(STRATEGIES),
        "layout": rng.choice(LAYOUTS),
        "cache": tpplan.Cache(rng.choice(tuple(CACHE_KINDS)), tokens),
        "kv": rng.choice(KV_MODES),
    }
    return f"{model.name} on {spec}, {asked['strategy']}, {asked['layout']}", planning(model, spec, **asked)


def slowest(count: int) -> tuple[float, str]:
    """Return the CPU seconds of the slowest of ``count`` random tasks, and the task in words."""
    models, rng = [tpplan.read_model(path) for path in sorted(MODEL.parent.parent.iterdir())], random.Random(1)  # noqa: S311
    times = []
    for _ in range(count):
        words, work = random_mix(models, rng)
        start = time.process_time()
        work()
        times.append((time.process_time() - start, words))
    return max(times)


def uneven(count: int) -> str:
    """Return the specification of ``count`` devices of four sizes."""
    return ",".join(f"{count // 4}x{size}GiB" for size in (48, 24, 16, 12))


def main() -> None:
    """Measure plans for more and more devices, one that does not exist, and the largest example file."""
    rounds = rounds_wanted(__doc__)
    model = tpplan.read_model(MODEL)
    largest = max(PLANS.rglob("*.json"), key=lambda path: path.stat().st_size)
    crowds = {count: row(f"plan(), {count} devices", planning(model, uneven(count))) for count in CROWDS}
    crowds[1024].aim = 2
    deepseek = tpplan.read_model(MODEL.parent.parent / "DeepSeek-V3")
    cards = "2xA6000,2xRTX4090,2xRTX4060Ti16GB,2xRTX3060"
    mixed = "RTX5090,A6000,RTX4090,RTX3090,RTX4060Ti16GB,RTX3060"
    small = ",".join(f"128x{size}MiB" for size in (800, 700, 640, 600))
    rows = [
        row("read_model(), 70B", lambda: tpplan.read_model(MODEL)),
        row("plan(), 8 devices", planning(model, GPUS), 0.030),
        row("plan(), 8 devices, does not fit", planning(model, "5x19GiB,3x15GiB")),
        row("plan(), 8 uneven cards, latency", planning(model, cards, strategy="latency"), 1),
        row("plan(), 6 uneven cards, latency, gather", planning(model, mixed, strategy="latency", layout="gather"), 1),
        row("plan(), DeepSeek-V3, 8 cards, does not fit", planning(deepseek, "4xH100,4xA100-SXM4-80GB"), 1),
        row("plan(), 512 devices, exllamav2, does not fit", planning(model, small, strategy="exllamav2"), 2),
        *crowds.values(),
        row(f"load(), {largest.name}, {format_bytes(largest.stat().st_size)}", lambda: tpplan.load(largest), 0.005),
    ]
    measure(rows, rounds)
    seconds, words = slowest(MIXES)
    print(f"\nthe slowest of {MIXES} random mixes took {seconds:.2f} s of CPU, aim 1 s: {words}")
    print(f"1024 devices take {crowds[1024].median / crowds[256].median:.1f} times as long as 256")


if __name__ == "__main__":
    main()
