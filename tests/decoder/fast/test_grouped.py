"""Rows grouped by their experts: the kernels' machine code, what their sources do lane by lane, what torch is left."""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve
from torch.utils._python_dispatch import TorchDispatchMode

from tests import machine_code
from tests.decoder.fast.experts_cases import Case, check, chosen_of, exact, gating_of, with_biases
from tests.decoder.fast.overlap import check_overlap
from tests.machine_code import CAPABILITIES, registers
from tpplan.decoder.fast.kernels.grouped_limits import BLOCKS, WARPS, most_tiles, shared_bytes
from tpplan.decoder.fast.launches import grouped
from tpplan.decoder.fast.launches.grouped import WHOLE, GroupedGemm, names_of
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.layer import experts
from tpplan.decoder.model.gates import SWIGLU_OAI
from tpplan.decoder.weights.stacked import Projection
from tpplan.exec.toolchain import kernel_cache

if TYPE_CHECKING:
    from tests.decoder.fast.experts_cases import Matrices

#: Kernels, each with a generation of GPUs that it is compiled for, and bytes that the assembler may keep in memory.
KERNELS = [
    ("bf16_e2m1_16", (9, 0), 0),
    ("f16_4_32", CAPABILITIES[-1], 0),
    ("bf16_e4m3_64", (8, 0), 0),
    ("bf16_4_128", (9, 0), 24),
    ("f16_8_16", (9, 0), 0),
    ("bf16_whole_128", CAPABILITIES[-1], 0),
]


