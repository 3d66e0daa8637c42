"""Kinds of weights, and how much longer than reading them the decoder's kernels take to multiply by each.

That was measured with tpplan's decoder on one and two H100: ``python -m benchmarks.bench_decode``, see
docs/benchmarks.md. With codes of 4 bits, 32 and 64 rows have been faster on sm_90 since, by up to a fifth.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from attrs import frozen

from tpplan.core.axes import Axis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.core.model import Block, ModelSpec, Parameter

#: Rows of the steps that the constants were measured with.
ROWS = (1, 2, 4, 8, 16, 32, 64)


@frozen
class Kind:
    """Weights that the decoder's kernels multiply by at one speed.

    Attributes:
        slower: for each of :data:`ROWS`, thousandths of the time in which the weights are read.
        layer_ns: for each of :data:`ROWS`, nanoseconds of everything else of a layer whose weights are of this kind.
        bits: bits of a weight.
        prefill: thousandths of the matrix rate that prefill reaches.
        dequantise_fs: femtoseconds in which prefill dequantises a weight.
    """

    slower: tuple[int, ...]
    layer_ns: tuple[int, ...]
    bits: int
    prefill: int
    dequantise_fs: int = 0


KINDS = {
    "dense": Kind(
        bits=16,
        slower=(1010, 1010, 1170, 1140, 1100, 1060, 1075),
        layer_ns=(10_000, 10_500, 8_000, 12_500, 21_500, 34_000, 38_500),
        prefill=820,
    ),
    "codes4": Kind(
        bits=4,
        slower=(1160, 1190, 1100, 1050, 2050, 1700, 2470),
        layer_ns=(17_500, 17_500, 22_500, 32_500, 29_000, 56_000, 66_000),
        prefill=820,
        dequantise_fs=1300,
    ),
    "codes8": Kind(
        bits=8,
        slower=(1080, 1050, 1030, 990, 1550, 1220, 1480),
        layer_ns=(13_500, 16_000, 17_500, 25_000, 27_000, 51_000, 66_500),
        prefill=820,
        dequantise_fs=1425,
    ),
    "experts16": Kind(
        bits=16,
        slower=(1030, 1050, 1300, 1300, 1200, 1200, 1200),
        layer_ns=(20_000, 25_000, 30_000, 40_000, 50_000, 60_000, 70_000),
        prefill=550,
    ),
    "experts4": Kind(
        bits=4,
        slower=(2150, 1760, 1580, 1290, 1300, 1400, 1430),
        layer_ns=(21_000, 25_000, 45_000, 65_000, 72_000, 80_000, 86_000),
        prefill=240,
    ),
    "experts8": Kind(  # not measured: between those of 16 and of 4 bits
        bits=8,
        slower=(1500, 1400, 1400, 1300, 1250, 1300, 1300),
        layer_ns=(20_000, 25_000, 37_000, 52_000, 60_000, 70_000, 78_000),
        prefill=400,
    ),
}


@frozen
class Attending:
    """How much longer a layer takes by its attention than one of queries, keys and values.

    These constants are fitted to one run of one model each, with 1, 8 and 64 rows, and in between in proportion. No run
    was held out, see docs/decisions/0003-time-of-a-step.md.

    Attributes:
        layer_ns: for each of :data:`ROWS`, nanoseconds of a decode step.
        prompt_ns: nanoseconds of a prompt of 4,096 tokens.
    """

    layer_ns: tuple[int, ...]
    prompt_ns: int


#: Linear attention with gates (gated DeltaNet), and latent attention (MLA).
GATED = Attending(layer_ns=(46_000, 43_700, 39_100, 30_000, 38_000, 54_000, 86_000), prompt_ns=2_010_000)
LATENT = Attending(layer_ns=(53_000, 45_400, 30_300, 0, 0, 0, 0), prompt_ns=2_360_000)
USUAL = Attending(layer_ns=(0,) * len(ROWS), prompt_ns=0)


def attending(block: Block) -> Attending:
    """Return how much longer each layer of a block takes by its attention."""
    linear, attention = block.linear, block.attention
    if linear and linear.key_head_dim and not (linear.shared_keys or linear.plain_keys):
        return GATED
    is_latent = attention and attention.latent_dim and not (attention.shared or attention.window)
    return LATENT if is_latent else USUAL


def kind_of(parameter: Parameter, model: ModelSpec, block: Block | None = None) -> str:
    """Return the kind of a parameter, of a layer of a block or outside the layers: a key of :data:`KINDS`."""
    if parameter.dtype.startswith(("F16", "BF16", "F32", "F64")):
        bits = 16
    else:
        # In files of MXFP4, exponents as dtype are the scales of most weights.
        bytewise = ("I8", "F8_E4", "F8_E5") if model.weight_format == "MXFP4" else ("I8", "F8")
        eight = parameter.dtype.startswith(bytewise) and not _are_halves(parameter, model, block)
        eight = eight or "8-bit" in model.weight_format
        bits = 8 if eight or model.weight_format.endswith("Q8_0") else 4
    return f"experts{bits}" if is_expert(parameter) else "dense" if bits == 16 else f"codes{bits}"  # noqa: PLR2004


def _are_halves(parameter: Parameter, model: ModelSpec, block: Block | None) -> bool:
    """Return whether two weights are stored in each element: one of the dimensions is half as long as its axis."""
    widths = {Axis.RESIDUAL: model.hidden_size, **dict(block.sizes() if block else ())}
    if block and block.attention:
        widths[Axis.Q_HEADS] = block.attention.q_heads * block.attention.v_head_dim
    segments = (segment for dim in parameter.dims for segment in dim)
    return any(s.axis is not None and 2 * s.length == widths.get(s.axis) for s in segments)


def is_expert(parameter: Parameter) -> bool:
    """Return whether a parameter is one of the experts that tokens are routed to."""
    return any(segment.axis is Axis.EXPERT_INTERMEDIATE for dim in parameter.dims for segment in dim)


def at_rows(values: Sequence[int], rows: int) -> int:
    """Return the value for a number of rows, between those of :data:`ROWS` in proportion, beyond them the last."""
    after = bisect_left(ROWS, rows)
    if after == len(ROWS) or ROWS[after] == rows:
        return values[min(after, len(ROWS) - 1)]
    low, high = ROWS[after - 1], ROWS[after]
    return values[after - 1] + (values[after] - values[after - 1]) * (rows - low) // (high - low)
