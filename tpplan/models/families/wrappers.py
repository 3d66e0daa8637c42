"""Models of text and images: which part of them is the language model, the only one that is planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from tpplan.models.config import Config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.models.families.table import Family

#: The key that holds the language model's own config.
TEXT: Final = "text_config"

#: Keys that hold it, or hold what it is in, in models of other kinds.
NESTED: Final = (TEXT, "llm_config", "language_config", "thinker_config", "text_model_config", "language_model_config")

#: How the names of the language model start in most models on the hub; in others they are those of a model alone.
ROOT: Final = "language_model."

#: By this start, names that some checkpoints have, and what the tables have in their place.
_RENAMED: Final[dict[str, dict[str, str]]] = {
    ROOT: {
        "model.language_model.": f"{ROOT}model.",
        "lm_head.": f"{ROOT}lm_head.",
        f"{ROOT}model.blocks.": f"{ROOT}model.layers.",  # transformers 5 saves Kimi's layers so, like those for images
    },
    "": {"model.language_model.": "model.", "model.text_model.": "model."},
}

#: What reads images, and leads from there to the language model.
_VISION: Final = (
    *("vision_tower.*", "multi_modal_projector.*", "image_newline"),
    *("vision_model.*", "mm_projector.*", "visual.*"),  # Llama 4, Kimi, Qwen
    "vit_large_projector.*",  # Step
    *("audio_tower.*", "embed_vision.*", "embed_audio.*", "vision_embedder.*"),  # Gemma 3n and 4
    *("connector.*", "aligner.*", "high_res_vision_*", "visual_embeddings_table.*"),  # Idefics, DeepSeek-VL, Ovis2
    *("vision_encoder.*", "vision_projection.*", "projector.*"),  # LightOnOCR, VideoLLaMA 3
    *("image_tower.*", "video_tower.*"),  # Video-LLaVA
)
VISION: Final = (*_VISION, *(f"model.{name}" for name in _VISION))


@frozen
class Wrapper:
    """A model of text and images around a language model.

    Attributes:
        architectures: the class of transformers, and other names that checkpoints have for it.
        text: the ``model_type`` of the language model where its own config does not say.
        root: how the names of the language model start.
        flat: whether a config.json may have the language model's keys beside its own, without a config of its own.
        tower: whether it has a part that reads images also if its config says nothing of one.
    """

    architectures: tuple[str, ...]
    text: str
    root: str = ROOT
    flat: bool = False
    tower: bool = True

    @property
    def renamed(self) -> Mapping[str, str]:
        """Starts of names that some checkpoints have, and what the tables have in their place."""
        return _RENAMED[self.root]

    def around(self, family: Family) -> Family:
        """Return the tables of a language model with the names that they have in the wrapper."""
        ignored = (*family.ignored, *VISION)
        return evolve(family, architectures=self.architectures, root=self.root, prefix="", ignored=ignored)


WRAPPERS: Final[dict[str, Wrapper]] = {
    "aya_vision": Wrapper(("AyaVisionForConditionalGeneration",), "cohere2"),
    "cohere2_vision": Wrapper(("Cohere2VisionForConditionalGeneration",), "cohere2", root=""),
    "deepseek_vl": Wrapper(("DeepseekVLForConditionalGeneration",), "llama", root=""),
    "deepseek_vl_hybrid": Wrapper(("DeepseekVLHybridForConditionalGeneration",), "llama", root=""),
    "exaone4_5": Wrapper(("Exaone4_5_ForConditionalGeneration",), "exaone4", root=""),
    "gemma3": Wrapper(("Gemma3ForConditionalGeneration",), "gemma3_text"),
    "gemma3n": Wrapper(("Gemma3nForConditionalGeneration",), "gemma3n_text", root=""),
    "gemma4": Wrapper(("Gemma4ForConditionalGeneration",), "gemma4_text", root="", tower=False),
    "gemma4_unified": Wrapper(("Gemma4UnifiedForConditionalGeneration",), "gemma4_unified_text", root="", tower=False),
    "glm4v": Wrapper(("Glm4vForConditionalGeneration",), "glm4v_text", root=""),
    "glm46v": Wrapper(("Glm46VForConditionalGeneration",), "glm4v_text", root=""),
    "got_ocr2": Wrapper(("GotOcr2ForConditionalGeneration",), "qwen2"),
    "idefics2": Wrapper(("Idefics2ForConditionalGeneration",), "mistral", root=""),
    "idefics3": Wrapper(("Idefics3ForConditionalGeneration",), "llama", root=""),
    "internvl": Wrapper(("InternVLForConditionalGeneration",), "qwen2"),
    "lighton_ocr": Wrapper(("LightOnOcrForConditionalGeneration",), "qwen3", root=""),
    "llava": Wrapper(("LlavaForConditionalGeneration",), "llama"),
    "llava_next": Wrapper(("LlavaNextForConditionalGeneration",), "llama"),
    "llava_next_video": Wrapper(("LlavaNextVideoForConditionalGeneration",), "llama"),
    "llava_onevision": Wrapper(("LlavaOnevisionForConditionalGeneration",), "qwen2"),
    "mistral3": Wrapper(("Mistral3ForConditionalGeneration",), "mistral"),
    "ovis2": Wrapper(("Ovis2ForConditionalGeneration",), "qwen2", root=""),
    "paligemma": Wrapper(("PaliGemmaForConditionalGeneration",), "gemma"),
    "qwen2_5_vl": Wrapper(("Qwen2_5_VLForConditionalGeneration",), "qwen2_5_vl_text", root="", flat=True),
    "qwen2_vl": Wrapper(("Qwen2VLForConditionalGeneration",), "qwen2_vl_text", root="", flat=True),
    "qwen3_5": Wrapper(("Qwen3_5ForConditionalGeneration",), "qwen3_5_text", root=""),
    "qwen3_5_moe": Wrapper(("Qwen3_5MoeForConditionalGeneration",), "qwen3_5_moe_text", root=""),
    "qwen3_vl": Wrapper(("Qwen3VLForConditionalGeneration",), "qwen3_vl_text", root=""),
    "step3p7": Wrapper(("Step3p7ForConditionalGeneration",), "step3p5", root=""),
    "smolvlm": Wrapper(("SmolVLMForConditionalGeneration",), "llama", root=""),
    "video_llama_3": Wrapper(("VideoLlama3ForConditionalGeneration",), "qwen2", root=""),
    "video_llava": Wrapper(("VideoLlavaForConditionalGeneration",), "llama"),
    "vipllava": Wrapper(("VipLlavaForConditionalGeneration",), "llama"),
    # Around mixtures of experts.
    "glm4v_moe": Wrapper(("Glm4vMoeForConditionalGeneration",), "glm4v_moe_text", root=""),
    "kimi_k25": Wrapper(("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"), "deepseek_v3"),
    "llama4": Wrapper(("Llama4ForConditionalGeneration",), "llama4_text"),
    "qwen3_vl_moe": Wrapper(("Qwen3VLMoeForConditionalGeneration",), "qwen3_vl_moe_text", root=""),
}

_KEYS: Final = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
)
_QWEN: Final = (151_936, 4096, 22_016, 32, 32, 32_768)

#: What a nested config may leave out beside what its family always may, as in transformers' configuration classes.
_DEFAULTS: Final[dict[str, tuple[int, ...]]] = {
    "cohere2": (256_000, 8192, 22_528, 40, 64, 8192),
    "exaone4": (102_400, 4096, 16_384, 32, 32, 2048),
    "gemma": (256_000, 3072, 24_576, 28, 16, 8192),
    "gemma2": (256_000, 2304, 9216, 26, 8, 8192),
    "llama": (32_000, 4096, 11_008, 32, 32, 2048),
    "ministral3": (131_072, 4096, 14_336, 34, 32, 262_144),
    "mistral": (32_000, 4096, 14_336, 32, 32, 131_072),
    "mistral4": (131_072, 4096, 12_288, 36, 32, 1_048_576),
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "qwen3_moe": (151_936, 2048, 6144, 24, 32, 32_768),
    # With experts.
    "deepseek_v3": (129_280, 7168, 18_432, 61, 128, 4096),
    "kimi_k2": (129_280, 7168, 18_432, 61, 128, 4096),
    "llama4_text": (202_048, 5120, 8192, 48, 40, 131_072),
    "qwen3_vl_moe_text": (151_936, 2048, 5632, 24, 16, 128_000),
}

_DEEPSEEK_V3: Final = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}

#: And what else those with experts may leave out.
_EXPERTS: Final[dict[str, dict[str, int]]] = {
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "llama4_text": {"num_experts": 16},
    "mistral4": {
        "num_experts": 128,
        "moe_intermediate_size": 2048,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 128,
    },
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "qwen3_vl_moe_text": {"num_experts": 60, "moe_intermediate_size": 1408},
}


def text_part(config: Config) -> tuple[str, Config]:
    """Return the ``model_type`` and the config of the language model, which is all of the model if it has no wrapper.

    Raises:
        ModelError: the language model's config is missing or no object, or its type is no string.
    """
    model_type = config.text("model_type")
    wrapper = WRAPPERS.get(model_type)
    if wrapper is None:
        return model_type, config
    if wrapper.flat and TEXT not in config:
        return wrapper.text, config
    text = config.section(TEXT)
    inner = text.text("model_type") or wrapper.text
    defaults = dict(zip(_KEYS, _DEFAULTS[inner], strict=True)) if inner in _DEFAULTS else {}
    defaults.update(_EXPERTS.get(inner, {}))
    missing = {key: value for key, value in defaults.items() if key not in text}
    return inner, Config({**missing, **text.data}, text.source)


def newer_name(name: str) -> str:
    """Return the name of a tensor or module of a wrapper's language model as newer tools write it; others stay."""
    starts = ((old, new) for root in (ROOT, "") for new, old in _RENAMED[root].items())
    return next((new + name.removeprefix(old) for old, new in starts if name.startswith(old)), name)
