"""A small server with OpenAI's API, for a checkpoint that is loaded by a plan.

    python examples/server.py plans/llama.json models/llama --port 8000

answers /v1/models, /v1/chat/completions and /v1/completions, also piece by piece (``"stream": true``). Requests that
arrive together are generated together, as many as the plan's batch; those that arrive later wait until all of these are
complete. It needs ``tpplan[server]``. There is no authentication: it listens on this machine only, unless ``--host``
says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import uvicorn
from attrs import define, field, frozen
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

import tpplan
from tpplan import exec as tpx
from tpplan.decoder import Decoder, Sampling, generate, prepare
from tpplan.decoder.generation.arguments import template_of
from tpplan.decoder.generation.defaults import Defaults
from tpplan.decoder.model.settings import check_model
from tpplan.decoder.text.continuation import Continuation
from tpplan.decoder.text.files import end_tokens
from tpplan.decoder.text.tokenizer import Tokenizer
from tpplan.errors import ModelError, RequestError, TpplanError
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from tpplan.decoder.text.chat import ChatTemplate

#: Seconds that a request waits for others that arrive together with it.
TOGETHER = 0.01
#: New tokens of /v1/completions where a request does not say, as of OpenAI's.
USUAL_NEW_TOKENS = 16
#: Largest body of a request, in bytes.
MOST_BYTES = 16 * 2**20

_Kinds = tuple[type, ...]
_NUMBER: _Kinds = (int, float)
_WHOLE: _Kinds = (int,)
_TEXT: _Kinds = (str,)
_FLAG: _Kinds = (bool,)
_OBJECT: _Kinds = (dict,)
_LIST: _Kinds = (list,)
_TEXTS: _Kinds = (str, list)
_NAMES: dict[_Kinds, str] = {
    _NUMBER: "a number",
    _WHOLE: "a whole number",
    _TEXT: "a text",
    _FLAG: "true or false",
    _OBJECT: "an object",
    _LIST: "a list",
    _TEXTS: "a text or a list",
}
_SAMPLING: dict[str, _Kinds] = {
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _WHOLE,
    "min_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "seed": _WHOLE,
}
_BOTH: dict[str, _Kinds] = {
    **_SAMPLING,
    "model": _TEXT,
    "stop": _TEXTS,
    "stream": _FLAG,
    "stream_options": _OBJECT,
    "max_tokens": _WHOLE,
    "n": _WHOLE,
    "user": _TEXT,
}
PARAMETERS: dict[str, dict[str, _Kinds]] = {
    "chat": {**_BOTH, "messages": _LIST, "max_completion_tokens": _WHOLE, "chat_template_kwargs": _OBJECT},
    "text": {**_BOTH, "prompt": _TEXTS, "echo": _FLAG, "best_of": _WHOLE},
}


class BadRequestError(Exception):
    """A request that cannot be answered."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}


@frozen
class Piece:
    """A part of an answer.

    Attributes:
        text: new text.
        tokens: new tokens so far.
        finish: ``stop`` or ``length`` in the last piece; empty before.
        error: why the answer cannot go on; empty if it can.
    """

    text: str
    tokens: int
    finish: str = ""
    error: str = ""


@define(eq=False)
class Job:
    """A text to generate.

    Attributes:
        prompt: tokens of the prompt.
        count: maximum new tokens.
        sampling: how tokens are chosen.
        stops: strings that end the text.
        loop: event loop of the request.
        pieces: what was generated, for the request to read.
        cancelled: whether nobody waits for it any more.
    """

    prompt: list[int]
    count: int
    sampling: Sampling
    stops: list[str]
    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[Piece] = field(factory=asyncio.Queue)
    cancelled: bool = False

    def put(self, piece: Piece) -> None:
        """Hand a piece over from the thread of the engine."""
        self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)


