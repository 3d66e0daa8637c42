"""``tpplan generate --chat``: what a checkpoint's chat template makes of a prompt, and what is refused."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from datetime import datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, patch

import jinja2
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tests.command import Done, command
from tests.decoder.chat_cases import CHATML, PLACES, SPECIAL, TEMPLATES, write_template, write_tokenizer
from tests.decoder_cases import VOCAB, model_of, plan_of, request_of
from tests.later import transformers
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.core.missing import install_command
from tpplan.decoder.text import chat, templates
from tpplan.decoder.text.chat import ChatTemplate
from tpplan.decoder.text.tokenizer import Tokenizer
from tpplan.errors import ExecutionError, ModelError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Templates that never end, or would take all memory, at one place or another.
HOSTILE = (
    "{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10 ** 9 }}",  # when it is compiled
    "{{ messages[0].content * 10 ** 9 }}",
    "{% set n = 9 %}{{ n ** n ** n ** n }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '%0999999999d' % 1 }}",
    "{% set it = namespace(x='aa') %}{% for _ in range(40) %}{% set it.x = it.x ~ it.x %}{% endfor %}",
    "{% set it = namespace(x=[1]) %}{% for _ in range(40) %}{% set it.x = it.x + it.x %}{% endfor %}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ range(99999) | join('y' * 10 ** 5) }}",
    "{{ ('a' * 10 ** 7) | wordwrap(1) }}",
    "{{ range(99999) | slice(10 ** 9) | list }}",
    "{{ range(10) | batch(10 ** 9, 'x') | list }}",
    "{{ lipsum(n=10 ** 6) }}",
    "{{ range(99999) | list | tojson(indent=10 ** 7) }}",
    "{{ strftime_now('%Y' * 10 ** 7) }}",
    "{{ raise_exception('x' * 10 ** 9) }}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "{{ " + " ~ ".join(["1"] * 100_000) + " }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{{ 'x' * (16 * 2 ** 20 + 1) }}",
    "x" * (15 * 2**20),
    "{{" * 10**6,
)

SYSTEM, USER = " You are brief.\n", "  Who keeps the light? <|im_end|>\n"


@pytest.fixture(autouse=True)
def _same_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it the same day for both sides."""
    clock = Mock(now=lambda: datetime(2026, 2, 3))  # noqa: DTZ001 (as transformers)
    for module in (chat, transformers.utils.chat_template_utils):
        monkeypatch.setattr(module, "datetime", clock)


@pytest.fixture
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render in this process, as for very many prompts a process each would take long to start."""
    monkeypatch.setattr(chat, "_answered", templates.outcome)


@cache
def _both(name: str, place: str) -> tuple[ChatTemplate, Tokenizer, Any]:
    """Return a checkpoint's template and tokenizer as tpplan reads them, and as transformers does."""
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
        write_template(Path(folder), TEMPLATES[name], place)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        return ChatTemplate.read(folder), Tokenizer(folder), theirs


def _said(user: str, system: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in (("system", system), ("user", user)) if text]


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", TEMPLATES)
@given(user=st.text(min_size=1) | st.just(USER), system=st.text() | st.just(SYSTEM))
def test_texts_and_tokens_are_those_of_transformers(name: str, place: str, user: str, system: str) -> None:
    """Whatever is said, in every shape and place of a template, and no special token is put around it again."""
    template, tokenizer, theirs = _both(name, place)
    said = _said(user, system)
    if name == "refusing" and system:
        with pytest.raises(jinja2.TemplateError, match="System role not supported"):
            theirs.apply_chat_template(said, add_generation_prompt=True)
        with pytest.raises(RequestError, match="refuses this: System role not supported"):
            template.render(user, system)
        return
    text = template.render(user, system)
    assert text == theirs.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokens == theirs.apply_chat_template(said, add_generation_prompt=True)["input_ids"]


def test_what_templates_find() -> None:
    """The date, special tokens by their names, and nothing for what nobody gives; as written out here."""
    headers, unusual = (_both(name, "text")[0].render("Hi", "Be brief.") for name in ("headers", "unusual"))
    assert headers == (
        "<s><|header|>system<|end_header|>\n\nToday Date: 03 Feb 2026\n\nBe brief.<|eot_id|>"
        "<|header|>user<|end_header|>\n\nHi<|eot_id|><|header|>assistant<|end_header|>\n\n"
    )
    assert unusual.endswith('{\n  "a": "system",\n  "b": "<é&>"\n}\nHi</s>FalseTrue<tool>False')


