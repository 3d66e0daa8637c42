"""The example that serves OpenAI's API, asked by OpenAI's own client over this machine's loopback."""

from __future__ import annotations

import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import uvicorn

from tests.decoder.generate_cases import write_chat_checkpoint
from tests.decoder_cases import LENGTH
from tests.later import openai, transformers
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.decoder.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openai import OpenAI

ROOT = Path(__file__).parents[2]
MESSAGES: list[Any] = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Who?"}]
TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role[0] }}{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>a{{ mood }}{% endif %}"
)


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("server_example", ROOT / "examples/server.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    with patch.dict("sys.modules", {"server_example": module}):  # where attrs looks for annotations
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small checkpoint with a short chat template, and a plan for two texts at a time."""
    directory = write_chat_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", batch=2)
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def example() -> Any:
    """Return the example's module."""
    return _example()


@pytest.fixture(scope="module")
def client(example: Any, checkpoint: Path) -> Iterator[OpenAI]:
    """Serve the checkpoint on virtual devices, and return a client of it."""
    with example.loaded(str(checkpoint / "plan.json"), str(checkpoint), "cpu") as engine:
        config = uvicorn.Config(example.Server(engine).app(), port=0, log_level="error", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                thread.join(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60) as it:
                yield it
        finally:
            server.should_exit = True
            thread.join()


def expected(checkpoint: Path, text: str, count: int) -> tuple[str, int]:
    """Return how transformers continues a text, and how many tokens the text has."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    prompt = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)(text, add_special_tokens=False)
    whole = model.generate(torch.tensor([prompt["input_ids"]]), max_new_tokens=count, do_sample=False)
    new = whole[0, len(prompt["input_ids"]) :].tolist()
    return Tokenizer(checkpoint).decode(new), len(prompt["input_ids"])


def test_models(client: OpenAI) -> None:
    """There is one, with the name that the plan has."""
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_chat(client: OpenAI, checkpoint: Path) -> None:
    """The answer is that of transformers, whole or piece by piece, with its counts; variables reach the template."""
    text = "<|turn|>sBe.<|end|><|turn|>uWho?<|end|><|turn|>a"
    for mood in ("", "m"):
        answer, length = expected(checkpoint, text + mood, 12)
        extra: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"mood": mood}}}
        done = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, **extra)
        assert (done.choices[0].message.content, done.choices[0].finish_reason) == (answer, "length")
        assert done.usage
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (length, 12)
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, **extra}
        events = list(
            client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=12, **options)
        )
        *pieces, usage = events
        assert "".join(piece.choices[0].delta.content for piece in pieces) == answer
        assert len(pieces) > 1
        assert [piece.choices[0].finish_reason for piece in pieces[-2:]] == [None, "length"]
        assert usage.usage == done.usage


def test_a_text(client: OpenAI, checkpoint: Path) -> None:
    """Tokens are continued as well as a text, up to a stop string, whole or piece by piece."""
    answer, length = expected(checkpoint, "<s>Who", 20)
    hot: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "temperature": 9, "seed": 3}
    for prompt in ("Who", Tokenizer(checkpoint).encode("Who")):
        done = client.completions.create(model="tiny", prompt=prompt, max_tokens=20)
        assert done.choices[0].text == answer
        assert done.usage
        assert done.usage.prompt_tokens == length
        text = client.completions.create(prompt=prompt, **hot).choices[0].text
        stop = text[9:12]
        done = client.completions.create(prompt=prompt, stop=["not in it", stop], **hot)
        assert (done.choices[0].text, done.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
        stream = client.completions.create(prompt=prompt, stop=stop, stream=True, **hot)
        assert "".join(event.choices[0].text for event in stream) == text[: text.index(stop)]
        assert len(text) > len(stop) + 9


def test_draws(client: OpenAI) -> None:
    """The seed decides, and a small top-p takes the likeliest tokens."""

    def drawn(**options: Any) -> str:
        text: str = client.completions.create(model="tiny", prompt="Who", max_tokens=12, **options).choices[0].text
        return text

    first, again, other = (drawn(temperature=1.5, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert drawn(temperature=1.5, top_p=0.001) == drawn() != first


def test_requests_that_arrive_together(client: OpenAI, example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the plan's batch are generated together, and each is answered as it is alone."""
    prompts = ["Who", "Why is it?", "Oh"]

    def text(prompt: str) -> str:
        tokens = 9 + len(prompt)
        return client.completions.create(model="tiny", prompt=prompt, max_tokens=tokens).choices[0].text

    alone = [text(prompt) for prompt in prompts]
    monkeypatch.setattr(example, "TOGETHER", 0.5)
    original, sizes = example.generate, []

    def generate(decoder: Any, given: list[list[int]], *rest: Any, **options: Any) -> Any:
        sizes.append(len(given))
        return original(decoder, given, *rest, **options)

    monkeypatch.setattr(example, "generate", generate)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(text, prompts)) == alone
    assert sizes == [2, 1]


def test_a_client_that_goes_away(client: OpenAI, example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text ends, and the next request is answered."""
    jobs, made, original = [], [], example.generate

    def add(self: Any, job: Any) -> None:
        jobs.append(job)
        original_add(self, job)

    def generate(*given: Any, **options: Any) -> Any:
        for step in original(*given, **options):
            made.append(step)
            if len(made) == 3:
                assert gone.wait(60)
            yield step

    gone, original_add = threading.Event(), example.Engine.add
    monkeypatch.setattr(example.Engine, "add", add)
    monkeypatch.setattr(example, "generate", generate)
    stream = client.completions.create(model="tiny", prompt="Who", max_tokens=60, temperature=9, stream=True)
    next(iter(stream))
    stream.close()
    while not jobs[0].cancelled:
        assert not gone.wait(0.01)
    gone.set()
    assert client.completions.create(model="tiny", prompt="Who", max_tokens=2).choices[0].finish_reason == "length"
    assert len(made) <= 3 + 2  # of the first text no more than were made when its client went


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        ({"max_tokens": LENGTH}, ["15 tokens", f"{LENGTH} new ones", f"room for {LENGTH}"], "messages"),
        (
            {"messages": [{"role": "user", "content": "a" * 99}]},
            [f"has 104 tokens, and the context has room for {LENGTH}"],
            "messages",
        ),
        ({"max_tokens": 0}, ["max_tokens is 0, expected 1 or more"], "max_tokens"),
        ({"max_tokens": "many"}, ['max_tokens is "many", expected a whole number'], "max_tokens"),
        ({"temperature": True}, ["temperature is true, expected a number"], "temperature"),
        ({"temperature": -1}, ["the temperature is -1"], None),
        ({"stop": [""]}, ['stop is [""], expected texts'], "stop"),
        ({"n": 2}, ["n is 2"], "n"),
        ({"colour": 1}, ["unknown parameter 'colour', expected some of temperature"], "colour"),
        ({"messages": []}, ["messages is missing or empty"], "messages"),
        ({"messages": [{"role": "user"}]}, ["messages[0].content is null"], "messages[0].content"),
        ({"messages": [{"content": "a"}]}, ["messages[0] has no role"], "messages[0]"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_refused(client: OpenAI, body: dict[str, Any], words: list[str], param: str | None) -> None:
    """The error is one of JSON that names what is wrong, with the numbers."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body={"model": "tiny", "messages": MESSAGES} | body, cast_to=object)
    error: Any = caught.value.body
    assert all(word in error["message"] for word in words), error["message"]
    assert error["param"] == param


def test_other_models_and_bodies(client: OpenAI) -> None:
    """A model that there is not is not found, and what is no JSON is a bad request."""
    with pytest.raises(openai.NotFoundError, match="there is no model 'huge', only 'tiny'"):
        client.completions.create(model="huge", prompt="Who")
    with pytest.raises(openai.BadRequestError, match="the body is no JSON"):
        client.post("/completions", content=b"{", cast_to=object)
    with pytest.raises(openai.BadRequestError, match="expected one text or tokens from 0 to 202"):
        client.completions.create(model="tiny", prompt=[999])
