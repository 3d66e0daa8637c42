"""What ``tpplan generate`` is asked for. It is checked here, without torch, whose import takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from attrs import frozen

from tpplan.core.missing import needing
from tpplan.core.model import ModelSpec
from tpplan.core.plan import SplitPlan
from tpplan.decoder.decoding.sampling import Sampling
from tpplan.decoder.generation.generate import check_prompts
from tpplan.decoder.prompts import length_of
from tpplan.decoder.text.files import end_tokens
from tpplan.decoder.text.tokenizer import Tokenizer
from tpplan.exec.options import BACKENDS, check_choice
from tpplan.models.gguf.reader import gguf_at
from tpplan.weights.source import Source

#: Default number of new tokens, if the plan's cache has room.
_USUAL: Final = 128


@frozen(kw_only=True)
class Order:
    """What to generate.

    Attributes:
        directory: directory of the checkpoint, or its GGUF file.
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


@frozen(kw_only=True)
class Task:
    """An order that fits its plan and its checkpoint.

    Attributes:
        order: the order.
        plan: the plan to load and run by.
        model: the model of the checkpoint.
        tokenizer: tokenizer of the checkpoint; None if tokens are given.
        prompt: tokens of the prompt.
        count: maximum new tokens.
        end: tokens that end the text.
    """

    order: Order
    plan: SplitPlan
    model: ModelSpec
    tokenizer: Tokenizer | None
    prompt: list[int]
    count: int
    end: frozenset[int]


def checked(plan: SplitPlan, order: Order) -> Task:
    """Check an order against a plan and a checkpoint, whose weights are not read.

    Args:
        plan: the plan to load and run by.
        order: what to generate.

    Raises:
        TpplanError: the plan, the checkpoint and the order do not fit together.
    """
    check_choice("backend", order.backend, BACKENDS)
    source = Source.read(Path(order.directory))
    source.check(plan)
    tokenizer = Tokenizer(order.directory) if order.prompt else None
    prompt = _encode(order, tokenizer) if tokenizer else list(order.tokens)
    count = order.max_new_tokens or max(1, min(_USUAL, length_of(plan.request) - len(prompt)))
    check_prompts([prompt], count, plan)
    return Task(
        order=order,
        plan=plan,
        model=source.model,
        tokenizer=tokenizer,
        prompt=prompt,
        count=count,
        end=end_tokens(order.directory),
    )


def _encode(order: Order, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a prompt, in the chat template if asked for; the template adds special tokens itself."""
    if not order.chat:
        return tokenizer.encode(order.prompt)
    with needing("--chat", "generate"):
        from tpplan.decoder.text.chat import ChatTemplate  # noqa: PLC0415 - an extra
    file = gguf_at(Path(order.directory))
    template = ChatTemplate.of_gguf(file, tokenizer) if file else ChatTemplate.read(order.directory)
    text = template.render(order.prompt, order.system)
    return tokenizer.encode(text, add_special_tokens=False)
