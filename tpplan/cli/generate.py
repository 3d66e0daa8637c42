"""The command ``tpplan generate``: a plan and a checkpoint in, texts out."""

from __future__ import annotations

import shlex
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING

from tpplan.cli import console, plans
from tpplan.cli.arguments import Backend, File, Runner  # noqa: TC001 (cyclopts reads it)
from tpplan.cli.commands import OK, Whole
from tpplan.core.missing import needing
from tpplan.core.sizes import listed
from tpplan.errors import PlanError, RequestError, TpplanError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from tpplan.core.plan import SplitPlan
    from tpplan.decoder.generation.arguments import Order, Task
    from tpplan.decoder.generation.command import Engine
    from tpplan.decoder.generation.timing import Startup
    from tpplan.reports.generate import GenerateReport

    Loader = Callable[[Task, Callable[[str], None], Startup], AbstractContextManager[Engine]]

#: Characters of a number; no model has so many tokens.
_LONGEST = 12
#: What running by transformers needs.
_NEEDED = ("torch", "transformers", "greenlet")
#: Settings that only count where tokens are drawn.
_DRAWING = ("top_p", "top_k", "min_p", "seed")


def generate(
    plan: File,
    /,
    *,
    model: File,
    prompt: str = "",
    prompts: File = "",
    token_ids: str = "",
    chat: bool = False,
    system: str = "",
    chat_template_kwargs: str = "",
    max_new_tokens: Whole | None = None,
    stop: tuple[str, ...] = (),
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: Whole | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    seed: Whole | None = None,
    backend: Backend = "auto",
    engine: Runner = "auto",
    json: bool = False,
) -> int:
    """Load a checkpoint by a plan and continue a text, token by token.

    Args:
        plan: a plan file; - is standard input.
        model: the checkpoint's directory, with safetensors files and a tokenizer.json; a GGUF file; or org/name.
        prompt: the text to continue; - is standard input.
        prompts: a file of texts to continue, one a line, or JSON lines such as {"prompt": "…"}; - is standard input.
        token_ids: tokens to continue instead, such as 5,17,99; then tokens are printed, and no tokenizer is needed.
        chat: put the prompt into the checkpoint's chat template; on a terminal without a prompt, a conversation.
        system: with --chat, what the system says before the prompt.
        chat_template_kwargs: with --chat, variables of the template as JSON, such as {"enable_thinking": false}.
        max_new_tokens: at most; 128 by default, or as many as the plan's cache has room for.
        stop: end a text before this; repeatable.
        temperature: 0 takes the likeliest token; above, one is drawn; by default as generation_config.json says.
        top_p: with a temperature, the probability of all the tokens that one is drawn from.
        top_k: with a temperature, how many of the likeliest tokens one is drawn from; 0 is all.
        min_p: with a temperature, how probable tokens must be, as a part of the largest probability.
        repetition_penalty: divides the logits of tokens that the text has; 1 changes nothing.
        presence_penalty: is subtracted from the logits of tokens that were generated.
        frequency_penalty: is subtracted for each time that they were.
        seed: with a temperature, of what is drawn; 0 by default.
        backend: cpu has virtual devices; auto, the default, is cuda if the machine has as many GPUs, else cpu.
        engine: tpplan's decoder, or transformers sharded by the plan; auto is the decoder where it knows the model.
        json: print one JSON document; with --prompts one in each line.
    """
    from tpplan.decoder.generation.arguments import Order, checked  # noqa: PLC0415
    from tpplan.decoder.generation.defaults import Defaults  # noqa: PLC0415
    from tpplan.decoder.generation.read_ahead import reading_ahead  # noqa: PLC0415
    from tpplan.decoder.generation.timing import Startup  # noqa: PLC0415
    from tpplan.models.hub import local  # noqa: PLC0415

    startup = Startup()
    talks = chat and not (prompt or prompts or token_ids) and sys.stdin.isatty()
    _check_source(prompt, prompts, token_ids, talks=talks, json=json)
    if talks:
        _check_talk(by_transformers=engine == "transformers")
    for option, value in (("--system", system), ("--chat-template-kwargs", chat_template_kwargs)):
        if value and not chat:
            raise UsageError(f"{option} is a part of a chat", f"add --chat, or leave out {option}")
    if token_ids and (chat or stop):
        option = "--chat" if chat else "--stop"
        raise UsageError(f"{option} takes a prompt, not tokens", f"give the prompt as a text, or leave out {option}")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise RequestError(f"--max-new-tokens is {max_new_tokens}, expected 1 or more", "leave it out for 128")
    settings = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    _check_installed(engine)
    tokens = _tokens(token_ids)
    variables = _variables(chat_template_kwargs)
    plans.some((plan, prompt, prompts))
    found = plans.read_plan(plan)
    directory = str(local(model))
    defaults = Defaults.read(directory).without(given)
    sampling = defaults.sampling(given)
    for name in _DRAWING:
        if name in given and not sampling.temperature:
            option = f"--{name.replace('_', '-')}"
            hint = f"add --temperature 0.7, or leave out {option}"
            raise UsageError(f"{option} takes effect with --temperature above 0", hint)
    order = Order(
        directory=directory,
        prompts=_texts(prompt, prompts),
        tokens=tokens,
        chat=chat,
        system=system,
        variables=variables,
        max_new_tokens=max_new_tokens or 0,
        sampling=sampling,
        stops=stop,
        backend=backend,
    )
    console.show_log()
    task = _checked(checked, found, order, plan, model)
    plans.note_undrafted(found)
    if text := str(defaults):
        plans.note(text)
    startup.mark("plan")
    with reading_ahead(task.source), needing("running a plan", "generate"):
        from tpplan.decoder.generation.command import by_decoder  # noqa: PLC0415 (torch, too, which takes seconds)
    lacks = _lacked_by_decoder(task) if engine == "auto" else None
    by_transformers = engine == "transformers" or bool(lacks)
    if talks:
        _check_talk(by_transformers=by_transformers)
        _talk(task, startup)
    else:
        load = _loader_of_transformers(lacks) if by_transformers else by_decoder
        _continue(task, startup, load, json=json, lines=bool(prompts))
    return OK


