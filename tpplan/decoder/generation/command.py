"""The implementation of ``tpplan generate``: it loads a checkpoint by a plan and generates a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.decoder.decoder import Decoder
from tpplan.decoder.generation.generate import generate
from tpplan.decoder.model.settings import check_model
from tpplan.decoder.text.tokenizer import Stream
from tpplan.exec.compiler import compiler
from tpplan.reports.generate import GenerateReport
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.decoder.generation.arguments import Task


def run(task: Task, note: Callable[[str], None], tell: Callable[[str], None]) -> GenerateReport:
    """Load a checkpoint by a plan, and continue a prompt. Whatever can be checked is checked before the weights load.

    Args:
        task: what to generate.
        note: called with the reason if the devices are virtual.
        tell: called with every piece of the text, or every token if tokens were given.

    Raises:
        TpplanError: the plan, the checkpoint and the machine do not fit together.
    """
    plan, prompt, directory = task.plan, task.prompt, task.order.directory
    check_model(directory, task.model, plan)
    stream = Stream(task.tokenizer, prompt) if task.tokenizer else None
    new: list[int] = []
    text = ""
    with compiler(plan, task.order.backend, note, scratch=False)("auto") as context:
        decoder = Decoder(context, directory, load_weights(plan, directory, context))
        for (token,) in generate(decoder, [prompt], task.count, sampling=task.order.sampling, end=task.end):
            assert token is not None  # noqa: S101 - None is only for texts that end before others
            piece = stream.add(token) if stream else f"{',' if new else ''}{token}"
            new.append(token)
            text += piece
            tell(piece)
        rest = stream.rest() if stream else ""
        tell(rest)
        devices = context.devices
    return GenerateReport(
        model=plan.model.name,
        devices=len(devices),
        backend=next(iter(devices.values())).device.type,
        prompt_tokens=tuple(prompt),
        new_tokens=tuple(new),
        text=text + rest if stream else "",
        ended=new[-1] in task.end,
    )
