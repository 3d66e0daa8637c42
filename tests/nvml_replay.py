"""Recorded answers of NVML, replayed through the interface of ``pynvml``.

A recording is a JSON object of calls and their answers: ``"nvmlDeviceGetName(gpu0)": "NVIDIA H200"``. Handles are
names. An object is a structure of NVML, ``{"error": 3}`` an NVMLError of that code. What holds of two GPUs is recorded
once and holds both ways. A call that was not recorded fails the test.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RECORDINGS = Path(__file__).parent / "data" / "probe"


class NVMLError(Exception):
    """As pynvml's: ``value`` is the code of nvml.h."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class Replay:
    """Answers like the module ``pynvml`` did when it was recorded; ``changes`` replaces or adds answers."""

    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12

    def __init__(self, recording: str, changes: Mapping[str, object] | None = None) -> None:
        answers = json.loads((RECORDINGS / f"{recording}.json").read_text())
        self.answers: dict[str, Any] = {"nvmlInit()": None, "nvmlShutdown()": None, **answers, **(changes or {})}
        self.asked: list[str] = []

    NVMLError = NVMLError

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*args: object) -> Any:
            asked = f"{name}({', '.join(map(str, args))})"
            self.asked.append(asked)
            if asked not in self.answers:
                asked = f"{name}({', '.join(map(str, (*args[1::-1], *args[2:])))})"
            return _structure(self.answers[asked])

        return call


def _structure(answer: Any) -> Any:
    if isinstance(answer, list):
        return [_structure(item) for item in answer]
    if not isinstance(answer, dict):
        return answer
    if "error" in answer:
        raise NVMLError(answer["error"])
    return SimpleNamespace(**answer)