def _check_installed(engine: str) -> None:
    """Refuse an engine before anything that takes seconds to import, if it lacks a library.

    Raises:
        MissingError: it does.
    """
    with needing("running a plan by transformers", "transformers"):
        if engine == "transformers" and (name := _lacking()):
            raise ModuleNotFoundError(name=name)


def _lacking() -> str:
    """Return a library that running by transformers lacks; empty if it lacks none."""
    return next((name for name in _NEEDED if find_spec(name) is None), "")


def _lacked_by_decoder(task: Task) -> TpplanError | None:
    """Return why the decoder does not compute a task, which is told, and transformers may; None if it does.

    Raises:
        TpplanError: it does not, and transformers does not either.
    """
    from tpplan.decoder.model.settings import check_model  # noqa: PLC0415 (not every command needs it)
    from tpplan.models.config import InvalidConfigError  # noqa: PLC0415 (not every command needs it)

    try:
        check_model(task.source, task.source.model, task.plan)
    except InvalidConfigError:
        raise  # nor is it one for transformers
    except TpplanError as error:
        if _lacking() or not task.source.model.is_plain:
            raise
        plans.note(f"computed by transformers, as {error.message}")
        return error
    return None


def _check_source(prompt: str, prompts: str, token_ids: str, *, talks: bool, json: bool) -> None:
    """Check that there is one thing to continue.

    Raises:
        UsageError: there is none, or there are several.
    """
    sources = {"--prompt": prompt, "--prompts": prompts, "--token-ids": token_ids}
    given = [option for option, text in sources.items() if text]
    if not given and not talks:
        hint = 'add --prompt "…", --prompts FILE or --token-ids 5,17,99'
        raise UsageError("generate has neither a prompt nor tokens to continue", hint)
    if len(given) > 1:
        raise UsageError(f"generate continues one thing, {listed(given)} are given", "leave out all but one of them")
    if talks and json:
        raise UsageError("a conversation is no JSON document", 'add --prompt "…", or leave out --json')


def _check_talk(*, by_transformers: bool) -> None:
    """Refuse a conversation by transformers.

    Raises:
        UsageError: it would be by transformers.
    """
    if by_transformers:
        hint = 'add --prompt "…", or --engine tpplan if the decoder knows the model'
        raise UsageError("a conversation is by tpplan's decoder, not by transformers", hint)


def _tokens(text: str) -> tuple[int, ...]:
    """Return the tokens of ``--token-ids``."""
    tokens = text.split(",") if text else []
    if not all(token.strip().isdecimal() and len(token) <= _LONGEST for token in tokens):
        raise UsageError(f"--token-ids is {text[:60]!r}, expected numbers", "write them as in 5,17,99")
    return tuple(map(int, tokens))


