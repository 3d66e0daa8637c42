"""The names of engines, which the command line lists without reading what it takes to serve them."""

from __future__ import annotations

from enum import StrEnum


class EngineName(StrEnum):
    """An engine, as ``--for`` takes it."""

    LLAMACPP = "llama.cpp"
    LLAMACPP_LAYER = "llama.cpp-layer"
    EXLLAMAV3 = "exllamav3"
    EXLLAMAV2 = "exllamav2"
    ACCELERATE = "accelerate"
    TRANSFORMERS = "transformers"
    VLLM = "vllm"
    SGLANG = "sglang"
