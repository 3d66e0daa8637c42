"""CUDA's toolchain has one door: what would replace it has to replace that package only."""

from __future__ import annotations

import ast
from pathlib import Path

import tpplan

_PACKAGE = Path(tpplan.__file__).parent
_DOOR = _PACKAGE / "exec" / "toolchain"
_BEHIND = {"cuda", "llvmlite", "numba", "numba_cuda"}


def _imported(text: str) -> set[str]:
    """Return the top packages that a module imports, wherever in it, by statements or by name."""
    found = set[str]()
    if not any(name in text for name in _BEHIND):  # most modules, which need not be parsed
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            given = [each.value for each in node.args if isinstance(each, ast.Constant)]
            found |= {each for each in given if isinstance(each, str)}
    return {name.partition(".")[0] for name in found}


def test_imports_are_found_wherever_they_are() -> None:
    """In functions, with other names, and by functions that import; a module of one's own is none of them."""
    texts = {
        "def f():\n    from numba.cuda import types": "numba",
        "import os, llvmlite.ir as ir": "llvmlite",
        "from cuda.core import launch": "cuda",
        "import importlib\nx = importlib.import_module('numba_cuda.numba')": "numba_cuda",
    }
    assert {text: _imported(text) & _BEHIND for text in texts} == {text: {name} for text, name in texts.items()}
    assert not _imported("from . import cuda\nfrom .numba import x\nfrom tpplan.weights import cuda") & _BEHIND


def test_the_toolchain_has_one_door() -> None:
    """Numba, llvmlite and the ``cuda`` packages are imported behind it, and nowhere else in the package."""
    imports = {path: _imported(path.read_text(encoding="utf-8")) & _BEHIND for path in _PACKAGE.rglob("*.py")}
    behind = {path for path, names in imports.items() if names}
    assert {path.relative_to(_PACKAGE).as_posix() for path in behind if _DOOR not in path.parents} == set()
    assert set().union(*(imports[path] for path in behind)) == {"cuda", "llvmlite", "numba"}
