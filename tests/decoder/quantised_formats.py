"""Matrices as the tools that quantise models store them, packed from the definitions of the formats, and their values.

Shapes: N outputs, K inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    Packed = dict[str, Tensor]

#: Which of eight neighbours AutoAWQ's GEMM version has in the nibbles of a word, lowest bits first.
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


@frozen(kw_only=True)
class Format(ABC):
    """How a tool stores matrices.

    Attributes:
        adds_biases: whether it gives all matrices biases, zeros where the model has none.
        head: whether the output matrix is quantised too.
    """

    adds_biases: bool = False
    head: bool = False

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the ``quantization_config`` of a config.json."""

    def of(self, name: str) -> Format:  # noqa: ARG002 (of some, matrices differ)
        """Return how the tool stores the matrix of a module."""
        return self

    @abstractmethod
    def store(self, matrix_NK: Tensor) -> tuple[Packed, Tensor]:
        """Return the tensors of a matrix by suffix, and the values that they stand for, in float32."""


@frozen(kw_only=True)
class Gptq(Format):
    """GPTQ as AutoGPTQ and GPTQModel pack it: words of neighbouring inputs, and of neighbouring outputs' zeros.

    Attributes:
        bits: of a code.
        group: inputs that share a scale; -1 for all.
        symmetric: whether zeros are in the middle of the codes.
        version: 1 stores zeros less one, 2 (``gptq_v2``) as they are.
        permuted: whether groups are of inputs in the order of their activations (``desc_act``).
        scales: their dtype; AutoGPTQ's is the model's, GPTQModel's always float16.
        adds_biases: AutoGPTQ's first versions do.
    """

    bits: int = 4
    group: int = 128
    symmetric: bool = True
    version: int = 1
    permuted: bool = False
    scales: torch.dtype = torch.float16

    def config(self) -> dict[str, Any]:
        """See :class:`Format`."""
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group,
            "desc_act": self.permuted,
            "sym": self.symmetric,
            "lm_head": self.head,
            "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2",
            "pack_dtype": "int32",
        }

    def store(self, matrix_NK: Tensor) -> tuple[Packed, Tensor]:
        """See :class:`Format`."""
        group_K = _groups(matrix_NK, self.group, permuted=self.permuted)
        rounded = _rounded(matrix_NK, group_K, self.bits, self.scales, symmetric=self.symmetric)
        return {
            ".qweight": words(rounded.codes, self.bits).T.contiguous(),
            ".qzeros": words(rounded.zeros.T - (1 if self.version == 1 else 0), self.bits),
            ".scales": rounded.scales.T.contiguous(),
            ".g_idx": group_K.int(),
        }, rounded.values


@frozen(kw_only=True)
class Awq(Format):
    """AWQ as AutoAWQ's GEMM version packs it, in 4 bits: words of eight outputs, and of their zeros.

    Attributes:
        group: inputs that share a scale.
    """

    group: int = 128

    def config(self) -> dict[str, Any]:
        """See :class:`Format`."""
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": self.group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["gate"],
        }

    def store(self, matrix_NK: Tensor) -> tuple[Packed, Tensor]:
        """See :class:`Format`."""
        rounded = _rounded(matrix_NK, _groups(matrix_NK, self.group), 4, torch.float16, symmetric=False)
        return {
            ".qweight": words(rounded.codes.T, 4, AWQ_ORDER),
            ".qzeros": words(rounded.zeros.T, 4, AWQ_ORDER),
            ".scales": rounded.scales.T.contiguous(),
        }, rounded.values


