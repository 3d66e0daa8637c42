"""ExLlamaV2 itself on tpplan: what :func:`install` puts in the place of ExLlamaV2's own.

That is our TPContext, and for the functions of its C++ extension that take ``ext_tp_context``, Python functions over
the operations of our TPContext.

Data moves by tpplan. What one device computes alone is the extension's own function for one device, or torch. Streams
are torch's current ones, which ExLlamaV2 sets for all devices at the start of a forward pass.
"""

from __future__ import annotations

import importlib
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch.nn.functional import gelu

from tpplan.errors import ExecutionError
from tpplan.exllamav2 import compat, tensor_p
from tpplan.exllamav2.tensor_p import BROADCAST_ID, BROADCAST_Q, BROADCAST_RS, Handle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from torch import Tensor

    Tensors = Sequence[Tensor]
    #: Addresses of the extension's quantised matrices, one on each device.
    Matrices = Sequence[int]

#: The extension's numbers of RoPE styles.
_NO_ROPE, _NEOX = 0, 2
#: Arguments of flash attention: RoPE's cosines and sines, rows of the cache, and padding at the left of it; slopes of
#: ALiBi; causal, the windows to the left and to the right, the cap of the scores, interleaved RoPE, and the splits.
_NO_ROPE_NOR_PADDING: tuple[None, ...] = (None, None, None, None)
_NO_ALIBI = None
_CAUSAL = (True, 10_000_000, -1, 0.0, True, 0)