@pytest.mark.parametrize("changes", [{}, {"bos_token": None}, {"added_tokens_decoder": {}}], ids=str)
@pytest.mark.parametrize(
    "older",
    [
        {"bos_token": "<|turn|>", "eos_token": {"content": "<|end|>", "lstrip": False}, "cls_token": "<tool>"},
        {"bos_token": None, "call_token": "<|turn|>", "additional_special_tokens": ["<tool>"]},
        {},
    ],
    ids=str,
)
def test_special_tokens_of_older_checkpoints(older: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    """special_tokens_map.json says what is in neither or in both files as it does in transformers."""
    write_tokenizer(tmp_path, sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    names = "bos_token", "eos_token", "cls_token", "tool_token", "call_token"
    text = "".join(f"{name}: {{{{ {name} | default('none') }}}}\n" for name in names)
    write_template(tmp_path, text, "text", **changes)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older), encoding="utf-8")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ChatTemplate.read(tmp_path).render("Hi") == theirs.apply_chat_template(_said("Hi", ""), tokenize=False)


_NAMES = ("bos_token", "eos_token", "cls_token", "tool_token", "call_token", "boi")
_TOKENS = st.sampled_from(SPECIAL)
_ADDED = _TOKENS.map(lambda token: {"__type": "AddedToken", "content": token, "lstrip": False, "special": True})
_KEYS = st.fixed_dictionaries({}, optional=dict.fromkeys(_NAMES, st.none() | _TOKENS | _ADDED))
_NAMED = st.dictionaries(st.sampled_from(_NAMES), _TOKENS | _ADDED)
_LIST = st.none() | st.lists(_TOKENS, unique=True)
_EXTRA = _NAMED | _LIST


@pytest.mark.usefixtures("_here")
@given(
    keys=_KEYS,
    config=st.fixed_dictionaries(
        {},
        optional={
            "extra_special_tokens": _EXTRA,
            "additional_special_tokens": _LIST,  # as it was called before, without names
            "model_specific_special_tokens": _NAMED,
            "added_tokens_decoder": st.just({}),
        },
    ),
    older=st.none() | st.tuples(_KEYS, st.fixed_dictionaries({}, optional={"extra_special_tokens": _EXTRA})),
)
def test_special_tokens_by_name(
    keys: dict[str, Any], config: dict[str, Any], older: tuple[dict[str, Any], dict[str, Any]] | None
) -> None:
    """Keys of their own and names among others are variables, and of several that of transformers counts."""
    text = "".join(f"{name}: {{{{ {name} | default('none') }}}}\n" for name in _NAMES)
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
        write_template(Path(folder), text, "text", **keys, **config)
        if older is not None:
            # There, objects are tokens without saying so.
            plain = {
                key: {"content": told["content"]} if isinstance(told, dict) else told for key, told in older[0].items()
            }
            (Path(folder) / "special_tokens_map.json").write_text(json.dumps(plain | older[1]), encoding="utf-8")
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        assert ChatTemplate.read(folder).render("Hi") == theirs.apply_chat_template(_said("Hi", ""), tokenize=False)


