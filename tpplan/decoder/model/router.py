"""How tokens are routed to experts: what scores are, which experts they choose, and the weights of these.

Routers choose by a softmax of the scores (arXiv:1701.06538), or by their sigmoids with a bias that balances the load
(arXiv:2408.15664). Some let a token choose only among the experts of a few groups (DeepSeek-V2, arXiv:2405.04434, and
DeepSeek-V3, arXiv:2412.19437).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, Self

from attrs import evolve, frozen

if TYPE_CHECKING:
    from collections.abc import Collection

    from tpplan.core.model import Block
    from tpplan.models.config import Config

#: Range of the factor of the weights, and of the least sum that they are divided by.
_FACTORS: Final = (1e-6, 1e6)
_SUMS: Final = (1e-30, 1.0)

#: Values of ``topk_method``: whether experts are in groups.
_METHODS: Final = {"greedy": False, "group_limited_greedy": True}

#: Keys of a config.json that a router may depend on.
Key = Literal[
    "norm_topk_prob",
    "routed_scaling_factor",
    "router_scaling_factor",
    "n_group",
    "topk_group",
    "topk_method",
    "moe_norm_min",
]


@frozen(kw_only=True)
class Router:
    """How a row is routed to some of a layer's experts.

    Attributes:
        sigmoid: whether an expert's score is the sigmoid of its logit, instead of the softmax of all.
        groups: number of groups of equally many successive experts.
        eligible: groups of a row from whose experts it chooses: those with the highest scores.
        best: number of best experts whose scores, with the selection bias if there is one, add up to a group's score.
        normalised: whether the weights of a row's experts add up to 1, before the factor.
        least: least sum of the scores that normalised weights are divided by.
        factor: factor of the weights.
        wide: whether logits are computed in float32, whatever the dtype of the activations.
    """

    sigmoid: bool = False
    groups: int = 1
    eligible: int = 1
    best: int = 1
    normalised: bool = False
    least: float = 1e-20
    factor: float = 1.0
    wide: bool = False

    @property
    def is_grouped(self) -> bool:
        """Whether some groups of experts are not eligible."""
        return self.eligible < self.groups

    def read(self, config: Config, keys: Collection[Key], blocks: Collection[Block]) -> Self:
        """Return the router of a model, given that of its family.

        Args:
            config: the config of the language model.
            keys: the keys that the family's models have; this router has the values of those that are left out.
            blocks: the model's layers.

        Raises:
            ModelError: a value is invalid, or too few experts are eligible.
        """
        found = self
        if "norm_topk_prob" in keys:
            found = evolve(found, normalised=config.flag("norm_topk_prob", default=self.normalised))
        for key in ("routed_scaling_factor", "router_scaling_factor"):
            if key in keys:
                found = evolve(found, factor=_number(config, key, self.factor, _FACTORS))
        if "moe_norm_min" in keys:
            found = evolve(found, least=_number(config, "moe_norm_min", self.least, _SUMS))
        if "n_group" in keys and ("topk_method" not in keys or _has_groups(config)):
            groups, eligible = (
                config.optional_count(key, default=default) or 1
                for key, default in (("n_group", self.groups), ("topk_group", self.eligible))
            )
            found = evolve(found, groups=groups, eligible=eligible)
            found.check(config, blocks)
        return found

    def check(self, config: Config, blocks: Collection[Block]) -> None:
        """Check that all experts are in groups, and that enough of them are eligible.

        Raises:
            ModelError: they are not.
        """
        for block in blocks:
            size, rest = divmod(block.experts, self.groups)
            if block.experts and (rest or not self.eligible <= self.groups or size < self.best):
                what = (
                    f"{block.experts} experts in {self.groups} groups (n_group) of which {self.eligible} are eligible"
                )
                hint = (
                    f"n_group has to divide the experts into groups of at least {self.best}, topk_group is at most it"
                )
                raise config.invalid(f"{what} (topk_group)", hint)
            if block.experts_per_token > size * self.eligible:
                what = f"a token has {block.experts_per_token} experts (num_experts_per_tok)"
                hint = f"topk_group groups of {size} have {size * self.eligible}"
                raise config.error(f"{what}, only {size * self.eligible} are eligible", hint)


def _has_groups(config: Config) -> bool:
    """Return whether ``topk_method`` says that experts are in groups.

    Raises:
        ModelError: it is unknown.
    """
    method = config.text("topk_method") or "greedy"
    if method not in _METHODS:
        raise config.error(f"topk_method is {method[:60]!r}", f"known are {', '.join(_METHODS)}")
    return _METHODS[method]


def _number(config: Config, key: str, default: float, bounds: tuple[float, float]) -> float:
    value = config.number(key, *bounds)
    return default if value is None else value