class Functions:
    """Each method has the name, the arguments and the effect of the C++ function whose place it takes.

    The host buffers are an exception: only what is gathered into host memory is left in them. A device number, which
    picks one of several threads there, has no effect.
    """

    def __init__(self, ext: Any) -> None:
        """Compute with the extension's functions for one device."""
        # Looked up once: some of the names are those of methods below.
        self._rms_norm, self._gemm, self._rope = ext.rms_norm, ext.gemm_half_q_half, ext.rope_

    def tp_broadcast(  # noqa: PLR0917
        self, handle: Handle, buffer: int, source: Tensor, kind: int, targets: Tensors, dim: int, _device: int
    ) -> None:
        """Copy a tensor into one on each device of a split."""
        handle.tp_context.broadcast(buffer, source, kind, dim, out=targets)

    def tp_gather(  # noqa: PLR0917
        self,
        handle: Handle,
        buffer: int,
        inputs: Tensors,
        kind: int,
        targets: Tensors,
        target_kind: int,
        dim: int,
        _device: int,
    ) -> None:
        """Gather parts into a host buffer, or with a split to go to into one tensor on each of its devices."""
        if target_kind < 0:
            handle.tp_context.gather_pinned(buffer, inputs, kind, dim)
        else:
            handle.tp_context.allgather(buffer, inputs, kind, target_kind, dim, out=targets)

    def tp_cross_device_barrier(self, handle: Handle, *_: int) -> None:
        """Wait for all devices, as every operation of ours does where it has to."""
        handle.tp_context.wait_streams()

    def tp_all_reduce(self, handle: Handle, buffer: int, tensors: Tensors, residuals: Tensors) -> None:
        """Add up tensors over all devices, onto each device's residual."""
        handle.tp_context.all_reduce(buffer, tensors, residuals)

    def free_tp_context(self, handle: Handle) -> None:
        """Give back what the context has allocated."""
        handle.tp_context.unload()

    def rms_norm_tp(self, x: Tensors, w: Tensors, y: Tensors, epsilon: float, _handle: Handle) -> None:
        """Normalise on each device."""
        self._normalise(x, w, y, epsilon)

    def gemm_half_q_half_tp(
        self,
        a: Tensors,
        b: Matrices,
        c: Tensors,
        force_cuda: bool,  # noqa: FBT001
        _handle: Handle,
        _device: int,
    ) -> None:
        """Multiply by the quantised matrix of each device."""
        self._multiply(a, b, c, force_cuda=force_cuda)

    def tp_mlp_forward_(  # noqa: PLR0917
        self,
        handle: Handle,
        hidden_states: Tensor,
        temp_bc0: Tensors,
        temp_bc1: Tensors,
        temp_bc2: Tensors,
        temp_gate: Tensors,
        temp_up: Tensors,
        temp_down: Tensors,
        pre_layernorm: Tensors,
        norm_epsilon: float,
        gate_proj: Matrices,
        up_proj: Matrices,
        down_proj: Matrices,
        act_gelu: bool,  # noqa: FBT001
    ) -> None:
        """Run an MLP, residual included, and gather its output into host buffer 0."""
        tp, rows = handle.tp_context, hidden_states.shape[0]
        if tp.id_split_devs != tp.rs_split_devs:
            raise ExecutionError(
                f"ExLlamaV2 computes an MLP on the devices of its columns, {tp.id_split_devs}, and of the residual "
                f"stream, {tp.rs_split_devs}, which have to be the same",
                "give the smallest GPU a larger gpu_split, or leave it out with 0",
            )
        residual, x, whole = _rows(temp_bc0, rows), _rows(temp_bc1, rows), _rows(temp_bc2, rows)
        gate, up, down = _rows(temp_gate, rows), _rows(temp_up, rows), _rows(temp_down, rows)
        tp.broadcast(0, hidden_states, BROADCAST_RS, out=residual)
        self._normalise(residual, pre_layernorm, x, norm_epsilon)
        self._multiply(x, gate_proj, gate)
        self._multiply(x, up_proj, up)
        for gate_, up_ in zip(gate, up, strict=True):
            _activate(gate_, is_gelu=act_gelu).mul_(up_)
        tp.allgather(1, gate, BROADCAST_ID, BROADCAST_ID, out=whole)
        self._multiply(whole, down_proj, down)
        tp.add_residual(down, residual, BROADCAST_RS)
        tp.gather_pinned(0, down, BROADCAST_RS)

    def tp_attn_forward_(  # noqa: PLR0917
        self,
        handle: Handle,
        hidden_states: Tensor,
        temp_bc0: Tensors,
        temp_bc1: Tensors,
        temp_bc2: Tensors,
        temp_q: Tensors,
        temp_k: Tensors,
        temp_v: Tensors,
        temp_o: Tensors,
        k_cache: Tensors,
        v_cache: Tensors,
        pre_layernorm: Tensors,
        norm_epsilon: float,
        q_proj: Matrices,
        k_proj: Matrices,
        v_proj: Matrices,
        o_proj: Matrices,
        head_dim: int,
        rope_style: int,
        batch_size: int,
        q_len: int,
        sin: Tensors,
        cos: Tensors,
        past_lens: Tensors,
        scaling: float,
        block_index: Tensors | None = None,
    ) -> None:
        """Run attention with a cache, residual included, and gather its output into host buffer 0."""
        flash = importlib.import_module("flash_attn_2_cuda").fwd_kvcache
        tp, rows = handle.tp_context, batch_size * q_len
        residual, x, whole = _rows(temp_bc0, rows), _rows(temp_bc1, rows), _rows(temp_bc2, rows)
        q, k, v, o = (_rows(temp, rows) for temp in (temp_q, temp_k, temp_v, temp_o))
        tp.broadcast(0, hidden_states, BROADCAST_Q, head_dim, out=residual)
        self._normalise(residual, pre_layernorm, x, norm_epsilon)
        for matrices, out in ((q_proj, q), (k_proj, k), (v_proj, v)):
            self._multiply(x, matrices, out)
        for i, device in enumerate(tp.get_devs(BROADCAST_Q)):
            q_, k_, v_, o_ = (part[i].view(batch_size, q_len, -1, head_dim) for part in (q, k, v, o))
            if rope_style != _NO_ROPE:
                for part in (q_, k_):
                    table = sin[device], cos[device], 0, part.shape[2], head_dim, past_lens[i], rope_style == _NEOX
                    self._rope(part, *table)
            blocks = None if block_index is None else block_index[i]
            cache = k_cache[i], v_cache[i], k_, v_, past_lens[i]
            flash(q_, *cache, *_NO_ROPE_NOR_PADDING, blocks, _NO_ALIBI, o_, scaling, *_CAUSAL)
        tp.allgather(1, o, BROADCAST_Q, BROADCAST_Q, head_dim, out=whole)
        self._multiply(whole, o_proj, o)
        tp.add_residual(o, residual, BROADCAST_Q, head_dim)
        tp.gather_pinned(0, o, BROADCAST_Q, head_dim)

    def tp_attn_forward_paged_(self, handle: Handle, *arguments: Any) -> None:
        """Run attention like :meth:`tp_attn_forward_`, with the blocks of a paged cache before the last argument."""
        self.tp_attn_forward_(handle, *arguments[:-2], arguments[-1], arguments[-2])  # type: ignore[call-arg]

    def _normalise(self, x: Tensors, w: Tensors, y: Tensors, epsilon: float) -> None:
        for x_, w_, y_ in zip(x, w, y, strict=True):
            self._rms_norm(x_, w_, y_, epsilon)

    def _multiply(self, a: Tensors, b: Matrices, c: Tensors, *, force_cuda: bool = False) -> None:
        for a_, b_, c_ in zip(a, b, c, strict=True):
            self._gemm(a_, b_, c_, force_cuda)


