"""Kernels for linear attention by the gated delta rule (arXiv:2412.06464), in 16 bits: for steps and for prompts.

One kernel does all between a layer's projections but the norm: the causal convolution of queries, keys and values, L2
norms, decays, and the recurrence, token after token, with the state in registers. That reads and writes the state once,
and needs no more work for a prompt than its chunks would take (see :mod:`tpplan.decoder.layer.delta`).

A block has 32 elements of the values of one head, and 128 keys by these of the state: lane 8 s + v of warp w has
element 8 w + v, and of every 16 keys the four from 4 s on. Sixteen tokens at a time, inputs are copied to shared memory
while those before are worked off. Everything is computed in float32; what torch rounds is rounded. Addresses and
pitches are multiples of 16, in bytes.
"""

from __future__ import annotations

from typing import Any

from tpplan.decoder.fast.kernels import tiles
from tpplan.decoder.fast.kernels.attention import is_last
from tpplan.decoder.fast.kernels.finishing import silu
from tpplan.decoder.fast.kernels.pointwise import over_lanes, scaled_by, squares_of, weights_by
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.toolchain.language import FLOAT32, UINT32, UINT64, cuda, intrinsic, ir, libdevice, types

#: Elements of a query and of a key, and of a value; tokens that the convolution spans; and values of a block.
KEY_DIM, VALUE_DIM, SPAN, VALUES = 128, 128, 4, 32
#: Threads of a block: each has two channels of queries or keys where these are convolved.
THREADS = KEY_DIM

#: Tokens of a piece; words of a row of inputs (two channels each): of queries and keys, and of values; and of a buffer.
_PIECE = 16
_QK_WORDS, _V_WORDS = KEY_DIM, VALUES // 2
_WORDS = _QK_WORDS + _V_WORDS
_BUFFER = _PIECE * _WORDS
#: What a block has in shared memory: words of two buffers, and floats of queries and keys, and of values, of a piece.
_RAW, _QKS, _VS = 2 * _BUFFER, _PIECE * 2 * KEY_DIM, _PIECE * VALUES
#: Numbers of a token: its decay, β, factors of queries and keys by their norms, and the product of both.
_DECAY, _BETA, _BY_Q, _BY_K, _QK, _NUMBERS = *range(5), 8
_ALL_NUMBERS = _PIECE * _NUMBERS
#: Elements of the state that a lane has: four of every 16 keys.
_OWN, _FOUR, _EVERY = KEY_DIM // 4, 4, 16
#: From one key of a state to the next, in bytes; and blocks of a head.
_PITCH, _CUTS = 4 * VALUE_DIM, VALUE_DIM // VALUES
#: Lanes that norm and gate a head, 16 bytes each.
_LANES = VALUE_DIM // 8
_EPS = 1e-6
#: Where torch's softplus is what it is given.
_LINEAR = 20.0


@intrinsic  # type: ignore[untyped-decorator]
def _load_state(typingctx: Any, address: Any) -> Any:  # noqa: ARG001
    """Return what a lane has of a state, from the address of its first key on."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = [ptx.emit_float_of(builder, ptx.emit_load_32(builder, [at]))[0] for at in _addresses(builder, *values)]
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(types.float32, _OWN)(address), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _store_state(typingctx: Any, state: Any, address: Any) -> Any:  # noqa: ARG001
    """Write it."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        elements = tiles.all_of(builder, values[0])
        for at, element in zip(_addresses(builder, values[1]), elements, strict=True):
            ptx.emit_store_32(builder, [at, *ptx.emit_bits_of(builder, [element])])
        return context.get_dummy_value()

    return types.void(state, address), codegen


