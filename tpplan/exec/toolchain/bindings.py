"""CUDA's driver and runtime. Needs cuda-bindings."""

from __future__ import annotations

from cuda.bindings import driver, runtime

__all__ = ["driver", "runtime"]