def _variables(text: str) -> Mapping[str, object]:
    """Return the object of ``--chat-template-kwargs``."""
    from tpplan.files.jsontext import NotJSONError, read_json  # noqa: PLC0415

    hint = """write an object of JSON, such as '{"enable_thinking": false}'"""
    if not text:
        return {}
    try:
        data = read_json(text)
    except NotJSONError as error:
        raise UsageError(f"--chat-template-kwargs {error}", hint) from error
    if not isinstance(data, dict):
        raise UsageError(f"--chat-template-kwargs is {text[:60]!r}, expected an object", hint)
    if "messages" in data:
        raise UsageError(
            "--chat-template-kwargs has messages, which the prompt is", "give them by --prompt and --system"
        )
    return data


def _texts(prompt: str, prompts: str) -> tuple[str, ...]:
    """Return the texts to continue: one that is given, or those of a file."""
    from tpplan.decoder.generation.prompt_file import prompts_of  # noqa: PLC0415

    if prompts:
        return prompts_of(console.read(prompts), console.shown(prompts))
    text = console.read(prompt) if prompt == console.STREAM else prompt
    return (text,) if text else ()


def _checked(
    checked: Callable[[SplitPlan, Order, Callable[[str], None]], Task],
    found: SplitPlan,
    order: Order,
    path: str,
    model: str,
) -> Task:
    """Check an order, and say of a plan at a path that is not right for a model which commands help."""
    try:
        return checked(found, order, plans.note)
    except PlanError as error:
        if path != console.STREAM:
            again = plans.remake(found, path, model, "") or "tpplan plan"
            compares = shlex.join(["tpplan", "check", path, "--model", model])
            error.hint = f"{compares} compares them, {again} makes the plan again{plans.without_room(found)}"
        raise


def _continue(task: Task, startup: Startup, load: Loader, *, json: bool, lines: bool) -> None:
    """Continue prompts by what loads them, and write what follows; ``lines`` says whether these are those of a file."""
    from json import dumps  # noqa: PLC0415 (an option has this name)

    from tpplan.decoder.generation.command import run  # noqa: PLC0415 (not every command needs it)
    from tpplan.files.codec import unstructure  # noqa: PLC0415 (not every command has a document)
    from tpplan.files.jsontext import render  # noqa: PLC0415 (not every command has a document)

    startup.mark("torch")
    numbers = count(1)

    def done(report: GenerateReport) -> None:
        number = next(numbers)
        if json:
            data = unstructure(report)
            console.emit(dumps(data, ensure_ascii=False) + "\n" if lines else render(data))
        elif lines:
            console.emit(f"==> {number} <==\n{report.text}\n")
        else:
            console.emit("\n")

    timing = run(task, plans.note, (lambda _: None) if json or lines else console.emit, done, startup, load=load)
    console.say("start", str(startup))
    console.say("time", str(timing))


def _loader_of_transformers(lacks: TpplanError | None) -> Loader:
    """Return what loads a task's checkpoint into a model of transformers; ``lacks`` is why the decoder does not."""
    from tpplan.decoder.generation.command import Engine  # noqa: PLC0415

    with needing("running a plan by transformers", "transformers"):
        from tpplan.decoder.model.settings import FAMILIES  # noqa: PLC0415
        from tpplan.transformers.generate import loaded  # noqa: PLC0415
        from tpplan.transformers.trial import ELSEWHERE  # noqa: PLC0415

    @contextmanager
    def load(task: Task, note: Callable[[str], None], startup: Startup) -> Iterator[Engine]:
        try:
            with loaded(task.source, task.plan, task.order.backend, note) as (context, tokens):
                startup.mark("model")
                yield Engine(context, tokens)
        except RequestError as error:
            if lacks and error.hint == ELSEWHERE:  # the decoder does not compute it
                knows = task.source.model.model_type in FAMILIES
                error.hint = lacks.hint if knows else "docs/run-a-model.md lists what runs"
            raise

    return load


def _talk(task: Task, startup: Startup) -> None:
    """Hold a conversation on the terminal."""
    with needing("--chat", "generate"):
        from tpplan.cli.conversation import talk  # noqa: PLC0415
        from tpplan.decoder.generation.arguments import template_of  # noqa: PLC0415
        from tpplan.decoder.generation.command import loaded  # noqa: PLC0415
        from tpplan.decoder.generation.conversation import Conversation  # noqa: PLC0415
    assert task.tokenizer  # noqa: S101 - there are no tokens
    with loaded(task, plans.note, startup) as decoder:
        conversation = Conversation(decoder, task, task.tokenizer, template_of(task.source, task.tokenizer))
        talk(conversation)
    console.say("time", str(conversation.timing))