@frozen(kw_only=True)
class IntPacked(Format):
    """Integers as compressed-tensors packs them: codes and zeros from ``-(2 ** (bits - 1))``, stored from 0.

    Attributes:
        bits: of a code.
        group: inputs that share a scale; -1 for all (``channel``).
        symmetric: whether there are no zeros.
        permuted: whether groups are of inputs in the order of their activations (``actorder``).
        scales: their dtype, as a rule the model's.
    """

    bits: int = 4
    group: int = 128
    symmetric: bool = True
    permuted: bool = False
    scales: torch.dtype = torch.bfloat16

    def config(self) -> dict[str, Any]:
        """See :class:`Format`."""
        weights: dict[str, Any] = {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "dynamic": False}
        weights |= {"strategy": "channel"} if self.group < 0 else {"strategy": "group", "group_size": self.group}
        return compressed("pack-quantized", weights | ({"actorder": "group"} if self.permuted else {}), None)

    def store(self, matrix_NK: Tensor) -> tuple[Packed, Tensor]:
        """See :class:`Format`."""
        group_K = _groups(matrix_NK, self.group, permuted=self.permuted)
        rounded = _rounded(matrix_NK, group_K, self.bits, self.scales, symmetric=self.symmetric)
        packed = {
            ".weight_packed": words(rounded.codes, self.bits),
            ".weight_scale": rounded.scales,
            ".weight_shape": torch.tensor(matrix_NK.shape),
        }
        if not self.symmetric:
            packed[".weight_zero_point"] = words(rounded.zeros.T, self.bits).T.contiguous()
        return packed | ({".weight_g_idx": group_K.int()} if self.permuted else {}), rounded.values


@frozen(kw_only=True)
class Float8(Format):
    """Floats of 8 bits, as transformers (``weight_scale_inv``) or compressed-tensors (``weight_scale``) stores them.

    Attributes:
        block: outputs and inputs that share a scale; 0 for all.
        suffix: of the scales.
        codes: dtype of the floats.
        scales: dtype of the scales.
    """

    block: tuple[int, int] = (128, 128)
    suffix: str = ".weight_scale_inv"
    codes: torch.dtype = torch.float8_e4m3fn
    scales: torch.dtype = torch.float32

    def config(self) -> dict[str, Any]:
        """See :class:`Format`."""
        if self.suffix == ".weight_scale_inv":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3" if self.codes is torch.float8_e4m3fn else "e5m2",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.block) if any(self.block) else None,
                "modules_to_not_convert": ["lm_head", "gate"],
            }
        float8 = {"num_bits": 8, "type": "float", "symmetric": True}
        strategy = {(0, 0): "tensor", (1, 0): "channel"}.get(self.block, "block")
        structure = {"block_structure": list(self.block)} if strategy == "block" else {}
        inputs = {"strategy": "tensor", "dynamic": False} if strategy == "tensor" else {"strategy": "token"}
        weights = float8 | {"dynamic": False, "strategy": strategy} | structure
        return compressed("float-quantized", weights, float8 | {"dynamic": True} | inputs)

    def store(self, matrix_NK: Tensor) -> tuple[Packed, Tensor]:
        """See :class:`Format`; where a matrix has one scale, compressed-tensors also stores its inputs'."""
        rows, columns = (size or length for size, length in zip(self.block, matrix_NK.shape, strict=True))
        blocks = [[each.abs().max() for each in torch.split(part, columns, 1)] for part in torch.split(matrix_NK, rows)]
        top = torch.finfo(self.codes).max
        scales = (torch.tensor(blocks) / top).to(self.scales)
        by_NK = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        by_NK = by_NK[: matrix_NK.shape[0], : matrix_NK.shape[1]]
        codes_NK = (matrix_NK / by_NK).clamp(-top, top).to(self.codes)
        packed = {".weight": codes_NK, self.suffix: scales}
        if not any(self.block):
            more = {".input_scale": torch.tensor([0.5])} if self.suffix == ".weight_scale" else {}
            packed |= {self.suffix: scales.view([1] * len(more))} | more
        return packed, codes_NK.float() * by_NK


