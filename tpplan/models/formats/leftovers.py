"""What checkpoints hold beside the tensors of the model that is planned."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tpplan.models.checkpoint import Tensor

BUFFERS: Final = "buffers"
PREDICTION: Final = "prediction layers"

#: What tensors are, by a part of their names; the first that matches decides.
_PARTS: Final = {
    "adapters": r"(?:^|\.)lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)(?:\.|$)",
    "audio tower": (
        r"(?:^|\.)(?:audio_tower|audio_model|audio_encoder|audio_embed|embed_audio|apm|whisper|"
        r"multi_modal_projector\.audio|audio_projection_layer|audio_multi_modal_projector|audio_adapter)(?:\.|$)"
    ),
    "image projector": (
        r"^(?:model\.|thinker\.)?(?:multi_modal_projector|multimodal_projector|mm_projector|vision_projector|"
        r"image_projector|image_newline|view_seperator|mlp1|aligner|connector|embed_vision)(?:\.|$)"
    ),
    "vision tower": (
        r"(?:^|\.)(?:vision_tower|vision_model|vision_encoder|visual|vision_embed_tokens|image_tower|image_encoder|"
        r"img_processor|vision_embedder|vpm|vit)(?:\.|$)"
    ),
    PREDICTION: r"^(?:model\.|language_model\.)?mtp(?:[._]|$)|(?:^|\.)(?:mtp|nextn)(?:_\w+)?\.",
    BUFFERS: (
        r"(?:^|\.)(?:rotary_emb|rotary_pos_emb|rotary|rope|maybe_rotary)\."
        r"(?:inv_freq|original_inv_freq|\w*(?:cos|sin)\w*|freqs\w*)$|\.masked_bias$|(?:^|\.)position_ids$"
    ),
}
_WHAT: Final = re.compile("|".join(f"({pattern})" for pattern in _PARTS.values()))
_LABELS: Final = tuple(_PARTS)

#: Masks that older models keep as buffers under a name that is a bias in others.
_MASK: Final = re.compile(r"\.(?:attn|attention|self_attention)\.bias$")
_MASK_DIMS: Final = 4


def label(name: str, tensor: Tensor) -> str:
    """Return what a tensor that is not planned is part of, in words; empty if that is not known."""
    if match := _WHAT.search(name):
        return _LABELS[match.lastindex - 1] if match.lastindex else ""
    return BUFFERS if _MASK.search(name) and len(tensor.shape) == _MASK_DIMS else ""
