"""Devices without a part of some axis, as parts are of the sizes that kernels like, which three cannot share."""

from __future__ import annotations

from tests.transformers.cases import default_config
from tpplan.transformers.classes import runnable
from tpplan.transformers.trial import check_small_model


def test_devices_without_experts_have_what_latents_lead_back_to() -> None:
    """The matrix behind the sum of latent experts is on devices with experts only; all go on with its product."""
    check_small_model(runnable(default_config("nemotron_h with a latent")), "reduce", "idle")