#: The magnitudes of e2m1, in the order of their codes.
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@frozen(kw_only=True)
class Float4(Format):
    """Floats of 4 bits: NVFP4 as ModelOpt or compressed-tensors stores it, MXFP4 as the latter or Quark does.

    Attributes:
        tool: ``modelopt``, ``compressed-tensors`` or ``quark``.
        group: inputs that share a scale: 16 of NVFP4, 32 of MXFP4.
    """

    tool: str = "compressed-tensors"
    group: int = 16

    def config(self) -> dict[str, Any]:
        """See :class:`Format`."""
        if self.tool == "modelopt":
            return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.gate"]}
        if self.tool == "quark":
            weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
            return {
                "quant_method": "quark",
                "global_quant_config": {"weight": weight},
                "exclude": ["lm_head", "*.gate"],
            }
        kind = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": self.group}
        strategy, form = ("tensor_group", "nvfp4") if self.group == 16 else ("group", "mxfp4")
        weights = kind | {"strategy": strategy, "dynamic": False}
        return compressed(f"{form}-pack-quantized", weights, kind | {"strategy": strategy, "dynamic": "local"})

    def store(self, matrix_NK: Tensor) -> tuple[Packed, Tensor]:
        """See :class:`Format`."""
        largest_NG = torch.unflatten(matrix_NK, 1, (-1, self.group)).abs().amax(-1)
        if self.group == 16:
            factor = largest_NG.max() / (6 * 448)
            scales_NG = (largest_NG / 6 / factor).to(torch.float8_e4m3fn)
            by_NG = scales_NG.float() * factor
        else:
            exponents_NG = largest_NG.log2().floor() - 2
            scales_NG, by_NG = (exponents_NG + 127).to(torch.uint8), exponents_NG.exp2()
        by_NK = by_NG.repeat_interleave(self.group, 1)
        codes_NK = ((matrix_NK / by_NK).abs()[..., None] - torch.tensor(E2M1)).abs().argmin(-1)
        values_NK = torch.tensor(E2M1)[codes_NK] * by_NK * matrix_NK.sign()
        codes_NK += 8 * (matrix_NK < 0)
        name = ".weight_packed" if self.tool == "compressed-tensors" else ".weight"
        packed = {name: (codes_NK[:, ::2] | codes_NK[:, 1::2] << 4).to(torch.uint8), ".weight_scale": scales_NG}
        if self.group == 16:
            modelopt = {".weight_scale_2": factor, ".input_scale": torch.tensor(0.5)}
            own = {".weight_global_scale": (1 / factor).view(1), ".input_global_scale": torch.tensor([0.5])}
            packed |= modelopt if self.tool == "modelopt" else own
        return packed, values_NK


@frozen(kw_only=True)
class Int8(Format):
    """Integers of 8 bits that are not packed, as compressed-tensors or bitsandbytes stores them.

    Attributes:
        group: inputs that share a scale; -1 for all (``channel``), 0 for those of all outputs too (``tensor``).
        symmetric: whether there are no zeros.
        scales: their dtype, as a rule the model's.
        tool: ``compressed-tensors`` or ``bitsandbytes``.
    """

    group: int = -1
    symmetric: bool = True
    scales: torch.dtype = torch.bfloat16
    tool: str = "compressed-tensors"

    def config(self) -> dict[str, Any]:
        """See :class:`Format`."""
        if self.tool == "bitsandbytes":
            return {"quant_method": "bitsandbytes", "load_in_8bit": True}
        strategy = {-1: "channel", 0: "tensor"}.get(self.group, "group")
        int8 = {"num_bits": 8, "type": "int"}
        weights = int8 | {"symmetric": self.symmetric, "dynamic": False, "strategy": strategy}
        weights |= {"group_size": self.group} if self.group > 0 else {}
        return compressed("int-quantized", weights, int8 | {"symmetric": True, "dynamic": True, "strategy": "token"})

    def store(self, matrix_NK: Tensor) -> tuple[Packed, Tensor]:
        """See :class:`Format`."""
        if self.tool == "bitsandbytes":
            largest_N = matrix_NK.abs().amax(1)
            codes_NK = (matrix_NK * (127 / largest_N[:, None])).round()
            packed = {".weight": codes_NK.to(torch.int8), ".SCB": largest_N}
            packed[".weight_format"] = torch.tensor(0, dtype=torch.uint8)
            return packed, codes_NK * (largest_N[:, None] / 127)
        one = matrix_NK if self.group else matrix_NK.flatten()[None]
        rounded = _rounded(one, _groups(one, self.group or -1), 8, self.scales, symmetric=self.symmetric)
        packed = {
            ".weight": (rounded.codes - 128).to(torch.int8).view(matrix_NK.shape),
            ".weight_scale": rounded.scales if self.group else rounded.scales.view(1),
        }
        if not self.symmetric:
            packed[".weight_zero_point"] = (rounded.zeros - 128).to(torch.int8).view(packed[".weight_scale"].shape)
        return packed, rounded.values.view(matrix_NK.shape)


