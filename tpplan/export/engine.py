"""An exporter: a table from a plan to an engine's flags, and the sentences on what the engine does differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from tpplan.core.model import PREDICTION
from tpplan.core.plan import CACHE_KINDS
from tpplan.export.facts import Facts, apart, bytes_each
from tpplan.models.families.drafts import KINDS, is_head
from tpplan.reports.export import TextFile, Variable

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Stands for the path of the model, which a plan does not know.
MODEL = "MODEL"
#: Stands for the path of its draft model.
DRAFT = "DRAFT"

#: A flag's value: text or number, True for a word that has none, None to leave it out.
Flags = Mapping[str, Callable[[Facts], str | int | bool | None]]
Sentences = Callable[[Facts], Iterator[str]]


def _nothing(_: Facts) -> Iterator[str]:
    return iter(())


@frozen(kw_only=True)
class CacheKind:
    """A kind of cache that an engine has.

    Attributes:
        name: as the engine calls it.
        sixteenths: of a byte for each element, as in :data:`~tpplan.core.plan.CACHE_KINDS`.
    """

    name: str
    sixteenths: int


def with_fp8(name: str) -> dict[str, CacheKind]:
    """Return the kinds of an engine that caches in 16 bits or in FP8, which stands for all smaller kinds."""
    smaller = dict.fromkeys(CACHE_KINDS, CacheKind(name=name, sixteenths=16))
    return smaller | {"fp16": CacheKind(name="auto", sixteenths=32)}


def models_only(words: str) -> Callable[[str], str]:
    """Return how an engine that takes no heads is told of draft models."""
    return lambda kind: "" if kind else words


@frozen(kw_only=True)
class Engine:
    """An engine's table.

    Attributes:
        name: as ``--for`` takes it.
        version: what was read.
        command: the words before the flags.
        flags: the flags of the command, in order.
        caches: the engine's kind of cache for each of the plan's.
        allows_beyond: the variable that has to be 1 for contexts beyond the model's; empty if none has to.
        files: the files that the command reads.
        refused: why the engine cannot run a plan, a clause each.
        no_gguf: why it cannot where the plan's weights are in GGUF, which a clause ends with; empty if it can.
        differs: what only this engine does differently.
        draft: returns, of the kind of a head or nothing, how it is told of such a draft model, for which :data:`DRAFT`
            stands; empty if no option of it is known.
        mtp: how it is told to use the model's own prediction layers; empty if it does not use them.
        counts_draft: whether its share of memory, a flag, is that of what drafts, too.
        cuts_evenly: whether every device has to get the same.
        repeats_heads: whether it gives a KV head to several devices where there are more devices than heads.
        aliases: other names.
    """

    name: str
    version: str
    command: tuple[str, ...]
    flags: Flags
    caches: Mapping[str, CacheKind]
    allows_beyond: str = ""
    files: Callable[[Facts], tuple[TextFile, ...]] = lambda _: ()
    refused: Sentences = _nothing
    no_gguf: str = ""
    differs: Sentences = _nothing
    draft: Callable[[str], str]
    mtp: str = ""
    counts_draft: bool = False
    cuts_evenly: bool = False
    repeats_heads: bool = False
    aliases: tuple[str, ...] = ()

    def cache(self, facts: Facts) -> CacheKind:
        """Return the engine's kind of cache for a plan's."""
        return self.caches[facts.request.cache.kind]

    def argv(self, facts: Facts) -> tuple[str, ...]:
        """Return the command for a plan."""
        return (*self.command, *_words(self.flags, facts))

    def obstacles(self, facts: Facts) -> Iterator[str]:
        """Yield why the engine cannot run a plan, however that cuts, a clause each."""
        if is_head(facts.model.architecture):
            yield "the plan is that of a head, which has no embedding and reads the states of the model it drafts for"
        elif facts.request.drafts_for:
            yield f"the plan is that of a draft model of {facts.request.drafts_for}, which it loads and cuts with that"
        elif self.no_gguf and facts.is_gguf:
            yield f"the plan's weights are in {facts.model.weight_format}, {self.no_gguf}"
        else:
            yield from self.refused(facts)

    def environment(self, facts: Facts) -> tuple[Variable, ...]:
        """Return the variables of the command, which show the plan's devices to it in their order."""
        longer = facts.request.beyond and self.allows_beyond
        return (
            Variable("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
            Variable("CUDA_VISIBLE_DEVICES", ",".join(map(str, facts.used))),
            *([Variable(self.allows_beyond, "1")] if longer else []),
        )

    def differences(self, facts: Facts) -> tuple[str, ...]:
        """Return what the engine does differently from a plan, a sentence each."""
        return (
            *self.differs(facts),
            *self._of_the_cache(facts),
            *self._of_copies(facts),
            *self._of_drafts(facts),
            *_of_all(facts),
        )

    def _of_copies(self, facts: Facts) -> Iterator[str]:
        if not self.repeats_heads and any(split.replicas > 1 for split in facts.splits):
            yield "it does not replicate KV heads as the plan does"

    def _of_drafts(self, facts: Facts) -> Iterator[str]:
        """Yield how it is told of what a plan leaves room for, which it loads itself, and cuts as it does."""
        request = facts.request
        if request.draft is None:
            return
        room = f"the plan leaves {bytes_each([request.room(i) for i in facts.used])} to"
        included = ", which its share of memory includes" * self.counts_draft
        more = "" if self.counts_draft else ", and these bytes to its memory"
        if not request.mtp:
            kind, name = request.draft.head, request.draft.name
            who = f"the {KINDS[kind].name.partition(' ')[2] if kind else 'draft model'} {name}"
            if told := self.draft(kind):
                yield f"{room} {who}{included}: add {told}{more}"
            else:
                yield f"{room} {who}, for which tpplan knows no option of it"
        elif self.mtp:
            yield f"{room} {PREDICTION}{included}: add {self.mtp}{more}"
        else:
            yield f"{room} {PREDICTION}, which it does not use"

    def _of_the_cache(self, facts: Facts) -> Iterator[str]:
        asked, kind = facts.request.cache.kind, self.cache(facts)
        if kind.sixteenths != CACHE_KINDS[asked]:
            sizes = apart(sum(facts.cache_bytes(kind.sixteenths)), sum(facts.cache_bytes(CACHE_KINDS[asked])))
            yield f"the cache is {kind.name} instead of {asked}: on all devices {sizes}"


def _words(flags: Flags, facts: Facts) -> Iterable[str]:
    for flag, value_of in flags.items():
        value = value_of(facts)
        if value is True:
            yield flag
        elif value is not None:
            yield flag
            yield str(value)


def _of_all(facts: Facts) -> Iterator[str]:
    """Yield what all engines do differently."""
    workspace, free = (
        bytes_each([getattr(e, name) for e in facts.memory]) for name in ("workspace_bytes", "free_bytes")
    )
    yield f"its own buffers take the place of the plan's workspace ({workspace}); the plan leaves free: {free}"
    if facts.model.not_planned:
        parts = "; ".join(part.text for part in facts.model.not_planned)
        yield f"it may load what the plan does not count: {parts}"
    if len({device.name for device in facts.devices}) > 1:
        names = ", ".join(f"{i} is the {device.name}" for i, device in zip(facts.used, facts.devices, strict=True))
        yield (
            f"CUDA_VISIBLE_DEVICES takes the plan's numbers ({names}); if nvidia-smi numbers yours otherwise, "
            "write its numbers in this order"
        )
