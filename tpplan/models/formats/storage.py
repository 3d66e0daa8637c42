"""The tensors that store a matrix of the unquantised model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.core.model import Segment
from tpplan.models.formats.table import FORMATS, SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.core.model import Parameter
    from tpplan.models.checkpoint import Tensor
    from tpplan.models.formats.scheme import Form, Scheme
    from tpplan.models.formats.table import Dim

    Dims = tuple[tuple[Segment, ...], ...]

#: Suffixes with more than a dot and one word.
_LONG: Final = tuple(sorted((suffix for suffix in SUFFIXES if suffix.rfind(".") != 0), key=len, reverse=True))


class Assumed(NamedTuple):
    """A tensor as the config alone describes it: its dtype, and its number of dimensions if the format has several."""

    dtype: str
    rank: int | None = None


class Stored(NamedTuple):
    """How a matrix is stored.

    Attributes:
        parameters: the stored tensors.
        suffixes: suffixes of their names.
        text: display name of the format; the dtype if the matrix is not quantised.
        gather_only: reason why the inputs cannot be cut; empty if they can.
    """

    parameters: tuple[Parameter, ...]
    suffixes: tuple[str, ...]
    text: str
    gather_only: str = ""


def split_name(name: str) -> tuple[str, str]:
    """Split a tensor's name into its module's name and the suffix of its format, empty if there is none."""
    stem, _, tail = name.rpartition(".")
    if f".{tail}" in SUFFIXES:
        return stem, f".{tail}"
    if name.endswith(_LONG):
        suffix = next(suffix for suffix in _LONG if name.endswith(suffix))
        return name.removesuffix(suffix), suffix
    return name, ""


def store(parameter: Parameter, name: str, form: Form | Scheme, found: Mapping[str, Tensor | Assumed]) -> Stored | None:
    """Return how the format ``name`` stores a matrix, or None if the tensors do not match it.

    Args:
        parameter: the matrix.
        name: name of the format.
        form: what the config says of the matrix's form, with parameters of the format.
        found: tensors of the checkpoint by suffix; without a checkpoint, what to assume of them.
    """
    kind = FORMATS[name]
    inputs = sum(segment.length for segment in inputs_of(parameter))
    known = form.parameters(inputs)
    fits: list[tuple[str, str, tuple[Dim, ...], Dims]] = []
    for suffix, piece in kind.pieces.items():
        if suffix not in found:
            continue
        tensor = found[suffix]
        dtype, shape = tensor.dtype, None if isinstance(tensor, Assumed) else tensor.shape
        shapes = piece.shapes
        if isinstance(tensor, Assumed):
            shapes = tuple(words for words in shapes if tensor.rank in {None, len(words)})[:1]
        fit = next(
            ((words, dims) for words in shapes if (dims := _dims(words, parameter, shape, known)) is not None), None
        )
        if fit is None or dtype not in piece.dtypes:
            return None
        fits.append((suffix, dtype, *fit))
    whole = known.get("group", 0) >= inputs
    gather_only = kind.gather_only or ("" if whole else _permutation(name, form, found))
    stem = split_name(parameter.name)[0]
    parameters = tuple(
        evolve(
            parameter,
            name=stem + suffix,
            dtype=dtype,
            dims=dims,
            out=_out(words, parameter),
            home=_home(parameter, gather_only),
        )
        for suffix, dtype, words, dims in fits
    )
    text = kind.text.removesuffix(" g{group}") if whole else kind.text
    return Stored(parameters, tuple(suffix for suffix, *_ in fits), text.format_map(_Filled(known)), gather_only)


class _Filled(dict[str, int]):
    """Parameters for a format's text; unknown ones stay in braces."""

    def __missing__(self, key: str) -> str:
        return f"{{{key}}}"


def _permutation(name: str, form: Form | Scheme, found: Mapping[str, Tensor | Assumed]) -> str:
    """Return the reason why neighbouring inputs may belong to different groups of scales; empty if they do not."""
    if name == "int-packed" and ".weight_g_idx" in found:
        return "compressed-tensors stores weight_g_idx where inputs are in another order than their groups"
    return _PERMUTED[form.permuted] if name == "gptq" and ".g_idx" in found and form.permuted is not False else ""


_PERMUTED: Final = {
    True: "GPTQ with desc_act permutes the rows of every matrix",
    None: "the config does not say whether GPTQ permuted the rows (desc_act), and their g_idx says that it may have",
}


def inputs_of(parameter: Parameter) -> tuple[Segment, ...]:
    """Return the segments of a matrix's inputs."""
    return _sides(parameter)["in"]


def _sides(parameter: Parameter) -> dict[str, tuple[Segment, ...]]:
    """Return the segments that the words ``out``, ``in`` and ``flat`` refer to."""
    last = len(parameter.dims) - 1
    out = last - 1 if parameter.out is None else parameter.out
    outputs, inputs = parameter.dims[out], parameter.dims[2 * last - 1 - out]
    width = sum(segment.length for segment in inputs)
    return {
        "out": outputs,
        "in": inputs,
        "flat": tuple(Segment(s.axis, s.length * width, shared=s.shared) for s in outputs),
        "rows": parameter.dims[-2],
        "cols": parameter.dims[-1],
    }


def _dims(
    words: tuple[Dim, ...], parameter: Parameter, shape: tuple[int, ...] | None, known: dict[str, int]
) -> Dims | None:
    """Return the dimensions of a stored tensor, or None if it cannot have this shape."""
    sides = _sides(parameter)
    wanted = [
        pair
        for word in words
        for pair in (
            [(word, dim) for dim in parameter.dims[:-2]] if word.side == "lead" else [(word, sides.get(word.side))]
        )
    ]
    if shape is not None and len(shape) != len(wanted):
        return None
    dims = []
    for i, (word, segments) in enumerate(wanted):
        length = None if shape is None else shape[i]
        fit: tuple[Segment, ...] | None = None
        if segments is not None:
            fit = word.fit(segments, length, known)
        elif not word.side.isdigit():
            fit = None if length is None else (Segment(None, length),)
        elif length in {None, int(word.side)}:
            fit = (Segment(None, int(word.side)),)
        if fit is None:
            return None
        dims.append(fit)
    return tuple(dims)


def _out(words: tuple[Dim, ...], parameter: Parameter) -> int | None:
    """Return which stored dimension holds the outputs."""
    leading = len(parameter.dims) - len(("in", "out"))
    holding = {"out", "flat", "rows" if parameter.out in {None, leading} else "cols"}
    at = next((i for i, word in enumerate(words) if word.side in holding), None)
    return at if at is None or words[0].side != "lead" else at - 1 + leading


def _home(parameter: Parameter, gather_only: str) -> Axis | None:
    """Return where an uncut part of a matrix is needed: with its outputs.

    Where the outputs are the residual stream and the layout is open, ``reduce`` needs it with the inputs and ``gather``
    with the outputs; every device in use is the answer that is right for both.
    """
    out = next((segment.axis for segment in _sides(parameter)["out"] if segment.axis), None)
    return parameter.home or (None if out is Axis.RESIDUAL and not gather_only else out)
