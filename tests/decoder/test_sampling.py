"""From logits to tokens: the likeliest on devices, and what is drawn."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.contexts import UNEVEN, context, little_room  # noqa: F401
from tests.decoder_cases import decoding, model_of, plan_of, request_of
from tests.later import transformers
from tests.weight_plans import fine_units  # noqa: F401 (for plans of small models)
from tpplan.core.axes import Axis
from tpplan.decoder import Sampling, generate
from tpplan.decoder.decoding.steps import greedy
from tpplan.decoder.layer.steps import Plain
from tpplan.errors import RequestError
from tpplan.exec.options import TRANSPORTS

PROBABILITIES = torch.tensor([[0.05, 0.5, 0.15, 0.3]])


def draws(sampling: Sampling, count: int) -> list[int]:
    """Draw from the same probabilities again and again."""
    generator = torch.Generator().manual_seed(sampling.seed)
    return sampling.draw(PROBABILITIES.log().expand(count, -1), generator).tolist()


@pytest.mark.parametrize("least", [2048, 8])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_likeliest_token_is_that_of_the_whole_row(
    transport: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every device, whichever device's part it is in, also where others are minus infinity; in one part or more."""
    monkeypatch.setattr("tpplan.decoder.decoding.steps._LEAST_PART", least)
    with context(UNEVEN, transport) as ctx:
        whole = torch.randn(6, 101, generator=torch.Generator().manual_seed(1))
        best = [0, 31, 32, 63, 64, 100]  # the edges of the devices' parts
        whole[range(6), best] = torch.tensor([9.0, 1e30, 9.5, 20.0, 9.0, 9.0])
        whole[4, :64] = -torch.inf
        steps = dict.fromkeys(ctx.all_devices, Plain(1e-5, "silu"))
        found, positions = ([torch.arange(6) for _ in ctx.all_devices] for _ in range(2))
        greedy(ctx, ctx.scatter(whole, Axis.VOCAB), steps, found, positions)
        assert all(tokens.tolist() == best for tokens in found)
        assert all(at.tolist() == [1, 2, 3, 4, 5, 6] for at in positions)
        greedy(ctx, ctx.scatter(-whole.abs(), Axis.VOCAB), steps, found)
        assert all(tokens.tolist() == whole.abs().argmin(-1).tolist() for tokens in found)
        assert all(at.tolist() == [1, 2, 3, 4, 5, 6] for at in positions)


def test_draws_follow_the_probabilities() -> None:
    """Each token as often as its probability says, sharper or flatter by the temperature."""
    for temperature in (1.0, 0.5, 2.0):
        expected = (PROBABILITIES[0].log() / temperature).softmax(0)
        found = torch.bincount(torch.tensor(draws(Sampling(temperature, seed=1), 4000)), minlength=4) / 4000
        torch.testing.assert_close(found, expected, atol=0.03, rtol=0)


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 5e-324])
def test_next_to_no_temperature_takes_the_likeliest(temperature: float) -> None:
    """However small it is: no quotient overflows."""
    assert set(draws(Sampling(temperature), 50)) == {1}


@pytest.mark.parametrize(
    ("top_p", "tokens"), [(0.4, {1}), (0.5, {1}), (0.6, {1, 3}), (0.9, {1, 2, 3}), (1.0, {0, 1, 2, 3})]
)
def test_only_the_likeliest_are_drawn_from(top_p: float, tokens: set[int]) -> None:
    """As few tokens as it takes to reach the probability, and the likeliest always."""
    assert set(draws(Sampling(1.0, top_p, seed=2), 500)) == tokens


def test_the_seed_decides() -> None:
    """The same draws for the same seed, others for another."""
    assert draws(Sampling(1.0, seed=3), 50) == draws(Sampling(1.0, seed=3), 50) != draws(Sampling(1.0, seed=4), 50)


