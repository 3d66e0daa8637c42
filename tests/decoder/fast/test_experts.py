"""Experts of few rows: the kernels' machine code, the words that they are told, and what is left to torch."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve

from tests import machine_code
from tests.decoder.fast.experts_cases import exact, with_biases
from tests.decoder.fast.overlap import check_overlap
from tests.decoder.fused_cases import FakeAttention, FakeExperts, FakeGemv, FakeGrouped, FakeSkinny
from tests.decoder.pointwise_cases import launches, memory, number
from tests.decoder.test_memory import made, planned
from tests.machine_code import CAPABILITIES, check_code, registers
from tests.weight_plans import fine_units
from tpplan.core.plan import Cache
from tpplan.decoder import Decoder
from tpplan.decoder.fast import fused
from tpplan.decoder.fast.launches.chosen import words_of_biases
from tpplan.decoder.fast.launches.experts import ExpertGemv
from tpplan.decoder.fast.launches.launcher import DTYPES, bits_of
from tpplan.decoder.layer import experts
from tpplan.decoder.model.gates import ACTIVATIONS, SWIGLU_OAI, gated
from tpplan.decoder.model.router import Router
from tpplan.decoder.weights.row_kernels import GATES
from tpplan.decoder.weights.stacked import Projection
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

__all__ = ["fine_units", "launches"]  # fixtures

PROCESSORS = 132
#: Of what the kernel is told a layout of, see :func:`tpplan.decoder.fast.launches.gemv.shape_of`: two blocks of each.
BLOCKS = 2 * PROCESSORS


def words_of_choice(
    logits_RE: Tensor, choice_RC: Tensor, router: Router, correction_E: Tensor | None = None
) -> tuple[int, ...]:
    """Return what the kernel that routes is told."""
    count, correction = choice_RC.shape[1] // 2, 0 if correction_E is None else correction_E.data_ptr()
    return (
        logits_RE.data_ptr(), logits_RE.itemsize * logits_RE.stride(0), logits_RE.shape[1], correction,
        choice_RC.data_ptr(), 8 * count, count, router.sigmoid, router.groups, router.eligible, router.best,
        router.normalised, bits_of(router.least), bits_of(router.factor),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("count", "chosen", "router"),
    [
        (40, 6, Router(sigmoid=True, normalised=True, factor=2.5)),
        (48, 4, Router(sigmoid=True, groups=6, eligible=2, best=2, normalised=True)),
        (66, 8, Router(groups=3, eligible=1, factor=16.0)),
        (12, 3, Router(groups=4, eligible=3, best=2)),
        (5, 5, Router(sigmoid=True, normalised=True, least=0.9)),
    ],
    ids=str,
)
@pytest.mark.parametrize("corrects", [False, True])
def test_lanes_route_as_torch(count: int, chosen: int, router: Router, *, corrects: bool) -> None:
    """By logits in 32 bits, in groups and without, with a selection bias and without."""
    lanes, sources = pytest.importorskip("tests.lanes"), pytest.importorskip("tpplan.decoder.fast.kernels.experts")
    torch.manual_seed(count)
    logits_RE, correction_E = torch.randn(3, count), torch.randn(count) if corrects else None
    choice_RC = torch.full((3, 2 * chosen), torch.nan)
    own = [logits_RE, choice_RC, *([] if correction_E is None else [correction_E])]
    lanes.run(sources.EXPERTS_CHOOSE_F32, 3, 32, words_of_choice(logits_RE, choice_RC, router, correction_E), own)
    weights_RC, numbers_RC = experts.choose(logits_RE, chosen, router, correction_E)
    torch.testing.assert_close(choice_RC[:, :chosen], weights_RC)
    assert torch.equal(choice_RC[:, chosen:], numbers_RC.float())


@pytest.mark.parametrize("kernel", ["BF16", "F32"])
def test_lanes_order_what_is_equal_or_none(kernel: str) -> None:
    """The first of equal scores comes first, also of a lane's; NaN is the largest, and no expert is chosen twice."""
    lanes, sources = pytest.importorskip("tests.lanes"), pytest.importorskip("tpplan.decoder.fast.kernels.experts")
    logits_RE = torch.zeros(5, 80, dtype=torch.bfloat16 if kernel == "BF16" else torch.float32)
    logits_RE[1, 70], logits_RE[2], logits_RE[3, ::2], logits_RE[4, 3::32] = torch.nan, torch.nan, -torch.inf, 1.0
    choice_RC = torch.full((5, 12), -9.0)
    words = words_of_choice(logits_RE, choice_RC, Router(normalised=True))
    lanes.run(getattr(sources, f"EXPERTS_CHOOSE_{kernel}"), 5, 32, words, (logits_RE, choice_RC))
    assert torch.equal(choice_RC[:, 6:], logits_RE.sort(stable=True, dim=-1, descending=True).indices[:, :6].float())
    assert choice_RC[1:3, :6].isnan().all()
    torch.testing.assert_close(choice_RC[[0, 3], :6], torch.full((2, 6), 1 / 6))


