"""Table of weight formats: a line for each tensor that stores a matrix, in a compact notation.

A line has the suffix that is appended to the name of the matrix (``-`` for none; with ``?`` if the tensor is
optional), its possible dtypes, and the words of its dimensions. ``|`` separates alternative shapes; an empty shape is a
scalar. A dimension is

======== =================================================================================
``out``  the outputs of the matrix, and cut with them
``in``   its inputs
``lead`` its dimensions before these two (experts in one tensor)
``rows`` the first of these two, be it outputs or inputs; ``cols`` the second
``flat`` all its elements, row after row of outputs, and cut with the outputs
``any``  of any length, never cut
``16``   of this length, never cut
======== =================================================================================

preceded by ``~`` if it has this length but is never cut, and
followed by ``^n`` if it is padded to whole blocks of n, which no cut may separate, and by ``*n/m`` if n stored elements
represent m; n and m may be parameters of the format such as ``bits``. A dimension that divides evenly is cut with the
matrix. A dimension that does not (such as scales of a ragged block, or of a block that two fused matrices share), or
that has a single element for the whole axis, is uncut: every device that needs the tensor holds all of it.

Sources: AutoGPTQ and GPTQModel (``QuantLinear``), AutoAWQ (``WQLinear_GEMM``), ExLlamaV2 (``AdaptiveGPTQ.pack``),
ExLlamaV3 (``LinearEXL3``), bitsandbytes (``QuantState.as_dict``, ``Linear8bitLt``), compressed-tensors, transformers
(``FP8Linear``, ``Mxfp4GptOssExperts``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from tpplan.core.model import Segment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WORD: Final = re.compile(
    r"(?P<whole>~)?(?P<side>[a-z]+|\d+)(?:\^(?P<pad>\d+))?(?:\*(?P<times>\w+))?(?:/(?P<over>\w+))?"
)

#: The dtypes of tables of whole numbers.
INTEGERS: Final = ("I64", "I32", "I16", "U8")

#: The dtypes of unquantised tensors.
FLOATS: Final = ("F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2")


class Dim(NamedTuple):
    """One dimension of a stored tensor; see the module's docstring."""

    side: str
    pad: int = 1
    times: str = "1"
    over: str = "1"
    whole: bool = False

    def fit(self, segments: Sequence[Segment], stored: int | None, known: dict[str, int]) -> tuple[Segment, ...] | None:
        """Return the segments of this dimension, or None if it cannot be ``stored`` elements long.

        The last group or block may be ragged; packed words must be full.

        Args:
            segments: segments of the matrix dimension that it refers to.
            stored: its length in the file; None without a file.
            known: parameters of the format; a missing one is derived from ``stored`` and added.
        """
        if stored == 0:
            return None
        length = sum(segment.length for segment in segments)
        padded = -(-length // self.pad) * self.pad
        if stored and self.times not in known and not self.times.isdigit():
            known[self.times] = max(1, stored * self._value(self.over, known) // padded)
        times = self._value(self.times, known)
        if stored and self.over not in known and not self.over.isdigit():
            known[self.over] = max(1, -(-padded * times // stored))
        over = self._value(self.over, known)
        total = -(-padded * times // over)
        packed = self.over.isdigit() and self.over != "1"
        if (stored is not None and stored != total) or (packed and padded * times % over):
            return None
        if (
            self.whole
            or any(segment.length * times % over for segment in segments)
            or (padded > length and times != over)
        ):
            return (Segment(None, total),)
        block = max(1, self.pad * times // over)
        scaled = tuple(_scaled(segment, segment.length * times // over, block) for segment in segments)
        return (*scaled, Segment(None, padded - length)) if padded > length else scaled

    @staticmethod
    def _value(word: str, known: Mapping[str, int]) -> int:
        return int(word) if word.isdigit() else known[word]


def _scaled(segment: Segment, length: int, block: int) -> Segment:
    """Return the stored segment; a single element for a whole axis (a scale) is uncut."""
    axis = segment.axis if length > 1 or segment.length == 1 else None
    return Segment(axis, length, block if axis else 1, segment.shared if axis else 0)


class Piece(NamedTuple):
    """A stored tensor: its possible dtypes and shapes (without headers, the first ones are assumed)."""

    required: bool
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[Dim, ...], ...]


class Format(NamedTuple):
    """A way of storing a matrix.

    Attributes:
        text: display name, with parameters in braces.
        pieces: the stored tensors by suffix.
        gather_only: reason why the inputs cannot be cut; empty if they can.
    """

    text: str
    pieces: dict[str, Piece]
    gather_only: str = ""

    @property
    def required(self) -> frozenset[str]:
        """The suffixes of the tensors that are not optional."""
        return frozenset(suffix for suffix, piece in self.pieces.items() if piece.required)


def _dim(word: str) -> Dim:
    match = _WORD.fullmatch(word)
    if not match:
        raise ValueError(word)
    return Dim(match["side"], int(match["pad"] or 1), match["times"] or "1", match["over"] or "1", bool(match["whole"]))


def _format(text: str, lines: str, gather_only: str = "") -> Format:
    pieces = {}
    for line in filter(str.strip, lines.splitlines()):
        suffix, dtypes, *shape = line.split(maxsplit=2)
        shapes = tuple(tuple(_dim(word) for word in part.split()) for part in "".join(shape).split("|"))
        pieces[suffix.rstrip("?").removeprefix("-")] = Piece(not suffix.endswith("?"), tuple(dtypes.split(",")), shapes)
    return Format(text, pieces, gather_only)


_SCALARS = """
    .input_scale?       F32,BF16,F16    |1|lead
    .activation_scale?  F32,BF16,F16    |1|lead
    .output_scale?      F32,BF16,F16    |1|any any any
    .k_scale?           F32,BF16,F16    |1|any any any
    .v_scale?           F32,BF16,F16    |1|any any any
    .input_scale_ub?    F32             |1
    .pre_quant_scale?   F32,BF16,F16    in
"""
_FLAT = "bitsandbytes stores 4-bit weights as one run of all rows"
_NF4 = """
    .weight                  U8,BF16,F16,F32   flat/pack 1
    .weight.absmax           U8,F32            flat/block
    .weight.quant_map        F32               any
    .weight.nested_absmax?   F32               any
    .weight.nested_quant_map? F32              any
"""
#: What HQQ says of a matrix beside it: scalars and texts.
_HQQ_TOLD = (
    *("nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale"),
    *("quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise"),
    *("optimize", "round_zero"),
)
_HQQ = """
    .W_q    {codes}
    .scale  F32,BF16,F16    {scales}
    .zero   F32,BF16,F16    {scales}
""" + "".join(f".{name}? U8,I32,I64,F32,BOOL |any\n" for name in _HQQ_TOLD)
_HQQ_FLAT = "HQQ stores weights as one run of all rows"

#: The known formats; where several could store a matrix, the first that fits its shapes does.
FORMATS: Final[dict[str, Format]] = {
    "gptq": _format(
        "GPTQ {bits}-bit g{group}",
        """
        .qweight    I32             in*bits/32 out
        .qzeros     I32             in/group out*bits/32
        .scales     F16,BF16,F32    in/group out
        .g_idx?     I32             in
        .bias?      F16,BF16,F32    out
        """,
    ),
    "awq": _format(
        "AWQ {bits}-bit g{group}",
        """
        .qweight    I32             in out*bits/32
        .qzeros     I32             in/group out*bits/32
        .scales     F16,BF16,F32    in/group out
        """,
    ),
    "fp8-block": _format(
        "FP8 block {rows}x{columns}",
        """
        .weight             F8_E4M3,F8_E5M2         lead out in
        .weight_scale_inv   F32,BF16,F16,F8_E8M0    lead out/rows in/columns
        """
        + _SCALARS,
    ),
    # DeepSeek's own files from its fourth version on: scales are powers of two, and experts have 4 bits.
    "fp8-deepseek": _format(
        "FP8 block {rows}x{columns}",
        """
        .weight     F8_E4M3         out in
        .scale      F8_E8M0,F32     out/rows in/columns
        """,
    ),
    "fp4-deepseek": _format(
        "MXFP4",
        """
        .weight     I8          out in/2
        .scale      F8_E8M0     out in/32
        """,
    ),
    "fp8-tensor": _format(
        "FP8 per tensor",
        """
        .weight         F8_E4M3,F8_E5M2     out in
        .weight_scale   F32,BF16,F16        |1
        """
        + _SCALARS,
    ),
    "fp8-channel": _format(
        "FP8 per channel",
        """
        .weight         F8_E4M3,F8_E5M2     out in
        .weight_scale   F32,BF16,F16        out 1|out
        """
        + _SCALARS,
    ),
    "fp8-block-scale": _format(
        "FP8 block {rows}x{columns}",
        """
        .weight         F8_E4M3,F8_E5M2     out in
        .weight_scale   F32,BF16,F16        out/rows in/columns
        """
        + _SCALARS,
    ),
    "fp8-tensor-inv": _format(
        "FP8 per tensor",
        """
        .weight             F8_E4M3,F8_E5M2     out in
        .weight_scale_inv   F32,BF16,F16        |1
        """
        + _SCALARS,
    ),
    "fp8-block-4d": _format(
        "FP8 block {rows}x{columns}",
        """
        .weight         F8_E4M3     out in
        .weight_scale   F32         out/rows 1 in/columns 1
        """
        + _SCALARS,
    ),
    "int4-quark": _format(
        "INT{bits} g{group}",
        """
        .weight             I32             in out*bits/32
        .weight_scale       F32,BF16,F16    in/group out
        .weight_zero_point  I32             in/group out*bits/32
        """,
    ),
    "mlx": _format(
        "MLX {bits}-bit g{group}",
        """
        .weight     U32             lead out in*bits/32
        .scales     BF16,F16,F32    lead out in/group
        .biases     BF16,F16,F32    lead out in/group
        """,
    ),
    "mlx-float": _format(
        "MLX FP{bits} g{group}",
        """
        .weight     U32     lead out in*bits/32
        .scales     U8      lead out in/group
        """,
    ),
    "mxfp4": _format(
        "MXFP4",
        """
        _blocks     U8      lead out in/32 16
        _scales     U8      lead out in/32
        """,
    ),
    # Rows are sorted by activation and packed at several widths; q_scale has one nibble per column and group.
    "exl2": _format(
        "EXL2 {bpw} bpw",
        """
        .q_weight       I32         any out^32
        .q_scale        I32         any out^32/8
        .q_scale_max    F16         any
        .q_groups       I16         any
        .q_invperm?     I32,I16     in
        .q_perm?        I32,I16     in
        .q_group_map?   I16         any
        """,
        "EXL2 permutes the rows of every matrix",
    ),
    # Hadamard transforms mix every 128 inputs and every 128 outputs; tiles of 16 × 16 are stored.
    "exl3": _format(
        "EXL3 {bpw} bpw",
        """
        .trellis    I16     in^128/16 out^128/16 any
        .suh?       F16     in^128
        .svh?       F16     out^128
        .su?        I16     in^128/16
        .sv?        I16     out^128/16
        .mcg?       I32     |1
        .mul1?      I32     |1
        """,
    ),
    "nf4": _format("NF4", _NF4 + ".weight.quant_state.bitsandbytes__nf4 U8 any", _FLAT),
    "fp4": _format("FP4", _NF4 + ".weight.quant_state.bitsandbytes__fp4 U8 any", _FLAT),
    "int8": _format(
        "LLM.int8",
        """
        .weight         I8      out in
        .SCB            F32     out
        .weight_format? U8      |1
        """,
    ),
    "int-packed": _format(
        "INT{bits} g{group}",
        """
        .weight_packed          I32             lead out in*bits/32
        .weight_scale           BF16,F16,F32    lead out in/group
        .weight_shape           I64,I32         2
        .weight_zero_point?     I32             out*bits/32 in/group
        .weight_g_idx?          I32             in
        """,
    ),
    # ModelOpt's 4-bit floats: two scales, one of which is for the whole matrix.
    "nvfp4": _format(
        "NVFP4",
        """
        .weight             U8          lead out in/2
        .weight_scale       F8_E4M3     lead out in/16
        .weight_scale_2     F32         |1|lead
        """
        + _SCALARS,
    ),
    "nvfp4-packed": _format(
        "NVFP4",
        """
        .weight_packed          U8          out in/2
        .weight_scale           F8_E4M3     out in/16
        .weight_global_scale    F32         1|
        .input_global_scale?    F32         1|
        """,
    ),
    "mxfp4-packed": _format(
        "MXFP4",
        """
        .weight_packed  U8              out in/2
        .weight_scale   U8,F8_E8M0      out in/32
        """,
    ),
    "mxfp4-quark": _format(
        "MXFP4",
        """
        .weight         U8              out in/2
        .weight_scale   U8,F8_E8M0      out in/32
        """
        + _SCALARS,
    ),
    "mxfp8": _format(
        "MXFP8",
        """
        .weight         F8_E4M3,F8_E5M2     out in
        .weight_scale   U8,F8_E8M0          out in/32
        """
        + _SCALARS,
    ),
    "int8-tensor": _format(
        "INT8 per tensor",
        """
        .weight                 I8                  out in
        .weight_scale           BF16,F16,F32        1|
        .weight_zero_point?     I8                  1|
        .input_zero_point?      I8                  1|
        """
        + _SCALARS,
    ),
    "int8-channel": _format(
        "INT8 per channel",
        """
        .weight                 I8                  out in
        .weight_scale           BF16,F16,F32        out 1|out
        .weight_zero_point?     I8                  out 1|out
        .input_zero_point?      I8                  1|
        """
        + _SCALARS,
    ),
    # Weights as compressed-tensors' 8-bit integers, also where they have fewer bits.
    "int8-group": _format(
        "INT8 g{group}",
        """
        .weight                 I8                  out in
        .weight_scale           BF16,F16,F32        out in/group
        .weight_zero_point?     I8                  out in/group
        .weight_g_idx?          I32                 in
        """,
    ),
    "mxfp6-packed": _format(
        "MXFP6",
        """
        .weight_packed  U8              out in*6/8
        .weight_scale   U8,F8_E8M0      out in/32
        """,
    ),
    # ModelOpt's 4-bit integers: neighbouring outputs share a byte.
    "int4-modelopt": _format(
        "INT4 g{group}",
        """
        .weight             U8              out/2 in
        .weight_scale       F32,BF16,F16    out in/group
        .weight_scale_2?    F32             |1
        """
        + _SCALARS,
    ),
    # All experts of a layer in one tensor, rows and columns in either order.
    "fp8-experts-tensor": _format(
        "FP8 per tensor",
        """
        -                   F8_E4M3,F8_E5M2     lead rows cols
        _scale_inv          F32,BF16,F16        lead 1 1
        _activation_scale?  F32,BF16,F16        |1|lead|lead 1 1
        """,
    ),
    "fp8-experts-block": _format(
        "FP8 block {r}x{c}",
        """
        -                   F8_E4M3,F8_E5M2         lead rows cols
        _scale_inv          F32,BF16,F16,F8_E8M0    lead rows/r cols/c
        _activation_scale?  F32,BF16,F16            |1|lead|lead 1 1
        """,
    ),
    "fp8-experts": _format(
        "FP8 per channel",
        """
        -               F8_E4M3,F8_E5M2     lead rows cols
        _scale          F32,BF16,F16        lead 1 cols|lead rows 1|lead cols 1
        _scale_ub?      F32                 1|
        """,
    ),
    "fp8-experts-modelopt": _format(
        "FP8 per tensor",
        """
        -                   F8_E4M3,F8_E5M2     lead rows cols
        _weight_scale       F32,BF16,F16        |1|lead|lead 1 1
        _input_scale?       F32,BF16,F16        |1|lead|lead 1 1
        """,
    ),
    "nvfp4-experts": _format(
        "NVFP4",
        """
        -                   U8          lead in/2 out|lead out in/2
        _weight_scale       F8_E4M3     lead in/16 out|lead out in/16
        _weight_scale_2     F32         |1|lead|lead 1 1
        _input_scale?       F32         |1|lead|lead 1 1
        """,
    ),
    "awq-gemv": _format(
        "AWQ {bits}-bit",
        """
        .qweight    I32             out in*bits/32
        .qzeros     I32             out any
        .scales     F16,BF16,F32    out any
        """,
        "AWQ's version gemv pads the groups of inputs",
    ),
    "awq-gemv-fast": _format(
        "AWQ 4-bit",
        """
        .qweight    I16             out/4 in
        .qzeros     F16,BF16,F32    any out
        .scales     F16,BF16,F32    any out
        """,
        "AWQ's version gemv_fast pads the groups of inputs",
    ),
    # Tiles of 16 inputs × 64 outputs, and scales that are permuted within 64 outputs.
    "gptq-marlin": _format(
        "Marlin 4-bit g{group}",
        """
        .B              I32         in/16 out^64*2
        .s              F16,BF16    in/group out^64
        .workspace?     I32         any
        """,
    ),
    "awq-marlin": _format(
        "Marlin 4-bit g{group}",
        """
        .qweight        I32         in/16 out^64*2
        .scales         F16,BF16    in/group out^64
        .workspace?     I32         any
        """,
    ),
    "aqlm": _format(
        "AQLM {bpw} bpw",
        """
        .codes      I8,I16,U8       out/outs in/ins any
        .codebooks  F16,BF16,F32    any any any any
        .scales     F16,BF16,F32    out/outs 1 1 1
        """,
    ),
    "hqq-8": _format("HQQ 8-bit g{group}", _HQQ.format(codes="U8 flat/group any", scales="flat/group 1"), _HQQ_FLAT),
    "hqq": _format(
        "HQQ {bpw} bpw",
        _HQQ.format(codes="U8,I32,BF16,F16,F32 any any", scales="any any"),
        "HQQ packs distant rows into one byte, so each device holds all of the matrices that it needs",
    ),
    "bitnet": _format(
        "BitNet",
        """
        .weight         U8              ~out/4 ~in
        .weight_scale   BF16,F16,F32    1|
        """,
        "BitNet packs distant rows into one byte, so each device holds all of the matrices that it needs",
    ),
    "torchao-fp8": _format(
        "FP8 per channel",
        """
        ._weight_qdata      F8_E4M3,F8_E5M2     out in
        ._weight_scale      F32,BF16,F16        out 1|1 1|
        """,
    ),
    "torchao-fp8-block": _format(
        "FP8 block {rows}x{columns}",
        """
        ._weight_qdata      F8_E4M3,F8_E5M2     out in
        ._weight_scale      F32,BF16,F16        out/rows in/columns
        """,
    ),
    "torchao-int8": _format(
        "INT8 per channel",
        """
        ._weight_qdata          I8                  out in
        ._weight_scale          F32,BF16,F16        out 1|out|1 1
        ._weight_zero_point?    I8,I32,I64,F32,BF16,F16     out 1|out|1 1
        """,
    ),
    "torchao-int8-group": _format(
        "INT8 g{group}",
        """
        ._weight_qdata          I8                  out in
        ._weight_scale          F32,BF16,F16        out in/group
        ._weight_zero_point?    I8,I32,I64,F32,BF16,F16     out in/group
        """,
    ),
    "torchao-int4": _format(
        "INT4 g{group}",
        """
        ._weight_qdata          U8,I8               out in/2
        ._weight_scale          F32,BF16,F16        in/group out
        ._weight_zero_point     F32,BF16,F16,I8     in/group out
        ._weight_act_pre_scale? F32,BF16,F16        in|1 in
        """,
    ),
    "torchao-int4-words": _format(
        "INT4 g{group}",
        """
        ._weight_qdata          I32                 out in*4/32
        ._weight_scale          F32,BF16,F16        in/group out
        ._weight_zero_point     F32,BF16,F16,I8     in/group out
        ._weight_act_pre_scale? F32,BF16,F16        in|1 in
        """,
    ),
    # Scales in tiles of 128 outputs and 4 groups.
    "torchao-mxfp8": _format(
        "MXFP8",
        """
        ._weight_qdata      F8_E4M3,F8_E5M2     out in
        ._weight_scale      F8_E8M0,U8          out^128/4 any
        """,
        "torchao stores the scales of MXFP8 in tiles of rows",
    ),
    "torchao-nvfp4": _format(
        "NVFP4",
        """
        ._weight_qdata              U8          out in/2
        ._weight_scale              F8_E4M3     out^128/4 any
        ._weight_per_tensor_scale?  F32         |1
        ._weight_act_per_tensor_scale?  F32     |1
        """,
        "torchao stores the scales of NVFP4 in tiles of rows",
    ),
}

#: Every suffix of the table, and the plain one.
SUFFIXES: Final = frozenset({".weight"}.union(*(f.pieces for f in FORMATS.values()))) - {""}