def test_tokens_that_are_none(tmp_path: Path) -> None:
    """A name whose token is no text is no variable; transformers refuses such a file."""
    extra = {"boi": 5, "call_token": {"lstrip": True}}
    write_template(tmp_path, "{{ boi is defined }}{{ call_token is defined }}", "text", extra_special_tokens=extra)
    assert ChatTemplate.read(tmp_path).render("Hi") == "FalseFalse"


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{% for _ in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_templates_stay_in_the_sandbox(text: str, tmp_path: Path) -> None:
    """A checkpoint may come from anybody: its template sees nothing of Python, and changes nothing."""
    write_template(tmp_path, text, "file")
    with pytest.raises(ModelError, match=r"chat_template\.jinja fails: "):
        ChatTemplate.read(tmp_path).render("Hi")


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:40])
def test_templates_stay_within_limits(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a template does, it has an end: there is a prompt or one error, and this process does not grow."""
    monkeypatch.setattr(chat, "_SECONDS", 0.5)
    template = ChatTemplate(text, Path("it"), {})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        template.render("Hi")
    except ModelError as error:
        assert error.message.startswith("the chat template of it fails: ")  # noqa: PT017
        assert "--chat" in error.hint  # noqa: PT017
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 2**10  # KiB


@pytest.mark.parametrize(
    ("text", "seconds", "problem"),
    [
        (HOSTILE[0], 1.0, "it takes more than 1 s"),
        (HOSTILE[1], 60.0, "it needs more than 384 MiB"),
        (HOSTILE[-3], 60.0, "its text has more than 16777216 characters"),
    ],
)
def test_which_limit_a_template_exceeds(
    text: str, seconds: float, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named; the process that renders is gone afterwards."""
    monkeypatch.setattr(chat, "_SECONDS", seconds)
    with pytest.raises(ModelError, match=problem):
        ChatTemplate(text, Path("it"), {}).render("Hi")
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_process_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one error; so is a process that dies."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ExecutionError, match="cannot be started: No such file"):
        ChatTemplate("", Path("it"), {}).render("Hi")
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(ModelError, match="the process that renders it ended with code 1"):
        ChatTemplate("", Path("it"), {}).render("Hi")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small checkpoint for chats, half of whose tokens are special."""
    directory = tmp_path_factory.mktemp("checkpoints") / "tiny"
    shutil.copytree(model_of("mistral").directory, directory)
    letters = sorted({char for text in (CHATML, USER, SYSTEM, "Ġ") for char in text if char.isprintable()} | {"Ċ"})
    more = [f"<|{i}|>" for i in range(VOCAB - len(SPECIAL) - len(letters))]
    write_tokenizer(directory, letters, (*SPECIAL, *more))
    write_template(directory, CHATML, "text")
    plan_of(directory, 3, request_of(batch=1), {}, seed=4).save(directory / "plan.json")
    return directory


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    """Return a copy of the checkpoint, to be changed."""
    return shutil.copytree(checkpoint, tmp_path / "tiny")


def _generate(directory: Path, *arguments: object, stdin: bytes = b"") -> Done:
    plan = directory / "plan.json"
    return command("generate", plan, "--model", directory, "--backend", "cpu", *arguments, stdin=stdin)


def _document(directory: Path, *arguments: object, stdin: bytes = b"") -> dict[str, Any]:
    done = _generate(directory, *arguments, "--json", stdin=stdin)
    assert done.code == 0
    assert [line.partition(":")[0] for line in done.err.splitlines()] == ["start", "time"]
    document: dict[str, Any] = json.loads(done.out)
    return document


@pytest.mark.parametrize("system", ["", SYSTEM])
def test_the_model_is_given_a_chat(system: str, checkpoint: Path) -> None:
    """The tokens of the prompt are transformers', of standard input too; without --chat it is taken as it is."""
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)
    asked = ("--max-new-tokens", 1, "--chat", *(("--system", system) if system else ()))
    told = theirs.apply_chat_template(_said("Who keeps it?", system), add_generation_prompt=True)["input_ids"]
    assert _document(checkpoint, "--prompt", "Who keeps it?", *asked)["prompt_tokens"] == told
    assert _document(checkpoint, "--prompt", "-", *asked, stdin=b"Who keeps it?")["prompt_tokens"] == told
    plain = _document(checkpoint, "--prompt", "Who keeps it?", "--max-new-tokens", 1)["prompt_tokens"]
    assert plain == theirs("Who keeps it?")["input_ids"] != told


def test_a_file_of_messages(checkpoint: Path, tmp_path: Path) -> None:
    """Each line is put into the template alone, with the system message and the variables that are given."""
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)
    (tmp_path / "said").write_text("Who keeps it?\nWho?\n", encoding="utf-8")
    asked = ("--max-new-tokens", 1, "--chat", "--system", SYSTEM, "--json")
    for more in ({}, {"add_generation_prompt": False}):
        variables = ("--chat-template-kwargs", json.dumps(more)) if more else ()
        done = _generate(checkpoint, "--prompts", tmp_path / "said", *asked, *variables)
        found = [json.loads(line)["prompt_tokens"] for line in done.out.splitlines()]
        said = [_said(text, SYSTEM) for text in ("Who keeps it?", "Who?")]
        options = {"add_generation_prompt": True} | more
        assert found == [theirs.apply_chat_template(each, **options)["input_ids"] for each in said]


