"""Kernels of callers that add up what several GPUs have computed: right to the step, equal on all, in any order."""

from __future__ import annotations

import threading
from functools import partial
from itertools import chain
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch

from tests.exec.cuda.cuda_cases import GPUS, plan_for
from tests.packed_cases import dense_of, matrix_of
from tpplan import exec as tpx
from tpplan.decoder.fast.launches import gemv, norms, packed, skinny
from tpplan.decoder.fast.launches.gemv import Gemv
from tpplan.decoder.fast.launches.packed import STEPS, QuantisedSkinnyGemm
from tpplan.decoder.fast.launches.skinny import MOST_JOINT, SkinnyGemm
from tpplan.errors import ExecutionError
from tpplan.exec.toolchain import kernel_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.decoder.weights.quantised import Matrix

pytestmark = pytest.mark.multi_gpu
#: Columns of the residual stream, and of each device's part of a matrix.
_SIZE, _WIDTHS = 4096, (1024, 3584, 8, 520)
#: Rows, and columns of a product; and what matrices are made of, if of codes.
CASES = [
    *((rows, size, "") for rows, size in [
        (1, _SIZE), (2, _SIZE), (1, 5), (2, 1001), (2, 4), (3, _SIZE), (8, 1001), (5, 5), (8, _SIZE),
    ]),
    *((rows, size, "4") for rows, size in [(1, _SIZE), (2, 1001), (3, 5), (8, _SIZE)]),
    *((rows, size, "e4m3") for rows, size in [(1, _SIZE), (8, 1001)]),
    (4, _SIZE, "8"),
]  # fmt: skip