class Engine:
    """Generates texts in a thread of its own: those that wait, as many together as the plan's batch."""

    def __init__(self, decoder: Decoder, directory: str) -> None:
        self.decoder, self.tokenizer = decoder, Tokenizer(directory)
        self.defaults = Defaults.read(directory)
        self.model = decoder.context.plan.model.name
        self.directory = directory
        self._end = end_tokens(directory)
        self._waiting: deque[Job] = deque()
        self._changed = Condition()
        self._stopped = False
        self._thread = Thread(target=self._work)

    def start(self) -> None:
        """Begin to generate."""
        self._thread.start()

    def stop(self) -> None:
        """End after the texts that are being generated."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def add(self, job: Job) -> None:
        """Let a text wait for its turn."""
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()

    def _work(self) -> None:
        while not self._stopped:
            jobs = self._next()
            try:
                self._generate(jobs)
            except Exception as error:  # noqa: BLE001 (whatever it is, requests wait for an answer)
                message = error.message if isinstance(error, TpplanError) else f"{type(error).__name__}: {error}"
                for job in jobs:
                    job.put(Piece("", 0, "error", message))

    def _next(self) -> list[Job]:
        """Wait for jobs, and return those that are generated together; none if all were cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopped)
            end, most = time.monotonic() + TOGETHER, self.decoder.batch
            while len(self._waiting) < most and not self._stopped and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._stopped:
                for job in self._waiting:
                    job.put(Piece("", 0, "error", "the server ends"))
                return []
            jobs: list[Job] = []
            while self._waiting and len(jobs) < most:
                job = self._waiting.popleft()
                jobs += [] if job.cancelled else [job]
            return jobs

    def _generate(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        steps = generate(
            self.decoder,
            [job.prompt for job in jobs],
            [job.count for job in jobs],
            sampling=[job.sampling for job in jobs],
            end=self._end,
        )
        texts = {job: Continuation(self.tokenizer, job.prompt, job.stops) for job in jobs}
        for number, tokens in enumerate(steps, 1):
            for job, token in zip(jobs, tokens, strict=True):
                if job not in texts or token is None:
                    continue
                text, is_end = texts[job], token in self._end
                piece = text.add(token)
                if is_end or text.stop or number == job.count or job.cancelled:
                    piece += text.rest()
                    job.put(Piece(piece, number, "stop" if is_end or text.stop else "length"))
                    del texts[job]
                else:
                    job.put(Piece(piece, number))
            if not texts or self._stopped:
                break
        for job in texts:
            job.put(Piece("", 0, "error", "the server ends"))


def checked(data: object, kind: str, model: str) -> dict[str, Any]:
    """Return a request's parameters without those that are null, after checking names, types and the model."""
    if not isinstance(data, dict):
        raise BadRequestError("the body is no object of JSON")
    known = PARAMETERS[kind]
    for name, value in data.items():
        if name not in known:
            raise BadRequestError(f"unknown parameter {name!r}, expected some of {', '.join(known)}", name)
        is_flag = isinstance(value, bool) and bool not in known[name]  # which Python takes for a number
        if value is not None and (is_flag or not isinstance(value, known[name])):
            shown = json.dumps(value)[:60]
            raise BadRequestError(f"{name} is {shown}, expected {_NAMES[known[name]]}", name)
    for name in ("n", "best_of"):
        if data.get(name) not in {None, 1}:
            raise BadRequestError(f"{name} is {data[name]}, and this server makes 1 answer of a prompt", name)
    if data.get("echo"):
        raise BadRequestError("echo is true, and this server does not repeat prompts", "echo")
    given = {name: value for name, value in data.items() if value is not None}
    if given.get("model", model) != model:
        what = f"there is no model {given['model'][:60]!r}, only {model!r}"
        raise BadRequestError(what, "model", "model_not_found", 404)
    return given


def messages_of(data: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a request's messages, each with a role and a text."""
    messages = []
    for i, message in enumerate(data.get("messages", [])):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequestError(f"{where} has no role, expected an object with role and content", where)
        content = message.get("content")
        if isinstance(content, list):  # of parts
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
                raise BadRequestError(f"{where}.content has a part that is no text", f"{where}.content")
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise BadRequestError(f"{where}.content is {json.dumps(content)[:60]}, expected a text", f"{where}.content")
        messages.append({"role": message["role"], "content": content})
    if not messages:
        raise BadRequestError("messages is missing or empty, expected one or more", "messages")
    return messages


class Server:
    """Answers requests by an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._started = int(time.time())
        self._template: ChatTemplate | None = None

    def app(self) -> Starlette:
        """Return the application."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self._engine.start()
            yield
            await asyncio.to_thread(self._engine.stop)

        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.text, methods=["POST"]),
            ],
            lifespan=lifespan,
        )

    async def models(self, _: Request) -> Response:
        """List the one model."""
        model = {"id": self._engine.model, "object": "model", "created": self._started, "owned_by": "tpplan"}
        return JSONResponse({"object": "list", "data": [model]})

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answered(request, "chat")

    async def text(self, request: Request) -> Response:
        """Continue a text."""
        return await self._answered(request, "text")

    async def _answered(self, request: Request, kind: str) -> Response:
        try:
            data = checked(await _body(request), kind, self._engine.model)
            job = self._job(data, await asyncio.to_thread(self._prompt, data, kind), kind)
        except BadRequestError as error:
            return JSONResponse(error.body, error.status)
        except (ModelError, RequestError) as error:  # of the template, or of a setting
            return JSONResponse(BadRequestError(error.message).body, 400)
        self._engine.add(job)
        answer = _Answer(kind, self._engine.model, job)
        if data.get("stream"):
            with_usage = bool(data.get("stream_options", {}).get("include_usage"))
            return StreamingResponse(answer.stream(with_usage=with_usage), media_type="text/event-stream")
        return await answer.whole(request)

    def _prompt(self, data: Mapping[str, Any], kind: str) -> list[int]:
        """Return the tokens of a request's prompt."""
        tokenizer = self._engine.tokenizer
        if kind == "chat":
            self._template = self._template or template_of(self._engine.directory, tokenizer)
            text = self._template.converse(messages_of(data), data.get("chat_template_kwargs"))
            return tokenizer.encode(text, add_special_tokens=False)
        prompt = data.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        vocabulary = self._engine.decoder.context.plan.split(tpplan.Axis.VOCAB).size
        if not isinstance(prompt, list) or not all(type(t) is int and 0 <= t < vocabulary for t in prompt):
            what = f"prompt is {json.dumps(prompt)[:60]}, expected one text or tokens from 0 to {vocabulary - 1}"
            raise BadRequestError(what, "prompt")
        return prompt

    def _job(self, data: Mapping[str, Any], prompt: list[int], kind: str) -> Job:
        """Return the text to generate, after checking that the plan has room for it."""
        length = self._engine.decoder.length
        if not prompt:
            raise BadRequestError("the prompt has no tokens", "prompt")
        room = length - len(prompt)
        asked = data.get("max_completion_tokens", data.get("max_tokens"))
        if asked is not None and asked < 1:
            raise BadRequestError(f"max_tokens is {asked}, expected 1 or more", "max_tokens")
        count = asked or (max(1, room) if kind == "chat" else max(1, min(room, USUAL_NEW_TOKENS)))
        if count > room:
            what = f"the prompt has {len(prompt)} tokens"
            what += f" and {asked} new ones were asked for" if asked else ""
            what += f", and the context has room for {length}"
            raise BadRequestError(what, "messages" if kind == "chat" else "prompt", "context_length_exceeded")
        given = {name: data[name] for name in _SAMPLING if name in data}
        sampling = self._engine.defaults.sampling(given)
        stops = data.get("stop", [])
        stops = [stops] if isinstance(stops, str) else stops
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise BadRequestError(f"stop is {json.dumps(stops)[:60]}, expected texts that are not empty", "stop")
        return Job(prompt, count, sampling, stops, asyncio.get_running_loop())


