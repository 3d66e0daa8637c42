"""Tests on real GPUs: sizes there are those that users have."""

from __future__ import annotations

import ast
from pathlib import Path


def _needs_gpus(module: ast.Module) -> bool:
    """Tell whether a module has tests on real GPUs."""
    return any(isinstance(node, ast.Attribute) and node.attr in {"gpu", "multi_gpu"} for node in ast.walk(module))


def _has_little_room(module: ast.Module) -> bool:
    """Tell whether a module makes slots, stages and flags small in all its tests."""
    imports = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    return any(name.name == "little_room" for node in imports for name in node.names)


def test_no_module_makes_gpus_small() -> None:
    """What makes slots, stages and flags small does so on real GPUs too: tests of these are in other modules."""
    texts = {path: path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py")}
    modules = {path: ast.parse(text) for path, text in texts.items() if "little_room" in text or "gpu" in text}
    small = {name for name, module in modules.items() if _has_little_room(module)}
    on_gpus = {name for name, module in modules.items() if _needs_gpus(module)}
    assert small
    assert on_gpus
    assert not small & on_gpus
