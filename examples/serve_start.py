"""Start a model by its committed plan, as a server does before it takes requests; a stale plan is refused.

    python examples/serve_start.py plans/llama.json models/llama

answers each line of standard input with what the model makes of it, on the GPUs of this machine or, with ``cpu`` as a
third argument, on virtual devices. With tokens such as ``5,17,99`` in the lines it needs no tokenizer.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import tpplan
from tpplan import exec as tpx
from tpplan.decoder import Decoder, Sampling, generate, prepare
from tpplan.decoder.model.settings import check_model
from tpplan.decoder.text.files import end_tokens
from tpplan.decoder.text.tokenizer import Stream, Tokenizer
from tpplan.errors import ModelError, PlanError, RequestError, TpplanError
from tpplan.reports.check import check
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_NEW_TOKENS = 64
SAMPLING = Sampling(temperature=0.7, top_p=0.9)

tokenizer_of = cache(Tokenizer)  # read at most once


@contextmanager
def started(path: str, directory: str, backend: str = "auto") -> Iterator[Decoder]:
    """Load a checkpoint by a plan, which must be what planning again would give.

    Raises:
        TpplanError: the plan is stale, or the machine or the checkpoint is not the one that it is for.
    """
    plan = tpplan.load(path)
    model = tpplan.read_model(directory)
    (verdict,) = check({path: plan}, model).plans  # a few milliseconds, before anything is loaded
    if not verdict.current:
        hint = "see what is different with tpplan check, make the plan again, and commit it"
        raise PlanError(f"{path} is stale: {verdict.message}", hint)
    check_model(directory, model, plan)
    with tpx.compile(plan, backend=backend, model=directory, scratch=False) as context:  # which torch's tensors take
        decoder = Decoder(context, directory, load_weights(plan, directory, context))
        prepare(decoder, sampling=SAMPLING)  # so that the first request is as fast as the next
        yield decoder


def answer(decoder: Decoder, directory: str, line: str) -> Iterator[str]:
    """Yield what follows a line, piece by piece."""
    words = line.split(",")
    as_tokens = all(word.strip().isdecimal() for word in words)
    tokenizer = None if as_tokens else tokenizer_of(directory)
    prompt = tokenizer.encode(line) if tokenizer else list(map(int, words))
    stream = Stream(tokenizer, prompt) if tokenizer else None
    for (token,) in generate(decoder, [prompt], MOST_NEW_TOKENS, sampling=SAMPLING, end=end_tokens(directory)):
        if token is not None:
            yield stream.add(token) if stream else f"{token} "
    if stream:
        yield stream.rest()


def main(path: str, directory: str, backend: str = "auto") -> None:
    """Start, and answer line by line."""
    with started(path, directory, backend) as decoder:
        for line in filter(None, map(str.strip, sys.stdin)):
            try:
                for piece in answer(decoder, directory, line):
                    print(piece, end="", flush=True)
            except (ModelError, RequestError) as error:  # this line's, not the server's: no tokenizer, too many tokens
                print(f"error: {error.message}", end="")
            print()


if __name__ == "__main__":
    if len(sys.argv) not in {3, 4}:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
    except TpplanError as error:
        hint = error.hint.replace('backend="cpu"', "cpu as the third argument")
        sys.exit(f"error: {error.message}\nhint: {hint}")
