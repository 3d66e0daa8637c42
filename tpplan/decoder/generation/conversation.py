"""A conversation with a model: each turn continues from the cache that the turns before it have left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from tpplan.decoder.generation.generate import check_prompts, generate
from tpplan.decoder.generation.timing import Timing
from tpplan.decoder.generation.warmup import on_gpus
from tpplan.decoder.text.continuation import Continuation
from tpplan.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Generator

    from tpplan.decoder.decoder import Decoder
    from tpplan.decoder.generation.arguments import Task
    from tpplan.decoder.text.chat import ChatTemplate
    from tpplan.decoder.text.tokenizer import Tokenizer


class Conversation:
    """What was said so far, and the decoder that answers.

    Attributes:
        messages: what was said: ``role`` and ``content`` of each message.
        timing: counts the tokens of all turns that were read or generated.
    """

    def __init__(self, decoder: Decoder, task: Task, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """Begin a conversation, with the system message of a task if it has one.

        Args:
            decoder: the decoder; other generations may use it between turns.
            task: how to generate; it needs no prompts.
            tokenizer: tokenizer of the checkpoint.
            template: chat template of the checkpoint.
        """
        system = task.order.system
        self.messages = [{"role": "system", "content": system}] if system else []
        self.timing = Timing(task.plan.speed if on_gpus(decoder) else None)
        self._decoder, self._task, self._tokenizer, self._template = decoder, task, tokenizer, template
        self._turns = 0

    def answer(self, user: str) -> Generator[str, None, None]:
        """Yield the answer to a message piece by piece; what was yielded is remembered if no more is asked for.

        Raises:
            RequestError: the template refuses the message, or the conversation has become too long for the plan's
                cache; it goes on without the message.
        """
        order, plan, length = self._task.order, self._task.plan, self._decoder.length
        messages = [*self.messages, {"role": "user", "content": user}]
        text = self._template.converse(messages, order.variables)
        prompt = self._tokenizer.encode(text, add_special_tokens=False)
        if len(prompt) >= length:
            what = (
                f"the conversation has {len(prompt)} tokens with this message, the plan caches {length} of a sequence"
            )
            raise RequestError(what, "say less, begin again, or plan with a larger --context")
        count = order.max_new_tokens or length - len(prompt)
        check_prompts([prompt], count, plan)
        sampling = evolve(order.sampling, seed=(order.sampling.seed + self._turns) % 2**63)
        self._turns += 1
        read = len(prompt) - self._decoder.cached([prompt])[0]
        tokens = generate(self._decoder, [prompt], count, sampling=sampling, end=self._task.end, resume=True)
        continuation, pieces = Continuation(self._tokenizer, prompt, order.stops), [""]
        try:
            for (token,) in self.timing.of(read, tokens):
                assert token is not None  # noqa: S101 - None is only for texts that end before others
                pieces.append(continuation.add(token))
                yield pieces[-1]
                if continuation.stop:
                    break
            pieces.append(continuation.rest())
            yield pieces[-1]
        finally:
            self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
