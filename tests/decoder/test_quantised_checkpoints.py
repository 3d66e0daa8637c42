"""The tests' quantised checkpoints: what the tools' own words mean, read one by one, and that plans can cut them."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch

import tpplan
from tests.checkpoints import saved_values
from tests.decoder.quantised_checkpoints import FAMILIES, FORMATS, stored
from tests.decoder.quantised_formats import (
    AWQ_ORDER,
    AutoRound,
    Awq,
    Exl2,
    Float4,
    Float8,
    Gptq,
    Int8,
    IntPacked,
    Mxfp8,
    Nf4,
    words,
)
from tests.weight_plans import assert_loaded, even_plan, fine_units, loaded

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tests.decoder.quantised_formats import Format

__all__ = ["fine_units"]  # a fixture


def test_words() -> None:
    """The lowest bits of a word are its first number's, or those of the one that the order begins with."""
    numbers = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]])
    assert [f"{word & 0xFFFFFFFF:08x}" for word in words(numbers, 4).flatten().tolist()] == ["76543210", "fedcba98"]
    assert f"{words(numbers, 4, AWQ_ORDER)[0].item():08x}" == "75316420"
    assert f"{words(numbers, 8)[0, 1].item():08x}" == "07060504"


def _field(word: Tensor, place: int, bits: int) -> int:
    return int(word.item()) >> bits * place & (1 << bits) - 1