def _addresses(builder: Any, address: Any) -> list[Any]:
    """Return the addresses of a lane's elements."""
    keys = [_EVERY * i + j for i in range(_OWN // _FOUR) for j in range(_FOUR)]
    return [builder.add(address, ir.Constant(ir.IntType(64), key * _PITCH)) for key in keys]


@intrinsic  # type: ignore[untyped-decorator]
def _reads(typingctx: Any, state: Any, query: Any, key: Any) -> Any:  # noqa: ARG001
    """Return the products of a state with a query and with a key, as far as the lane has them; then its keys.

    It takes the addresses of the lane's first elements in shared memory.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        state, (query, key) = tiles.all_of(builder, values[0]), values[1:]
        totals: list[list[Any]] = [[], []]
        keys = []
        for i in range(_OWN // _FOUR):
            for total, start in zip(totals, (query, key), strict=True):
                at = builder.add(start, ir.Constant(ir.IntType(32), 4 * _EVERY * i))
                four = [ptx.emit_float_of(builder, [each])[0] for each in ptx.emit_shared_load_128(builder, [at])]
                products = [builder.fmul(a, b) for a, b in zip(state[_FOUR * i :], four, strict=False)]
                total[:] = [builder.fadd(a, b) for a, b in zip(products, total, strict=True)] if total else products
                if start is key:
                    keys += four
        sums = [builder.fadd(builder.fadd(a, b), builder.fadd(c, d)) for a, b, c, d in totals]
        return context.make_tuple(builder, signature.return_type, [*sums, *keys])

    return types.UniTuple(types.float32, 2 + _OWN)(state, query, key), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _updated(typingctx: Any, state: Any, decay: Any, new: Any, reads: Any) -> Any:  # noqa: ARG001
    """Return a state times its decay, plus the product of the keys of :func:`_reads` and a new value."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        state, decay, new, (_, _, *keys) = (
            tiles.all_of(builder, each) if i in {0, 3} else each for i, each in enumerate(values)
        )
        found = [
            builder.fadd(builder.fmul(key, new), builder.fmul(each, decay))
            for each, key in zip(state, keys, strict=True)
        ]
        return context.make_tuple(builder, signature.return_type, found)

    return state(state, decay, new, reads), codegen


@device_function
def _before(at: Any, row: Any, buffer: Any, back: Any) -> Any:
    """Return where inputs are so many rows before one of a buffer: in it, or the last ones of the other."""
    wraps = row < UINT64(back) and buffer == UINT64(0)
    return at + (UINT64(2 * _BUFFER) if wraps else UINT64(0)) - UINT64(back) * UINT64(_WORDS)


@device_function
def _windows_of(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Return four inputs of either channel, two in a word, of the inputs of two channels by tokens."""
    a, c, b, d = _rows_of(a, c, b, d)
    return a, b, c, d


@device_function
def _rows_of(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Return the inputs of two channels by tokens, a word each, of four inputs of either, two in a word."""
    low, high = types.uint32(0xFFFF), types.uint32(16)
    return (
        types.uint32(a & low | c << high),
        types.uint32(a >> high | c & types.uint32(0xFFFF0000)),
        types.uint32(b & low | d << high),
        types.uint32(b >> high | d & types.uint32(0xFFFF0000)),
    )


@device_function
def _over_parts(value: Any) -> Any:
    """Return the sum over the four lanes that share an element of the values."""
    value += cuda.shfl_xor_sync(0xFFFFFFFF, value, 8)
    return value + cuda.shfl_xor_sync(0xFFFFFFFF, value, 16)


def _recur(name: str, low: Any, high: Any, two: Any) -> Kernel:  # noqa: C901, PLR0915 (the kernel)
    """Make a kernel for the next tokens of some sequences: a block for 32 values, a head of keys, and a sequence.

    Its words:

    - x, its pitch: the inputs of the convolution, the rows of a sequence one behind the other.
    - q_step, v_step: from one key head's queries (and keys), and values, to the next one's, in elements.
    - k_at, v_at: where keys and values begin, in elements.
    - q_channels, v_channels: the two steps, where channels are numbered.
    - weight: of the convolution, ``[C, 4]``.
    - inputs, states: what sequences have, see :class:`tpplan.decoder.cache.state.State`.
    - beta, its pitch and step from head to head; decay, its pitch and step: what β and decays are made of.
    - rates, bias: of the decays, in float32.
    - y, its pitch and step: the outputs, which may be in the place of the values.
    - goes_on, its pitch: a byte for each sequence, 0 if it begins; no address if none does, or if all begin.
    - fresh: whether all do.
    - turns: a zero for each head of a sequence, and so again in the end.
    - rows: of a sequence.

    Args:
        name: of it.
        low: makes a float32 of the first element in 32 bits.
        high: the same of the second.
        two: makes 32 bits of both.
    """
    zeros = tiles.zeros(_OWN)

    @device_function
    def copy(to: Any, rows: Any, q: Any, k: Any, v: Any, pitch: Any) -> None:
        """Copy the inputs of so many tokens, 16 bytes at a time."""
        t = UINT64(cuda.threadIdx.x)
        vector, row = t & UINT64(31), t >> UINT64(5)
        source = (q if vector < UINT64(16) else k) + (vector & UINT64(15)) * UINT64(16)
        while row < min(rows, UINT64(_PIECE)):
            at = to + row * UINT64(4 * _WORDS) + vector * UINT64(16)
            ptx.copy_128(types.uint32(at), source + row * pitch)
            row += UINT64(THREADS // 32)
        vector, row = t & UINT64(3), t >> UINT64(2)
        if row < min(rows, UINT64(_PIECE)):
            at = to + row * UINT64(4 * _WORDS) + UINT64(4 * _QK_WORDS) + vector * UINT64(16)
            ptx.copy_128(types.uint32(at), v + row * pitch + vector * UINT64(16))

    @device_function
    def rounded(value: Any) -> Any:
        return low(two(value, value))

    @device_function
    def acted(a: Any, b: Any, c: Any, d: Any, w: Any) -> Any:
        """Return the activation of four inputs' products with weights."""
        return rounded(silu(rounded(a * w[0] + b * w[1] + c * w[2] + d * w[3])))

    @device_function
    def weights_at(address: Any) -> Any:
        a, b, c, d = ptx.load_128(address)
        return (low(a), high(a), low(b), high(b)), (low(c), high(c), low(d), high(d))

    @device_function
    def sigmoid(x: Any) -> Any:
        return FLOAT32(1) / (FLOAT32(1) + libdevice.expf(-x))

    @device_function
    def softplus(x: Any) -> Any:
        return x if x > FLOAT32(_LINEAR) else libdevice.log1pf(libdevice.expf(x))

    @device_function
    def one(address: Any) -> Any:
        return low(types.uint32(ptx.load_16(address)))

    def recur(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912, PLR0915
        x, x_pitch, q_step, v_step, k_at, v_at, q_channels, v_channels, weight, inputs, states, beta, beta_pitch,
        beta_step, decay, decay_pitch, decay_step, rates, bias, y, y_pitch, y_step, goes_on, goes_on_pitch, fresh,
        turns, rows,
    ):  # fmt: skip
        ptx.after_earlier_with_next()
        raw = cuda.shared.array(_RAW, types.uint32, 16)
        qk = cuda.shared.array(_QKS, FLOAT32, 16)
        vs = cuda.shared.array(_VS, FLOAT32)
        numbers = cuda.shared.array(_ALL_NUMBERS, FLOAT32)
        turn = cuda.shared.array(1, types.uint32)
        t, head, sequence = UINT64(cuda.threadIdx.x), UINT64(cuda.blockIdx.y), UINT64(cuda.blockIdx.z)
        lane, warp = t & UINT64(31), t >> UINT64(5)
        g, cut = UINT64(cuda.blockIdx.x) // UINT64(_CUTS), UINT64(cuda.blockIdx.x) % UINT64(_CUTS)
        group, width = UINT64(cuda.gridDim.x) // UINT64(_CUTS), UINT64(VALUE_DIM)
        keys = UINT64(cuda.gridDim.y)
        value = g * width + cut * UINT64(VALUES)  # of the key head's
        first_row = sequence * rows
        source = x + first_row * x_pitch
        q = source + UINT64(2) * head * q_step
        k = q + UINT64(2) * k_at
        v = source + UINT64(2) * (v_at + head * v_step + value)
        raw_at, qk_at = ptx.shared_address(raw), ptx.shared_address(qk)
        copy(raw_at, rows, q, k, v, x_pitch)

        begins = fresh != UINT64(0)
        if goes_on != UINT64(0):
            begins = ptx.load_8(goes_on + sequence * goes_on_pitch) == types.uint16(0)
        channel = head * q_channels + (t & UINT64(63)) * UINT64(2) + (k_at if t >= UINT64(64) else UINT64(0))
        v_channel = v_at + head * v_channels + value + (t & UINT64(15)) * UINT64(2)
        windows = inputs + sequence * keys * (UINT64(2 * KEY_DIM) + group * width) * UINT64(2 * SPAN)
        window, v_window = windows + channel * UINT64(2 * SPAN), windows + v_channel * UINT64(2 * SPAN)
        even, odd = weights_at(weight + channel * UINT64(2 * SPAN))
        v_even, v_odd = weights_at(weight + v_channel * UINT64(2 * SPAN))
        # The inputs before are where those of a piece before would be.
        nothing = types.uint32(0)
        r0, r1, r2, r3 = nothing, nothing, nothing, nothing
        s0, s1, s2, s3 = nothing, nothing, nothing, nothing
        if not begins:
            a, b, c, d = ptx.load_128(window)
            r0, r1, r2, r3 = _rows_of(a, b, c, d)
            a, b, c, d = ptx.load_128(v_window)
            s0, s1, s2, s3 = _rows_of(a, b, c, d)
        at = UINT64(2 * _BUFFER - SPAN * _WORDS) + t
        raw[at], raw[at + UINT64(_WORDS)] = r0, r1
        raw[at + UINT64(2 * _WORDS)], raw[at + UINT64(3 * _WORDS)] = r2, r3
        if t < UINT64(_V_WORDS):
            at += UINT64(_QK_WORDS)
            raw[at], raw[at + UINT64(_WORDS)] = s0, s1
            raw[at + UINT64(2 * _WORDS)], raw[at + UINT64(3 * _WORDS)] = s2, s3

        part = lane >> UINT64(3)
        column = warp * UINT64(8) + (lane & UINT64(7))
        state_at = states + ((sequence * keys + head) * group + g) * UINT64(KEY_DIM * _PITCH)
        state_at += (cut * UINT64(VALUES) + column) * UINT64(4) + part * UINT64(_FOUR * _PITCH)
        state = zeros()
        if not begins:
            state = _load_state(state_at)
        # Whoever is last here knows that all others have read the inputs before.
        writes = is_last(turns + (sequence * keys + head) * UINT64(4), turn, UINT64(cuda.gridDim.x))

        rate, shift = FLOAT32(0), FLOAT32(0)
        beta += first_row * beta_pitch + UINT64(2) * (head * beta_step + g)
        decay += first_row * decay_pitch + UINT64(2) * (head * decay_step + g)
        found_beta, found_decay = FLOAT32(0), FLOAT32(0)
        if t < UINT64(_PIECE):
            number = (head * group + g) * UINT64(4)
            rate, shift = ptx.float_of(ptx.load_32(rates + number)), ptx.float_of(ptx.load_32(bias + number))
            if t < rows:
                found_beta, found_decay = one(beta + t * beta_pitch), one(decay + t * decay_pitch)
        out = y + first_row * y_pitch + UINT64(2) * (head * y_step + value + column)
        own_q = qk_at + part * UINT64(16)
        own_k = own_q + UINT64(4 * KEY_DIM)
        start, buffer, count = UINT64(0), UINT64(0), UINT64(0)
        while start < rows:
            count, other = min(rows - start, UINT64(_PIECE)), UINT64(_BUFFER) - buffer
            ptx.copied()
            cuda.syncthreads()
            # Queries and keys, two channels a thread; the inputs before are in the other buffer.
            at, to = other + UINT64((_PIECE - SPAN + 1) * _WORDS) + t, t * UINT64(2)
            p, r, s = raw[at], raw[at + UINT64(_WORDS)], raw[at + UINT64(2 * _WORDS)]
            at = buffer + t
            for _ in range(count):
                ptx.roll()
                u = raw[at]
                qk[to] = acted(low(p), low(r), low(s), low(u), even)
                qk[to + UINT64(1)] = acted(high(p), high(r), high(s), high(u), odd)
                p, r, s = r, s, u
                at += UINT64(_WORDS)
                to += UINT64(2 * KEY_DIM)
            # Values, two channels of two tokens.
            row = t >> UINT64(4)
            while row < count:
                at = buffer + row * UINT64(_WORDS) + UINT64(_QK_WORDS) + (t & UINT64(15))
                p, r, s = _before(at, row, buffer, 3), _before(at, row, buffer, 2), _before(at, row, buffer, 1)
                p, r, s, u = raw[p], raw[r], raw[s], raw[at]
                to = row * UINT64(VALUES) + UINT64(2) * (t & UINT64(15))
                vs[to] = acted(low(p), low(r), low(s), low(u), v_even)
                vs[to + UINT64(1)] = acted(high(p), high(r), high(s), high(u), v_odd)
                row += UINT64(THREADS // _V_WORDS)
            if t < count:
                to = t * UINT64(_NUMBERS)
                numbers[to + UINT64(_BETA)] = rounded(sigmoid(found_beta))
                numbers[to + UINT64(_DECAY)] = libdevice.expf(rate * softplus(found_decay + shift))
            cuda.syncthreads()
            ahead = start + UINT64(_PIECE)
            if ahead < rows:
                far = ahead * x_pitch
                copy(raw_at + UINT64(4) * other, rows - ahead, q + far, k + far, v + far, x_pitch)
                if t < UINT64(_PIECE) and ahead + t < rows:
                    found_beta = one(beta + (ahead + t) * beta_pitch)
                    found_decay = one(decay + (ahead + t) * decay_pitch)
            # Norms, a token for each warp at a time.
            row = warp
            while row < count:
                at = qk_at + row * UINT64(8 * KEY_DIM) + lane * UINT64(16)
                a, b, c, d = ptx.shared_load_128(at)
                e, f, h, i = ptx.shared_load_128(at + UINT64(4 * KEY_DIM))
                a, b, c, d = ptx.float_of(a), ptx.float_of(b), ptx.float_of(c), ptx.float_of(d)
                e, f, h, i = ptx.float_of(e), ptx.float_of(f), ptx.float_of(h), ptx.float_of(i)
                of_q = over_lanes(a * a + b * b + c * c + d * d, types.uint32(32))
                of_k = over_lanes(e * e + f * f + h * h + i * i, types.uint32(32))
                both = over_lanes(a * e + b * f + c * h + d * i, types.uint32(32))
                if lane == UINT64(0):
                    to = row * UINT64(_NUMBERS)
                    by_q = libdevice.rsqrtf((of_q + FLOAT32(_EPS)) * FLOAT32(KEY_DIM))
                    by_k = libdevice.rsqrtf(of_k + FLOAT32(_EPS))
                    numbers[to + UINT64(_BY_Q)], numbers[to + UINT64(_BY_K)] = by_q, by_k
                    numbers[to + UINT64(_QK)] = by_q * by_k * both
                row += UINT64(THREADS // 32)
            cuda.syncthreads()
            at_q, at_k, to, at = types.uint32(own_q), types.uint32(own_k), UINT64(0), column
            for _ in range(count):
                ptx.roll()
                reads = _reads(state, at_q, at_k)
                by_query, by_key = _over_parts(reads[0]), _over_parts(reads[1])
                left, by_k = numbers[to + UINT64(_DECAY)], numbers[to + UINT64(_BY_K)]
                new = (vs[at] - left * by_k * by_key) * numbers[to + UINT64(_BETA)]
                state = _updated(state, left, by_k * new, reads)
                if part == UINT64(0):
                    found = left * numbers[to + UINT64(_BY_Q)] * by_query + numbers[to + UINT64(_QK)] * new
                    ptx.store_16(out, types.uint16(two(found, found) & types.uint32(0xFFFF)))
                out += y_pitch
                at_q, at_k = types.uint32(at_q + UINT32(8 * KEY_DIM)), types.uint32(at_k + UINT32(8 * KEY_DIM))
                to += UINT64(_NUMBERS)
                at += UINT64(VALUES)
            start, buffer = ahead, other
        _store_state(state, state_at)
        # The last inputs, some of which may be of the piece before.
        buffer = UINT64(_BUFFER) - buffer
        at = buffer + count * UINT64(_WORDS)
        p, r = _before(at, count, buffer, 4), _before(at, count, buffer, 3)
        s, u = _before(at, count, buffer, 2), _before(at, count, buffer, 1)
        if writes:
            a, b, c, d = _windows_of(raw[p + t], raw[r + t], raw[s + t], raw[u + t])
            ptx.store_128(window, a, b, c, d)
        if t < UINT64(_V_WORDS):
            t += UINT64(_QK_WORDS)
            a, b, c, d = _windows_of(raw[p + t], raw[r + t], raw[s + t], raw[u + t])
            ptx.store_128(v_window, a, b, c, d)

    return Kernel(name, recur, 27, bounds=(THREADS, 2))


def _gate(name: str, low: Any, high: Any, two: Any) -> Kernel:
    """Make a kernel that multiplies the norms of heads' outputs by the activations of gates.

    It rounds the norm, the activation and their product. As many lanes have a head as it has vectors.

    Args:
        name: of it.
        low: makes a float32 of the first element in 32 bits.
        high: the same of the second.
        two: makes 32 bits of both.
    """
    squares, weights_at, scaled = squares_of(low, high), weights_by(low, high), scaled_by(low, high, two)

    @device_function
    def gated(gate: Any, y: Any) -> Any:
        act = two(silu(low(gate)), silu(high(gate)))
        return two(low(act) * low(y), high(act) * high(y))

    def gate(  # type: ignore[no-untyped-def]
        x, x_pitch, x_step, gate, gate_pitch, gate_step, y, y_pitch, weight, eps, heads, group,
    ):  # fmt: skip
        ptx.after_earlier_with_next()
        row, t = UINT64(cuda.blockIdx.x), UINT64(cuda.blockIdx.y) * UINT64(cuda.blockDim.x) + UINT64(cuda.threadIdx.x)
        head, at = t // UINT64(_LANES), t % UINT64(_LANES) * UINT64(16)
        own = min(head, heads - UINT64(1))
        key, of_group = own // group, own % group * UINT64(2 * VALUE_DIM) + at
        a, b, c, d = ptx.load_128(x + row * x_pitch + UINT64(2) * key * x_step + of_group)
        e, f, g, h = ptx.load_128(gate + row * gate_pitch + UINT64(2) * key * gate_step + of_group)
        s = over_lanes(squares(a, b, c, d), types.uint32(_LANES))
        by = libdevice.rsqrtf(s * FLOAT32(1 / VALUE_DIM) + ptx.float_of(types.uint32(eps)))
        a, b, c, d = scaled((a, b, c, d), weights_at(weight + at, UINT64(0)), by)
        if head < heads:
            to = y + row * y_pitch + own * UINT64(2 * VALUE_DIM) + at
            ptx.store_128(to, gated(e, a), gated(f, b), gated(g, c), gated(h, d))

    return Kernel(name, gate, 12)


_BF16 = ptx.low_bf16, ptx.high_bf16, ptx.two_bf16
_F16 = ptx.low_f16, ptx.high_f16, ptx.two_f16

DELTA_RECUR_BF16 = _recur("delta_recur_bf16", *_BF16)
DELTA_RECUR_F16 = _recur("delta_recur_f16", *_F16)
DELTA_GATE_BF16 = _gate("delta_gate_bf16", *_BF16)
DELTA_GATE_F16 = _gate("delta_gate_f16", *_F16)