@given(
    seed=st.integers(0, 2**32),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from((0.3, 1.0, 1.7)),
        top_k=st.sampled_from((0, 1, 5, 500)),
        top_p=st.sampled_from((0.2, 0.9, 1.0)),
        min_p=st.sampled_from((0.0, 0.02, 0.5)),
        repetition_penalty=st.sampled_from((0.7, 1.0, 1.3)),
    ),
)
def test_probabilities_are_those_of_transformers(seed: int, sampling: Sampling) -> None:
    """After penalty, temperature, top-k, top-p and min-p, in the order in which transformers applies them."""
    random = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, 97, generator=random, dtype=torch.float64)
    texts = torch.randint(0, 97, (2, 12), generator=random)
    names = "temperature", "top_k", "top_p", "min_p", "repetition_penalty"
    config = transformers.GenerationConfig(do_sample=True, **{name: getattr(sampling, name) for name in names})
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=97, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    processors = model._get_logits_processor(config, input_ids_seq_length=12)
    expected = processors(texts, logits.clone()).softmax(-1)

    scores = sampling.penalised(logits, texts.tolist(), [[], []])
    kept, order = sampling.probabilities(scores - scores.amax(-1, keepdim=True))
    found = torch.zeros_like(kept).scatter(-1, order, kept / kept.sum(-1, keepdim=True))
    torch.testing.assert_close(found, expected)
    assert (found > 0).equal(expected > 0)


def test_tokens_as_likely_as_the_last_of_the_top_are_kept() -> None:
    """As in transformers: which of them the sort puts first decides nothing."""
    sampling = Sampling(1.0, top_k=2)
    kept, _ = sampling.probabilities(torch.tensor([[0.0, -1.0, -1.0, -2.0]]))
    assert kept.count_nonzero() == 3


def test_what_was_generated_is_penalised() -> None:
    """Once for its presence and once more each time, as OpenAI's API says; what the prompt has is not."""
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    found = sampling.penalised(torch.zeros(2, 4), [[3, 1, 1, 2], [0, 0]], [[1, 1, 2], [0]])
    assert found.tolist() == [[0, -1, -0.75, 0], [-0.75, 0, 0, 0]]


def test_repetition_is_penalised_without_temperature() -> None:
    """The text is the one that transformers generates greedily with the penalty, prompt by prompt and in a batch."""
    model = model_of("llama")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model.directory)
    expected = [
        theirs.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, repetition_penalty=1.4)[0].tolist()
        for prompt in model.prompts
    ]
    with decoding(plan_of(model.directory, 3, request_of(), {}, seed=5), "llama", "fp32") as decoder:
        steps = list(generate(decoder, model.prompts, 16, sampling=Sampling(repetition_penalty=1.4)))
    found = [list(tokens) for tokens in zip(*steps, strict=True)]
    assert [[*prompt, *new] for prompt, new in zip(model.prompts, found, strict=True)] == expected
    assert found != [tokens[:16] for tokens in model.tokens]


def test_a_text_with_a_sampling_of_its_own_is_the_same_in_any_batch() -> None:
    """Its draws depend on its own seed only; a greedy text beside it stays greedy."""
    model = model_of("llama")
    drawn = Sampling(0.9, top_k=20, seed=4)
    with decoding(plan_of(model.directory, 2, request_of(), {}, seed=5), "llama", "fp32") as decoder:
        together = list(generate(decoder, model.prompts, 12, sampling=[Sampling(), drawn]))
        alone = list(generate(decoder, model.prompts[1:], 12, sampling=[drawn]))
        with pytest.raises(RequestError, match="1 samplings for 2 prompts"):
            generate(decoder, model.prompts, 12, sampling=[drawn])
    assert [tokens[0] for tokens in together] == model.tokens[0][:12]
    assert [tokens[1] for tokens in together] == [token for (token,) in alone] != model.tokens[1][:12]


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        ({"temperature": -1.0}, "the temperature is -1.0"),
        ({"temperature": math.nan}, "the temperature is nan"),
        ({"temperature": math.inf}, "the temperature is inf"),
        ({"top_p": 0.0}, "top-p is 0.0"),
        ({"top_p": 1.5}, "top-p is 1.5"),
        ({"seed": -1}, "the seed is -1"),
        ({"top_k": -1}, "top-k is -1"),
        ({"min_p": 1.5}, "min-p is 1.5"),
        ({"repetition_penalty": 0.0}, "the repetition penalty is 0.0"),
        ({"presence_penalty": 2.5}, "the presence penalty is 2.5"),
        ({"frequency_penalty": math.nan}, "the frequency penalty is nan"),
        ({"seed": 2**63}, f"the seed is {2**63}"),
    ],
    ids=str,
)
def test_what_cannot_be_drawn(sampling: dict[str, float], problem: str) -> None:
    """Numbers out of range are refused by name."""
    with pytest.raises(RequestError, match=problem):
        Sampling(**sampling)  # type: ignore[arg-type]
