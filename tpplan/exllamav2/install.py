"""ExLlamaV2 itself on tpplan: its own modules plan with our TPContext, and its data moves by our operations."""

from __future__ import annotations

import importlib
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any

from tpplan.errors import ExecutionError
from tpplan.exllamav2 import compat, tensor_p
from tpplan.exllamav2.functions import Functions
from tpplan.exllamav2.tensor_p import Handle

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

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
