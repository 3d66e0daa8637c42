"""The fingerprint of a model: frozen, and of everything but the name."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from tpplan.core.axes import Axis
from tpplan.core.model import Attention, Block, ModelSpec, Parameter, Segment
from tpplan.planfile import codec

HEAD = Parameter(
    "lm_head.weight", "BF16", ((Segment(Axis.VOCAB, 512),), (Segment(Axis.RESIDUAL, 256),)), out=0, home=Axis.VOCAB
)
UP = Parameter(
    "layers.{layer}.up.weight", "BF16", ((Segment(Axis.INTERMEDIATE, 1024),), (Segment(Axis.RESIDUAL, 256),)), out=0
)
SPEC = ModelSpec(
    name="tiny",
    architecture="TinyForCausalLM",
    model_type="tiny",
    hidden_size=256,
    vocab_size=512,
    max_context=4096,
    tied_embeddings=False,
    dtype="bfloat16",
    weight_format="BF16",
    parameter_count=1_000_000,
    blocks=(
        Block((0, 2), Attention(8, 2, 32, 32), (UP,), intermediate=1024),
        Block((1,), None, (UP,), intermediate=1024),
    ),
    parameters=(HEAD,),
)


def test_fingerprint_is_frozen() -> None:
    """The fingerprint of a model is the same for every version of tpplan and Python, or old plans go stale."""
    assert codec.fingerprint(SPEC) == "sha256:9c92940cbad57f786c6c13c5d48d6bda7a6a505216fa5f494e9c59aaf299be0e"


def test_fingerprint_ignores_the_name() -> None:
    """A renamed directory is the same model."""
    assert codec.fingerprint(attrs.evolve(SPEC, name="other")) == codec.fingerprint(SPEC)


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": "Other"},
        {"model_type": "other"},
        {"hidden_size": 257},
        {"vocab_size": 513},
        {"max_context": 4097},
        {"tied_embeddings": True},
        {"dtype": "float16"},
        {"weight_format": "F16"},
        {"parameter_count": 1},
        {"gather_only": "act order"},
        {"parameters": ()},
        {"blocks": SPEC.blocks[:1]},
        {"blocks": (attrs.evolve(SPEC.blocks[0], layers=(0, 1)), attrs.evolve(SPEC.blocks[1], layers=(2,)))},
        {"blocks": (attrs.evolve(SPEC.blocks[0], attention=Attention(8, 2, 32, 32, window=1)), SPEC.blocks[1])},
        {"parameters": (attrs.evolve(HEAD, dtype="F16"),)},
        {"parameters": (attrs.evolve(HEAD, home=None),)},
        {"parameters": (attrs.evolve(HEAD, out=1),)},
    ],
)
def test_fingerprint_sees_everything_else(changes: dict[str, Any]) -> None:
    """Any other change to what a plan depends on is another model."""
    assert codec.fingerprint(attrs.evolve(SPEC, **changes)) != codec.fingerprint(SPEC)
