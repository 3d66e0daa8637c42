"""The PTX instructions that numba has no function for, by 64-bit address. All inline PTX is in this file.

Needs numba-cuda, but no GPU: a kernel that uses them compiles anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tpplan.exec.protocol.words import GRID_DEPENDENCY, PARAMETER, PREFETCH
from tpplan.exec.toolchain.language import intrinsic, ir, types

#: Writes an instruction for LLVM, given its builder and the arguments, and returns the results.
Emitter = Callable[[Any, Sequence[Any]], list[Any]]

#: Of each operand: numba's type, LLVM's, and the letter of the constraint.
_OPERANDS = {
    "u16": (types.uint16, ir.IntType(16), "h"),
    "u32": (types.uint32, ir.IntType(32), "r"),
    "u64": (types.uint64, ir.IntType(64), "l"),
    "f32": (types.float32, ir.FloatType(), "f"),
}


def _instruction(text: str, results: str, arguments: str, *, memory: bool = False, whole: bool = False) -> Any:
    """Return an intrinsic for one instruction.

    Args:
        text: of the instruction; ``$0`` is the first result, and arguments follow the results.
        results: names of operand types; several make a tuple.
        arguments: the same.
        memory: whether it touches memory, so that the compiler must neither move nor drop nor repeat it.
        whole: whether the threads of a warp do it together.
    """
    outs, ins = ([_OPERANDS[name] for name in names.split()] for names in (results, arguments))
    kinds = [out[0] for out in outs]
    returned = types.void if not kinds else kinds[0] if len(kinds) == 1 else types.Tuple(tuple(kinds))
    emit = emitter(text, results, arguments, memory=memory, whole=whole)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        got = emit(builder, values)
        if not outs:
            return context.get_dummy_value()
        return got[0] if len(outs) == 1 else context.make_tuple(builder, signature.return_type, got)

    signature = returned(*(each[0] for each in ins))
    return intrinsic(_TYPERS[len(ins)](signature, codegen))


def emitter(text: str, results: str, arguments: str, *, memory: bool = False, whole: bool = False) -> Emitter:
    """Return what writes one instruction for LLVM, for intrinsics of several; arguments as :func:`_instruction` has.

    Args:
        text: of it.
        results: of it.
        arguments: of it.
        memory: whether it touches memory.
        whole: whether the threads of a warp do it together, so that it must stay where all of them come.
    """
    outs, ins = ([_OPERANDS[name] for name in names.split()] for names in (results, arguments))
    raw = ir.VoidType() if not outs else outs[0][1] if len(outs) == 1 else ir.LiteralStructType([o[1] for o in outs])
    kind = ir.FunctionType(raw, [each[1] for each in ins])
    constraint = ",".join([f"={out[2]}" for out in outs] + [each[2] for each in ins] + ["~{memory}"] * memory)
    attributes = ("convergent",) if whole else ()

    def emit(builder: Any, values: Sequence[Any]) -> list[Any]:
        function = ir.InlineAsm(kind, text, constraint, side_effect=memory or whole)
        got = builder.call(function, values, attrs=attributes)
        return [got] if len(outs) == 1 else [builder.extract_value(got, i) for i in range(len(outs))]

    return emit


def _typer_of_0(signature: Any, codegen: Any) -> Any:
    return lambda typingctx: (signature, codegen)  # noqa: ARG005


def _typer_of_1(signature: Any, codegen: Any) -> Any:
    return lambda typingctx, a: (signature, codegen)  # noqa: ARG005 (numba reads the number of parameters)


def _typer_of_2(signature: Any, codegen: Any) -> Any:
    return lambda typingctx, a, b: (signature, codegen)  # noqa: ARG005


def _typer_of_3(signature: Any, codegen: Any) -> Any:
    return lambda typingctx, a, b, c: (signature, codegen)  # noqa: ARG005


def _typer_of_5(signature: Any, codegen: Any) -> Any:
    return lambda typingctx, a, b, c, d, e: (signature, codegen)  # noqa: ARG005


_TYPERS = {0: _typer_of_0, 1: _typer_of_1, 2: _typer_of_2, 3: _typer_of_3, 5: _typer_of_5}

load_16 = _instruction("ld.global.u16 $0, [$1];", "u16", "u64", memory=True)
store_16 = _instruction("st.global.u16 [$0], $1;", "", "u64 u16", memory=True)
load_32 = _instruction("ld.global.u32 $0, [$1];", "u32", "u64", memory=True)
emit_load_32 = emitter("ld.global.u32 $0, [$1];", "u32", "u64", memory=True)
_STORE_32 = "st.global.u32 [$0], $1;", "", "u64 u32"
store_32, emit_store_32 = _instruction(*_STORE_32, memory=True), emitter(*_STORE_32, memory=True)
#: If one number is below another.
emit_store_32_below = emitter(
    "{ .reg .pred p; setp.lt.u32 p, $2, $3; @p st.global.u32 [$0], $1; }", "", "u64 u32 u32 u32", memory=True
)
load_64 = _instruction("ld.global.v2.u32 {$0,$1}, [$2];", "u32 u32", "u64", memory=True)
store_64 = _instruction("st.global.v2.u32 [$0], {$1,$2};", "", "u64 u32 u32", memory=True)
load_8 = _instruction("ld.global.u8 $0, [$1];", "u16", "u64", memory=True)
store_8 = _instruction("st.global.u8 [$0], $1;", "", "u64 u16", memory=True)
#: 16 bytes, at a multiple of 16.
_LOAD_128 = "ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", "u32 u32 u32 u32", "u64"
load_128, emit_load_128 = _instruction(*_LOAD_128, memory=True), emitter(*_LOAD_128, memory=True)
store_128 = _instruction("st.global.v4.u32 [$0], {$1,$2,$3,$4};", "", "u64 u32 u32 u32 u32", memory=True)
#: The same of what is read once, and written by no kernel that may still run, such as weights.
stream_128 = _instruction(
    "ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {$0,$1,$2,$3}, [$4];", "u32 u32 u32 u32", "u64", memory=True
)
#: 32 bits if the last number is not 0, else 16.
load_32_or_16 = _instruction(
    "{ .reg .pred p; setp.ne.u64 p, $2, 0; @p ld.global.u32 $0, [$1]; @!p ld.global.u16 $0, [$1]; }",
    "u32", "u64 u64", memory=True,
)  # fmt: skip
#: 32, 16 or 8 bits if the last number is not 0; else there is nothing, and 0 is found.
load_32_if, load_16_if, load_8_if = (
    _instruction(
        f"{{ .reg .pred p; setp.ne.u64 p, $2, 0; mov.b32 $0, 0; @p ld.global.{kind} $0, [$1]; }}",
        "u32", "u64 u64", memory=True,
    )
    for kind in ("u32", "u16", "u8")
)  # fmt: skip
#: 16 bytes of an array in shared memory, by :func:`shared_address` and a multiple of 16.
shared_load_128 = _instruction("ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", "u32 u32 u32 u32", "u64", memory=True)
emit_shared_load_128 = emitter("ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", "u32 u32 u32 u32", "u32", memory=True)
emit_shared_load_32 = emitter("ld.shared.u32 $0, [$1];", "u32", "u32", memory=True)
#: Adds to a word there, and returns what it was.
shared_add_32 = _instruction("atom.shared.add.u32 $0, [$1], $2;", "u32", "u32 u32", memory=True)
shared_store_32 = _instruction("st.volatile.shared.u32 [$0], $1;", "", "u64 u32", memory=True)
shared_store_128 = _instruction("st.shared.v4.u32 [$0], {$1,$2,$3,$4};", "", "u64 u32 u32 u32 u32", memory=True)
#: Copies 16 bytes there without registers; what a thread has copied so is there behind the second one.
copy_128 = _instruction("cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", "", "u32 u64", memory=True)
copied = _instruction("cp.async.wait_all;", "", "", memory=True)
#: The same if a number is below another.
emit_copy_128_below = emitter(
    "{ .reg .pred p; setp.lt.u32 p, $2, $3; @p cp.async.cg.shared.global [$0], [$1], 16; }",
    "", "u32 u64 u32 u32", memory=True,
)  # fmt: skip
#: The same, of which so many bytes are read, and the others are zeros.
emit_copy_128_filled_below = emitter(
    "{ .reg .pred p; setp.lt.u32 p, $3, $4; @p cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2; }",
    "", "u32 u64 u32 u32 u32", memory=True,
)  # fmt: skip
#: The same of 4 bytes.
emit_copy_32_below = emitter(
    "{ .reg .pred p; setp.lt.u32 p, $2, $3; @p cp.async.ca.shared.global [$0], [$1], 4; }",
    "", "u32 u64 u32 u32", memory=True,
)  # fmt: skip
#: The same of 4 bytes without a condition, of which so many are read, and the others are zeros.
copy_32 = _instruction("cp.async.ca.shared.global [$0], [$1], 4, $2;", "", "u32 u64 u32", memory=True)
#: Makes a group of what a thread has copied so since the last one; and waits for all groups but the last ones.
end_copies = _instruction("cp.async.commit_group;", "", "", memory=True)
copied_but_one, copied_but_three = (
    _instruction(f"cp.async.wait_group {count};", "", "", memory=True) for count in (1, 3)
)
#: Four float32, at a multiple of 16.
emit_load_floats = emitter("ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", "f32 f32 f32 f32", "u64", memory=True)
emit_store_floats = emitter("st.global.v4.f32 [$0], {$1,$2,$3,$4};", "", "u64 f32 f32 f32 f32", memory=True)

#: What another device writes or reads while the kernel runs; the compiler neither keeps nor repeats it.
poll_32 = _instruction("ld.volatile.global.u32 $0, [$1];", "u32", "u64", memory=True)
post_32 = _instruction("st.volatile.global.u32 [$0], $1;", "", "u64 u32", memory=True)
poll_128 = _instruction("ld.volatile.global.v4.u32 {$0,$1,$2,$3}, [$4];", "u32 u32 u32 u32", "u64", memory=True)
#: If the last number is not 0; else zeros are found.
poll_128_if = _instruction(
    "{ .reg .pred p; setp.ne.u64 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
    "@p ld.volatile.global.v4.u32 {$0,$1,$2,$3}, [$4]; }",
    "u32 u32 u32 u32", "u64 u64", memory=True,
)  # fmt: skip
post_128 = _instruction("st.volatile.global.v4.u32 [$0], {$1,$2,$3,$4};", "", "u64 u32 u32 u32 u32", memory=True)
#: The same of 8 bytes at once, of which each half is given, or returned, for itself.
poll_64 = _instruction(
    "{ .reg .b64 w; ld.volatile.global.u64 w, [$2]; mov.b64 {$0,$1}, w; }", "u32 u32", "u64", memory=True
)
post_64 = _instruction(
    "{ .reg .b64 w; mov.b64 w, {$1,$2}; st.volatile.global.u64 [$0], w; }", "", "u64 u32 u32", memory=True
)
#: A flag that says that data is there, or may be written: what follows sees what came before a fence and the post.
acquire_32 = _instruction("ld.acquire.sys.global.u32 $0, [$1];", "u32", "u64", memory=True)
fence = _instruction("fence.acq_rel.sys;", "", "", memory=True)
#: The same between threads of one device.
near_fence = _instruction("fence.acq_rel.gpu;", "", "", memory=True)
#: Of threads of one device that take turns: which one this is, from 0 to the last; the one after that is 0 again.
next_turn = _instruction("atom.global.inc.u32 $0, [$1], $2;", "u32", "u64 u32", memory=True)
#: Returns a word of the kernel's parameter by its index.
_TEXT = f"{{ .reg .b64 a, b; shl.b64 b, $1, 3; mov.b64 a, {PARAMETER}; add.s64 a, a, b; ld.param.b64 $0, [a]; }}"
word = _instruction(_TEXT, "u64", "u64")
#: At the start of a loop: not to be unrolled, for most go through it once or twice.
roll = _instruction(".pragma \\22nounroll\\22;", "", "", memory=True)
#: Of a clock that all multiprocessors share, in steps of up to a microsecond.
nanoseconds = _instruction("mov.u64 $0, %globaltimer;", "u64", "", memory=True)

#: Two 16-bit floats lie in one register, the first of them in its low half.
_LOW_BF16 = "{ .reg .b32 b; shl.b32 b, $1, 16; mov.b32 $0, b; }", "f32", "u32"
_HIGH_BF16 = "{ .reg .b32 b; and.b32 b, $1, 0xffff0000; mov.b32 $0, b; }", "f32", "u32"
_LOW_F16 = "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }", "f32", "u32"
_HIGH_F16 = "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h; }", "f32", "u32"
_FLOAT_OF = "mov.b32 $0, $1;", "f32", "u32"
low_bf16, high_bf16 = _instruction(*_LOW_BF16), _instruction(*_HIGH_BF16)
_TWO_BF16, _TWO_F16 = ((f"cvt.rn.{kind}x2.f32 $0, $2, $1;", "u32", "f32 f32") for kind in ("bf16", "f16"))
two_bf16, emit_two_bf16 = _instruction(*_TWO_BF16), emitter(*_TWO_BF16)
low_f16, high_f16 = _instruction(*_LOW_F16), _instruction(*_HIGH_F16)
two_f16, emit_two_f16 = _instruction(*_TWO_F16), emitter(*_TWO_F16)
float_of = _instruction(*_FLOAT_OF)
_BITS_OF = "mov.b32 $0, $1;", "u32", "f32"
bits_of, emit_bits_of = _instruction(*_BITS_OF), emitter(*_BITS_OF)
emit_low_bf16, emit_high_bf16 = emitter(*_LOW_BF16), emitter(*_HIGH_BF16)
emit_low_f16, emit_high_f16 = emitter(*_LOW_F16), emitter(*_HIGH_F16)
emit_float_of = emitter(*_FLOAT_OF)
#: 2 to a power, to two units of the last place; 0 of minus infinity.
exp2 = _instruction("ex2.approx.ftz.f32 $0, $1;", "f32", "f32")
inverse = _instruction("rcp.approx.ftz.f32 $0, $1;", "f32", "f32")
larger = _instruction("max.f32 $0, $1, $2;", "f32", "f32 f32")
#: Of what all threads of a warp have, in all of them (sm_80).
largest_of_warp = _instruction("redux.sync.max.u32 $0, $1, 0xffffffff;", "u32", "u32", whole=True)
#: What the first lane has, in all of them: the compiler knows then that it is the same.
of_first = _instruction("shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "u32", "u32", whole=True)
#: Lanes of the warp that are here: where all are, ones that the compiler does not know of.
active = _instruction("activemask.b32 $0;", "u32", "", memory=True)
#: Bits, moved to the right by the second number modulo 32.
shifted = _instruction("shf.r.wrap.b32 $0, $1, 0, $2;", "u32", "u32 u32")

#: The address of the vector of 16 bytes that has this number, from an address on.
_VECTOR_AT = "mad.wide.u32 $0, $1, 16, $2;", "u64", "u32 u64"
vector_at, emit_vector_at = _instruction(*_VECTOR_AT), emitter(*_VECTOR_AT)

#: The low, and the high 16 bits of two registers.
emit_lows = emitter("prmt.b32 $0, $1, $2, 0x5410;", "u32", "u32 u32")
emit_highs = emitter("prmt.b32 $0, $1, $2, 0x7632;", "u32", "u32 u32")
#: A byte of the first, from the lowest on, below the highest one of the second, which has no others.
emit_bytes = tuple(emitter(f"prmt.b32 $0, $1, $2, 0x744{i};", "u32", "u32 u32") for i in range(4))
#: A byte, from the lowest on, below zeros.
emit_one_byte = tuple(emitter(f"prmt.b32 $0, $1, 0, 0x444{i};", "u32", "u32") for i in range(4))
two_highs = _instruction("prmt.b32 $0, $1, $2, 0x7632;", "u32", "u32 u32")
#: The first, and the last, two bytes of a register, each below a byte of another one.
emit_first_bytes = emitter("prmt.b32 $0, $1, $2, 0x5140;", "u32", "u32 u32")
emit_last_bytes = emitter("prmt.b32 $0, $1, $2, 0x7362;", "u32", "u32 u32")
#: The first and the third byte of a register, each above zeros.
emit_even_bytes = emitter("prmt.b32 $0, $1, 0, 0x2404;", "u32", "u32")
#: The first, and the last, two bytes of a register, each below eight times its first bit.
emit_first_signed = emitter("prmt.b32 $0, $1, 0, 0x9180;", "u32", "u32")
emit_last_signed = emitter("prmt.b32 $0, $1, 0, 0xb3a2;", "u32", "u32")
#: A quotient, at most two of the last bits off: division proper is a call, for which instructions of groups would wait.
divided = _instruction("div.full.f32 $0, $1, $2;", "f32", "f32 f32")
#: Of pairs of 16-bit floats, rounded once; subnormals are what they are.
emit_fma_bf16 = emitter("fma.rn.bf16x2 $0, $1, $2, $3;", "u32", "u32 u32 u32")
emit_fma_f16 = emitter("fma.rn.f16x2 $0, $1, $2, $3;", "u32", "u32 u32 u32")
emit_add_f16 = emitter("add.rn.f16x2 $0, $1, $2;", "u32", "u32 u32")


def _multiply(kind: str) -> Emitter:
    """Return what adds to a matrix of 16 × 8 the product of one of 16 × 16 and one of 16 × 8, by a warp (sm_80)."""
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, "
    return emitter(
        text + "{$10,$11,$12,$13};", "f32 f32 f32 f32", "u32 u32 u32 u32 u32 u32 f32 f32 f32 f32", whole=True
    )


emit_multiply_bf16, emit_multiply_f16 = _multiply("bf16"), _multiply("f16")


def _kept(text: str, kept: int, others: str) -> Emitter:
    """Return what writes instructions of several warps that change float32 where they are, which come first.

    Args:
        text: of them; ``$0`` is the first of those kept, and others follow these.
        kept: how many.
        others: names of operand types.
    """
    ins = [_OPERANDS[name] for name in others.split()]
    floats = [ir.FloatType()] * kept
    kind = ir.FunctionType(ir.LiteralStructType(floats), [*(each[1] for each in ins), *floats])
    constraint = ",".join(["=f"] * kept + [each[2] for each in ins] + [str(i) for i in range(kept)] + ["~{memory}"])

    def emit(builder: Any, values: Sequence[Any]) -> list[Any]:
        function = ir.InlineAsm(kind, text, constraint, side_effect=True)
        got = builder.call(function, [*values[kept:], *values[:kept]], attrs=("convergent",))
        return [builder.extract_value(got, i) for i in range(kept)]

    return emit


def emit_multiply_group(kind: str, eights: int) -> Emitter:
    """Return what begins to add to two matrices of 64 × 8 `eights` products of 64 × 16 and 16 × 8 `eights` (sm_90a).

    Four warps do it together. It takes a lane's sums, four of each for every eight; its four registers of each left
    matrix; and the descriptor of the right one. Up to two such steps may not be settled when it ends.
    """
    kept = 8 * eights
    lines = ["wgmma.fence.sync.aligned; { .reg .pred p; setp.ne.b32 p, 1, 0;"]
    for i in range(2):
        first, left = kept // 2 * i, kept + 4 * i
        sums, own = (",".join(f"${k}" for k in range(a, a + n)) for a, n in ((first, kept // 2), (left, 4)))
        name = f"wgmma.mma_async.sync.aligned.m64n{8 * eights}k16.f32.{kind}.{kind}"
        lines.append(f"{name} {{{sums}}}, {{{own}}}, ${kept + 8}, p, 1, 1, 0;")
    settle = "} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 2;"
    return _kept(" ".join([*lines, settle]), kept, "u32 " * 8 + "u64")


def emit_settle_group(kept: int) -> Emitter:
    """Return what waits until all that four warps have begun is in so many sums (sm_90a)."""
    return _kept("wgmma.wait_group.sync.aligned 0;", kept, "")


#: Lets instructions of several warps see what a thread has written to shared memory (sm_90).
shared_for_groups = _instruction("fence.proxy.async.shared::cta;", "", "", memory=True)
#: Brings so many bytes, a multiple of 16 at one, to the L2 cache, where what reads them later finds them.
prefetch = _instruction(f"{PREFETCH}.L2.global [$0], $1;", "", "u64 u32", memory=True)


@intrinsic  # type: ignore[untyped-decorator]
def shared_address(typingctx: Any, array: Any) -> Any:  # noqa: ARG001
    """Return the address of an array in shared memory, among the addresses of shared memory."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        address = builder.ptrtoint(data, ir.IntType(64))
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)])
        return builder.call(ir.InlineAsm(kind, "cvta.to.shared.u64 $0, $1;", "=l,l"), [address])

    return types.uint64(array), codegen


#: Waits until all work before is done and seen: comes before everything that others write or read.
after_earlier = _instruction(f"{GRID_DEPENDENCY}.wait;", "", "", memory=True)
#: Lets the next kernel begin, as soon as all blocks have.
let_next_begin = _instruction(f"{GRID_DEPENDENCY}.launch_dependents;", "", "", memory=True)
#: Both.
after_earlier_with_next = _instruction(
    f"{GRID_DEPENDENCY}.wait; {GRID_DEPENDENCY}.launch_dependents;", "", "", memory=True
)