#: The numbers of NF4 (QLoRA, arXiv:2305.14314, appendix E), and of bitsandbytes' FP4, in the order of their codes.
NF4: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4: Final = (0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25)


@frozen(kw_only=True)
class Nf4(Format):
    """bitsandbytes' codes of 4 bits, in blocks of one run of all rows.

    Attributes:
        numbers: what the codes stand for: :data:`NF4` or :data:`FP4`.
        nested: whether scales are codes of 8 bits, in blocks of 256 (double quantisation).
        storage: dtype that the bytes of codes are stored as.
    """

    numbers: tuple[float, ...] = NF4
    nested: bool = False
    storage: torch.dtype = torch.uint8

    def config(self) -> dict[str, Any]:
        """See :class:`Format`."""
        return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": self.nested}

    def store(self, matrix_NK: Tensor) -> tuple[Packed, Tensor]:
        """See :class:`Format`."""
        kind = "nf4" if self.numbers is NF4 else "fp4"
        table = torch.tensor(self.numbers if kind == "nf4" else (*self.numbers, *(-each for each in self.numbers)))
        blocks = matrix_NK.view(-1, 64)
        scales = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": [*matrix_NK.shape]}
        more = {".weight.absmax": scales}
        if self.nested:
            offset = scales.mean()
            levels = torch.linspace(-1, 1, 256)  # bitsandbytes has others; a file says which
            rest = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 256)).view(-1, 256)
            tops = rest.abs().amax(1)
            codes = ((rest / tops[:, None])[..., None] - levels).abs().argmin(-1)
            scales = (levels[codes] * tops[:, None]).flatten()[: len(scales)] + offset
            more = {".weight.absmax": codes.flatten()[: len(scales)].to(torch.uint8)}
            more |= {".weight.nested_absmax": tops, ".weight.nested_quant_map": levels}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
        codes = ((blocks / scales[:, None])[..., None] - table).abs().argmin(-1)
        halves = codes.view(-1, 2)
        text = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
        return {
            ".weight": (halves[:, :1] << 4 | halves[:, 1:]).to(torch.uint8).flatten().view(self.storage)[:, None],
            ".weight.quant_map": table,
            f".weight.quant_state.bitsandbytes__{kind}": text,
            **more,
        }, (table[codes] * scales[:, None]).view(matrix_NK.shape)