@pytest.mark.parametrize(("dtype", "capabilities"), [("bf16", CAPABILITIES), ("f16", [(9, 0)]), ("f32", [(9, 0)])])
@pytest.mark.parametrize("what", ["choose", "product"])
def test_they_read_vectors_and_spill_nothing(what: str, dtype: str, capabilities: Sequence[tuple[int, int]]) -> None:
    """Loads of matrices are of 16 bytes, all is computed in 32 bits in registers, and two blocks have enough."""
    name = f"experts_{what}_{dtype}"
    if name == "experts_product_f32":
        return
    for capability in capabilities:
        text = machine_code.ptx(name, capability)
        assert f".visible .entry {name}(" in text
        check_overlap(name, text, capability)
        assert ("ld.global.nc.L1::no_allocate.L2::128B.v4.u32" in text) == (what == "product")
        assert ("redux.sync.max.u32" in text) == (what == "choose")
        log = check_code(text, capability)
        assert registers(log) * 512 <= 2**16


@pytest.mark.parametrize(
    "case",  # dtype, rows, experts, chosen, hidden, width, activation, team, teams, blocks, biases
    [
        ("bf16", 1, 8, 2, 64, 48, "silu", 1, 1, 1, False),  # nothing is left over
        ("f16", 2, 8, 3, 72, 24, "gelu", 1, 2, 2, True),  # lanes of a warp have different experts
        ("bf16", 2, 150, 2, 40, 24, "gelu_pytorch_tanh", 2, 1, 1, True),  # warps without columns
        ("f16", 1, 300, 8, 8, 72, SWIGLU_OAI, 1, 2, 1, True),  # several rounds
        ("bf16", 1, 4, 1, 264, 8, "silu", 1, 1, 2, True),  # more batches than a warp keeps
    ],
    ids=str,
)
def test_lanes_agree(case: tuple[str, int, int, int, int, int, str, int, int, int, bool]) -> None:
    """What the sources do lane by lane is what torch does, and reaches for nothing beside their tensors."""
    lanes, sources = pytest.importorskip("tests.lanes"), pytest.importorskip("tpplan.decoder.fast.kernels.experts")
    name, rows, count, chosen, hidden, width, act, team, teams, blocks, is_biased = case
    torch.manual_seed(count)
    dtype = {text: each for each, text in DTYPES.items()}[name]
    choose, product = (getattr(sources, f"EXPERTS_{what}_{name.upper()}") for what in ("CHOOSE", "PRODUCT"))

    scores_RE, choice_RC = torch.randn(rows, count + 3).to(dtype)[:, 2:-1], torch.full((rows, 2 * chosen), -9.0)
    scores_RE[0, :3] = torch.tensor([-0.0, 0.0, scores_RE.max()])
    for normalised in (False, True):
        router = Router(normalised=normalised)
        words = words_of_choice(scores_RE, choice_RC, router)
        lanes.run(choose, rows, 32, words, (scores_RE, choice_RC))
        weights_RC, _ = experts.choose(scores_RE, chosen, router)
        torch.testing.assert_close(choice_RC[:, :chosen], weights_RC)
    ordered_RE = scores_RE.sort(stable=True, dim=-1, descending=True).indices
    assert torch.equal(choice_RC[:, chosen:], ordered_RE[:, :chosen].float())

    x_RD = torch.randn(rows, hidden + 8).to(dtype)[:, :-8]
    gate_EID, up_EID = (torch.randn(2, count, width, hidden) / hidden**0.5).to(dtype)
    down_EDI = (torch.randn(count, hidden, width) / width**0.5).to(dtype)
    h_RCI, to_RD = x_RD.new_full((rows, chosen, width), torch.nan), torch.randn(rows, hidden + 3).to(dtype)
    gates, ups, downs = map(Projection, (gate_EID, up_EID, down_EDI))
    if is_biased:
        (gates, ups), (downs,) = with_biases(gate_EID, up_EID, dtype=dtype), with_biases(down_EDI, dtype=dtype)
    of_both, of_all = words_of_biases(gates.bias, ups.bias), words_of_biases(downs.bias)
    assert of_both is not None
    assert of_all is not None
    told, group = (choice_RC.data_ptr(), chosen), (team, teams)
    mode, of_expert, pitch = GATES[act], 2 * hidden * width, 2 * hidden
    of_up = (
        h_RCI.data_ptr(), 2 * width, x_RD.data_ptr(), 2 * x_RD.stride(0), gate_EID.data_ptr(), of_expert, pitch,
        up_EID.data_ptr() - gate_EID.data_ptr(), *told, 1, hidden, width // 2, 0, 0, *of_both, mode, *group,
    )  # fmt: skip
    own = [gate_EID, x_RD, h_RCI, choice_RC, down_EDI, to_RD, *(x.bias for x in (gates, downs) if x.bias is not None)]
    threads = 32 * team * teams
    lanes.run(product, (blocks, rows * chosen), threads, of_up, own)

    def gating(gate: Tensor, up: Tensor) -> Tensor:
        return gated(act, gate.to(dtype).float(), up.to(dtype).float()).to(dtype)

    numbers_RC = choice_RC[:, chosen:].long()
    step = torch.finfo(dtype).eps
    exact_RCI = experts.up(x_RD.float(), exact(gates), exact(ups), numbers_RC, gating, fixed=True)
    torch.testing.assert_close(h_RCI, exact_RCI, atol=2 * step, rtol=2 * step)
    exact_RD = experts.down(h_RCI.float(), exact(downs), numbers_RC, choice_RC[:, :chosen], fixed=False)
    before_RD, pitch = to_RD.clone(), 2 * width
    for start in (to_RD.data_ptr(), 0):
        of_down = (
            to_RD.data_ptr(), 2 * to_RD.stride(0), h_RCI.data_ptr(), pitch, down_EDI.data_ptr(), of_expert, pitch,
            2 * pitch, *told, chosen, width, hidden // 4, start, 2 * to_RD.stride(0), *of_all, 0, *group,
        )  # fmt: skip
        lanes.run(product, (blocks, rows), threads, of_down, own)
        expected_RD = (before_RD[:, :hidden] if start else 0) + exact_RD
        torch.testing.assert_close(to_RD[:, :hidden].float(), expected_RD, atol=2 * step, rtol=2 * step)
        assert torch.equal(to_RD[:, hidden:], before_RD[:, hidden:])


