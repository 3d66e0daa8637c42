"""Tables of decoders that follow Llama's names, with an MLP that has no gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.models.families.rows import (
    ALWAYS,
    BIASED_ATTENTION,
    BIASED_NORMS,
    NORMS,
    attention,
    head_norms,
    norm,
    outside,
    plain,
)
from tpplan.models.families.shape import every_layer, windows
from tpplan.models.families.table import Family, Row, Shape

if TYPE_CHECKING:
    from tpplan.models.config import Config


#: What the activation xIELU has learned, and what it is computed with: two vectors of one element, and two numbers.
_XIELU = (
    *(Row(f"mlp.act_fn.{name}", "1", "xielu", Axis.INTERMEDIATE) for name in ("alpha_p", "alpha_n")),
    *(Row(f"mlp.act_fn.{name}", "", "xielu", Axis.INTERMEDIATE) for name in ("beta", "eps")),
)


def _apertus(config: Config, shape: Shape) -> Shape:
    """Tell whether the activation has tensors of its own."""
    is_xielu = config.text("hidden_act") in {"", "xielu"}
    return evolve(shape, flags=shape.flags | {"xielu"}) if is_xielu else shape


UNGATED: Final[dict[str, Family]] = {
    "phi": Family(
        architectures=("PhiForCausalLM",),
        outside=(*outside(final=norm("model.final_layernorm", bias=True)), Row("lm_head.bias", "VC")),
        layer=(
            *norm("input_layernorm", bias=True),
            *attention(ALWAYS, ALWAYS, out="dense"),
            *head_norms("q_layernorm", "k_layernorm", bias=True, when="qk_layernorm"),
        ),
        dense=plain("mlp.fc1", "mlp.fc2", ALWAYS),
        flags={"qk_layernorm": False},
    ),
    "starcoder2": Family(
        architectures=("Starcoder2ForCausalLM",),
        outside=outside(final=norm("model.norm", bias=True)),
        layer=(*BIASED_NORMS, *attention("use_bias", "use_bias")),
        dense=plain("mlp.c_fc", "mlp.c_proj", "use_bias"),
        defaults={"num_key_value_heads": 2},
        flags={"use_bias": True},
        tied=True,
        window=windows(None, every_layer),
    ),
    "nemotron": Family(
        architectures=("NemotronForCausalLM",),
        outside=outside(final=norm("model.norm", bias=True)),
        layer=(*BIASED_NORMS, *BIASED_ATTENTION),
        dense=plain("mlp.up_proj", "mlp.down_proj", "mlp_bias"),
        flags={"attention_bias": False, "mlp_bias": False},
    ),
    "arcee": Family(
        architectures=("ArceeForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION),
        dense=plain("mlp.up_proj", "mlp.down_proj", "mlp_bias"),
        flags={"attention_bias": False, "mlp_bias": False},
    ),
    "apertus": Family(
        architectures=("ApertusForCausalLM",),
        outside=outside(),
        layer=(*norm("attention_layernorm"), *norm("feedforward_layernorm"), *BIASED_ATTENTION, *head_norms()),
        dense=(*plain("mlp.up_proj", "mlp.down_proj"), *_XIELU),
        flags={"attention_bias": False},
        adapt=_apertus,
    ),
    "nanochat": Family(  # its norms have no parameters
        architectures=("NanoChatForCausalLM",),
        outside=outside(final=()),
        layer=BIASED_ATTENTION,
        dense=plain("mlp.fc1", "mlp.fc2"),
        flags={"attention_bias": False},
    ),
    "jais2": Family(
        architectures=("Jais2ForCausalLM",),
        outside=outside(final=norm("model.norm", bias=True)),
        layer=(*BIASED_NORMS, *BIASED_ATTENTION),
        dense=plain("mlp.up_proj", "mlp.down_proj", "mlp_bias"),
        flags={"attention_bias": True, "mlp_bias": True},
    ),
}
