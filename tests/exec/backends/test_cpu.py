"""Plain virtual devices do what the adversarial ones do under their kindest schedule, and nothing else."""

from __future__ import annotations

from random import Random
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.exec.caller import DTYPES, LAYOUTS, Caller, Script, bits, memory, noise, scripts, total, widths
from tests.exec.program_cases import CASES
from tpplan.errors import ExecutionError, InternalError
from tpplan.exec.backends import cpu
from tpplan.exec.backends.cpu import VirtualDevices, add, sequence
from tpplan.exec.memory.binding import resolve
from tpplan.exec.programs.fence import HOST_STREAM, order, own
from tpplan.exec.programs.program import (
    EXCHANGE,
    HOST,
    INPUT,
    OUTPUT,
    SLOT,
    SLOTS,
    STAGE,
    Await,
    Buffer,
    Copy,
    Exchange,
    Flag,
    Program,
    Queue,
    Signal,
    View,
)

QUEUE = Queue(1, 0, (1,))


def plain(random: Random) -> VirtualDevices:
    """Return virtual devices whose memory holds garbage."""
    mine = memory()
    for block in (*mine.exchange.values(), *mine.rings.values()):
        block.copy_(noise(1, block.numel(), torch.uint8, random)[0])
    return VirtualDevices(mine)


@settings(max_examples=examples(200))
@given(scripts())
def test_operations_in_a_row_give_what_torch_gives(script: Script) -> None:
    """All outputs are right to the byte, in any dtype and layout, fed from operation to operation, and in place."""
    script.play(lambda _, random: plain(random))


@pytest.mark.parametrize("name", CASES)
def test_every_program_is_right(name: str) -> None:
    """Every program gives the right bytes each time it runs on the same devices."""
    case, random = CASES[name], Random(0)
    caller = Caller(plain(random), random, case.rows, torch.bfloat16)
    program = case.program
    for _ in range(3):
        caller.call(case.operation, program)
    caller.check()


