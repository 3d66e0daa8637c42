"""From logits to tokens: the likeliest on devices, and what is drawn."""

from __future__ import annotations

import math

import pytest
import torch

from tests.contexts import UNEVEN, context, little_room  # noqa: F401
from tpplan.core.axes import Axis
from tpplan.decoder import Sampling
from tpplan.decoder.decoding.steps import greedy
from tpplan.decoder.layer.steps import Plain
from tpplan.errors import RequestError
from tpplan.exec.options import TRANSPORTS

PROBABILITIES = torch.tensor([[0.05, 0.5, 0.15, 0.3]])


def draws(sampling: Sampling, count: int) -> list[int]:
    """Draw from the same probabilities again and again."""
    generator = torch.Generator().manual_seed(sampling.seed)
    return sampling.draw(PROBABILITIES.log().expand(count, -1), generator).tolist()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_likeliest_token_is_that_of_the_whole_row(transport: str) -> None:
    """On every device, whichever device's part it is in, also where others are minus infinity."""
    with context(UNEVEN, transport) as ctx:
        whole = torch.randn(6, 101, generator=torch.Generator().manual_seed(1))
        best = [0, 31, 32, 63, 64, 100]  # the edges of the devices' parts
        whole[range(6), best] = torch.tensor([9.0, 1e30, 9.5, 20.0, 9.0, 9.0])
        whole[4, :64] = -torch.inf
        steps = dict.fromkeys(ctx.all_devices, Plain(1e-5, "silu"))
        found = greedy(ctx, ctx.scatter(whole, Axis.VOCAB), steps, len(whole))
        assert len(found) == len(ctx.all_devices)
        assert all(tokens.tolist() == best for tokens in found)


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


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        ({"temperature": -1.0}, "the temperature is -1.0"),
        ({"temperature": math.nan}, "the temperature is nan"),
        ({"temperature": math.inf}, "the temperature is inf"),
        ({"top_p": 0.0}, "top-p is 0.0"),
        ({"top_p": 1.5}, "top-p is 1.5"),
        ({"seed": -1}, "the seed is -1"),
        ({"seed": 2**63}, f"the seed is {2**63}"),
    ],
    ids=str,
)
def test_what_cannot_be_drawn(sampling: dict[str, float], problem: str) -> None:
    """Numbers out of range are refused by name."""
    with pytest.raises(RequestError, match=problem):
        Sampling(**sampling)  # type: ignore[arg-type]