def _gptq(of: dict[str, Tensor], n: int, k: int, bits: int, plus: int) -> float:
    per = 32 // bits
    inputs = len(of[".qweight"]) * per
    g = int(of[".g_idx"][k].item()) if ".g_idx" in of else k * len(of[".scales"]) // inputs
    zero = _field(of[".qzeros"][g, n // per], n % per, bits) + plus
    return (_field(of[".qweight"][k // per, n], k % per, bits) - zero) * of[".scales"][g, n].item()


def _awq(of: dict[str, Tensor], n: int, k: int) -> float:
    place = (0, 4, 1, 5, 2, 6, 3, 7)[n % 8]
    g = k * len(of[".scales"]) // len(of[".qweight"])
    code, zero = (_field(of[name][at, n // 8], place, 4) for name, at in ((".qweight", k), (".qzeros", g)))
    return (code - zero) * of[".scales"][g, n].item()


def _packed(of: dict[str, Tensor], n: int, k: int, bits: int) -> float:
    per, half = 32 // bits, 1 << bits - 1
    inputs = int(of[".weight_shape"][1].item())
    g = int(of[".weight_g_idx"][k].item()) if ".weight_g_idx" in of else k * of[".weight_scale"].shape[1] // inputs
    code, zero = _field(of[".weight_packed"][n, k // per], k % per, bits) - half, 0
    if ".weight_zero_point" in of:
        zero = _field(of[".weight_zero_point"][n // per, g], n % per, bits) - half
    return (code - zero) * of[".weight_scale"][n, g].item()


def _float8(of: dict[str, Tensor], n: int, k: int, block: tuple[int, int]) -> float:
    scale = of.get(".weight_scale_inv", of.get(".weight_scale", torch.ones(())))
    if scale.numel() > 1:
        scale = scale[n // block[0], k // block[1] if block[1] else 0]
    return of[".weight"][n, k].float().item() * scale.item()


def _float4(of: dict[str, Tensor], n: int, k: int) -> float:
    code = _field(of[".weight_packed" if ".weight_packed" in of else ".weight"][n, k // 2], k % 2, 4)
    exponent, fraction = code >> 1 & 3, code & 1
    magnitude = (1 + fraction / 2) * 2 ** (exponent - 1) if exponent else fraction / 2
    scales = of[".weight_scale"]
    scale = (
        scales[n, k // 16].float().item()
        if scales.dtype.is_floating_point
        else 2.0 ** (scales[n, k // 32].item() - 127)
    )
    factor = of.get(".weight_scale_2", 1 / of.get(".weight_global_scale", torch.ones(())))
    return (-magnitude if code >> 3 else magnitude) * scale * factor.item()


def _int8(of: dict[str, Tensor], n: int, k: int) -> float:
    if ".SCB" in of:
        return of[".weight"][n, k].item() * of[".SCB"][n].item() / 127

    def own(numbers: Tensor) -> float:
        if numbers.ndim == 1:
            return numbers.item()
        return numbers[n, k * numbers.shape[1] // of[".weight"].shape[1]].item()

    zero = own(of[".weight_zero_point"]) if ".weight_zero_point" in of else 0
    return (of[".weight"][n, k].item() - zero) * own(of[".weight_scale"])


def _table(of: dict[str, Tensor], n: int, k: int) -> float:
    (state,) = (json.loads(bytes(of[name].tolist())) for name in of if ".quant_state." in name)
    at = n * state["shape"][1] + k
    byte = of[".weight"].view(torch.uint8).flatten()[at // 2].item()
    block = at // 64
    scale = of[".weight.absmax"][block].item()
    if ".weight.nested_absmax" in of:
        level, top = of[".weight.nested_quant_map"][int(scale)], of[".weight.nested_absmax"][block // 256]
        scale = (level * top + state["nested_offset"]).item()
    return of[".weight.quant_map"][int(byte) & 15 if at % 2 else int(byte) >> 4].item() * scale


def _exl2(of: dict[str, Tensor], n: int, k: int) -> float:
    at = int(of[".q_invperm"][k].item())
    groups, row = of[".q_groups"].view(-1, 2).tolist(), 0
    for group, (bits, first) in enumerate(groups):
        end = groups[group + 1][1] if group + 1 < len(groups) else len(of[".q_weight"])
        count = (end - first) * 32 // bits
        if at < row + count:
            break
        row += count
    stream = sum((int(word) & 0xFFFFFFFF) << 32 * i for i, word in enumerate(of[".q_weight"][first:end, n].tolist()))
    code = (stream >> bits * (at - row)) & (1 << bits) - 1
    scale = float((_field(of[".q_scale"][group, n // 8], n % 8, 4) + 1) ** 2 / 256 * of[".q_scale_max"][group].item())
    return float((code - (1 << bits - 1)) * scale)


def _mxfp8(of: dict[str, Tensor], n: int, k: int) -> float:
    return float(of[".weight"][n, k]) * 2.0 ** int(of[".weight_scale"][n, k // 32].item() - 127)


def _element(form: Format, of: dict[str, Tensor], n: int, k: int) -> float:
    """Return the element of a matrix that its tensors stand for."""
    form = form.packed if isinstance(form, AutoRound) else form
    if isinstance(form, Gptq):
        return _gptq(of, n, k, form.bits, int(form.version == 1))
    if isinstance(form, IntPacked):
        return _packed(of, n, k, form.bits)
    if isinstance(form, Float8):
        return _float8(of, n, k, form.block)
    others: dict[type[Format], Callable[..., float]] = {
        Awq: _awq,
        Float4: _float4,
        Int8: _int8,
        Nf4: _table,
        Exl2: _exl2,
        Mxfp8: _mxfp8,
    }
    return others[type(form)](of, n, k)


@pytest.mark.parametrize("form", FORMATS)
def test_elements_are_what_the_format_says(form: str) -> None:
    """The values beside a quantised model are those that its codes, zeros and scales stand for, near the original's."""
    directory, twin = stored("llama", form, 1)
    parts, values = saved_values(directory), saved_values(twin)
    random = Random(form)
    stems = [name.removesuffix(".weight") for name in values if "_proj.weight" in name]
    stems += ["lm_head"] if FORMATS[form].head else []
    assert len(stems) == 7 + FORMATS[form].head
    for stem in stems:
        of = {name.removeprefix(stem): tensor for name, tensor in parts.items() if name.startswith(f"{stem}.")}
        matrix = values[f"{stem}.weight"]
        for _ in range(20):
            n, k = (random.randrange(size) for size in matrix.shape)
            found = _element(FORMATS[form], of, n, k)
            assert matrix[n, k].item() == pytest.approx(found, rel=2e-7), (stem, n, k)
        assert 0.15 < matrix.std() < 0.25


@pytest.mark.parametrize(("family", "form"), [("llama", form) for form in FORMATS] + [(f, "awq g64") for f in FAMILIES])
def test_plans_cut_them(family: str, form: str) -> None:
    """They are what their configs say, and arrive on every device as they are stored."""
    directory, twin = stored(family, form, 1 if family == "llama" else 2)
    spec = tpplan.read_model(directory)
    assert spec.parameter_count == tpplan.read_model(twin).parameter_count
    assert spec.weight_format.lower().startswith(form[:3])
    assert spec.weight_bytes < tpplan.read_model(twin).weight_bytes / 2
    plan = even_plan(spec, 2, "gather" if spec.gather_only else "reduce")
    assert all(memory.weights_bytes for memory in plan.memory)
    assert_loaded(plan, spec, loaded(plan, directory), saved_values(directory))