@pytest.mark.parametrize(("name", "capability", "spare"), KERNELS)
def test_tensor_cores_multiply(name: str, capability: tuple[int, int], spare: int) -> None:
    """Rows and codes are copied 16 bytes at a time without registers, and as many blocks as meant have registers."""
    text = machine_code.ptx(f"grouped_{name}", capability)
    check_overlap(name, text, capability)
    dtype, kind, size = name.split("_")
    rows = int(size)
    steps = {"4": 8, "e2m1": 8, "whole": 2}.get(kind, 4)  # of 16 columns, in one of the kernel
    assert text.count(f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32") % (steps * rows // 8 * 2) == 0
    assert text.count("cp.async.cg.shared.global.L2::128B") >= 2 * 5  # before the loop, and in it
    assert not re.search(r"ld\.global\.nc|cvt\.rn\.f32\.u", text)
    log = machine_code.assembled(text, capability)
    assert registers(log) * 32 * WARPS[rows] * BLOCKS[rows] <= 2**16
    (frame,) = re.findall(r"(\d+) bytes stack frame", log)
    assert int(frame) <= spare


@pytest.mark.parametrize("name", ["grouping_tiles", "grouping_sum_bf16"])
def test_others_spill_nothing(name: str) -> None:
    """All is in registers."""
    text = machine_code.ptx(name, (9, 0))
    check_overlap(name, text, (9, 0))
    machine_code.check_code(text, (9, 0))


class Tensors(TorchDispatchMode):
    """Remembers what torch makes.

    Attributes:
        made: that.
    """

    def __init__(self) -> None:
        """Have nothing yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it."""
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.made.append(found)
        return found


class Launches:
    """Stands for launchers: runs sources lane by lane, which may touch nothing but what torch has made.

    Attributes:
        names: of the kernels that have run.
        tensors: what torch has made.
    """

    def __init__(self) -> None:
        """Have run nothing yet."""
        self.names: list[str] = []
        self.tensors = Tensors()
        self._run = pytest.importorskip("tests.lanes").run

    def launcher(self, name: str, place: torch.device, *, most_shared: int = 0) -> Any:
        """Return one."""
        assert place.type == "cuda"
        kernel = getattr(import_module(kernel_cache._module(name)), name.upper())

        def launch(blocks: Any, threads: int, *words: int, shared: int = 0) -> None:
            assert shared <= most_shared
            self.names.append(name)
            self._run(kernel, blocks, threads, words, self.tensors.made, shared)

        return launch


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Return what kernels run by, which need no GPU."""
    found = Launches()
    monkeypatch.setattr(grouped, "Launcher", found.launcher)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: None)
    return found


def kernels(dtype: torch.dtype, kind: str, act: str = "silu") -> GroupedGemm:
    """Return them."""
    return GroupedGemm(torch.device("cuda"), dtype, act, [kind])


def matrices(case: Case) -> tuple[Matrices, Matrices, Matrices]:
    """Return those of a case; without codes they are in the dtype of its scales, those of gates between the others."""
    if case.kind:
        return case.matrices()
    both_EID = (torch.randn(case.count, 2 * case.width, case.hidden) / case.hidden**0.5).to(case.scales)
    down_EDI = (torch.randn(case.count, case.hidden, case.width) / case.width**0.5).to(case.scales)
    return both_EID[:, ::2], both_EID[:, 1::2], down_EDI


CASES = [
    # tails of columns and of strips; more pairs of an expert than a tile has; stored zeros, and none
    (Case("e2m1", 5, 160, 96, (1, 32), torch.uint8), "bf16", 16, 7, 2, SWIGLU_OAI),
    (Case("4", 3, 96, 64, (1, 32), torch.float16, 1), "f16", 16, 14, 3, "silu"),
    (Case("4", 9, 32, 96, (1, 32), torch.float32), "bf16", 32, 5, 4, "gelu_pytorch_tanh"),
    (Case("8", 3, 80, 48, (1, 16), torch.bfloat16, 0), "bf16", 32, 11, 3, "gelu"),
    (Case("8", 2, 16, 64, (1, 64), torch.float16), "f16", 64, 3, 1, "silu"),
    (Case("", 3, 40, 72, (1, 1), torch.bfloat16), "bf16", 16, 8, 3, "silu"),
    (Case("", 5, 24, 32, (1, 1), torch.float16), "f16", 64, 9, 2, SWIGLU_OAI),
    (Case("e4m3", 3, 48, 96, (3, 48), torch.bfloat16), "bf16", 64, 23, 3, "silu"),
]


@pytest.mark.parametrize(("case", "name", "tile", "rows", "chosen", "act"), CASES, ids=str)
def test_lanes_agree(  # noqa: PLR0917
    case: Case, name: str, tile: int, rows: int, chosen: int, act: str, ran: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sources do lane by lane, as they are launched, is what torch does."""
    torch.manual_seed(rows)
    dtype = {text: each for each, text in DTYPES.items()}[name]
    monkeypatch.setattr(grouped, "_TILES", ((tile, 0),))
    run = kernels(dtype, case.kind, act)
    with ran.tensors:
        gate_EID, up_EID, down_EDI = matrices(case)
        (gates, ups), (downs,) = with_biases(gate_EID, up_EID, dtype=dtype), with_biases(down_EDI, dtype=dtype)
        if rows % 2:
            gates, ups, downs = (evolve(each, bias=None) for each in (gates, ups, downs))
        x_RD, choice_RC = torch.randn(rows, case.hidden + 8).to(dtype), chosen_of(rows, chosen, case.count)
        h_RCI = run.up(x_RD[:, : case.hidden], gates, ups, choice_RC)
        assert h_RCI is not None
        to_RD = torch.randn(rows, case.hidden).to(dtype)
        before_RD = to_RD.clone()
        found = run.down(h_RCI, downs, choice_RC, to_RD)
    product = f"grouped_{name}_{case.kind or WHOLE}_{tile}"
    assert ran.names == ["grouping_tiles", product, product, f"grouping_sum_{name}"]
    numbers_RC, gating = choice_RC[:, chosen:].long(), gating_of(act, torch.float32)
    x_RD = x_RD[:, : case.hidden].float()
    check(h_RCI, experts.up(x_RD, exact(gates), exact(ups), numbers_RC, gating, fixed=True))
    exact_RD = experts.down(h_RCI.float(), exact(downs), numbers_RC, choice_RC[:, :chosen], fixed=True)
    check(found, before_RD + exact_RD)
    assert found is to_RD


@pytest.mark.parametrize("turned", [False, True])
def test_outputs_take_no_more_memory_than_activations(
    turned: bool, ran: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they would, they are of some rows at a time, which are grouped for themselves; nor do they with copies."""
    torch.manual_seed(4)
    monkeypatch.setattr(grouped, "_FREE", 0)
    case, rows, chosen = Case("4", 4, 64, 32, (1, 32), torch.float16), 5, 3
    with ran.tensors:
        run, (_, _, down_EDI) = kernels(torch.bfloat16, "4"), case.matrices()
        h_RCI = torch.randn(rows, chosen, case.width).bfloat16()
        if turned:
            h_RCI = h_RCI.transpose(1, 2).contiguous().transpose(1, 2)
        choice_RC = chosen_of(rows, chosen, case.count)
        before = len(ran.tensors.made)
        found = run.down(h_RCI, Projection(down_EDI), choice_RC)
    parts = [2, 2, 1] if turned else [4, 1]
    assert len(ran.names) == 3 * len(parts)
    large = [each.shape for each in ran.tensors.made[before:] if each.dtype is torch.bfloat16 and each.dim() == 3]
    assert large.count(torch.Size((parts[0], chosen, case.hidden))) == parts.count(parts[0])
    assert max(parts) * chosen * (case.hidden + turned * case.width) <= rows * (chosen * case.width + case.hidden)
    numbers_RC = choice_RC[:, chosen:].long()
    check(found, experts.down(h_RCI.float(), Projection(down_EDI), numbers_RC, choice_RC[:, :chosen], fixed=True))


def test_new_choices_in_the_same_memory(ran: Launches) -> None:
    """Rows are grouped anew by every product up, and by one back that has none before it."""
    torch.manual_seed(5)
    case = Case("", 2, 16, 32, (1, 1), torch.bfloat16)
    with ran.tensors:
        run, (gate_EID, up_EID, down_EDI) = kernels(torch.bfloat16, ""), matrices(case)
        gates, ups, downs = map(Projection, (gate_EID, up_EID, down_EDI))
        x_RD, choice_RC = torch.randn(3, 16).bfloat16(), torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
        for _ in range(2):
            h_RCI = run.up(x_RD, gates, ups, choice_RC)
            assert h_RCI is not None
            numbers_RC = choice_RC[:, 1:].long()
            expected = experts.up(
                x_RD.float(), exact(gates), exact(ups), numbers_RC, gating_of("silu", torch.float32), fixed=True
            )
            check(h_RCI, expected)
            choice_RC[:, 1] = 1 - choice_RC[:, 1]
        assert h_RCI is not None
        found = run.down(h_RCI, downs, choice_RC.clone())
    exact_RD = experts.down(h_RCI.float(), exact(downs), choice_RC[:, 1:].long(), choice_RC[:, :1], fixed=True)
    check(found, exact_RD)
    assert ran.names.count("grouping_tiles") == 3


def test_many_pairs(ran: Launches) -> None:
    """More than threads that group them, of as many experts as there may be, and of one most."""
    torch.manual_seed(6)
    run = kernels(torch.bfloat16, "")
    with ran.tensors:
        choice_RC = torch.cat((torch.rand(700, 3), torch.randint(512, (700, 3))), dim=1)
        choice_RC[:, -1] = 511
        groups = run._grouped(choice_RC, 512)
    experts_N, order = choice_RC[:, 3:].flatten().int(), groups.order.tolist()
    assert sorted(order) == [*range(2100)]
    covered = []
    for expert, start, count, _ in groups.tiles.tolist():
        assert count <= groups.rows
        assert all(experts_N[pair] == expert for pair in order[start : start + count])
        covered += [*range(start, start + count)]
    assert sorted(covered) == [*range(2100)]


@pytest.mark.parametrize(
    "change",
    [
        {"count": 32},  # few pairs for each expert
        {"hidden": 36, "block": (1, 36)},
        {"scales": torch.bfloat16, "dtype": torch.float16},
    ],
    ids=str,
)
def test_others_are_left(change: dict[str, Any], ran: Launches) -> None:
    """Kernels for few rows, or torch, take what these do not."""
    dtype = change.pop("dtype", torch.bfloat16)
    case = evolve(Case("4", 4, 64, 64, (1, 32), torch.float16), **change)
    run, (gate_EID, up_EID, down_EDI) = kernels(dtype, case.kind), case.matrices()
    x_RD, choice_RC = torch.randn(4, case.hidden).to(dtype), chosen_of(4, 2, case.count)
    found = run.up(x_RD, Projection(gate_EID), Projection(up_EID), choice_RC)
    assert run.down(torch.randn(4, 2, case.width).to(dtype), Projection(down_EDI), choice_RC) is None
    assert found is None
    assert not ran.names


def test_whether_projections_are_taken(ran: Launches) -> None:
    """Of enough rows, and not too many, with biases of all or none; nothing is launched to tell."""
    case = Case("4", 4, 64, 64, (1, 32), torch.float16)
    run, wrong = kernels(torch.bfloat16, "4"), Projection(torch.randn(4, 64, 65).bfloat16()[..., :64])
    gates, ups, downs = map(Projection, case.matrices())
    for rows, is_taken in ((2, False), (3, True), (2**16 - 1, True), (2**16, False)):
        assert run.takes_up(rows, 1, gates, ups) == is_taken
        assert run.takes_down(rows, 1, downs) == is_taken
    assert not run.takes_up(4, 2, gates, wrong)
    assert not run.takes_up(4, 2, wrong, ups)
    assert not run.takes_down(4, 2, wrong)
    (biased,) = with_biases(case.matrices()[1], dtype=torch.bfloat16)
    assert not run.takes_up(4, 2, gates, biased)
    large = Projection(torch.empty(2, 2**12, 2**12, dtype=torch.bfloat16))
    for rows, is_taken in ((255, True), (256, False)):
        assert run.takes_up(rows, 2, large, large) == is_taken
        assert run.takes_down(rows, 2, large) == is_taken
    scaled = Projection(evolve(case, scales=torch.bfloat16).matrices()[2])
    assert run.takes_down(4, 2, scaled)
    assert not kernels(torch.float16, "4").takes_down(4, 2, scaled)
    narrow = Projection(torch.empty(2, 16, 12, dtype=torch.bfloat16))  # not of whole vectors
    assert not run.takes_down(4, 2, narrow)
    assert not ran.names


def test_torch_takes_what_is_no_vector(ran: Launches) -> None:
    """Rows that do not begin at multiples of 16 bytes, residuals that do not, and matrices."""
    case = Case("4", 4, 64, 64, (1, 32), torch.float16)
    run, (gate_EID, up_EID, down_EDI) = kernels(torch.bfloat16, "4"), case.matrices()
    x_RD, choice_RC = torch.randn(4, 65).bfloat16(), chosen_of(4, 2, 4)
    for wrong_RD in (x_RD[:, :64], x_RD[:, 1:], x_RD[:, :64].float()):
        assert run.up(wrong_RD, Projection(gate_EID), Projection(up_EID), choice_RC) is None
    h_RCI, gates = torch.randn(4, 2, 64).bfloat16(), Projection(gate_EID)
    assert run.down(h_RCI, Projection(down_EDI), choice_RC, x_RD[:, :64]) is None
    assert run.down(h_RCI, Projection(torch.randn(4, 64, 65).bfloat16()[..., :64]), choice_RC) is None
    assert run.down(torch.randn(4 * 2 * 64 + 1).bfloat16()[1:].view(4, 2, 64), Projection(down_EDI), choice_RC) is None
    assert run.down(torch.randn(4, 2, 12).bfloat16(), Projection(torch.randn(4, 64, 12).bfloat16()), choice_RC) is None
    (biased,) = with_biases(up_EID, dtype=torch.bfloat16)
    assert run.up(x_RD[:, :64].contiguous(), gates, biased, choice_RC) is None
    assert not ran.names


def test_tiles_fit_into_the_shared_memory_there_is(ran: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest ones need a GPU of data centres."""
    made: list[str] = []
    monkeypatch.setattr(grouped, "Launcher", lambda name, _, **__: made.append(name))
    for most, count in ((99 << 10, 3), (163 << 10, 4)):
        shared = type("Properties", (), {"shared_memory_per_block_optin": most})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, shared=shared: shared)
        kernels(torch.bfloat16, "4")
        assert len(made) == 2 + 2 * count
        made.clear()
    assert shared_bytes(64, 4) <= 99 << 10 < shared_bytes(128, 4)
    assert not ran.names


def test_names() -> None:
    """Of matrices without codes, and of kinds that there are kernels for."""
    assert not any("e2m1" in name or "e5m2" in name for name in names_of(torch.float16, ["e2m1", "e5m2"]))
    tiles = 16, 32, 64, 128
    products = [f"grouped_bf16_{kind}_{rows}" for kind in ("whole", "4") for rows in tiles]
    assert names_of(torch.bfloat16, ["4", "e5m2"]) == ["grouping_tiles", "grouping_sum_bf16", *products]


@pytest.mark.parametrize("rows", [16, 64])
def test_most_tiles(rows: int) -> None:
    """As many as the worst choice makes, but not more than could be."""
    for experts_count in (1, 3, 8):
        for pairs in (1, 2, 15, 16, 17, 40, 200):
            sizes = [1] * min(pairs, experts_count)
            sizes[0] += pairs - len(sizes)
            most = most_tiles(pairs, experts_count, rows)
            assert most >= sum(-(-size // rows) for size in sizes)
            assert most <= pairs
