"""Wrappers of torch's private functions: small, fast, and the same in torch 2.6 to 2.14."""

from __future__ import annotations

import ctypes
import os
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch._C._dynamo.guards import TensorGuards
from torch.nn.attention import SDPBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta

    from torch.distributed import ProcessGroup


#: Bytes of the vectors that kernels of attention read.
_VECTOR = 16
#: At most one in this many of a device's multiprocessors is left free.
_SHARE = 16
#: Opens only libraries that are loaded already; not available on all platforms.
_LOADED = ctypes.DEFAULT_MODE | getattr(os, "RTLD_NOLOAD", 0)


def _own(name: str) -> Any:
    """Return a private function of torch, fast enough for every call; None if torch has no CUDA."""
    return getattr(torch._C, name, None)  # noqa: SLF001


#: Returns the handle of a CUDA device's current stream; 0 for its default one.
stream_handle: Callable[[int], int] = _own("_cuda_getCurrentRawStream")
#: Returns whether the current stream of the current CUDA device is being captured.
is_capturing: Callable[[], bool] = _own("_cuda_isCurrentStreamCapturing")
#: Returns the current CUDA device.
current_device: Callable[[], int] = _own("_cuda_getDevice")
#: Makes a CUDA device current, and returns the previous one.
switch_device: Callable[[int], int] = _own("_cuda_exchangeDevice")


def driver_version() -> str:
    """Return the newest CUDA that the driver supports, as torch tells; empty if it does not."""
    ask = _own("_cuda_getDriverVersion")
    try:
        return f"CUDA {version}" if ask and (version := ask()) else ""
    except RuntimeError:  # without a driver
        return ""


def store_of(name: str) -> Any:
    """Return a part of the store by which the processes of torch.distributed have found each other.

    Args:
        name: start of the names of all values in this part.

    Raises:
        ValueError: there are no processes.
    """
    from torch.distributed import distributed_c10d  # noqa: PLC0415 (not for one process)

    return distributed_c10d.PrefixStore(name, distributed_c10d._get_default_store())  # noqa: SLF001


def store_rank() -> int | None:
    """Return the rank of the process that has the store of torch.distributed; None if torchrun has it."""
    return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


def make_current(streams: Sequence[torch.cuda.Stream]) -> None:
    """Make each stream its device's current one, without changing the current device; complete it if interrupted."""
    before = torch.cuda.current_device()
    try:
        for stream in streams:
            torch.cuda.set_stream(stream)
    except BaseException:
        for stream in streams:
            torch.cuda.set_stream(stream)
        raise
    finally:
        torch.cuda.set_device(before)


