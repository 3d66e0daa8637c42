"""Prompts that go on from the cache of the latest generation, and texts that end before others."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from tests.decoder_cases import LENGTH, decoding, model_of, plan_of, request_of
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.decoder import Decoder, generate
from tpplan.decoder.prompts import Prompt
from tpplan.errors import RequestError


@pytest.mark.parametrize(("model_type", "rewinds"), [("llama", True), ("mistral", False), ("qwen3_5_text", False)])
def test_only_what_the_cache_lacks_is_read(model_type: str, rewinds: bool) -> None:
    """The text is that of transformers; tokens of a cache with windows cannot be taken back, and are read again."""
    model = model_of(model_type)
    (prompt, _), (expected, _) = model.prompts, model.tokens
    with decoding(plan_of(model.directory, 3, request_of(), {}, seed=5), model_type, "fp32") as decoder:

        def starts_of(prompt: list[int], count: int, *, resume: bool = True) -> tuple[list[int], list[int | None]]:
            """Return where the passes of a prompt began, and what followed it."""
            read: list[Prompt] = []

            def note(self: Decoder, prompts: list[Prompt]) -> None:
                read.extend(prompts)
                original(self, prompts)

            original = Decoder._begin
            with patch.object(Decoder, "_begin", note):
                tokens = [token for (token,) in generate(decoder, [prompt], count, resume=resume)]
            return [each.start for each in read], tokens

        assert starts_of(prompt, 20) == ([0], expected[:20])
        longer = prompt + expected[:24]
        assert starts_of(longer, 8) == ([len(prompt) + 19], expected[24:32])  # the latest token was not in the cache
        earlier = prompt + expected[:10]
        assert starts_of(earlier, 8) == ([len(earlier) - 1 if rewinds else 0], expected[10:18])
        assert starts_of(longer, 8, resume=False) == ([0], expected[24:32])
        assert starts_of(model.prompts[1], 8) == ([0], model.tokens[1][:8])
        decoder.read([Prompt([1, 2, 3])])
        assert starts_of(model.prompts[1], 8) == ([0], model.tokens[1][:8])
    assert len(longer) + 8 <= LENGTH


def test_texts_of_different_lengths() -> None:
    """Each has as many new tokens as asked for, even where one that has ended would outgrow its cache."""
    model = model_of("mistral")
    short, long = sorted(model.prompts, key=len)
    with decoding(plan_of(model.directory, 3, request_of(), {}, seed=5), "mistral", "fp32") as decoder:
        whole = [token for (token,) in generate(decoder, [short], LENGTH - len(short))]
        filled = long + [1] * (LENGTH - len(long) - 3)
        first = [token for (token,) in generate(decoder, [filled], 3)]
        steps = list(generate(decoder, [filled, short], [3, LENGTH - len(short)]))
        with pytest.raises(RequestError, match=f"{len(filled)} tokens and 4 new ones, the plan caches {LENGTH}"):
            generate(decoder, [filled, short], [4, 1])
        with pytest.raises(RequestError, match="1 number of new tokens for 2 prompts"):
            generate(decoder, [filled, short], [3])
    found = [list(tokens) for tokens in zip(*steps, strict=True)]
    assert found == [first + [None] * (len(whole) - 3), whole]
    assert whole[:64] == model.tokens[model.prompts.index(short)]
