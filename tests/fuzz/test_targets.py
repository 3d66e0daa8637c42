"""The fuzz targets hold for some hundred inputs each, the same every time; ``just fuzz`` tries many more."""

from __future__ import annotations

import json
from random import Random

import pytest

from tests.codec_cases import TEXT
from tests.fuzz.choices import Choices
from tests.fuzz.targets import TARGETS

#: Inputs that once were found, by target.
FOUND: dict[str, tuple[bytes, ...]] = {}


@pytest.mark.parametrize("name", TARGETS)
def test_targets(name: str) -> None:
    """Nothing but a result or a TpplanError comes of random bytes, of none, and of what was found once."""
    random = Random(7)
    for data in (b"", *FOUND.get(name, ()), *(random.randbytes(random.randrange(400)) for _ in range(150))):
        TARGETS[name](data)


def test_most_choices_are_nearly_valid() -> None:
    """Mutations reach beyond the parser: most are JSON, few are the document itself, and no two need be alike."""
    random = Random(7)
    made = []
    for _ in range(200):
        choices = Choices(random.randbytes(300))
        made.append(choices.text(choices.changed(json.loads(TEXT))))
    whole = [text for text in made if text.rstrip().endswith(b"}")]
    assert len(whole) > 150
    assert len(set(made)) > 190