@given(st.data())
def test_sums_are_rounded_once(data: st.DataObject) -> None:
    """Sums of any bit patterns equal, to the bit, additions in float32 in order, rounded at the end; NaN stays NaN.

    So they do where the target is one of the sources, whichever, and in any layout.
    """
    dtype = data.draw(st.sampled_from((torch.float16, torch.bfloat16, torch.float32)))
    random = Random(data.draw(st.integers(0, 2**32)))
    rows, columns, count = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 70)), data.draw(st.integers(2, 6))
    sources = []
    for _ in range(count):
        source = random.choice(LAYOUTS)(rows, columns, dtype)
        bits(source).copy_(noise(rows, columns, bits(source).dtype, random))
        sources.append(source)
    target = data.draw(st.sampled_from([random.choice(LAYOUTS)(rows, columns, dtype), *sources]))
    truth = total(*sources)
    with patch.object(cpu, "_CACHED", data.draw(st.sampled_from((1, 100, 2**16)))):  # rows at once: 1, some, all
        add(target, sources)
    assert torch.equal(target.isnan(), truth.isnan())
    assert torch.equal(bits(target)[~truth.isnan()], bits(truth)[~truth.isnan()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_lie_where_programs_say(dtype: torch.dtype) -> None:
    """Context memory is dense, in pieces that start at multiples of 64 bytes; operands keep their strides."""
    mine, size = memory(), dtype.itemsize
    second = resolve(View(Buffer(EXCHANGE, 2, 1, 3), 1, 3, 1, 2, width=5), {}, mine, 5, dtype)
    assert second.shape == (3, 2)  # rows 2 to 5, columns 1 and 2 of 5
    assert second.stride() == (5, 1)
    assert second.data_ptr() == mine.exchange[2].data_ptr() + 1024 // 3 // 64 * 64 + size
    ring = resolve(View(Buffer(STAGE, HOST, 1, SLOTS), 0, 5, width=5), {}, mine, 2, dtype)
    assert ring.data_ptr() == mine.rings[HOST].data_ptr() + 1024
    slot = resolve(View(Buffer(SLOT, 1, queue=QUEUE), 2, 5, width=5), {}, mine, 2, dtype, slot=1)
    assert slot.data_ptr() == mine.slots(QUEUE).data_ptr() + 256 + 2 * size
    operand = torch.zeros(40, 5, dtype=dtype).t()
    part = resolve(View(Buffer(INPUT, 0), 3, 7, 2, 4), {Buffer(INPUT, 0): operand}, mine, 5, dtype)
    assert part.shape == (1, 4)
    assert part.data_ptr() == operand[2:, 3:].data_ptr()
    assert part.stride() == operand.stride()


def test_a_message_that_is_too_large_is_an_error() -> None:
    """What does not fit its piece never spills into the next one."""
    with pytest.raises(InternalError, match=r"exchange\[1/3\]@2\[0:40\] takes 480 bytes, but its place has 320"):
        resolve(View(Buffer(EXCHANGE, 2, 1, 3), 0, 40, width=40), {}, memory(), 3, torch.float32)


def test_kernels_take_turns_as_their_flags_say() -> None:
    """The order is one that the streams allow, also where a stream waits for one whose commands were issued later."""
    into, out = Copy(own(0), _at(INPUT, 0), _at(OUTPUT, 0)), Copy(own(1), _at(OUTPUT, 0), _at(OUTPUT, 1))
    late = Copy(HOST_STREAM, _at(OUTPUT, 1), _at(OUTPUT, HOST))
    last = Copy(own(2), _at(OUTPUT, HOST), _at(OUTPUT, 2))
    done = Flag("done", QUEUE)
    receiver, sender = Exchange(own(1), (Await(own(1), done), out)), Exchange(own(0), (into, Signal(own(0), done)))
    program = Program("backwards", (receiver, sender, *order("taken", own(1), HOST_STREAM), late, last))
    assert [work.target.view for work in sequence(program)] == [step.target for step in (into, out, late, last)]


def test_what_never_ends_is_an_error() -> None:
    """A program whose streams wait for each other is refused, with what is left of it, before anything moves."""
    done = Flag("done", QUEUE)
    copy = Copy(own(0), _at(INPUT, 0), _at(OUTPUT, 0))
    program = Program("stuck", (copy, Exchange(own(1), (Await(own(1), done),))))
    operands = {Buffer(INPUT, 0): torch.ones(1, 4), Buffer(OUTPUT, 0): torch.zeros(1, 4)}
    with pytest.raises(InternalError, match=r"stuck never ends: own1: await done\(0→1\)$"):
        plain(Random(0)).run(program, operands)
    assert not operands[Buffer(OUTPUT, 0)].any()


def test_autograd_takes_no_notice() -> None:
    """Parameters are moved like any tensor: outputs need no gradient, and tensors made for inference are written."""
    case = CASES["all_reduce of two, events-1 parts"]
    operands = {buffer: torch.ones(3, columns) for buffer, columns in widths(case.operation).items()}
    for buffer, tensor in operands.items():
        tensor.requires_grad_(buffer.role == INPUT)
    with torch.inference_mode():
        operands[Buffer(OUTPUT, 1)] = torch.zeros(3, 40)
    plain(Random(0)).run(case.program, operands)
    for device in (0, 1):
        assert not operands[Buffer(OUTPUT, device)].requires_grad
        assert operands[Buffer(OUTPUT, device)].eq(2).all()


def test_what_is_remembered_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of many sizes, and many programs, all run right, and leave no more behind than a few."""
    monkeypatch.setattr(cpu, "_KEPT", 4)
    case, devices = CASES["all_reduce of two, peer-small"], plain(Random(0))
    for rows in range(1, 4):
        for _ in range(3):
            program = case.program
            operands = {buffer: torch.ones(rows, columns) for buffer, columns in widths(case.operation).items()}
            for dtype in (torch.float16, torch.bfloat16):
                tensors = {buffer: tensor.to(dtype) for buffer, tensor in operands.items()}
                devices.run(program, tensors)
                assert tensors[Buffer(OUTPUT, 0)].eq(2).all()
    assert len(devices._bound) <= 4
    assert len(devices._work) <= 4


def test_closed_devices_run_nothing() -> None:
    """Closing gives the memory back, also twice; a program after that is an error."""
    case, devices = CASES["broadcast, peer-small"], plain(Random(0))
    operands = {buffer: torch.ones(1, columns) for buffer, columns in widths(case.operation).items()}
    pending = devices.run(case.program, operands)
    pending.wait(timeout=0)
    devices.synchronize()
    devices.close()
    devices.close()
    assert pending.done()
    with pytest.raises(ExecutionError, match="the virtual devices are closed"):
        devices.run(case.program, operands)


def _at(role: str, device: int) -> View:
    return View(Buffer(role, device), 0, 4)
