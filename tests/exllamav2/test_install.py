"""``install()`` with a stand-in for ExLlamaV2 that has its modules' and functions' names, on virtual devices."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.exllamav2 import client as clients
from tests.exllamav2.client import EPSILON, FLOWS, PAGE, Attention, Client, Linear, Mlp, Norm, reference
from tests.exllamav2.models import HALF, LOPSIDED, finalized, noise, parts_of, size_of
from tests.exllamav2.test_flows import SHAPES
from tpplan.errors import ExecutionError
from tpplan.exllamav2 import (
    BROADCAST_ID,
    BROADCAST_KV,
    TPContext,
    install,
    safe_move_tensor,
    test_gpu_peer_copy,
    uninstall,
)
from tpplan.exllamav2.extension import _activate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

#: The functions of the extension that take the address of a context.
TAKE_HANDLES = (
    "free_tp_context",
    "gemm_half_q_half_tp",
    "rms_norm_tp",
    "tp_all_reduce",
    "tp_attn_forward_",
    "tp_attn_forward_paged_",
    "tp_broadcast",
    "tp_cross_device_barrier",
    "tp_gather",
    "tp_mlp_forward_",
)
ADDRESS = 0x7F00_1234_5678
_NAMES = ("TPContext", "safe_move_tensor", "test_gpu_peer_copy")


class Extension(ModuleType):
    """The extension: what one device computes, by the client's arithmetic, and C++ functions that take an address.

    Attributes:
        matrices: those that an address stands for.
        calls: of the C++ functions, by name.
    """

    def __init__(self) -> None:
        super().__init__("exllamav2_ext")
        self.matrices: dict[int, Tensor] = {}
        self.calls: list[str] = []
        for name in TAKE_HANDLES:
            setattr(self, name, self._native(name))

    def _native(self, name: str) -> Any:
        def call(*arguments: Any) -> str:
            if not any(type(argument) is int and argument == ADDRESS for argument in arguments):
                raise TypeError(f"{name}(): incompatible function arguments")
            self.calls.append(name)
            return name

        return call

    def address(self, matrix: Tensor) -> int:
        """Return the address of a matrix."""
        return next((key for key, known in self.matrices.items() if known is matrix), None) or self._new(matrix)

    def _new(self, matrix: Tensor) -> int:
        self.matrices[number := ADDRESS + 64 * len(self.matrices) + 64] = matrix
        return number

    @staticmethod
    def rms_norm(x: Tensor, w: Tensor, y: Tensor, epsilon: float) -> None:
        """Normalise."""
        assert epsilon == EPSILON
        y.copy_(clients.norm(x, w))

    def gemm_half_q_half(self, a: Tensor, b: int, c: Tensor, force_cuda: bool) -> None:
        """Multiply."""
        assert force_cuda is False
        c.copy_(clients.product(a, self.matrices[b]))

    @staticmethod
    def rope_(  # noqa: PLR0917
        x: Tensor, sin: Tensor, cos: Tensor, past: int, heads: int, dim: int, offsets: Tensor, is_neox: bool
    ) -> None:
        """Rotate."""
        assert (x.shape[2:], past, is_neox) == ((heads, dim), 0, True)
        x.copy_(clients.rotated(x, sin, cos, int(offsets[0])))


def _fwd_kvcache(  # noqa: PLR0917
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *others: Any
) -> None:
    """Flash attention's function with a cache, as ExLlamaV2 calls it."""
    cos, sin, rows, padding, blocks, slopes, out, scale, *kind = others
    assert [cos, sin, rows, padding, slopes] == [None] * 5
    assert scale == q.shape[-1] ** -0.5
    assert kind == [True, 10_000_000, -1, 0.0, True, 0]
    past = int(lengths[0])
    at = torch.arange(past + q.shape[1]).expand(q.shape[0], -1)
    if blocks is None:
        at = at + torch.arange(q.shape[0])[:, None] * k_cache.shape[1]
    else:
        at = blocks.gather(1, at // PAGE) * PAGE + at % PAGE
    stored = []
    for cache, new in ((k_cache, k), (v_cache, v)):
        flat = cache.view(-1, *cache.shape[2:])
        flat[at[:, past:]] = new
        stored.append(flat[at])
    out.copy_(clients.attention(q, *stored))


def _stepwise(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU as the extension's kernel has it: rounded to float16 after every step."""
    exponential = (-gate.double()).exp().half()
    return (gate * (1 / (1 + exponential).double()).half()) * up


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **names: object) -> ModuleType:
    """Make a module that can be imported."""
    module = ModuleType(name)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def ext(monkeypatch: pytest.MonkeyPatch) -> Iterator[Extension]:
    """Have an ExLlamaV2 whose functions the client's layers call with ExLlamaV2's arguments."""
    extension = Extension()
    context = type("TPContext", (), {})
    moves = {"safe_move_tensor": lambda *_: "theirs", "test_gpu_peer_copy": lambda *_: "theirs"}
    _module(monkeypatch, "exllamav2")
    _module(monkeypatch, "exllamav2.ext", exllamav2_ext=extension)
    _module(monkeypatch, "exllamav2.compat", **moves)
    _module(monkeypatch, "exllamav2.tensor_p", TPContext=context)
    _module(monkeypatch, "exllamav2.model", TPContext=context, safe_move_tensor=moves["safe_move_tensor"])
    monkeypatch.setitem(sys.modules, "exllamav2.server", None)  # not to be imported
    _module(monkeypatch, "flash_attn_2_cuda", fwd_kvcache=_fwd_kvcache)

    def addresses(layer: Any, names: Sequence[str]) -> Iterator[list[int]]:
        for name in names:
            yield [extension.address(part) for part in layer.matrices[name].parts]

    def attend(layer: Attention, handle: Any, x: Tensor, chunk: Any, *tables: Any) -> None:
        caches = chunk.cache.layers[layer.layer]
        blocks = []
        if chunk.flow == "paged":
            caches = [cache.view(2, -1, PAGE, *cache.shape[3:]) for cache in caches]
            blocks = [chunk.pages_by_device]
        sizes = (layer.dim, 2, chunk.batch, chunk.length)
        function = extension.tp_attn_forward_paged_ if blocks else extension.tp_attn_forward_
        keys_values = ([cache[0] for cache in caches], [cache[1] for cache in caches])
        arguments = (handle, x, *layer.slices, *keys_values, layer.before.parts, EPSILON, *addresses(layer, "qkvo"))
        function(*arguments, *sizes, *tables, chunk.past_by_device, *blocks, layer.dim**-0.5)

    def mlp(layer: Mlp, handle: Any, x: Tensor) -> None:
        matrices = addresses(layer, ("gate", "up", "down"))
        extension.tp_mlp_forward_(handle, x, *layer.slices, layer.before.parts, EPSILON, *matrices, False)

    def multiply(linear: Linear, xs: Sequence[Tensor]) -> list[Tensor]:
        outputs = [torch.empty(x.shape[0], part.shape[1], dtype=HALF) for x, part in zip(xs, linear.parts, strict=True)]
        matrices = [extension.address(part) for part in linear.parts]
        extension.gemm_half_q_half_tp(xs, matrices, outputs, False, linear.model.tp.ext_tp_context, -1)
        return outputs

    def normalise(norm: Norm, xs: Sequence[Tensor]) -> list[Tensor]:
        outputs = [torch.empty_like(x) for x in xs]
        extension.rms_norm_tp(xs, norm.parts, outputs, EPSILON, norm.model.tp.ext_tp_context)
        return outputs

    monkeypatch.setattr(Attention, "_with_handle", attend)
    monkeypatch.setattr(Mlp, "_with_handle", mlp)
    monkeypatch.setattr(Linear, "forward_tp", multiply)
    monkeypatch.setattr(Norm, "forward_tp", normalise)
    monkeypatch.setattr(clients, "gated", _stepwise)
    yield extension
    uninstall()


@pytest.mark.parametrize(("gpu_split", "keys"), SHAPES.values(), ids=SHAPES)
def test_flows(ext: Extension, gpu_split: tuple[float, ...], keys: dict[str, Any]) -> None:
    """A model whose layers call the extension has one device's logits, bit for bit, and no C++ function is called."""
    install()
    client = Client(gpu_split, has_contexts=True, **keys)
    ids = torch.randint(client.config.vocab_size, (2, 11), generator=torch.Generator().manual_seed(3))
    expected = reference(client.config, client.weights, ids)
    for flow in FLOWS:
        assert torch.equal(client.logits(ids, flow), expected), flow
    assert not ext.calls
    uninstall()
    with pytest.raises(TypeError, match="incompatible function arguments"):
        client.logits(ids, "flash")
    client.tp.unload()


def test_names(ext: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    """ExLlamaV2's modules have our names while installed, also those imported meanwhile, and theirs after that."""
    modules = [module for name, module in sys.modules.items() if name.startswith("exllamav2") and module is not None]
    before = [dict(vars(module)) for module in (ext, *modules)]
    uninstall()
    for _ in range(2):
        install()
        assert sys.modules["exllamav2.model"].TPContext is TPContext
        for module in modules:
            ours = [value for name, value in vars(module).items() if name in _NAMES]
            assert all(value in {TPContext, safe_move_tensor, test_gpu_peer_copy} for value in ours)
    late = _module(monkeypatch, "exllamav2.generator", TPContext=sys.modules["exllamav2.tensor_p"].TPContext)
    elsewhere = _module(monkeypatch, "exllamav20", TPContext=TPContext)
    for _ in range(2):
        uninstall()
        assert [dict(vars(module)) for module in (ext, *modules)] == before
    assert late.TPContext is sys.modules["exllamav2.tensor_p"].TPContext
    assert elsewhere.TPContext is TPContext


def test_contexts_of_exllamav2_go_on(ext: Extension) -> None:
    """A call with the address of ExLlamaV2's own context is one of the C++ function, installed or not."""
    install()
    for name in TAKE_HANDLES:
        assert getattr(ext, name)([], ADDRESS, 0) == name
    assert ext.calls == list(TAKE_HANDLES)


def test_functions(ext: Extension) -> None:
    """Functions that only move data do what the context's methods do, into the tensors that they are given."""
    install()
    tp = finalized()
    handle = tp.ext_tp_context
    whole = noise(1, 3, size_of(tp, BROADCAST_ID))
    targets = [torch.zeros_like(whole) for _ in tp.get_split(BROADCAST_KV)]
    ext.tp_broadcast(handle, 0, whole, BROADCAST_KV, targets, 32, -1)
    assert all(torch.equal(target, whole) for target in targets)
    parts = parts_of(tp, whole, BROADCAST_ID)
    targets = [torch.zeros_like(whole) for _ in targets]
    ext.tp_gather(handle, 1, parts, BROADCAST_ID, targets, BROADCAST_KV, 1, -1)
    assert all(torch.equal(target, whole) for target in targets)
    for end in (-1, -2):
        parts[0].neg_()
        ext.tp_gather(handle, 0, parts, BROADCAST_ID, [], end, 1, -1)
        assert torch.equal(tp.get_pinned(0, 1, 3, whole.shape[1])[0], torch.cat(parts, 1))
    x = noise(2, 3, 64)
    residuals = [torch.ones_like(x) for _ in tp.all_devs]
    ext.tp_all_reduce(handle, 0, [x.clone() for _ in residuals], residuals)
    assert all(torch.equal(each, (1 + len(residuals) * x.float()).half()) for each in residuals)
    ext.tp_cross_device_barrier(handle, BROADCAST_ID, -1, -1, -1)
    ext.free_tp_context(handle)
    assert tp.context is None


def test_mlp_on_other_devices_than_the_residual_stream(ext: Extension) -> None:
    """Where devices hold only columns of the residual stream, which C++ would read past a list for, the error says so.

    A GPU left out, as the hint has it, helps.
    """
    install()
    keys = {**LOPSIDED, "num_key_value_heads": 1, "num_key_value_groups": 16}
    tp = finalized((8.0, 1.0), **keys)
    assert tp.id_split_devs != tp.rs_split_devs
    temps = [[noise(0, 2, 64)]] * 6
    with pytest.raises(ExecutionError, match=r"\[0\], and of the residual stream, \[0, 1\]") as caught:
        ext.tp_mlp_forward_(tp.ext_tp_context, noise(0, 2, 64), *temps, [], EPSILON, [], [], [], False)
    assert "leave it out with 0" in caught.value.hint
    tp = finalized((8.0, 0.0), **keys)
    assert tp.id_split_devs == tp.rs_split_devs


def test_activations() -> None:
    """SiLU has the bits of rounding after every step, for every float16; GELU is the one with a tanh."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(HALF)
    every = every[every.isfinite()]
    x = every.clone()
    assert _activate(x, is_gelu=False) is x
    assert torch.equal(x, _stepwise(every, torch.ones_like(every)))
    wide = every.double()
    expected = wide / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)))
    assert torch.allclose(_activate(every.clone(), is_gelu=True).double(), expected, rtol=1e-3, atol=1e-6)


def test_without_exllamav2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ExLlamaV2, with a part of it missing, or with an extension that does not build, an error says so."""
    monkeypatch.setitem(sys.modules, "exllamav2", None)
    with pytest.raises(ExecutionError, match="ExLlamaV2 is not installed: there is no module exllamav2"):
        install()
    uninstall()
    errors = {
        ModuleNotFoundError("No module named 'websockets'", name="websockets"): "needs the module websockets",
        ImportError("undefined symbol: _ZN\nmore"): "cannot be imported: undefined symbol: _ZN\nhint",
        RuntimeError("Error building extension 'exllamav2_ext'"): "cannot be imported: Error building",
        OSError("CUDA_HOME environment variable is not set"): "cannot be imported: CUDA_HOME",
    }
    for error, message in errors.items():

        def fail(_: str, error: Exception = error) -> ModuleType:
            raise error

        monkeypatch.setattr(importlib, "import_module", fail)
        with pytest.raises(ExecutionError, match=message) as caught:
            install()
        assert caught.value.hint


def test_another_version(ext: Extension) -> None:
    """An extension without one of the functions is named, and left as it was."""
    del ext.tp_attn_forward_paged_
    before = dict(vars(ext))
    with pytest.raises(ExecutionError, match="extension has no tp_attn_forward_paged_") as caught:
        install()
    assert "0.3.2" in caught.value.hint
    assert vars(ext) == before
