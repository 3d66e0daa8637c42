"""Kernels for the gated delta rule: their machine code, and what their sources do, beside what torch does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve

from tests import machine_code
from tests.decoder.delta_cases import Layer
from tests.decoder.fast.overlap import check_overlap
from tests.decoder.pointwise_cases import memory
from tests.machine_code import CAPABILITIES, check_code
from tpplan.decoder.fast.launches import delta
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.weights.linear import BY_HEAD, ONE_BEHIND_THE_OTHER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpplan.decoder.cache.state import State
    from tpplan.decoder.layer.recurrence import DeltaWeights


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("what", ["recur", "gate"])
def test_they_keep_states_in_registers(what: str, dtype: str) -> None:
    """Nothing spills, all is computed in 32 bits, and inputs are copied 16 bytes at a time."""
    name = f"delta_{what}_{dtype}"
    for capability in CAPABILITIES:
        text = machine_code.ptx(name, capability)
        assert f".visible .entry {name}(" in text
        check_overlap(name, text, capability)
        assert ("cp.async.cg.shared.global" in text) == (what == "recur")
        assert text.count(".shared .align 16") == (2 if what == "recur" else 0)
        check_code(text, capability)


class Lanes:
    """Kernels of a layer that lanes do.

    Attributes:
        launches: how many there were of each.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Make none yet."""
        self.launches = dict.fromkeys(delta.names_of(dtype), 0)
        self._known: list[torch.Tensor] = []
        self._allowed: list[torch.Tensor] = []

    def allow(self, given: Sequence[torch.Tensor]) -> None:
        """Let kernels touch what they are given next."""
        self._allowed = [*self._known, *given]

    def __call__(self, state: State, weights: DeltaWeights) -> delta.OfLayer:
        """Return those of a layer."""
        turns = torch.zeros(len(state.recurrent) * state.keys, dtype=torch.int32)
        self._known = [state.inputs, state.recurrent, weights.conv, weights.rates, weights.dt_bias, weights.norm, turns]
        launches = (self._launch(name, turns) for name in self.launches)
        return delta.OfLayer(state, weights, turns, *launches)  # type: ignore[arg-type]

    def _launch(self, name: str, turns: torch.Tensor) -> Callable[..., None]:
        lanes, kernels = pytest.importorskip("tests.lanes"), pytest.importorskip("tpplan.decoder.fast.kernels.delta")
        kernel = getattr(kernels, name.upper())

        def launch(blocks: tuple[int, int, int], threads: int, *words: int) -> None:
            self.launches[name] += 1
            assert len(words) == kernel.arguments
            if "recur" in name:
                (start, pitch), rows = words[19:21], blocks[2] * words[26]
                if words[22]:
                    self._allowed.append(memory(words[22], (blocks[2],), (words[23],), torch.uint8))
            else:
                (start, pitch), rows = words[6:8], blocks[0]
            self._allowed.append(memory(start, (rows, pitch), (pitch, 1), torch.uint8))
            lanes.run(kernel, blocks, threads, [int(word) for word in words], self._allowed)
            assert not turns.any()

        return launch


@pytest.mark.parametrize(
    ("joined", "sizes", "dtype"),
    [
        (ONE_BEHIND_THE_OTHER, (1, 2), torch.bfloat16),
        (BY_HEAD, (2, 1), torch.float16),
    ],
)
def test_lanes_agree(joined: str, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """With torch: outputs, states and latest inputs, of texts in one piece and several."""
    torch.manual_seed(7)
    lanes = Lanes(dtype)
    layer = Layer(joined, sizes, 3, dtype, lanes)
    layer.check_texts(6, 3, lanes.allow)
    recur, gate = lanes.launches.values()
    assert (recur, gate) == (3 + 1 + 1 + 1, 4)


def test_lanes_round_as_torch() -> None:
    """β, as torch's sigmoid does: 0.6's is far from all numbers of 16 bits."""
    torch.manual_seed(1)
    lanes = Lanes(torch.bfloat16)
    layer = Layer(BY_HEAD, (1, 1), 1, torch.bfloat16, lanes)
    rows = layer.rows(1)
    rows.betas.fill_(0.6)
    lanes.allow(rows)
    for each in (layer.plain, layer.fast):
        each.step(rows, torch.tensor([False]))
    ours, theirs = (each.state.recurrent.flatten() for each in (layer.fast, layer.plain))
    assert ((ours / theirs)[theirs.abs() > 1e-4].median() - 1).abs() < 1e-4


def test_what_they_keep_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporaries leave room for it in the plan's scratch: 4 bytes for each key head of each sequence."""
    monkeypatch.setattr(delta, "Launcher", lambda name, _: name)
    kernels = delta.Delta(torch.device("cpu"), torch.bfloat16)
    layers = [Layer(BY_HEAD, (4, 2), 6, torch.bfloat16, kernels.of) for _ in range(2)]
    assert kernels._turns.nbytes == 4 * 4 * 6
    for layer in layers:
        assert layer.fast._kernels is not None
        assert layer.fast._kernels.nbytes == 4 * 4 * 6
        free = [each._elements * each.state.inputs.itemsize for each in (layer.plain, layer.fast)]
        assert free[0] - free[1] == 4 * 4 * 6 // 2  # half of what is left is theirs


