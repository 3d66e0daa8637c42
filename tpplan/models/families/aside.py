"""Parts of a model that its config.json tells of and no plan counts: what sees, hears, or predicts further tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tpplan.core.model import PREDICTION, NotPlanned
from tpplan.models.families.wrappers import HEARS, NGRAMS, SEES, WRAPPERS

if TYPE_CHECKING:
    from tpplan.models.config import Config

#: Keys that configs of the hub have for the number of prediction layers; the first that is there counts.
PREDICTION_KEYS: Final = (
    *("num_nextn_predict_layers", "num_mtp_modules", "num_mtp_layers", "mtp_num_layers"),
    "mtp_num_hidden_layers",
)

#: Keys that configs of the hub have for each part: an object or a name for towers, a number of layers for predictions.
_KEYS: Final = {
    SEES: ("vision_config", "vision_tower", "mm_vision_tower", "vit_config", "visual", "vision_lora"),
    HEARS: ("audio_config", "audio_encoder_config", "speech_config", "speech_lora"),
    NGRAMS: ("ple_layer_ids",),
    PREDICTION: PREDICTION_KEYS,
}


def parts_aside(config: Config, text: Config) -> tuple[NotPlanned, ...]:
    """Return the parts of a model that are not planned, of sizes that only files tell: these may leave a part out.

    Args:
        config: the model's.
        text: that of its language model, which may be the same.
    """
    found = {what for what, keys in _KEYS.items() for key in keys if config.raw(key) or text.raw(key)}
    if wrapper := WRAPPERS.get(config.text("model_type")):
        found.update(wrapper.parts)  # a config may leave all of them to the defaults of the class
    return tuple(NotPlanned(what) for what in _KEYS if what in found)