async def _body(request: Request) -> object:
    """Return the JSON of a request."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > MOST_BYTES:
            raise BadRequestError(f"the body has more than {MOST_BYTES} bytes", status=413)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is no JSON: {error}") from error


class _Answer:
    """What a request is answered, in OpenAI's form."""

    def __init__(self, kind: str, model: str, job: Job) -> None:
        self._kind, self._job = kind, job
        name, prefix = ("chat.completion", "chatcmpl") if kind == "chat" else ("text_completion", "cmpl")
        self._head = {"id": f"{prefix}-{uuid4().hex}", "object": name, "created": int(time.time()), "model": model}

    def _usage(self, tokens: int) -> dict[str, int]:
        prompt = len(self._job.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    async def whole(self, request: Request) -> Response:
        """Return the whole answer."""
        text = ""
        while True:
            try:
                piece = await asyncio.wait_for(self._job.pieces.get(), 1)
            except TimeoutError:
                self._job.cancelled = await request.is_disconnected()
                continue
            text += piece.text
            if piece.finish:
                break
        if piece.error:
            return JSONResponse(_failure(piece.error), 500)
        said = {"message": {"role": "assistant", "content": text}} if self._kind == "chat" else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": piece.finish}
        return JSONResponse(self._head | {"choices": [choice], "usage": self._usage(piece.tokens)})

    async def stream(self, *, with_usage: bool) -> AsyncIterator[str]:
        """Yield the answer as events."""
        head = self._head | ({"object": "chat.completion.chunk"} if self._kind == "chat" else {})
        role = {"role": "assistant"} if self._kind == "chat" else {}
        try:
            while True:
                piece = await self._job.pieces.get()
                if piece.error:
                    yield f"data: {json.dumps(_failure(piece.error))}\n\n"
                    return
                if piece.text or piece.finish or role:
                    text = {"delta": {**role, "content": piece.text}} if self._kind == "chat" else {"text": piece.text}
                    choice = {"index": 0, **text, "logprobs": None, "finish_reason": piece.finish or None}
                    yield f"data: {json.dumps(head | {'choices': [choice]})}\n\n"
                    role = {}
                if piece.finish:
                    break
            if with_usage:
                yield f"data: {json.dumps(head | {'choices': [], 'usage': self._usage(piece.tokens)})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self._job.cancelled = True


def _failure(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": None}}


@contextmanager
def loaded(path: str, directory: str, backend: str) -> Iterator[Engine]:
    """Load a checkpoint by a plan, and capture what the first requests would wait for."""
    plan = tpplan.load(path)
    check_model(directory, tpplan.read_model(directory), plan)
    with tpx.compile(plan, backend=backend, model=directory, scratch=False) as context:
        decoder = Decoder(context, directory, load_weights(plan, directory, context))
        engine = Engine(decoder, directory)
        for sequences in {1, decoder.batch}:
            prepare(decoder, sequences, sampling=engine.defaults.sampling({}))
        yield engine


def main() -> None:
    """Load a checkpoint and serve it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", help="a plan file")
    parser.add_argument("model", help="the checkpoint's directory")
    parser.add_argument("--backend", default="auto", help="cuda, cpu (virtual devices) or auto")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 is any free one")
    given = parser.parse_args()
    if not Path(given.plan).is_file():
        parser.error(f"{given.plan} is no file")
    with loaded(given.plan, given.model, given.backend) as engine:
        uvicorn.run(Server(engine).app(), host=given.host, port=given.port)


if __name__ == "__main__":
    try:
        main()
    except TpplanError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