def _shifted(x: torch.Tensor) -> torch.Tensor:
    """Return the same numbers, which begin and follow each other between vectors."""
    found = x.new_empty(*x.shape[:-1], x.shape[-1] + 1)[..., 1:]
    return found.copy_(x)


def test_what_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other dtypes, and what does not lie in vectors or one behind the other, is left to torch."""
    launched: list[str] = []
    monkeypatch.setattr(delta, "Launcher", lambda name, _: lambda *_: launched.append(name))
    kernels, layers = delta.Delta(torch.device("cpu"), torch.bfloat16), []

    def making(state: State, weights: DeltaWeights) -> delta.OfLayer | None:
        layers.append((state, weights))
        return kernels.of(state, weights)

    layer = Layer(BY_HEAD, (2, 2), 3, torch.bfloat16, making)
    ((state, weights),), rows, found = layers, layer.rows(3), layer.fast._kernels
    assert found is not None
    out, y = (torch.zeros(3, 2, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    goes_on = torch.ones(3, dtype=torch.bool)
    assert found.recur(rows, 0, 3, out, goes_on_N=goes_on)
    assert found.gate(y, rows.gates, 1e-6) is not None
    assert launched == delta.names_of(torch.bfloat16)
    for odd in (
        rows._replace(mixed=_shifted(rows.mixed)),
        rows._replace(mixed=rows.mixed.float()),
        rows._replace(betas=rows.betas.float()),
        rows._replace(decays=rows.decays.float()),
        rows._replace(betas=rows.betas.repeat_interleave(2, dim=2)[..., ::2]),
        rows._replace(decays=rows.decays.repeat_interleave(2, dim=2)[..., ::2]),
    ):
        assert not found.recur(odd, 0, 3, out)
    assert not found.recur(rows, 0, 3, out.float())
    assert not found.recur(rows, 0, 3, out.transpose(2, 3).contiguous().transpose(2, 3))
    assert not found.recur(rows, 0, 3, out, goes_on_N=goes_on.int())
    for odd_y, odd_gates in ((y, _shifted(rows.gates)), (_shifted(y), rows.gates), (y, rows.gates.float())):
        assert found.gate(odd_y, odd_gates, 1e-6) is None
    assert len(launched) == 2
    wide, narrow = torch.float32, torch.bfloat16
    for name, dtype in (("conv", wide), ("norm", wide), ("rates", narrow), ("dt_bias", narrow)):
        assert kernels.of(state, evolve(weights, **{name: getattr(weights, name).to(dtype)})) is None
    assert kernels.of(state, evolve(weights, conv=weights.conv.transpose(0, 2).contiguous().transpose(0, 2))) is None


@pytest.mark.parametrize(("span", "key_dim", "value_dim"), [(3, 128, 128), (4, 64, 128), (4, 128, 64)])
def test_other_sizes_have_none(span: int, key_dim: int, value_dim: int) -> None:
    """They are torch's."""
    assert delta.takes(4, 128, 128)
    assert not delta.takes(span, key_dim, value_dim)
