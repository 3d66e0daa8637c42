"""Modules that take seconds to import, which a run without the tests that use them need not pay."""

from __future__ import annotations

import importlib
from functools import cached_property
from typing import Any


class _Later:
    """Stands for a module until a test first uses it."""

    def __init__(self, name: str) -> None:
        self._name = name

    @cached_property
    def _module(self) -> Any:
        module = importlib.import_module(self._name)
        if self._name == "transformers":
            module.logging.set_verbosity_error()  # it comments on whatever is small
        return module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name != "__version__":  # pytest asks all in a file whether it is a test
            raise AttributeError(name)
        return getattr(self._module, name)


openai: Any = _Later("openai")
transformers: Any = _Later("transformers")
optimize: Any = _Later("scipy.optimize")
sparse: Any = _Later("scipy.sparse")
