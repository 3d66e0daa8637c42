"""Conversion of a device's quantised matrices from the stored format to the decoder's layout, in the same memory.

GPTQ (arXiv:2210.17323) and AWQ (arXiv:2306.00978) store the transposed matrix, in words of several columns or rows. The
decoder's layout has the codes of a row one after the other. It takes no more memory, so that the plan's bytes stay
right. For shapes see :mod:`tpplan.decoder.weights.quantised`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from math import gcd
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from attrs import frozen
from torch import Tensor

from tpplan.decoder.model.stored import (
    ABSMAX,
    EXL2,
    FACTOR,
    FLOAT4,
    INT8_SCALES,
    INVERSE,
    NIBBLE,
    QUANT_STATE,
    SCALES,
    WORD,
    Layout,
    config_values,
    layout_of,
    size_of,
)
from tpplan.decoder.weights.quantised import (
    ORDER,
    Exl2Matrix,
    Float4Matrix,
    Float8Matrix,
    IntMatrix,
    NestedScales,
    Quantised,
    TableMatrix,
)
from tpplan.errors import ModelError, RequestError
from tpplan.files.jsontext import read_json
from tpplan.models.formats.scheme import Scheme
from tpplan.models.formats.storage import split_name
from tpplan.weights import TensorSlice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


#: Codes to unpack at a time; each takes a few bytes of temporary memory.
_AT_ONCE: Final = 2**20


def unpacked(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Unpack the codes in words, one code to a byte.

    Args:
        words: packed codes, ``int32``.
        bits: bits of a code.
        dim: dimension along which to put the codes of a word.
        order: position in a word of the first code, the second, and so on, counted from the lowest bits; ascending if
            not given.
    """
    words = words.movedim(dim, -1)
    if not words.is_contiguous() or words.stride(-1) > 1:  # torch says that rows of one word are, with any stride
        words = words.clone(memory_format=torch.contiguous_format)
    codes = words.view(torch.uint8)
    if bits == NIBBLE:
        codes = torch.stack((codes & 15, codes >> NIBBLE), dim=-1).flatten(-2)
    if order:
        codes = torch.unflatten(codes, -1, (-1, len(order)))[..., list(order)].flatten(-2)
    return codes.movedim(-1, dim)


def packed(codes: Tensor, order: Sequence[int]) -> Tensor:
    """Pack each eight 4-bit codes along the last dimension into a word.

    Args:
        codes: one code to a byte.
        order: which of the eight codes is in the lowest bits of the word, the next ones, and so on.
    """
    eights = torch.unflatten(codes, -1, (-1, len(order)))[..., list(order)]
    return (eights[..., ::2] | eights[..., 1::2] << NIBBLE).flatten(-2).view(torch.int32)


