"""What ``tpplan generate`` tells with ``--json``: the tokens, and where they were computed."""

from __future__ import annotations

from attrs import frozen

from tpplan.files.codec import document


@frozen(kw_only=True)
class StartPart:
    """A part of the time from the process's start to its first token.

    Attributes:
        what: ``Python``, ``plan``, ``torch``, ``compile``, ``weights`` and so on.
        time_ns: its time.
        size_bytes: what was loaded in it; left out if nothing was.
    """

    what: str
    time_ns: int
    size_bytes: int = 0


@frozen(kw_only=True)
class TokenTimes:
    """How many tokens were read and made until now, of all texts together, and how long that took.

    Attributes:
        prompt_token_count: number of those that were read.
        prompt_ns: the time of that, with the first new token of each text.
        new_token_count: number of those that were made.
        later_token_count: number of those behind the first one of each text, which rates of decoding count.
        later_ns: the time of these.
    """

    prompt_token_count: int
    prompt_ns: int
    new_token_count: int
    later_token_count: int
    later_ns: int


@document("generate-report")
@frozen(kw_only=True)
class GenerateReport:
    """A text that was continued.

    Attributes:
        model: its name in the plan.
        devices: how many computed it.
        backend: ``cuda``, or ``cpu`` for virtual devices.
        prompt_tokens: that were given.
        new_tokens: that follow them; the last one may be the one that ends a text.
        text: that the new tokens stand for, up to a stop string; left out where tokens were given, which need no
            tokenizer.
        ended: whether the model or a stop string ended the text; else there were as many new tokens as asked for.
        stop: the stop string that ended it; empty if none did.
        start: what the first token waited for since the process started, part by part; none for a later text.
        start_ns: all of that together; left out for a later text.
        times: tokens of all texts so far, and their time.
    """

    model: str
    devices: int
    backend: str
    prompt_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    ended: bool
    text: str | None = None
    stop: str = ""
    start: tuple[StartPart, ...] = ()
    start_ns: int = 0
    times: TokenTimes | None = None