def biases_at(words: Sequence[int], expert: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the biases of an expert that a kernel is told of: the first ones, and those that follow at a distance."""
    bias, of_expert, step, half = words
    if not bias:
        assert (of_expert, step, half) == (0, 0, 0)
        return torch.zeros(count), torch.zeros(count)
    first = memory(bias + expert * of_expert, (count,), (step,), dtype).float()
    if half == 2 * step:
        return first, first[2:]
    return first, memory(bias + expert * of_expert + half, (count,), (step,), dtype).float()


class FakeLauncher:
    """Does what a kernel does, by its words."""

    def __init__(self, name: str, place: torch.device) -> None:
        """Take any device."""
        _, what, dtype = name.split("_")
        assert place.type == "cuda"
        self._dtype = {text: each for each, text in DTYPES.items()}.get(dtype, torch.float32)
        self._run = {"choose": self._choose, "product": self._product}[what]

    def __call__(self, blocks: int | tuple[int, int, int], threads: int, *words: int) -> None:
        """Do it."""
        self._run(*((blocks, 1, 1) if isinstance(blocks, int) else blocks), threads, *words)

    def _choose(self, rows: int, groups: int, depth: int, threads: int, *words: int) -> None:
        logits, pitch, count, correction, out, out_pitch, chosen, sigmoid, *of_groups, normalised, least, factor = words
        assert (groups, depth, threads) == (1, 1, 32)
        logits_RE = memory(logits, (rows, count), (pitch, self._dtype.itemsize), self._dtype)
        counts = dict(zip(("groups", "eligible", "best"), of_groups, strict=True))
        floats = {"least": number(least), "factor": number(factor)}
        router = Router(sigmoid=bool(sigmoid), normalised=bool(normalised), **counts, **floats)  # type: ignore[arg-type]
        correction_E = memory(correction, (count,), (4,), torch.float32) if correction else None
        found = memory(out, (rows, 2 * chosen), (out_pitch, 4), torch.float32)
        found.copy_(torch.cat(experts.choose(logits_RE, chosen, router, correction_E), dim=1))

    def _product(self, blocks: int, groups: int, depth: int, threads: int, *words: int) -> None:
        y, y_pitch, x, x_pitch, weight, of_expert, pitch, half, choices, chosen, many, width, batches, *rest = words
        plus, plus_pitch, *biases, mode, team, teams = rest
        assert depth == 1
        assert 128 < threads == 32 * team * teams <= 256
        assert chosen <= threads
        assert blocks * groups <= max(BLOCKS, groups)
        assert (blocks - 1) * teams < batches
        assert not any(word % 16 for word in (x, x_pitch, weight, of_expert, pitch, half, 2 * width))
        rows = groups * many // chosen
        weights_RC, experts_RC = memory(choices, (rows, 2 * chosen), (8 * chosen, 4), torch.float32).chunk(2, dim=1)
        for pair, (by, expert) in enumerate(
            zip(weights_RC.flatten(), experts_RC.flatten().int().tolist(), strict=True)
        ):
            start, shape = weight + expert * of_expert, (2 * batches, width)
            first, second = biases_at(biases, expert, 2 * batches if mode else 4 * batches, self._dtype)
            if mode:
                assert (many, plus) == (1, 0)
                gate, up = (memory(place, shape, (pitch, 2), self._dtype) for place in (start, start + half))
                x_D = memory(x + pair // chosen * x_pitch, (width,), (2,), self._dtype).float()
                act = ACTIVATIONS[{each: name for name, each in GATES.items()}[mode]]
                h_I = act((gate.float() @ x_D + first).to(self._dtype)) * (up.float() @ x_D + second).to(self._dtype)
                memory(y + pair * y_pitch, (2 * batches,), (2,), self._dtype).copy_(h_I)
                continue
            assert (many, half) == (chosen, 2 * pitch)
            if not pair % chosen:
                row = pair // chosen
                sum_D = torch.zeros(4 * batches)
                if plus:
                    sum_D += memory(plus + row * plus_pitch, (4 * batches,), (2,), self._dtype)
            matrix_DI = memory(start, (4 * batches, width), (pitch, 2), self._dtype)
            h_I = memory(x + pair * x_pitch, (width,), (2,), self._dtype)
            sum_D += by * (matrix_DI.float() @ h_I.float() + first)
            memory(y + row * y_pitch, (4 * batches,), (2,), self._dtype).copy_(sum_D)


@pytest.fixture(params=DTYPES, ids=str)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ExpertGemv:
    """Return kernels of a device that is not there."""
    monkeypatch.setattr("tpplan.decoder.fast.launches.experts.Launcher", FakeLauncher)
    found = SimpleNamespace(multi_processor_count=PROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    return ExpertGemv(torch.device("cuda", 0), request.param, "silu")


def some(kernels: ExpertGemv, *shape: int) -> Tensor:
    """Return numbers in the dtype of kernels."""
    return torch.randn(shape).to(kernels._dtype)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("count", "chosen"), [(8, 2), (128, 8), (300, 32), (5, 5)])
def test_choices(kernels: ExpertGemv, count: int, chosen: int, *, normalised: bool) -> None:
    """They are those of torch: weights, then experts, of which the first of equal ones."""
    torch.manual_seed(count)
    scores_RE = some(kernels, 3, count + 1)[:, :count]
    router = Router(normalised=normalised)
    found = kernels.choose(scores_RE, chosen, router)
    assert found is not None
    weights_RC, _ = experts.choose(scores_RE, chosen, router)
    torch.testing.assert_close(found[:, :chosen], weights_RC)
    assert torch.equal(scores_RE.gather(1, found[:, chosen:].long()), scores_RE.topk(chosen).values)


@pytest.mark.parametrize(("rows", "chosen"), [(1, 2), (1, 9), (3, 3), (9, 1)])
def test_products(kernels: ExpertGemv, rows: int, chosen: int) -> None:
    """They are those of torch with copies of matrices, for rows and results that are parts of longer ones.

    There are biases, but where a row has too many experts for them.
    """
    torch.manual_seed(rows)
    count, hidden, width = 9, 72, 40
    x_RD, to_RD = some(kernels, rows, 80)[:, :72], some(kernels, rows, 75)[:, :72]
    three = gate_EID, up_EID, down_EDI = [some(kernels, count, *shape) / 8 for shape in ((40, 72), (40, 72), (72, 40))]
    gates, ups, downs = map(Projection, three)
    if chosen < 9:
        dtype = kernels._dtype
        (gates, ups), (downs,) = with_biases(gate_EID, up_EID, dtype=dtype), with_biases(down_EDI, dtype=dtype)
    choice_RC = kernels.choose(some(kernels, rows, count), chosen, Router(normalised=True))
    assert choice_RC is not None
    weights_RC, numbers_RC = choice_RC[:, :chosen], choice_RC[:, chosen:].long()
    h_RCI = kernels.up(x_RD, gates, ups, choice_RC)
    assert h_RCI is not None

    def gating(gate: Tensor, up: Tensor) -> Tensor:
        return ACTIVATIONS["silu"](gate) * up

    def check(found: Tensor | None, expected: Tensor) -> None:
        assert found is not None
        torch.testing.assert_close(found, expected, atol=0.05, rtol=0.02)

    check(h_RCI, experts.up(x_RD, gates, ups, numbers_RC, gating, fixed=True))
    assert h_RCI.shape == (rows, chosen, width)
    expected = experts.down(h_RCI.clone(), downs, numbers_RC, weights_RC, fixed=True)
    assert expected.shape == (rows, hidden)
    apart_RCI = h_RCI.transpose(1, 2).contiguous().transpose(1, 2)
    joined_RCI = torch.unflatten(apart_RCI.transpose(1, 2).flatten(1), 1, (-1, chosen)).transpose(1, 2)
    for each in (h_RCI, apart_RCI, joined_RCI):
        check(kernels.down(each, downs, choice_RC), expected)
    before = to_RD.clone()
    assert kernels.down(h_RCI, downs, choice_RC, to_RD) is to_RD
    check(to_RD, before + expected)


@pytest.mark.parametrize("chosen", [8, 9])
def test_biases_that_are_not_taken(kernels: ExpertGemv, chosen: int) -> None:
    """Those of one projection of two, unlike ones, of other dtypes, and of more experts of a row are left to torch."""
    dtype, h_RCI = kernels._dtype, some(kernels, 1, chosen, 32)
    x_RD, choice_RC, matrix_EOI = some(kernels, 1, 32), torch.ones(1, 2 * chosen), some(kernels, 9, 32, 32)
    (gates, ups), (downs,) = (with_biases(*each, dtype=dtype) for each in ((matrix_EOI, matrix_EOI), (matrix_EOI,)))
    assert kernels.up(x_RD, gates, ups, choice_RC) is not None
    assert (kernels.down(h_RCI, downs, choice_RC) is not None) == (chosen == 8)
    for other in (Projection(matrix_EOI), downs, exact(downs)):
        assert kernels.up(x_RD, gates, Projection(matrix_EOI, other.bias), choice_RC) is None
        assert kernels.up(x_RD, Projection(matrix_EOI, other.bias), ups, choice_RC) is None
    assert kernels.down(h_RCI, Projection(matrix_EOI, exact(downs).bias), choice_RC) is None


def test_what_is_not_taken(kernels: ExpertGemv) -> None:
    """More pairs than experts, of which torch reads each once, and other dtypes and strides are left to torch."""
    scores_RE, choice_RC, router = some(kernels, 2, 600), torch.ones(2, 4), Router(normalised=True)
    assert kernels.choose(scores_RE[:, :512], 32, router) is not None
    assert kernels.choose(scores_RE.float()[:, :512], 32, router, torch.zeros(512)) is not None
    for odd_RE, count in ((scores_RE, 8), (scores_RE[:, :512], 33), (scores_RE[:, :3], 4), (scores_RE.double(), 2)):
        assert kernels.choose(odd_RE, count, router) is None
    for odd_RE in (scores_RE[:0, :8], scores_RE[:, ::2]):
        assert kernels.choose(odd_RE, 2, router) is None
    for other in (evolve(router, groups=33), evolve(router, best=3)):
        assert kernels.choose(scores_RE[:, :66], 2, other) is None
    for odd_E in (torch.zeros(66).bfloat16(), torch.zeros(132)[::2]):
        assert kernels.choose(scores_RE[:, :66], 2, router, odd_E) is None
    x_RD, gate_EID, up_EID, down_EDI = (
        some(kernels, *shape) for shape in ((2, 64), (4, 32, 64), (4, 32, 64), (4, 64, 32))
    )
    h_RCI = some(kernels, 2, 2, 32)
    assert kernels.up(x_RD, Projection(gate_EID), Projection(up_EID), choice_RC) is not None
    assert kernels.down(h_RCI, Projection(down_EDI), choice_RC) is not None
    assert kernels.up(x_RD, Projection(gate_EID[:3]), Projection(up_EID[:3]), choice_RC) is None
    assert kernels.down(h_RCI, Projection(down_EDI[:3]), choice_RC) is None
    assert kernels.up(x_RD[:0], Projection(gate_EID), Projection(up_EID), choice_RC[:0]) is None
    assert kernels.up(x_RD.float(), Projection(gate_EID), Projection(up_EID), choice_RC) is None
    assert kernels.up(x_RD, Projection(gate_EID), Projection(up_EID.float()), choice_RC) is None
    assert kernels.up(x_RD, Projection(gate_EID), Projection(some(kernels, 4, 32, 72)[..., :64]), choice_RC) is None
    assert kernels.up(x_RD[:, :60], Projection(gate_EID[..., :60]), Projection(up_EID[..., :60]), choice_RC) is None
    assert kernels.up(x_RD, Projection(gate_EID[:, :30]), Projection(up_EID[:, :30]), choice_RC) is None
    assert kernels.up(x_RD, Projection(gate_EID), Projection(up_EID), choice_RC.double()) is None
    assert kernels.up(x_RD, Projection(gate_EID), Projection(up_EID), torch.ones(2, 8)[:, :4]) is None
    assert kernels.down(h_RCI.float(), Projection(down_EDI), choice_RC) is None
    assert kernels.down(h_RCI, Projection(down_EDI.mT.contiguous().mT), choice_RC) is None
    assert kernels.down(some(kernels, 132)[4:].view(2, 2, 32), Projection(down_EDI), choice_RC) is None
    assert kernels.down(h_RCI, Projection(down_EDI), choice_RC, torch.zeros(2, 64)) is None
    assert kernels.down(h_RCI, Projection(down_EDI), choice_RC, some(kernels, 2, 128)[:, ::2]) is None


@pytest.mark.parametrize(
    ("model_type", "rows", "shares", "expected"),
    [
        ("mixtral", 2, (1,), {"choose": 1, "up": 1, "down and add": 1, "norm": 1, "linear": 1}),
        ("mixtral", 2, (3, 1), {"choose": 1, "up": 2, "down": 2, "norm": 2, "linear": 1}),
        ("mixtral", 3, (1,), {"choose": 1, "grouped, up": 1, "grouped, down": 1, "norm": 1, "few rows": 1}),
        ("qwen3_moe", 1, (1,), {"choose": 1, "up": 1, "down and add": 1, "norm": 1, "linear": 1}),
    ],
)
def test_kernels_of_a_layer(  # noqa: PLR0917
    model_type: str,
    rows: int,
    shares: tuple[int, ...],
    expected: dict[str, int],
    tmp_path: Path,
    launches: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One device chooses, all multiply, and who is alone adds to the residual stream, beside what attention takes."""
    monkeypatch.setattr(fused, "Attention", FakeAttention)
    monkeypatch.setattr(FakeGrouped, "is_on", True)

    def called(layers: int) -> Counter[str]:
        directory = made(model_type, tmp_path / str(layers), num_hidden_layers=layers, mlp_only_layers=[])
        plan = planned(directory, "reduce", shares, Cache("fp16", 8 * 128))
        with compile_plan(plan, backend="cpu", scratch=False) as context:
            decoder = Decoder(context, directory, load_weights(plan, directory, context))
            for calls in (FakeGemv.calls, FakeSkinny.calls, FakeExperts.calls, launches):
                calls.clear()
            zeros = [torch.zeros(rows, dtype=torch.int64)] * len(shares)
            decoder.decode(zeros, zeros)
        return FakeGemv.calls + FakeSkinny.calls + FakeExperts.calls + launches

    found = called(2) - called(1)
    devices, back = len(shares), {1: "add", 2: "linear"}
    names = ["norm", "few rows", "few rows, added"] if rows > 2 else ["linear of a norm", back[devices]]
    assert found == Counter(dict.fromkeys(names, devices)) + Counter(expected)