class Products:
    """Matrices whose columns several GPUs have, rows for them, and streams that their products are added to."""

    def __init__(self, context: tpx.TPContext, cases: Sequence[tuple[int, int, str]], seed: int = 0) -> None:
        """Make random ones.

        Args:
            context: on the first GPUs.
            cases: rows of each, columns of the product, and what matrices are made of, if of codes.
            seed: for all.
        """
        torch.manual_seed(seed)
        self.places = [context.devices[device].device for device in context.all_devices]
        dtype = context.dtype
        channel = context.channel(MOST_JOINT * _SIZE)
        assert channel
        assert context.channel(MOST_JOINT * _SIZE) is channel
        self._channel = channel
        capability = torch.cuda.get_device_capability(self.places[0])
        names = chain(*gemv.names_of(dtype), gemv.joint_names_of(dtype))
        names = chain(names, skinny.names_of(dtype), [skinny.joint_name_of(dtype)])
        names = chain(names, packed.names_of(dtype, STEPS), packed.names_of(dtype, STEPS, joint=True))
        kernel_cache.prepare((name, capability) for name in names)
        self._gemvs = [Gemv(place, dtype, joint=True) for place in self.places]
        self._skinnies = [SkinnyGemm(place, dtype, joint=True) for place in self.places]
        self._packed = [QuantisedSkinnyGemm(place, dtype, STEPS, joint=True) for place in self.places]
        self._sides: list[list[tuple[torch.Tensor, Matrix]]] = []
        self._exact = []
        self.streams = []
        self._starts = []
        for rows, size, kind in cases:
            pairs: list[tuple[torch.Tensor, Matrix]] = []
            for width, place in zip(_WIDTHS, self.places, strict=False):
                own = -(-width // 128) * 128 if kind else width
                weight = (torch.randn(size, own) / own**0.5).to(place, dtype)
                matrix = matrix_of(kind, size, own, 128, torch.float16, 1, str(place)) if kind else weight
                pairs.append((torch.randn(rows, own).to(place, dtype), matrix))
            start = torch.randn(rows, size).to(self.places[0], dtype)
            parts = [(x.float() @ dense_of(matrix).mT).to(self.places[0]) for x, matrix in pairs]
            self._sides.append(pairs)
            self._exact.append(sum(parts, start.float()))
            self._starts.append(start)
            self.streams.append([start.to(place, copy=True) for place in self.places])

    def launch(self, case: int, device: int) -> None:
        """Launch the kernel of one device."""
        to, (x, matrix) = self.streams[case][device], self._sides[case][device]
        if isinstance(matrix, torch.Tensor):
            kernels = self._gemvs if len(x) <= norms.MOST_ROWS else self._skinnies
            kernels[device].joint(to, x, matrix, self._channel, device)
        else:
            assert self._packed[device].adds_up(x, matrix)
            self._packed[device].joint(to, x, matrix, self._channel, device)

    def run(self, case: int, devices: int | None = None) -> None:
        """Add a product to its streams, on all devices or the first ones."""
        count = len(self.places)
        launches = [partial(self.launch, case, each) for each in range(count)][:devices]
        self._channel.run([*launches, *[lambda: None] * (count - len(launches))])

    def restart(self, case: int) -> None:
        """Let streams be what they were."""
        for to in self.streams[case]:
            to.copy_(self._starts[case])

    def check(self, case: int) -> None:
        """Compare streams, to which one product was added, with what float32 makes, and with each other."""
        first, *others = self.streams[case]
        exact = self._exact[case]
        assert (first.float() - exact).abs().max() <= torch.finfo(first.dtype).eps * exact.abs().max()
        for to in others:
            assert torch.equal(to.to(first.device), first)

    def delay(self, random: Random, most: int) -> None:
        """Keep a random device busy for a random time, in cycles."""
        with torch.cuda.device(random.choice(self.places)):
            torch.cuda._sleep(random.randrange(most))  # type: ignore[no-untyped-call]


def context_of(count: int, dtype: torch.dtype = torch.bfloat16, timeout: float | None = None) -> tpx.TPContext:
    """Return one on the first GPUs."""
    if count > GPUS:
        pytest.skip(f"needs {count} GPUs, found {GPUS}")
    return tpx.compile(plan_for(count), backend="cuda", devices=list(range(count)), dtype=dtype, timeout=timeout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_sums_of_products(count: int, dtype: torch.dtype) -> None:
    """They are what float32 makes, rounded once, and the same on all devices, late ones too."""
    random = Random(count)
    with context_of(count, dtype) as context:
        products = Products(context, CASES)
        for turn in range(200):
            case = random.randrange(len(CASES))
            products.restart(case)
            if not turn % 7:
                products.delay(random, 1_000_000)
            products.run(case)
            products.check(case)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_graphs_of_them(count: int) -> None:
    """Many in a row, of several sizes, are what they are without a graph."""
    random = Random(count)
    order = [random.randrange(len(CASES)) for _ in range(60)]
    with context_of(count) as context:
        products = Products(context, CASES)

        def run() -> None:
            for case in range(len(CASES)):
                products.restart(case)
            for case in order:
                products.run(case)

        run()
        expected = [stream[0].clone() for stream in products.streams]
        with context.capture() as graph:
            run()
        for _ in range(20):
            products.delay(random, 100_000)
            graph.replay()
            context.synchronize()
            for stream, wanted in zip(products.streams, expected, strict=True):
                assert all(torch.equal(to.to(wanted.device), wanted) for to in stream)


def _replay(seed: int, found: list[object]) -> None:
    """Tell whether a graph of a context of its own says the same each time, on streams of its own."""
    try:
        with context_of(2) as context:
            products = Products(context, CASES[:1], seed)

            def run() -> None:
                for _ in range(50):
                    products.restart(0)
                    products.run(0)

            run()
            with context.capture() as graph:
                run()
            for place in products.places:
                torch.cuda.set_stream(torch.cuda.Stream(place))  # type: ignore[no-untyped-call]
            random = Random(seed)
            for _ in range(300):
                products.delay(random, 40_000)
                graph.replay()
            context.synchronize()
            for place in products.places:
                torch.cuda.synchronize(place)
            products.check(0)
            found.append(True)
    except Exception as error:  # noqa: BLE001 (which the test tells)
        found.append(error)


def test_two_contexts_at_the_same_time() -> None:
    """On the same GPUs, each with a graph of its own: no device waits for ever, and all is right."""
    context_of(2).close()
    found: list[object] = []
    threads = [threading.Thread(target=_replay, args=(seed, found)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [True, True]


def test_a_device_that_never_comes() -> None:
    """The others give up after the deadline, and the context says so."""
    context = context_of(2, timeout=0.3)
    products = Products(context, CASES[:1])
    products.run(0, devices=1)
    with pytest.raises(ExecutionError, match="waited for a message that never came"):
        context.synchronize()
    with pytest.raises(ExecutionError):
        products.run(0)
    with pytest.raises(ExecutionError):
        context.close()


def test_there_is_none_without_peers() -> None:
    """A single device, and devices that go through the host, have no channels."""
    with context_of(1) as context:
        assert context.channel(8) is None
    context_of(2).close()
    with tpx.compile(plan_for(2), backend="cuda", devices=[0, 1], transport="host") as context:
        assert context.channel(8) is None
