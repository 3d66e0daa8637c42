"""The quantisation scheme of a model's weights, as its config.json and the files beside it describe it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Final

from attrs import field, frozen

from tpplan.errors import ModelError
from tpplan.models.families.wrappers import name_within, newer_name
from tpplan.models.formats.names import Names

HINT: Final = "point to the directory that has the model's .safetensors files: their headers say what is stored"

#: What a module is for a rule: a matrix of a layer, all experts of a layer in one tensor, a router, the output matrix,
#: the embedding.
LINEAR, EXPERTS, ROUTER, HEAD, EMBEDDING = "linear", "experts", "router", "head", "embedding"

#: Routers of mixture-of-experts layers, and weights of an indexer's heads: only MLX quantises them.
_ROUTERS: Final = frozenset({"gate", "shared_expert_gate", "router", "layer", "wg", "weights_proj"})

#: The most rules of a scheme; real ones have a few, and several hundred names in them.
_MOST_RULES: Final = 100

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@frozen(kw_only=True)
class Form:
    """How matrices are stored that are quantised alike.

    Attributes:
        format: name in the table of formats, empty if the config does not determine it.
        known: parameters of the format.
        group: elements that share a scale; -1 for a whole row, 0 if not given.
        permuted: whether GPTQ quantised rows in activation order (``desc_act``); None if not given.
        extra: suffixes of the format's optional tensors that are stored too.
        dtypes: by suffix, the dtypes that are not the format's first; empty for that of the model.
        ranks: by suffix, how many dimensions a tensor has, where the format's first shape may have others.
        whole_groups: whether matrices stay as they are if a group does not divide their inputs.
    """

    format: str = ""
    known: Mapping[str, int] = field(factory=dict)
    group: int = 0
    permuted: bool | None = None
    extra: tuple[str, ...] = ()
    dtypes: Mapping[str, str] = field(factory=dict)
    ranks: Mapping[str, int] = field(factory=dict)
    whole_groups: bool = False

    def parameters(self, inputs: int) -> dict[str, int]:
        """Return the parameters of the format for a matrix with this many inputs."""
        return {**self.known, **({"group": inputs if self.group < 0 else self.group} if self.group else {})}


@frozen(kw_only=True)
class Rule:
    """Which modules have a form.

    Attributes:
        form: how they are stored, None for unquantised.
        names: the modules, see :class:`tpplan.models.formats.names.Names`; None for all.
        exact: whether a name without wildcards must be the whole name of a module.
        kinds: what modules the rule is for at all.
    """

    form: Form | None
    names: tuple[str, ...] | None = None
    exact: bool = False
    kinds: frozenset[str] = frozenset({LINEAR, EXPERTS, HEAD})


@frozen(kw_only=True)
class Scheme:
    """The quantisation that a model's config describes.

    Attributes:
        method: the config's ``quant_method``, or the tool's name where that key is not used; empty for unquantised
            weights.
        rules: how modules are stored: the first rule that is for a module decides. Names in them are not looked at
            before :class:`Choice` does. There are none if only headers can say how weights are stored.
        zeros_less_one: whether GPTQ stored zero points less 1, as its first format does.
        caches: the scales of a quantised cache that are stored in each layer with attention, see :class:`CacheScales`;
            None without.
        is_known: whether tpplan can read the method's checkpoints.
        source: name of the file in messages.
        problem: what is wrong with the description, None if nothing is; then there are no rules.
        slips: keys of the description that are probably misspelt, what is meant, and a note on each.
    """

    method: str = ""
    rules: tuple[Rule, ...] = ()
    zeros_less_one: bool = False
    caches: CacheScales | None = None
    is_known: bool = True
    source: str = ""
    problem: ModelError | None = field(default=None, eq=False)
    slips: Mapping[tuple[str, str], str] = field(factory=dict, eq=False)

    @property
    def form(self) -> Form:
        """The only form of all quantised matrices; an empty one if there are several or none."""
        forms = [rule.form for rule in self.rules if rule.form]
        return forms[0] if forms and all(form == forms[0] for form in forms) else Form()

    @property
    def format(self) -> str:
        """The format of :attr:`form`."""
        return self.form.format

    @property
    def known(self) -> Mapping[str, int]:
        """The parameters of :attr:`form`."""
        return self.form.known

    @property
    def group(self) -> int:
        """The group of :attr:`form`."""
        return self.form.group

    @property
    def permuted(self) -> bool | None:
        """Whether :attr:`form` is permuted."""
        return self.form.permuted

    def parameters(self, inputs: int) -> dict[str, int]:
        """Return the parameters of :attr:`form` for a matrix with this many inputs."""
        return self.form.parameters(inputs)


@frozen
class CacheScales:
    """The scales of a quantised cache.

    Attributes:
        in_projections: whether they belong to ``k_proj`` and ``v_proj``; if not, to the attention.
        dtype: their dtype, empty for that of the model.
        dims: their dimensions: none, ``1``, or ``heads`` for one for each KV head.
    """

    in_projections: bool
    dtype: str
    dims: tuple[str, ...]


class Choice:
    """What form each module has by the rules of a scheme."""

    def __init__(self, scheme: Scheme) -> None:
        """Prepare the lists of names.

        Raises:
            ModelError: a list has an expression that cannot be followed.
        """
        self._scheme = scheme
        rules = list(_merged(scheme.rules))
        if len(rules) > _MOST_RULES:
            raise needs_headers(scheme, f"they differ between modules in more than {_MOST_RULES} ways")
        try:
            self._rules = [
                (rule, None if rule.names is None else Names(rule.names, exact=rule.exact)) for rule in rules
            ]
        except ValueError as error:
            raise self._unfollowed(error) from error

    def form(self, module: str, kind: str) -> Form | None:
        """Return the form of a module, None if it is not quantised; lists may have any of its tools' names for it.

        Raises:
            ModelError: the expressions of a list take too long.
        """
        if kind == LINEAR and module.rpartition(".")[2] in _ROUTERS:
            kind = ROUTER
        known_as = list(self._names(module))
        try:
            return next(
                (
                    rule.form
                    for rule, names in self._rules
                    if kind in rule.kinds and (names is None or any(name in names for name in known_as))
                ),
                None,
            )
        except ValueError as error:
            raise self._unfollowed(error) from error

    def tells_apart(self, start: str, count: int) -> bool:
        """Return whether experts may have several forms; their names begin with ``start`` and a number below ``count``.

        Raises:
            ModelError: the expressions of a list take too long.
        """
        try:
            return any(
                names is not None and any(names.tells_apart(name, count) for name in self._names(start))
                for _, names in self._rules
            )
        except ValueError as error:
            raise self._unfollowed(error) from error

    def _names(self, module: str) -> Iterator[str]:
        """Yield the names of a module: as in the checkpoint, as newer tools write it, and as MLX does for experts.

        Of a wrapper's language model also those within that, which alone may be what was quantised.
        """
        yield from dict.fromkeys((module, newer_name(module), name_within(module)))
        before, stacked, after = module.partition(".experts.")
        if stacked and self._scheme.method == "mlx":
            part = after.partition(".")[2]
            yield f"{before}.switch_mlp.{_MLX_PARTS.get(part, part)}"

    def _unfollowed(self, error: ValueError) -> ModelError:
        message = f"{self._scheme.source}: in a list of modules {error}, so it is not followed"
        return ModelError(message, HINT)


def _merged(rules: Iterable[Rule]) -> Iterator[Rule]:
    """Yield fewer rules that mean the same: neighbours that differ in names only are one."""
    for (_, exact, kinds, named), same in groupby(
        rules, lambda rule: (repr(rule.form), rule.exact, rule.kinds, rule.names is not None)
    ):
        first, *others = same
        names = tuple(name for rule in (first, *others) for name in rule.names or ())
        yield Rule(form=first.form, names=names if named else None, exact=exact, kinds=kinds)


_MLX_PARTS: Final = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def needs_headers(scheme: Scheme, reason: str = "") -> ModelError:
    """Return the error for weights whose sizes do not follow from the config alone."""
    what = f"the sizes of {scheme.method!r:.60} weights do not follow from the config alone"
    return ModelError(f"{scheme.source}: {what}{reason and ': '}{reason}", HINT)