def _rows(tensors: Tensors, rows: int) -> list[Tensor]:
    """Return the first rows of each tensor."""
    return [tensor.narrow(0, 0, rows) for tensor in tensors]


def _activate(x: Tensor, *, is_gelu: bool) -> Tensor:
    """Apply SiLU or GELU in place; SiLU rounds after every step, as the extension's kernel does."""
    if is_gelu:
        return x.copy_(gelu(x, approximate="tanh"))
    return x.mul_(x.neg().exp_().add_(1).reciprocal_())


#: What modules of ExLlamaV2 import by name from the one named here, and what takes its place.
_NAMES = (
    ("exllamav2.tensor_p", "TPContext", tensor_p.TPContext),
    ("exllamav2.compat", "safe_move_tensor", compat.safe_move_tensor),
    ("exllamav2.compat", "test_gpu_peer_copy", compat.test_gpu_peer_copy),
)
_FUNCTIONS = [name for name in vars(Functions) if not name.startswith("_")]
_VERSION = "install ExLlamaV2 0.3.2"

#: While installed: a name, what it stood for, and what it stands for now.
_replaced: list[tuple[str, Any, Any]] = []


def install() -> None:
    """Let ExLlamaV2, which has to be installed, run on tpplan in this process, until :func:`uninstall`.

    ``load_tp`` then makes a :class:`tpplan.exllamav2.TPContext`; the functions of ExLlamaV2's extension that take
    ``ext_tp_context`` move data with it; and ``exllamav2.compat`` is :mod:`tpplan.exllamav2.compat`. Models that were
    loaded before keep the context that they have. A second call does nothing new.

    Raises:
        ExecutionError: ExLlamaV2 is not installed, cannot be imported, or lacks a function that would be replaced.
    """
    ext = _extension()
    if not _replaced:
        missing = [name for name in _FUNCTIONS if not hasattr(ext, name)]
        if missing:
            raise ExecutionError(f"this ExLlamaV2's extension has no {', '.join(missing)}", _VERSION)
        functions = Functions(ext)
        for name in _FUNCTIONS:
            original = getattr(ext, name)
            _replaced.append((name, original, _by_handle(getattr(functions, name), original)))
        _replaced.extend((name, getattr(sys.modules[module], name), ours) for module, name, ours in _NAMES)
    for module in _modules(ext):
        for name, original, ours in _replaced:
            if vars(module).get(name) is original:
                setattr(module, name, ours)


def uninstall() -> None:
    """Undo :func:`install`; without it this does nothing. Models that were loaded in between cannot be used any more.

    Raises:
        ExecutionError: see :func:`install`.
    """
    if not _replaced:
        return
    for module in _modules(_extension()):
        for name, original, ours in _replaced:
            if vars(module).get(name) is ours:
                setattr(module, name, original)
    _replaced.clear()


def _extension() -> ModuleType:
    """Return ExLlamaV2's extension, with all of its modules imported that take part."""
    try:
        importlib.import_module("exllamav2")
        ext: ModuleType = importlib.import_module("exllamav2.ext").exllamav2_ext
    except ModuleNotFoundError as error:
        if error.name != "exllamav2":
            raise ExecutionError(
                f"ExLlamaV2 needs the module {error.name}, which is not installed", _VERSION
            ) from error
        hint = f"{_VERSION}, or use tpplan.exllamav2.TPContext without it"
        raise ExecutionError("ExLlamaV2 is not installed: there is no module exllamav2", hint) from error
    except (ImportError, OSError, RuntimeError) as error:  # it may build its extension when it is imported
        reason = str(error).partition("\n")[0]
        raise ExecutionError(
            f"ExLlamaV2 cannot be imported: {reason}", "see to it that import exllamav2 works"
        ) from error
    return ext


def _modules(ext: ModuleType) -> list[ModuleType]:
    """Return the extension and all modules of ExLlamaV2 that are imported."""
    modules: dict[str, Any] = sys.modules  # None stands for one that must not be imported
    theirs = (module for name, module in modules.items() if name.partition(".")[0] == "exllamav2")
    return [ext, *filter(None, theirs)]


def _by_handle(ours: Callable[..., None], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ours with a handle of ours, and the original with the address of its own context."""

    @wraps(original)
    def call(*arguments: Any) -> Any:
        return (ours if any(isinstance(argument, Handle) for argument in arguments) else original)(*arguments)

    return call
