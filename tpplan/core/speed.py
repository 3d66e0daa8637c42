"""How long a step takes on every device: what a plan predicts, and the measured constants that it predicts it from."""

from __future__ import annotations

from attrs import frozen

#: Bytes of the sum that :attr:`LinkSpeed.middle_ns` is of.
MIDDLE_BYTES = 512 * 2**10


@frozen(kw_only=True)
class LinkSpeed:
    """The measured all-reduce of two devices, which :mod:`tpplan.planner.speed` interpolates.

    Attributes:
        first: index of the first device.
        second: index of the second device, larger than ``first``.
        latency_ns: nanoseconds of a sum of 8 KiB, next to nothing.
        bytes_per_second: rate of large sums: their bytes on one device, divided by the time.
        middle_ns: nanoseconds of a sum of 512 KiB; 0 where only the other two were measured.
    """

    first: int
    second: int
    latency_ns: int
    bytes_per_second: int
    middle_ns: int = 0


@frozen
class DeviceTime:
    """The predicted nanoseconds of a pass on one device, by cause.

    Attributes:
        device: index of the device in the plan.
        weights_ns: reading weights, or multiplying by them where that takes longer.
        cache_ns: reading the cache, when it is full, and reading and writing states.
        exchanges_ns: moving data between devices, which all of them take part in.
        rest_ns: all other kernels, and what lies between kernels.
    """

    device: int
    weights_ns: int
    cache_ns: int
    exchanges_ns: int
    rest_ns: int

    @property
    def total_ns(self) -> int:
        """Nanoseconds of the pass while the cache is full."""
        return self.without_cache_ns + self.cache_ns

    @property
    def without_cache_ns(self) -> int:
        """Nanoseconds of the pass without any cache or states."""
        return self.weights_ns + self.exchanges_ns + self.rest_ns


@frozen
class Pass:
    """The predicted times of a pass.

    Devices wait for each other at every sum. So a pass takes, for each half of a layer (attention, and the MLP or the
    experts) and for the logits, as long as the device that is slowest at that, which need not always be the same one.

    Attributes:
        rows: tokens of the pass: one of each sequence in a decode step, those of a prompt in prefill.
        devices: times of the devices in use, in order, without what they wait for each other.
        without_cache_ns: nanoseconds of the pass while next to nothing is cached, with states; 0 in plans by the first
            tpplan with predictions, which took the slowest device's total.
        total_ns: nanoseconds of the pass while the cache is full; 0 likewise.
    """

    rows: int
    devices: tuple[DeviceTime, ...]
    without_cache_ns: int = 0
    total_ns: int = 0

    @property
    def slowest(self) -> DeviceTime:
        """The device that waits least for the others while the cache is full."""
        return max(self.devices, key=lambda each: each.total_ns)

    @property
    def tokens_per_second(self) -> int:
        """Tokens per second of all sequences together while next to nothing is cached, rounded down."""
        longest = self.without_cache_ns or max(each.without_cache_ns for each in self.devices)
        return self.rows * 10**9 // max(1, longest)

    @property
    def full_tokens_per_second(self) -> int:
        """Tokens per second of all sequences together while the cache is full, rounded down."""
        return self.rows * 10**9 // max(1, self.total_ns or self.slowest.total_ns)


@frozen
class Speed:
    """What a plan predicts of tpplan's decoder.

    Attributes:
        decode: steps of one sequence, and of the plan's batch if that is larger.
        prefill: a pass of a prompt's tokens; empty where no device's matrix rate is known.
        links: the links that were measured; those of others are guessed.
    """

    decode: tuple[Pass, ...]
    prefill: tuple[Pass, ...] = ()
    links: tuple[LinkSpeed, ...] = ()


@frozen(kw_only=True)
class GpuSpeed:
    """What was measured of one GPU.

    Attributes:
        uuid: the GPU's, as torch tells it; empty if it does not.
        read_bytes_per_second: bandwidth of a kernel that only reads.
        copy_bytes_per_second: bytes read and written per second by a copy within the GPU's memory.
        boundary_ns: nanoseconds from one tiny kernel of a CUDA graph to the next.
        matrix_flops_per_second: rate of products of large matrices in bfloat16, in operations per second.
    """

    uuid: str
    read_bytes_per_second: int
    copy_bytes_per_second: int
    boundary_ns: int
    matrix_flops_per_second: int


@frozen
class MeasuredSpeeds:
    """What was measured of the GPUs of a machine.

    Attributes:
        gpus: the GPUs, in torch's order.
        links: pairs of them; indices are torch's.
    """

    gpus: tuple[GpuSpeed, ...]
    links: tuple[LinkSpeed, ...]