@frozen(kw_only=True)
class Exl2(Format):
    """EXL2 as ExLlamaV2's converter packs it: inputs in any order, and groups of 32 with several numbers of bits."""

    bits: tuple[int, ...] = (8, 6, 5, 4, 3, 2)

    def config(self) -> dict[str, Any]:
        """See :class:`Format`."""
        return {"quant_method": "exl2", "bits": 4.0}

    def store(self, matrix_NK: Tensor) -> tuple[Packed, Tensor]:
        """See :class:`Format`; outputs are padded to a multiple of 32, which shows in no value."""
        outputs, inputs = matrix_NK.shape
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        some = [self.bits[i * len(self.bits) * 32 // inputs] for i in range(inputs // 32)]
        scales, codes_KN, nibbles, largest = [], [], [], []
        for i, bits in enumerate(some):
            own_KN = matrix_NK.T[order[32 * i : 32 * i + 32]]
            half = 2 ** (bits - 1)
            wanted_N = own_KN.abs().amax(0) / max(half - 1, 1)
            largest.append(wanted_N.max().half().float())
            nibbles.append((wanted_N / largest[i] * 256).sqrt().sub(1).ceil().clamp(0, 15).int())
            scales.append((nibbles[i] + 1) ** 2 / 256 * largest[i])
            codes_KN.append((own_KN / scales[i]).round().clamp(-half, half - 1).int() + half)
        lines: list[list[int]] = []
        groups: list[int] = []
        for bits, own_KN in zip(some, codes_KN, strict=True):
            groups += [bits, len(lines)]
            streams = [sum(code << bits * k for k, code in enumerate(column)) for column in own_KN.T.tolist()]
            lines += [[stream >> 32 * word & 0xFFFFFFFF for stream in streams] for word in range(bits)]
        values_KN = torch.empty(inputs, outputs)
        halves = [2 ** (bits - 1) for bits in some]
        values_KN[order] = torch.cat(
            [(codes - half) * scale for codes, half, scale in zip(codes_KN, halves, scales, strict=True)]
        )
        packed = torch.from_numpy(np.array(lines, dtype=np.uint32).view(np.int32))
        return {
            ".q_weight": torch.nn.functional.pad(packed, (0, -outputs % 32)),
            ".q_scale": words(torch.nn.functional.pad(torch.stack(nibbles), (0, -outputs % 32)), 4),
            ".q_scale_max": torch.stack(largest).half(),
            ".q_groups": torch.tensor(groups, dtype=torch.int16),
            ".q_invperm": order.argsort().int(),
        }, values_KN.T.contiguous()


@frozen(kw_only=True)
class AutoRound(Format):
    """What auto-round writes: another tool's format, but with its own config, since 0.5 without groups of inputs.

    Attributes:
        packed: the other tool's.
        packing: what the config calls it.
        key: the config's key for that; before 0.5, it was ``backend``.
    """

    packed: Gptq | Awq
    packing: str
    key: str = "packing_format"

    def config(self) -> dict[str, Any]:
        """See :class:`Format`."""
        other = self.packed.config()
        return {
            "quant_method": "auto-round" if self.key == "packing_format" else "intel/auto-round",
            "bits": other["bits"],
            "group_size": other["group_size"],
            "data_type": "int",
            self.key: self.packing,
        }

    def store(self, matrix_NK: Tensor) -> tuple[Packed, Tensor]:
        """See :class:`Format`."""
        packed, values = self.packed.store(matrix_NK)
        dropped = ".g_idx" if self.key == "packing_format" else ""
        return {suffix: tensor for suffix, tensor in packed.items() if suffix != dropped}, values


@frozen(kw_only=True)
class Mxfp8(Format):
    """Floats of 8 bits with a power of two for each 32 inputs, as compressed-tensors stores them."""

    def config(self) -> dict[str, Any]:
        """See :class:`Format`."""
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
        return compressed("mxfp8-quantized", weights | {"dynamic": False}, None)

    def store(self, matrix_NK: Tensor) -> tuple[Packed, Tensor]:
        """See :class:`Format`."""
        exponents_NG = torch.unflatten(matrix_NK, 1, (-1, 32)).abs().amax(-1).log2().floor() - 7
        by_NK = exponents_NG.exp2().repeat_interleave(32, 1)
        codes_NK = (matrix_NK / by_NK).to(torch.float8_e4m3fn)
        packed = {".weight": codes_NK, ".weight_scale": (exponents_NG + 127).to(torch.uint8)}
        return packed, codes_NK.float() * by_NK


@frozen(kw_only=True)
class Mixed(Format):
    """A tool's format of which one module is stored otherwise than the others.

    Attributes:
        usual: how most modules are stored.
        others: how those are stored whose names have ``part`` in them.
        part: part of the names.
    """

    usual: Format
    others: Format
    part: str

    def of(self, name: str) -> Format:
        """See :class:`Format`."""
        return self.others if self.part in name else self.usual

    def config(self) -> dict[str, Any]:
        """See :class:`Format`: GPTQ names other modules in ``dynamic``, compressed-tensors in groups of their own."""
        usual, others = self.usual.config(), self.others.config()
        if usual["quant_method"] == "gptq":
            changed = {key: value for key, value in others.items() if value != usual[key]}
            return usual | {"dynamic": {f"+:.*{self.part}.*": changed}}
        (group,), (other,) = (each["config_groups"].values() for each in (usual, others))
        groups = {
            "group_0": other | {"targets": [f"re:.*{self.part}.*"], "format": others["format"]},
            "group_1": group | {"format": usual["format"]},
        }
        return usual | {"format": "mixed-precision", "config_groups": groups}

    def store(self, matrix_NK: Tensor) -> tuple[Packed, Tensor]:
        """See :class:`Format`."""
        return self.usual.store(matrix_NK)


def compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """Return what compressed-tensors writes into a config.json, for one group of settings."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head", r"re:.*\.gate$"],
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
    }


def words(numbers: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Return whole numbers packed along the last dimension, lowest bits first, as ``int32``.

    Args:
        numbers: ``[..., L]``, each from 0 to below ``2 ** bits``.
        bits: of each.
        order: which of a word's neighbours comes first, and so on; one after the other if not given.
    """
    per = 32 // bits
    each = numbers.contiguous().numpy().astype(np.uint32).reshape(*numbers.shape[:-1], -1, per)
    shifted = each[..., list(order or range(per))] << np.arange(0, 32, bits, dtype=np.uint32)
    return torch.from_numpy(np.bitwise_or.reduce(shifted, axis=-1).view(np.int32))


@frozen
class _Rounded:
    """A matrix of whole numbers.

    Attributes:
        codes: from 0, ``[N, K]``.
        zeros: from 1, as the first version of GPTQ has no others, ``[N, G]``.
        scales: in the dtype that they are stored in, ``[N, G]``.
        values: ``[N, K]``, what all this stands for, rounded once; exact where scales have 16 bits.
    """

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    values: Tensor


def _groups(matrix_NK: Tensor, size: int, *, permuted: bool = False) -> Tensor:
    """Return the group of each input: of neighbours, or of any, other ones for each matrix."""
    inputs = matrix_NK.shape[1]
    group_K = torch.arange(inputs) // (inputs if size < 0 else size)
    seed = int(matrix_NK[0, 0].view(torch.int32)) & 0xFFFF
    return group_K[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))] if permuted else group_K


def _rounded(matrix_NK: Tensor, group_K: Tensor, bits: int, dtype: torch.dtype, *, symmetric: bool) -> _Rounded:
    """Round a matrix to whole numbers that reach from the least to the largest element of a group."""
    top, groups = 2**bits - 1, range(int(group_K.max()) + 1)
    ranges = [matrix_NK[:, group_K == group].aminmax(dim=1) for group in groups]
    low, high = (torch.stack(ends, dim=1) for ends in zip(*ranges, strict=True))
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scales_NG = ((high - low) / top).to(dtype)
    by_NG = scales_NG.float()
    zeros_NG = torch.full_like(low, 2 ** (bits - 1)) if symmetric else (-low / by_NG).round().clamp(1, top)
    codes_NK = ((matrix_NK / by_NG[:, group_K]).round() + zeros_NG[:, group_K]).clamp(0, top)
    return _Rounded(codes_NK, zeros_NG, scales_NG, (codes_NK - zeros_NG[:, group_K]) * by_NG[:, group_K])