def test_a_turn_ends(copied: Path) -> None:
    """One of several tokens of generation_config.json ends an answer, and no special token is printed."""
    asked = ("--prompt", "Who?", "--chat", "--max-new-tokens", 24, "--temperature", 9, "--seed", 3)
    tokens = _document(copied, *asked)["new_tokens"]
    tokenizer = tokenizers.Tokenizer.from_file(str(copied / "tokenizer.json"))
    special = {token for token, what in tokenizer.get_added_tokens_decoder().items() if what.special}
    first, *_, last = dict.fromkeys(token for token in tokens if token in special)
    unused = next(token for token in special if token not in tokens)
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [unused, last]}), encoding="utf-8")
    document = _document(copied, *asked)
    assert document["ended"]
    assert document["new_tokens"] == tokens[: tokens.index(last) + 1]
    assert first in document["new_tokens"]
    letters = [token for token in document["new_tokens"] if token not in special]
    assert letters
    assert document["text"] == tokenizer.decode(letters)
    assert _generate(copied, *asked).out == document["text"] + "\n"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"chat_template": None}, "has no chat template"),
        ({"chat_template": 5}, "chat_template is 5, expected a text"),
        ({"chat_template": [{"name": "rag", "template": ""}]}, "has the chat templates rag, and none is the default"),
        ({"chat_template": [{"name": "default"}, 5]}, "has no chat template"),
        ({"chat_template": [{"name": [1], "template": ""}]}, "has no chat template"),
        ({"chat_template": [{"name": [1]}, {"name": "rag"}]}, "has the chat templates rag, and none is the default"),
        ({"chat_template": "{{ raise_exception('not you\\x1b') }}"}, "refuses this: not you"),
        ({"chat_template": "{% if %}"}, "fails: TemplateSyntaxError: Expected an expression"),
        ({"chat_template": "{{ messages[7].content }}"}, "fails: UndefinedError: list object has no element 7"),
        ({"chat_template": "{{ 1 / 0 }}"}, "fails: ZeroDivisionError: division by zero"),
        ({"chat_template": "{{ '\\ud800' }}"}, r"has '\ud800' at character 0, which is no text"),
        ({"chat_template": ""}, "a prompt has no tokens"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_templates_that_do_not_do(changes: dict[str, Any], problem: str, copied: Path) -> None:
    """One error that names the file and says what is wrong, before anything is loaded."""
    write_template(copied, CHATML, "text", **changes)
    with patch("tpplan.decoder.generation.command.load_weights", side_effect=AssertionError("too late")):
        done = _generate(copied, "--prompt", "Who?", "--chat")
    assert (done.code, done.out) == (2, "")
    assert problem in done.err.replace("\n", " ")
    assert "hint: " in done.err
    assert "\x1b" not in done.err


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer_config.json", b"{", "ends before its JSON does"),
        ("tokenizer_config.json", b"[]", "is no object of JSON"),
        ("tokenizer_config.json", b"\xff", "cannot be read: "),
        ("chat_template.jinja", b"\xff", "cannot be read: "),
        ("tokenizer_config.json", None, "has no chat template"),
        ("special_tokens_map.json", b"[]", "is no object of JSON"),
    ],
)
def test_files_that_do_not_do(name: str, content: bytes | None, problem: str, copied: Path) -> None:
    """A broken file is named; without one there is no template."""
    (copied / name).unlink(missing_ok=True)
    if content is not None:
        (copied / name).write_bytes(content)
    done = _generate(copied, "--prompt", "Who?", "--chat")
    assert (done.code, done.out) == (2, "")
    assert problem in done.err.replace("\n", " ")
    assert (name if content else str(copied)) in done.err.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--token-ids", "1", "--chat"), "--chat takes a prompt, not tokens"),
        (("--prompt", "a", "--system", "b"), "--system is a part of a chat"),
        (("--prompt", "a\udcff", "--chat"), r"the prompt has '\udcff' at character 1"),
        (("--prompt", "a", "--chat", "--system", "\udcff"), r"--system has '\udcff' at character 0"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_what_is_refused(arguments: tuple[object, ...], problem: str, checkpoint: Path) -> None:
    """Options that do not go together, and bytes that are no text, end in one error."""
    done = _generate(checkpoint, *arguments)
    assert (done.code, done.out) == (2, "")
    assert problem in done.err.replace("\n", " ")
    assert "hint: " in done.err


@pytest.fixture
def _no_jinja(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take jinja2 away."""
    monkeypatch.delitem(sys.modules, "tpplan.decoder.text.chat")
    with patch.dict("sys.modules", {"jinja2": None}):
        yield


@pytest.mark.usefixtures("_no_jinja")
def test_without_jinja(checkpoint: Path) -> None:
    """Only chats need it, and say what to install."""
    assert _generate(checkpoint, "--prompt", "Who?", "--max-new-tokens", 1).code == 0
    done = _generate(checkpoint, "--prompt", "Who?", "--chat")
    assert (done.code, done.out) == (2, "")
    assert "--chat needs jinja2, which is not installed" in done.err
    assert f"hint: {install_command('generate')}" in done.err
