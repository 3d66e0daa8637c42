"""More devices than GPUs: what three, four and eight do is right to the bit on one or two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
#: Kernels that wait for each other in vain give up after ten seconds; this is for a process that hangs otherwise.
_DEADLINE = 600


@pytest.mark.gpu
@pytest.mark.parametrize(("devices", "gpus"), [(3, 1), (4, 1), (8, 1), (3, 2), (4, 2), (8, 2)])
def test_devices_that_share_gpus(devices: int, gpus: int) -> None:
    """All operations by all transports are right, in all sizes, strided and in place; so are random ones, some late."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, found {torch.cuda.device_count()}")
    arguments = ["--devices", str(devices), "--gpus", str(gpus)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.exec.cuda.shared_gpus", *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        capture_output=True,
        text=True,
        timeout=_DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