def rearranged(words: Tensor, size: tuple[int, int], bits: int, some: Callable[[Tensor, int, int], Tensor]) -> Tensor:
    """Rearrange stored codes into the decoder's layout, in the same memory.

    Args:
        words: stored codes, ``int32``, contiguous.
        size: rows and columns of the matrix.
        bits: bits of a code.
        some: returns the codes of rows ``start`` to ``end`` from words, ``uint8 [end - start, K]``.
    """
    rows, columns = size
    memory = words.view(-1).view(torch.int32 if bits == NIBBLE else torch.uint8)
    to = memory.view(rows, -1)
    words = words.clone()
    step = max(WORD, _AT_ONCE // columns // WORD * WORD)  # rows of whole words, where words pack rows
    for start in range(0, rows, step):
        end = min(start + step, rows)
        codes = some(words, start, end)
        to[start:end] = packed(codes, ORDER) if bits == NIBBLE else codes
    return to


_T = TypeVar("_T")

#: Attribute of a tensor whose memory is rearranged: the converted matrix, or None while the conversion runs.
_CONVERTED: Final = "tpplan_matrix"


@frozen
class _Stored:
    """A quantised matrix on one device in its stored format.

    Attributes:
        name: name of the matrix, without a suffix.
        tensors: the device's tensors of the matrix, by suffix.
        slices: the parts of the whole tensors that these are, by suffix.
        scheme: quantisation scheme of the checkpoint.
    """

    name: str
    tensors: Mapping[str, Tensor]
    slices: Mapping[str, TensorSlice]
    scheme: Scheme

    def numbers(self, suffix: str, dim: int, per: int = 1) -> Tensor:
        """Return the rows, columns or groups of the whole matrix that a tensor has, with ``per`` in each element."""
        part = self.slices[suffix]
        ranges = part.ranges if part.dim == dim else [(0, part.whole[dim])]
        return torch.cat([torch.arange(start * per, end * per) for start, end in ranges])


def matrices_of(
    weights: Mapping[str, Tensor], slices: Mapping[str, TensorSlice], scheme: Scheme
) -> dict[str, Quantised]:
    """Return the quantised matrices of a device by name, ``….weight``.

    The memory of tensors of integers is rearranged by the first call; later calls return the same matrices.

    Args:
        weights: the device's tensors by name in the checkpoint, contiguous.
        slices: the parts of the whole tensors that these are, by name.
        scheme: quantisation scheme of the checkpoint, whose matrices
            :func:`tpplan.decoder.model.stored.check_formats` accepts.

    Raises:
        ModelError: groups or blocks cannot be determined.
        RequestError: an earlier call was interrupted.
    """
    stems: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        stem, suffix = split_name(name)
        stems.setdefault(stem, {})[suffix] = tensor
    found: dict[str, Quantised] = {}
    layout = layout_of(scheme)
    for stem, tensors in stems.items():
        stored = _Stored(stem, tensors, {suffix: slices[stem + suffix] for suffix in tensors}, scheme)
        codes = next((tensors[suffix] for suffix in FLOAT4 if suffix in tensors), None)
        if layout and layout.codes in tensors and tensors[layout.codes].dtype == torch.int32:
            found[f"{stem}.weight"] = convert_once(tensors[layout.codes], stem, partial(_ints, stored, layout))
        elif EXL2 in tensors:
            found[f"{stem}.weight"] = _exl2(stored)
        elif ABSMAX in tensors:
            found[f"{stem}.weight"] = _table(stored)
        elif codes is not None and codes.dtype == torch.int8:
            found[f"{stem}.weight"] = convert_once(codes, stem, partial(_int8, stored))
        elif codes is not None and codes.dtype == torch.uint8:
            found[f"{stem}.weight"] = _float4(stored)
        elif codes is not None and codes.dtype.is_floating_point and codes.dtype.itemsize == 1:
            found[f"{stem}.weight"] = _floats(stored)
    return found


def convert_once(memory: Tensor, name: str, make: Callable[[], _T]) -> _T:
    """Convert a tensor in its own memory by the first call, and return the result of that in later ones.

    Args:
        memory: the tensor.
        name: name of the matrix in the error.
        make: rearranges the tensor's memory, and calls :func:`begin_overwriting` before it overwrites anything.

    Raises:
        RequestError: an earlier call was interrupted while it overwrote the tensor.
    """
    if not hasattr(memory, _CONVERTED):
        setattr(memory, _CONVERTED, make())
    found: _T | None = getattr(memory, _CONVERTED)
    if found is None:
        raise RequestError(f"{name} was left half rearranged", "load the weights again")
    return found


def begin_overwriting(memory: Tensor) -> None:
    """Note that a tensor is being overwritten from here on, see :func:`convert_once`."""
    setattr(memory, _CONVERTED, None)


def _ints(stored: _Stored, layout: Layout) -> IntMatrix:
    """Rearrange a matrix of integers.

    Raises:
        ModelError: its groups cannot be determined.
    """
    words, scales, zeros = (stored.tensors.get(suffix) for suffix in (layout.codes, layout.scales, layout.zeros))
    if words is None or scales is None:
        raise ModelError(f"{stored.name} has no {layout.scales}", "fetch the checkpoint again")
    out, into = (1, 0) if layout.transposed else (0, 1)
    bits, group = _bits_and_group(stored, layout, into)
    per = WORD // bits
    rows = stored.numbers(layout.codes, out, per if layout.packs_rows else 1)
    columns = stored.numbers(layout.codes, into, 1 if layout.packs_rows else per)
    some, step, order = _groups(stored, layout, columns, stored.numbers(layout.scales, into), group)
    values = scales.mT if layout.transposed else scales
    values = _some(values, _places(rows, stored.numbers(layout.scales, out)), some)
    wide = None
    if zeros is not None:
        wide = unpacked(zeros, bits, out, layout.order)
        wide = wide.mT if layout.transposed else wide
        wide = _some(wide, _places(rows, stored.numbers(layout.zeros, out, per)), some)
        if bits == NIBBLE and not wide.numel() % (WORD // NIBBLE):
            wide = packed(wide.flatten(), range(WORD // NIBBLE))

    def part(words: Tensor, start: int, end: int) -> Tensor:
        by = per if layout.packs_rows else 1
        own = words.narrow(out, start // by, (end - start) // by)
        codes = unpacked(own, bits, out if layout.packs_rows else into, layout.order)
        codes = codes.mT if layout.transposed else codes
        return codes.contiguous() if order is None else codes[:, order]

    begin_overwriting(words)
    return IntMatrix(
        codes=rearranged(words, (len(rows), len(columns)), bits, part),
        scales=_reuse_memory(scales, values),
        zeros=None if zeros is None or wide is None else _reuse_memory(zeros, wide),
        plus=int(stored.scheme.zeros_less_one),
        group=step,
        bits=bits,
        columns=None if order is None else _reuse_memory(stored.tensors[layout.groups], order.int()),
    )


def _groups(
    stored: _Stored, layout: Layout, columns: Tensor, owned: Tensor, group: int
) -> tuple[Tensor, int, Tensor | None]:
    """Return the groups of a matrix's columns, in order.

    Args:
        stored: the matrix.
        layout: layout of its format.
        columns: numbers of its columns in the whole matrix.
        owned: numbers of the groups whose scales the device has.
        group: columns of a group in the whole matrix.

    Returns:
        Indices of the groups among ``owned``; columns that share a scale here; and the column order that brings the
        columns of each group together, None if they are together.

    Raises:
        ModelError: the device does not have the groups of all its columns, or groups differ in size.
    """
    groups, order = columns // group, None
    if layout.groups in stored.tensors:
        index = stored.tensors[layout.groups]
        groups = index.cpu().long()[_places(columns, stored.numbers(layout.groups, 0))]
    places = _places(groups, owned).clamp(max=len(owned) - 1)
    if not torch.equal(owned[places], groups):
        what = f"{stored.name} has columns whose scales are those of other devices' columns: its rows are permuted"
        raise ModelError(what, "plan again with --layout gather")
    if not torch.equal(groups, columns // group):
        order = places.argsort(stable=True)
        places = places[order]
    step = gcd(group, int(columns[0]))
    some = places[::step]
    if not torch.equal(some.repeat_interleave(step)[: len(places)], places):
        raise ModelError(f"{stored.name} has groups of other sizes than {group}", "quantise it again")
    return some, step, None if order is None else order.to(stored.tensors[layout.codes].device)


def _bits_and_group(stored: _Stored, layout: Layout, into: int) -> tuple[int, int]:
    """Return the bits of a code and the columns of a group.

    Raises:
        ModelError: they cannot be determined, or the decoder does not support codes of these bits.
    """
    shapes = {suffix: part.whole for suffix, part in stored.slices.items()}
    codes, count = shapes[layout.codes], shapes[layout.scales][into]
    shape = stored.tensors.get(".weight_shape")
    bits = layout.bits_of(shapes)
    if not bits and shape is not None and int(shape[-1]) > 0:
        bits = codes[into] * WORD // int(shape[-1])
    if bits not in layout.bits:
        raise ModelError(f"{stored.name} has codes of {bits} bits", f"the decoder computes with {layout.bits}")
    width = layout.width_of(codes, bits)
    group = size_of(width, count, config_values(stored.scheme, "group"))
    if not group:
        what = f"{stored.name} has {count} scales for {width} columns"
        raise ModelError(what, "name the group_size in config.json")
    return bits, group


def _floats(stored: _Stored) -> Float8Matrix:
    """Return a matrix of 8-bit floats, with a scale for each of its blocks.

    Raises:
        ModelError: its scales are missing, or its blocks cannot be determined.
    """
    codes = stored.tensors[".weight"]
    suffix = next((each for each in SCALES if each in stored.tensors), "")
    if not suffix:
        raise ModelError(f"{stored.name} has no scale", "fetch the checkpoint again")
    scales, part = stored.tensors[suffix], stored.slices[suffix]
    height, width = stored.slices[".weight"].whole
    is_one = part.whole in {(), (1,)} and height > 1
    if is_one or len(part.whole) == 1 or part.whole == (height, 1):
        return Float8Matrix(codes, _wide(scales).view(-1, 1), len(codes) if is_one else 1, codes.shape[1])
    sizes = []
    for size, count, key in ((height, part.whole[0], "rows"), (width, part.whole[1], "columns")):
        block = size_of(size, count, config_values(stored.scheme, key))
        if not block:
            raise ModelError(
                f"{stored.name} has {count} scales for {size} {key}", "name the block's size in config.json"
            )
        sizes.append(block)
    scales, sizes = _scales_of(stored, ".weight", suffix, sizes)
    is_mx = sizes[0] == 1 and scales.dtype.itemsize == 1  # so many scales stay as they are
    return Float8Matrix(codes, scales.view(torch.uint8) if is_mx else _wide(scales), *sizes)


def _wide(scales: Tensor) -> Tensor:
    """Return scales in at least 16 bits: powers of two, which bfloat16 holds exactly."""
    return scales.bfloat16() if scales.dtype.itemsize == 1 else scales


def _scales_of(
    stored: _Stored, codes: str, suffix: str, sizes: Sequence[int], *, per: int = 1
) -> tuple[Tensor, list[int]]:
    """Return the scales of a device's part of a matrix, and the rows and columns that share one there.

    Args:
        stored: the matrix.
        codes: suffix of its codes.
        suffix: suffix of its scales, which have two dimensions.
        sizes: rows and columns that share a scale in the whole matrix.
        per: columns in an element of the codes.
    """
    scales, part, found = stored.tensors[suffix], stored.slices[codes], []
    if scales.dtype.itemsize == 1:
        scales = scales.view(torch.uint8)  # torch cannot index float8
    for dim, block in enumerate(sizes):
        by = per if dim else 1
        own = stored.numbers(codes, dim, by)
        ranges = part.ranges if part.dim == dim else []
        starts, lengths = [start * by for start, _ in ranges], [(end - start) * by for start, end in ranges[:-1]]
        found.append(gcd(block, *starts, *lengths))
        some = _places((own // block)[:: found[dim]], stored.numbers(suffix, dim))
        scales = scales.index_select(dim, some.to(scales.device)) if not _is_all(some, scales.shape[dim]) else scales
    return scales.view(stored.tensors[suffix].dtype) if scales.dtype == torch.uint8 else scales, found


def _float4(stored: _Stored) -> Float4Matrix:
    """Return a matrix of 4-bit floats, in place but for the factor of its scales, which compressed-tensors inverts."""
    suffix = next(each for each in FLOAT4 if each in stored.tensors)
    is_nv = stored.tensors[".weight_scale"].dtype == torch.float8_e4m3fn
    scales, (_, group) = _scales_of(stored, suffix, ".weight_scale", (1, 16 if is_nv else 32), per=2)
    factor, inverse = stored.tensors.get(FACTOR), stored.tensors.get(INVERSE)
    if inverse is not None:
        factor = convert_once(inverse, stored.name, partial(_inverted, inverse))
    return Float4Matrix(
        stored.tensors[suffix],
        scales if is_nv else scales.view(torch.uint8),
        group,
        None if factor is None else factor.view(1),
    )


def _int8(stored: _Stored) -> IntMatrix:
    """Make codes from 0 of integers that are not packed, in their own memory, and likewise of zero points.

    Raises:
        ModelError: the groups cannot be determined, or bitsandbytes has stored the codes in another order.
    """
    suffix = next((each for each in INT8_SCALES if each in stored.tensors), "")
    if not suffix:
        raise ModelError(f"{stored.name} has no scale", "fetch the checkpoint again")
    order = stored.tensors.get(".weight_format")
    if order is not None and int(order):
        what = f"{stored.name} is in the order {int(order)} of bitsandbytes, the decoder reads rows (0)"
        raise ModelError(what, "save the model again with a newer bitsandbytes")
    codes, zeros, whole = (
        stored.tensors[".weight"],
        stored.tensors.get(".weight_zero_point"),
        stored.slices[suffix].whole,
    )
    width, group = stored.slices[".weight"].whole[1], 0
    if len(whole) == 2:  # noqa: PLR2004 (dimensions)
        group = size_of(width, whole[1], config_values(stored.scheme, "group"))
        if not group:
            what = f"{stored.name} has {whole[1]} scales for {width} columns"
            raise ModelError(what, "name the group_size in config.json")
    begin_overwriting(codes)
    scales = stored.tensors[suffix]
    if suffix == ".SCB":
        scales.div_(127)
    for each in (codes, zeros):
        if each is not None:
            each.view(torch.uint8).bitwise_xor_(128)
    tensors = [scales, *([] if zeros is None else [zeros])]
    if group:
        names = [suffix, ".weight_zero_point"]
        (scales, (_, group)), *more = [
            _scales_of(stored, ".weight", name, (1, group)) for name, _ in zip(names, tensors, strict=False)
        ]
        found = [scales, *(each for each, _ in more)]
    else:
        found, group = [each.view(-1, 1).expand(len(codes), 1) for each in tensors], codes.shape[1]
    return IntMatrix(
        codes=codes.view(torch.uint8),
        scales=found[0],
        zeros=None if zeros is None else found[1].view(torch.uint8),
        plus=0,
        group=group,
        bits=8,
    )


def _table(stored: _Stored) -> TableMatrix:
    """Return a matrix of bitsandbytes' 4-bit codes, in place.

    Raises:
        ModelError: its description cannot be read, or a block has parts of two rows.
    """
    state = next(tensor for suffix, tensor in stored.tensors.items() if suffix.startswith(QUANT_STATE))
    try:
        told: Any = read_json(bytes(state.tolist()))
        (_, width), block = (int(size) for size in told["shape"]), int(told["blocksize"])
        size, offset = int(told.get("nested_blocksize", 0)), float(told.get("nested_offset", 0))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"the quant_state of {stored.name} does not tell its shape", "fetch the checkpoint again"
        ) from error
    if width % block:
        what = f"{stored.name} has blocks of {block} elements in rows of {width}"
        raise ModelError(what, "quantise it with blocks that divide the rows")
    codes, scales = stored.tensors[".weight"], stored.tensors[ABSMAX]
    codes, scales = codes.view(-1).view(torch.uint8).view(-1, width // 2), scales.view(-1, width // block)
    nested = None
    if scales.dtype == torch.uint8:
        part = stored.slices[ABSMAX]
        ranges = part.ranges if part.dim == 0 else [(0, part.whole[0])]
        lengths = [(end - start) * block // width for start, end in ranges]
        starts = [0, *accumulate(lengths)][: len(ranges)]
        nested = NestedScales(
            stored.tensors[".weight.nested_quant_map"],
            stored.tensors[".weight.nested_absmax"],
            size,
            torch.tensor(starts, device=codes.device),
            torch.tensor([start for start, _ in ranges], device=codes.device),
            torch.full((len(ranges),), offset, device=codes.device),
        )
    return TableMatrix(codes, scales, stored.tensors[".weight.quant_map"], block, nested)


def _exl2(stored: _Stored) -> Exl2Matrix:
    """Return a matrix in EXL2, in place but for the order of its inputs.

    Raises:
        ModelError: its groups are not those of its codes.
    """
    codes, scales, largest = (stored.tensors[suffix] for suffix in (EXL2, ".q_scale", ".q_scale_max"))
    order = stored.tensors.get(".q_perm")
    if order is None:
        inverse = stored.tensors[".q_invperm"]
        order = convert_once(inverse, stored.name, partial(_argsort, inverse))
    inputs, told = len(order), stored.tensors[".q_groups"].tolist()
    ends, groups, places, shifts = [*told[3::2], len(codes)], list[Tensor](), list[Tensor](), list[Tensor]()
    for bits, first, end in zip(told[::2], told[1::2], ends, strict=True):
        left = inputs - sum(map(len, groups))
        count = min((end - first) * WORD // bits, left) if 0 < bits <= 2 * NIBBLE else 0
        at = first * WORD + bits * torch.arange(max(0, count), dtype=torch.int32)
        groups.append(torch.full_like(at, len(groups)))
        places.append(at // 8)
        shifts.append(torch.stack((16 - bits - at % 8, torch.full_like(at, 16 - bits))))
    if sum(map(len, groups)) < inputs or len(groups) != len(scales) or not all(map(len, groups)):
        what = f"the groups of {stored.name} are not those of {len(codes)} rows of words"
        raise ModelError(what, "fetch the checkpoint again")
    of_columns = [torch.cat(each, -1).to(codes.device) for each in (groups, places, shifts)]
    return Exl2Matrix(codes, scales, largest, of_columns[0], of_columns[1], of_columns[2].char(), order)


def _argsort(tensor: Tensor) -> Tensor:
    order = tensor.argsort()
    begin_overwriting(tensor)
    return tensor.copy_(order)


def _inverted(tensor: Tensor) -> Tensor:
    begin_overwriting(tensor)
    return tensor.reciprocal_()


def _places(numbers: Tensor, owned: Tensor) -> Tensor:
    """Return the indices of numbers among the ascending numbers ``owned``."""
    return torch.searchsorted(owned, numbers.contiguous())


def _is_all(some: Tensor, size: int) -> bool:
    return len(some) == size and torch.equal(some, torch.arange(size))


def _some(values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return some rows and columns of a matrix; all of them, the usual case, are not copied."""
    if not _is_all(rows, len(values)):
        values = values[rows.to(values.device)]
    return values if _is_all(columns, values.shape[1]) else values[:, columns.to(values.device)]


def _reuse_memory(memory: Tensor, values: Tensor) -> Tensor:
    """Return values in the memory of a tensor that is no longer needed, or in a copy if it is too small."""
    values = values.clone(memory_format=torch.contiguous_format)
    if values.nbytes > memory.nbytes:
        return values
    to = memory.view(-1).view(torch.uint8)[: values.nbytes].view(values.dtype).view(values.shape)
    return to.copy_(values)
