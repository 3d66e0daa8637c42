"""The implementation of ``tpplan generate``: it loads a checkpoint by a plan and generates a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import frozen

from tpplan.decoder.generation import check_prompts, generate
from tpplan.decoder.heads import length_of
from tpplan.decoder.model import Decoder
from tpplan.decoder.sampling import Sampling
from tpplan.decoder.settings import check_model, end_tokens
from tpplan.decoder.text import Stream, Tokenizer
from tpplan.exec.fallback import compiler
from tpplan.extras import needing
from tpplan.generate_report import GenerateReport
from tpplan.weights import load_weights
from tpplan.weights.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.plan import SplitPlan

#: Default number of new tokens, if the plan's cache has room.
_USUAL: Final = 128


@frozen(kw_only=True)
class Order:
    """What to generate.

    Attributes:
        directory: directory of the checkpoint.
        prompt: text of the prompt; empty if tokens are given.
        tokens: tokens of the prompt; empty if a text is given.
        chat: whether the prompt is a user's message, to be put into the checkpoint's chat template.
        system: system message of the chat; empty if there is none.
        max_new_tokens: maximum new tokens; 0 for 128, or fewer if the plan's cache has no room for them.
        sampling: how to choose tokens.
        backend: ``cuda``, ``cpu`` or ``auto``.
    """

    directory: str
    prompt: str
    tokens: tuple[int, ...]
    chat: bool
    system: str
    max_new_tokens: int
    sampling: Sampling
    backend: str


def run(plan: SplitPlan, order: Order, note: Callable[[str], None], tell: Callable[[str], None]) -> GenerateReport:
    """Load a checkpoint by a plan, and continue a prompt. Whatever can be checked is checked before the weights load.

    Args:
        plan: the plan to load and run by.
        order: what to generate.
        note: called with the reason if the devices are virtual.
        tell: called with every piece of the text, or every token if tokens were given.

    Raises:
        TpplanError: the plan, the checkpoint, the machine and the order do not fit together.
    """
    source = Source.read(Path(order.directory))
    source.check(plan)
    check_model(order.directory, source.model, plan)
    end = end_tokens(order.directory)
    tokenizer = Tokenizer(order.directory) if order.prompt else None
    prompt = _encode(order, tokenizer) if tokenizer else list(order.tokens)
    count = order.max_new_tokens or max(1, min(_USUAL, length_of(plan.request) - len(prompt)))
    check_prompts([prompt], count, plan)
    stream = Stream(tokenizer, prompt) if tokenizer else None
    new: list[int] = []
    text = ""
    with compiler(plan, order.backend, note, scratch=False)("auto") as context:
        decoder = Decoder(context, order.directory, load_weights(plan, order.directory, context))
        for (token,) in generate(decoder, [prompt], count, sampling=order.sampling, end=end):
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
        ended=new[-1] in end,
    )


def _encode(order: Order, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a prompt, in the chat template if asked for; the template adds special tokens itself."""
    if not order.chat:
        return tokenizer.encode(order.prompt)
    with needing("--chat", "generate"):
        from tpplan.decoder.chat import ChatTemplate  # noqa: PLC0415 - an extra
    text = ChatTemplate.read(order.directory).render(order.prompt, order.system)
    return tokenizer.encode(text, add_special_tokens=False)
