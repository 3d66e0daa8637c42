"""What ``tpplan generate`` is asked for. It is checked here, without torch, whose import takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from attrs import frozen

from tpplan.core.missing import needing
from tpplan.core.plan import SplitPlan
from tpplan.decoder.decoding.sampling import Sampling
from tpplan.decoder.generation.generate import check_prompts
from tpplan.decoder.prompts import length_of
from tpplan.decoder.text.continuation import check_stops
from tpplan.decoder.text.files import end_tokens
from tpplan.decoder.text.tokenizer import Tokenizer
from tpplan.errors import RequestError
from tpplan.exec.options import BACKENDS, check_choice
from tpplan.models.hub import local
from tpplan.weights.source import Source, directory_of, gguf_of

if TYPE_CHECKING:
    from pathlib import Path

    from tpplan.decoder.text.chat import ChatTemplate

#: Default number of new tokens, if the plan's cache has room.
_USUAL: Final = 128


@frozen(kw_only=True)
class Order:
    """What to generate.

    Attributes:
        directory: directory of the checkpoint, or its GGUF file.
        prompts: texts of the prompts; empty if tokens are given.
        tokens: tokens of the prompt; empty if texts are given.
        chat: whether prompts are messages of a user, to be put into the checkpoint's chat template.
        system: system message of the chat; empty if there is none.
        variables: further variables of the chat template.
        max_new_tokens: maximum new tokens; 0 for 128, or fewer if the plan's cache has no room for them.
        sampling: how to choose tokens; text number n has the seed plus n.
        stops: strings that end a text, which has none of them.
        backend: ``cuda``, ``cpu`` or ``auto``.
    """

    directory: str
    prompts: tuple[str, ...]
    tokens: tuple[int, ...]
    chat: bool
    system: str
    variables: Mapping[str, object]
    max_new_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    backend: str


@frozen(kw_only=True)
class Task:
    """An order that fits its plan and its checkpoint.

    Attributes:
        order: the order.
        plan: the plan to load and run by.
        source: the checkpoint.
        tokenizer: tokenizer of the checkpoint; None if tokens are given.
        prompts: tokens of each prompt; none in a conversation, which has yet to begin.
        end: tokens that end a text.
    """

    order: Order
    plan: SplitPlan
    source: Source
    tokenizer: Tokenizer | None
    prompts: list[list[int]]
    end: frozenset[int]

    def count(self, prompt: Sequence[int]) -> int:
        """Return the maximum new tokens of a prompt."""
        return self.order.max_new_tokens or max(1, min(_USUAL, length_of(self.plan.request) - len(prompt)))


def checked(plan: SplitPlan, order: Order, note: Callable[[str], None]) -> Task:
    """Check an order against a plan and a checkpoint, whose weights are not read.

    Args:
        plan: the plan to load and run by.
        order: what to generate.
        note: is called with what is to know of the checkpoint, also of one that does not fit.

    Raises:
        TpplanError: the plan, the checkpoint and the order do not fit together.
    """
    check_choice("backend", order.backend, BACKENDS)
    check_stops(order.stops)
    source = Source.read(local(order.directory))
    for text in source.model.notes:
        note(text)
    source.check(plan)
    tokenizer = None if order.tokens else Tokenizer(source)
    prompts = _encoded(order, source, tokenizer) if tokenizer else [list(order.tokens)]
    task = Task(
        order=order,
        plan=plan,
        source=source,
        tokenizer=tokenizer,
        prompts=prompts,
        end=end_tokens(source),
    )
    for number, prompt in enumerate(prompts, 1):
        try:
            check_prompts([prompt], task.count(prompt), plan)
        except RequestError as error:
            if len(prompts) == 1:
                raise
            raise RequestError(f"prompt {number}: {error.message}", error.hint) from error
    return task


def template_of(checkpoint: str | Path | Source, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template of a checkpoint, or of a GGUF file.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    from tpplan.decoder.text.chat import ChatTemplate  # noqa: PLC0415 - an extra

    model = gguf_of(checkpoint)
    return ChatTemplate.of_gguf(model.file, tokenizer) if model else ChatTemplate.read(directory_of(checkpoint))


def _encoded(order: Order, source: Source, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of the prompts, in the chat template if asked for; the template adds special tokens itself."""
    if not order.chat:
        return [tokenizer.encode(prompt) for prompt in order.prompts]
    with needing("--chat", "generate"):
        from tpplan.decoder.text.chat import messages_of  # noqa: PLC0415 - an extra
    template = template_of(source, tokenizer)
    texts = (template.converse(messages_of(prompt, order.system), order.variables) for prompt in order.prompts)
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]