@contextmanager
def leaving_processors(places: Sequence[torch.device], count: int) -> Iterator[None]:
    """Make this thread's cuBLAS matrix products leave ``count`` multiprocessors of each CUDA device free, if possible.

    At most one in sixteen is left free. Torch has no public API for this; if its cuBLAS is not found, nothing changes.
    """
    set_target = _sm_count_target() if any(place.type == "cuda" for place in places) else None
    if set_target is None:
        yield
        return

    def tell(left: int) -> None:
        for place in places:
            total = torch.cuda.get_device_properties(place).multi_processor_count
            with torch.cuda.device(place):
                handle = torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
                set_target(handle, total - min(left, total // _SHARE) if left else 0)  # 0: all

    try:
        tell(count)
        yield
    finally:
        tell(0)


@cache
def _sm_count_target() -> Callable[[int, int], int] | None:
    """Return ``cublasSetSmCountTarget`` of the cuBLAS that torch has loaded; None if it is not found."""
    if torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.partition('.')[0]}", _LOADED)
    except OSError:
        return None
    function: Any = library.cublasSetSmCountTarget
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_int
    set_target: Callable[[int, int], int] = function
    return set_target


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a callable that takes as many tensors and returns whether each is like the one in its place.

    That is: the same class, shape, strides, dtype and device, and the same gradient, conjugate and negative bits. Torch
    compares all of these at once, in a tenth of the time of querying them.
    """
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def takes_cudnn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    is_causal: bool = False,
) -> bool:
    """Return whether torch would choose cuDNN for this grouped-query attention."""
    choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=True)  # noqa: SLF001
    return choice == SDPBackend.CUDNN_ATTENTION.value


def at_vectors(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose rows begin at multiples of 16 bytes on a GPU: itself if they do, else a copy.

    FlashAttention and cuDNN read vectors of 16 bytes without asking, and end in a misaligned address.
    """
    steps = (x.stride(i) for i in range(x.dim() - 1) if x.shape[i] > 1)
    is_at_vectors = not x.is_cuda or not any(at % _VECTOR for at in (x.data_ptr(), *(n * x.itemsize for n in steps)))
    return x if is_at_vectors else x.clone(memory_format=torch.contiguous_format)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the causal attention of the last tokens' queries by the flash kernel, whichever torch would choose.

    Args:
        q: queries, ``[texts, heads, tokens, elements]``.
        k: keys of all tokens.
        v: values of all tokens.
        scale: scale of the scores.
        window: tokens that a query sees, itself included; 0 for all.
        sinks: score of each head's sink, see :class:`tpplan.decoder.math.Scoring`.
    """
    most = q.shape[2], k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    found, sums = _flash(q, k, v, (None, None, None), most, scale=scale, window=window)
    return _beside_sinks(found, sums, sinks).transpose(1, 2)


def flash_attention_to_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention over a part of the tokens by the flash kernel, and how much its scores weigh.

    Args:
        q: queries, ``[texts, heads, tokens, elements]``.
        k: keys of the part.
        v: values of the part.
        scale: scale of the scores.
        is_causal: whether the queries are those of the last tokens of the part; else they see all of it.

    Returns:
        The attention output, and the logarithm of each softmax's denominator in float32, ``[texts, heads, tokens]``.
    """
    most = q.shape[2], k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    found, sums = _flash(q, k, v, (None, None, None), most, scale=scale, window=0, is_causal=is_causal)
    return found.transpose(1, 2), sums


def cudnn_attention_to_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention over a part of the tokens by cuDNN; see :func:`flash_attention_to_part`.

    cuDNN makes a plan for each shape, and one of its own without these logarithms.
    """
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention  # noqa: SLF001
    with_sums, returns_mask = True, False
    q, k, v = map(at_vectors, (q, k, v))
    found, sums, *_ = attend(q, k, v, None, with_sums, 0.0, is_causal, returns_mask, scale=scale)
    return found, sums.view(q.shape[:3])  # in some releases of torch with a last dimension of 1


def flash_attention_of_several(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    where: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    most: tuple[int, int],
    *,
    scale: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the causal attention of the last tokens of several texts, ``[tokens, heads, elements]``.

    Args:
        q: queries of the last tokens, one text after the other.
        k: keys of all tokens; there may be unused ones between two texts.
        v: values of all tokens.
        where: three int32 tensors: the first query of each text and one past the last of all; the first key of each
            text and any number; and the number of keys of each text. A text may have no queries.
        most: maximum queries and maximum keys of a text.
        scale: scale of the scores.
        window: tokens that a query sees, itself included; 0 for all.
        sinks: score of each head's sink, see :class:`tpplan.decoder.math.Scoring`.
    """
    longest, length = max(2, most[0]), most[1]  # if 1, the kernel assumes that every text has one query
    found, sums = _flash(q, k, v, where, (longest, length), scale=scale, window=window)
    return _beside_sinks(found, sums, sinks)


def flash_attention_to_cached(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    where: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    most: tuple[int, int],
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of a text's tokens to all of the given keys by the flash kernel, and how much they weigh.

    Args:
        q: queries, ``[tokens, heads, elements]``.
        k: keys of a cache.
        v: values of a cache.
        where: see :func:`flash_attention_of_several`; there is one text, which has a key at least.
        most: maximum queries and maximum keys.
        scale: scale of the scores.

    Returns:
        As :func:`flash_attention_to_part`, of one text.
    """
    found, sums = _flash(q, k, v, where, most, scale=scale, window=0, is_causal=False)
    return found.unsqueeze(0).transpose(1, 2), sums.unsqueeze(0)


def _beside_sinks(found: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return attention beside sinks: each adds its exponential to the denominators of a head's softmaxes.

    Args:
        found: attention without them, ``[..., tokens, heads, elements]``; scaled in place.
        sums: logarithms of the denominators without them, ``[..., heads, tokens]``.
        sinks: score of each head's sink; None if there are none.
    """
    return found if sinks is None else found.mul_(torch.sigmoid(sums.mT - sinks).unsqueeze(-1))


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    where: tuple[torch.Tensor | None, ...],
    most: tuple[int, int],
    *,
    scale: float,
    window: int,
    is_causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention, ``[..., tokens, heads, elements]``, and what the kernel returns beside it.

    That is the logarithm of each softmax's denominator in float32, ``[..., heads, tokens]``.
    """
    attend = torch.ops.aten._flash_attention_forward  # noqa: SLF001
    q, k, v = map(at_vectors, (q, k, v))
    queries, keys, counts = where
    returns_mask = False
    sides = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    found, sums, *_ = attend(
        q, k, v, queries, keys, *most, 0.0, is_causal, returns_mask, scale=scale, seqused_k=counts, **sides
    )
    return found, sums


def is_own_allocator(*, default: bool) -> bool:
    """Return whether CUDA memory comes from torch's own allocator; ``default`` if CUDA is not initialised."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return default
    return torch.cuda.get_allocator_backend() == "native"


def expandable_segments(*, default: bool) -> bool:
    """Return whether torch's allocator uses expandable segments; ``default`` if this is unknown."""
    if not torch.cuda.is_initialized() or not is_own_allocator(default=True):  # type: ignore[no-untyped-call]
        return default
    settings = torch.cuda.memory._snapshot()["allocator_settings"]  # noqa: SLF001
    return bool(settings.get("expandable_segments", default))


def timeout_of(group: ProcessGroup, place: torch.device) -> float | None:
    """Return the time-out of a process group's messages in memory of a kind of device, in seconds; None if unknown."""
    options = getattr(group._get_backend(place), "options", None)  # noqa: SLF001
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return None if timeout is None else timeout.total_seconds()


def backends_of(group: ProcessGroup) -> dict[str, str]:
    """Return the name of a group's backend for each kind of device, such as ``nccl`` for ``cuda``."""
    config = distributed.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    return dict(entry.split(":", 1) for entry in config.split(","))
