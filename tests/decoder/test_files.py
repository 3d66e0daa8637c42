"""What the decoder reads of the files beside a checkpoint's config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tpplan.decoder.text.files import end_tokens
from tpplan.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path


def test_tokens_that_end_a_text(tmp_path: Path) -> None:
    """One or several; none where neither file names any; what is no token is refused, and what is no JSON."""
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert end_tokens(tmp_path) == {7}
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "text_config": {"eos_token_id": [1, 106]}}')
    assert end_tokens(tmp_path) == {1, 106}
    (tmp_path / "config.json").write_text('{"eos_token_id": 7, "text_config": {"eos_token_id": 8}}')
    generation = tmp_path / "generation_config.json"
    for content, tokens in (("{}", {7}), ('{"eos_token_id": [2, 3]}', {2, 3}), ('{"eos_token_id": []}', set())):
        generation.write_text(content)
        assert end_tokens(tmp_path) == tokens
    for content, problem in (
        ('{"eos_token_id": ["</s>"]}', r"eos_token_id is \['</s>'\]"),
        ("{", "cannot be read"),
        ("[2]", "is no object of JSON"),
    ):
        generation.write_text(content)
        with pytest.raises(ModelError, match=problem):
            end_tokens(tmp_path)
