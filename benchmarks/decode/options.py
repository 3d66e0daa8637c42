"""The options of the commands that run a whole model: which one, on how many GPUs, and for how long."""

from __future__ import annotations

import argparse

import torch

from benchmarks.decode.random_codes import METHODS
from tpplan.exec.options import TRANSPORTS


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that these commands have in common."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--gpus", type=numbers_of, default=(1, 2), help="how many, one after the other (default 1,2)")
    add("--layers", type=int, default=0, help="of the model (default: all that it has)")
    add("--config", default="", help="config.json of another model than Llama-3.1-8B")
    add("--quantise", choices=[*METHODS], default="", help="how its matrices are stored (default: dense)")
    add("--folder", default="", help="where the checkpoint is made, or any is already; it stays there")
    add("--backend", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--transport", choices=("auto", *TRANSPORTS), default="auto", help="of tpplan (default: what serves best)")
    add("--max-rows", type=int, default=0, help="of a pass of prompts, at most (default: all of the long prompt)")
    add("--watchdog", type=float, default=180, help="seconds after which one run is ended (default 180)")
    return parser


def numbers_of(text: str) -> tuple[int, ...]:
    """Return numbers from 1 that have commas between them.

    Raises:
        ValueError: they are others, or none.
    """
    numbers = tuple(map(int, text.split(",")))
    if min(numbers) < 1:
        raise ValueError
    return numbers
