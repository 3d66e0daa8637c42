"""Models that see or hear: which part of them is the language model, the only one that is planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from attrs import evolve, field, frozen

from tpplan.models.families.table import sizes

if TYPE_CHECKING:
    from tpplan.models.config import Config
    from tpplan.models.families.table import Family

#: The key that holds the language model's own config.
TEXT: Final = "text_config"

#: Keys that hold it, or hold what it is in, in models of other kinds.
NESTED: Final = (TEXT, "llm_config", "language_config", "thinker_config", "text_model_config", "language_model_config")

#: How the names of the language model start in most models on the hub; in others they are those of a model alone.
ROOT: Final = "language_model."

#: And in MiniCPM's and Ovis'.
LLM: Final = "llm."

#: And in DeepSeek-VL2.
LANGUAGE: Final = "language."

#: How they start in models that speak, where it is next to what makes speech of its tokens.
THINKER: Final = "thinker."

#: By this start, names that some checkpoints have, and what the tables have in their place.
_RENAMED: Final[dict[str, dict[str, str]]] = {
    ROOT: {
        "model.language_model.": f"{ROOT}model.",
        "lm_head.": f"{ROOT}lm_head.",
        # So transformers 5 saves the layers of Kimi and Qianfan, like those for images.
        f"{ROOT}model.blocks.": f"{ROOT}model.layers.",
        f"{ROOT}model.encoder.layers.": f"{ROOT}model.layers.",
    },
    "": {"model.language_model.": "model.", "model.text_model.": "model."},
    THINKER: {},
    LLM: {},
    # DeepSeek-OCR, which is of the same type, has the names of a model alone.
    LANGUAGE: {
        **{f"model.{name}.": f"{LANGUAGE}model.{name}." for name in ("embed_tokens", "layers", "norm")},
        "lm_head.": f"{LANGUAGE}lm_head.",
    },
}

#: What reads images or sound, leads from there to the language model, or makes images or sound of what that says.
_VISION: Final = (
    *("vision_tower.*", "multi_modal_projector.*", "image_newline"),
    *("vision_model.*", "mm_projector.*", "visual.*"),  # Llama 4, Kimi, Qwen
    "vit_large_projector.*",  # Step
    *("audio_tower.*", "embed_vision.*", "embed_audio.*", "vision_embedder.*"),  # Gemma 3n and 4
    *("connector.*", "aligner.*", "high_res_vision_*", "visual_embeddings_table.*"),  # Idefics, DeepSeek-VL, Ovis2
    *("vision_encoder.*", "vision_projection.*", "projector.*"),  # LightOnOCR, VideoLLaMA 3
    *("image_tower.*", "video_tower.*"),  # Video-LLaVA
    *("query_tokens", "qformer.*", "language_projection.*"),  # BLIP
    *("vqmodel.*", "generation_*"),  # Janus
    *("mlp1.*", "merger.*"),  # InternVL and Nemotron, MiniCPM-V
    *("encoder.*", "acoustic_*", "semantic_*", "sound_*"),  # Granite Speech, VibeVoice, Nemotron
    *("latent_*_factor", "diffusion_head.*", "prediction_head.*", "speech_*"),  # VibeVoice
    *("mlp_AR.*", "patch_merge_mlp.*"),  # PaddleOCR-VL, MiniMax
    *("resampler_model.*", "vision_adapter.*", "vit.*"),  # ERNIE, Muse, HunYuan
    *("layerwise_projectors.*", "spatial_projectors.*", "vision_backbone.*"),  # Granite, Molmo
    *("vision_language_adapter.*", "patch_merger.*", "pre_mm_projector_norm.*"),  # Mistral
    *("visual_tokenizer.*", "vte.*", "vision_embed_tokens.*"),  # Ovis, Phi-3-V
    *("vision.*", "sam_model.*", "qwen2_model.*", "view_seperator"),  # DeepSeek-VL2 and OCR
    *("vpm.*", "resampler.*", "apm.*", "audio_avg_pooler.*", "audio_projection_layer.*", "tts.*"),  # MiniCPM
)
VISION: Final = (
    *_VISION,
    *(f"{root}{name}" for root in ("model.", THINKER) for name in _VISION),
    *("talker.*", "token2wav.*", "code2wav.*"),  # Qwen's Omni
)


#: Of MiniCPM-V 2, whose config is of no version, as that of 2.5 may be.
_QUERIES_OF_V2: Final = 64

#: The key with the name of the language model where its config and weights are not in a model's own files (Ultravox).
_ELSEWHERE: Final = "text_model_id"

#: What plans call the parts that read images, and sound.
SEES: Final = "vision tower"
HEARS: Final = "audio tower"

#: And embeddings of n-grams, which stay in the host's memory.
NGRAMS: Final = "n-gram embeddings"


@frozen
class Wrapper:
    """A model of text and images, or sound, around a language model.

    Attributes:
        architectures: the class of transformers, and other names that checkpoints have for it.
        text: the ``model_type`` of the language model where its own config does not say.
        root: how the names of the language model start.
        flat: whether a config.json may have the language model's keys beside its own, without a config of its own.
        parts: what it has beside also if its config says nothing of it, see :mod:`~tpplan.models.families.aside`.
        usual: values of keys that the language model's config may leave out, where they are not those of its family.
        within: the section of the config that has the language model's in one of its own; empty for the whole.
        section: that section.
        versions: the ``model_type`` of the language model by the config's ``version``, "" without one, of models whose
            configs do not say it.
    """

    architectures: tuple[str, ...]
    text: str
    root: str = ROOT
    flat: bool = False
    parts: tuple[str, ...] = (SEES,)
    usual: Mapping[str, int] = field(factory=dict)
    within: str = ""
    section: str = TEXT
    versions: Mapping[str, str] = field(factory=dict)

    @property
    def renamed(self) -> Mapping[str, str]:
        """Starts of names that some checkpoints have, and what the tables have in their place."""
        return _RENAMED[self.root]

    def around(self, family: Family) -> Family:
        """Return the tables of a language model with the names that they have in the wrapper."""
        ignored = (*family.ignored, *VISION)
        return evolve(family, architectures=self.architectures, root=self.root, prefix="", ignored=ignored)


_GLM_ASR: Final = sizes(59_264, 2048, 6144, 28, 16, 4, 8192)
_VOXTRAL: Final = sizes(131_072, 3072, 8192, 30, 32, 8, 131_072, head_dim=128)


def _hearing(architecture: str, text: str, root: str = ROOT, usual: Mapping[str, int] | None = None) -> Wrapper:
    """Return a model of text and sound, see :class:`Wrapper`."""
    return Wrapper((architecture,), text, root, parts=(HEARS,), usual=usual or {})


def _speaking(text: str, *architectures: str) -> Wrapper:
    """Return a model that speaks, whose language model is that of its thinker."""
    return Wrapper(architectures, text, THINKER, parts=(SEES, HEARS), within="thinker_config")


WRAPPERS: Final[dict[str, Wrapper]] = {
    "aya_vision": Wrapper(("AyaVisionForConditionalGeneration",), "cohere2"),
    "cohere2_vision": Wrapper(("Cohere2VisionForConditionalGeneration",), "cohere2", root=""),
    "deepseek_vl": Wrapper(("DeepseekVLForConditionalGeneration",), "llama", root=""),
    "deepseek_vl_hybrid": Wrapper(("DeepseekVLHybridForConditionalGeneration",), "llama", root=""),
    "exaone4_5": Wrapper(("Exaone4_5_ForConditionalGeneration",), "exaone4", root=""),
    "gemma3": Wrapper(("Gemma3ForConditionalGeneration",), "gemma3_text"),
    "gemma3n": Wrapper(("Gemma3nForConditionalGeneration",), "gemma3n_text", root=""),
    "gemma4": Wrapper(("Gemma4ForConditionalGeneration",), "gemma4_text", root="", parts=()),
    "gemma4_unified": Wrapper(("Gemma4UnifiedForConditionalGeneration",), "gemma4_unified_text", root="", parts=()),
    "glm4v": Wrapper(("Glm4vForConditionalGeneration",), "glm4v_text", root=""),
    "glm46v": Wrapper(("Glm46VForConditionalGeneration",), "glm4v_text", root=""),
    "got_ocr2": Wrapper(("GotOcr2ForConditionalGeneration",), "qwen2"),
    "idefics2": Wrapper(("Idefics2ForConditionalGeneration",), "mistral", root=""),
    "idefics3": Wrapper(("Idefics3ForConditionalGeneration",), "llama", root=""),
    "internvl": Wrapper(("InternVLForConditionalGeneration",), "qwen2"),
    "lighton_ocr": Wrapper(
        ("LightOnOcrForConditionalGeneration", "LightOnOCRForConditionalGeneration"), "qwen3", root=""
    ),
    "llava": Wrapper(("LlavaForConditionalGeneration",), "llama"),
    "llava_next": Wrapper(("LlavaNextForConditionalGeneration",), "llama"),
    "llava_next_video": Wrapper(("LlavaNextVideoForConditionalGeneration",), "llama"),
    "llava_onevision": Wrapper(("LlavaOnevisionForConditionalGeneration",), "qwen2"),
    # LightOnOCR was written so before transformers had a class for it.
    "mistral3": Wrapper(("Mistral3ForConditionalGeneration", "LightOnOCRForConditionalGeneration"), "mistral"),
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
    "blip-2": Wrapper(("Blip2ForConditionalGeneration",), "opt"),
    "fast_vlm": Wrapper(("FastVlmForConditionalGeneration",), "qwen2", root=""),
    "glm_ocr": Wrapper(("GlmOcrForConditionalGeneration",), "glm_ocr_text", root=""),
    "glmga": Wrapper(("Glm46VForConditionalGeneration",), "glm4v_text", root=""),
    "granite_docling": Wrapper(("GraniteDoclingForConditionalGeneration",), "granite_docling_text", root=""),
    "instructblip": Wrapper(("InstructBlipForConditionalGeneration",), "opt"),
    "instructblipvideo": Wrapper(("InstructBlipVideoForConditionalGeneration",), "opt"),
    "janus": Wrapper(("JanusForConditionalGeneration",), "llama", root=""),
    "lfm2_vl": Wrapper(("Lfm2VlForConditionalGeneration",), "lfm2", root=""),
    "lfm3_vl": Wrapper(("Lfm3VlForConditionalGeneration",), "lfm3", root=""),
    "minicpm_ocr": Wrapper(("MiniCPMOcrForConditionalGeneration",), "qwen3_5_text", root=""),
    "minicpmv4_6": Wrapper(("MiniCPMV4_6ForConditionalGeneration",), "qwen3_5_text", root=""),
    "minicpmv4_7": Wrapper(("MiniCPMV4_7ForConditionalGeneration",), "qwen3_5_text", root=""),
    "mllama": Wrapper(("MllamaForConditionalGeneration",), "mllama_text_model"),
    "nemotron_h_omni": Wrapper(("NemotronH_Omni_Reasoning_V3",), "nemotron_h"),
    "paddleocr_vl": Wrapper(("PaddleOCRVLForConditionalGeneration",), "paddleocr_vl_text", root="", flat=True),
    "perception_lm": Wrapper(("PerceptionLMForConditionalGeneration",), "llama", root=""),
    "pp_chart2table": Wrapper(("GotOcr2ForConditionalGeneration",), "qwen2"),
    "qianfan_ocr": Wrapper(("QianfanOCRForConditionalGeneration",), "qwen3"),
    "internvl_chat": Wrapper(("InternVLChatModel",), "internlm2", section="llm_config"),
    "minicpmo": Wrapper(
        ("MiniCPMO",), "qwen2", LLM, flat=True, parts=(SEES, HEARS), versions={"2.6": "qwen2", "4.5": "qwen3"}
    ),
    "minicpmv": Wrapper(
        ("MiniCPMV",),
        "qwen2",
        LLM,
        flat=True,
        versions={"": "llama", "2.5": "llama", "2.6": "qwen2", "4.0": "llama", "4.5": "qwen3"},
    ),
    "dots_ocr": Wrapper(("DotsOCRForCausalLM",), "qwen2", root="", flat=True),
    "eagle_2_5_vl": Wrapper(("Eagle2_5_VLForConditionalGeneration",), "qwen2"),
    "h2ovl_chat": Wrapper(("H2OVLChatModel",), "mistral", section="llm_config"),
    "interns1": Wrapper(("InternS1ForConditionalGeneration",), "qwen3"),
    "Keye": Wrapper(("KeyeForConditionalGeneration",), "qwen3", root="", flat=True),
    "KeyeVL1_5": Wrapper(("KeyeVL1_5ForConditionalGeneration",), "qwen3", root="", flat=True),
    "Llama_Nemotron_Nano_VL": Wrapper(("Llama_Nemotron_Nano_VL",), "llama", section="llm_config"),
    "NemotronH_Nano_VL_V2": Wrapper(("NemotronH_Nano_VL_V2",), "nemotron_h", section="llm_config"),
    "NVLM_D": Wrapper(("NVLM_D",), "qwen2", section="llm_config"),
    "opencua": Wrapper(("OpenCUAForConditionalGeneration",), "qwen2"),
    "ovis": Wrapper(("Ovis",), "qwen2", LLM, section="llm_config"),
    "ovis2_5": Wrapper(("Ovis2_5",), "qwen3", LLM, section="llm_config"),
    "phi3_v": Wrapper(("Phi3VForCausalLM",), "phi3", root="", flat=True),
    "skywork_chat": Wrapper(("SkyworkR1VChatModel",), "qwen2", section="llm_config"),
    "granite4_vision": Wrapper(("Granite4VisionForConditionalGeneration",), "granite4_vision_text", root=""),
    "hunyuan_vl": Wrapper(("HunYuanVLForConditionalGeneration",), "hunyuan_vl_text", root=""),
    "molmo2": Wrapper(("Molmo2ForConditionalGeneration",), "molmo2_text", root=""),
    "muse_glimmer": Wrapper(("MuseGlimmerForConditionalGeneration",), "muse_glimmer_text", root=""),
    # Around mixtures of experts.
    "aria": Wrapper(("AriaForConditionalGeneration",), "aria_text"),
    "ernie4_5_vl_moe": Wrapper(
        ("Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VL_MoeForConditionalGeneration"),
        "ernie4_5_vl_moe_text",
        root="",
    ),
    "mistral_large4": Wrapper(("MistralLarge4ForConditionalGeneration",), "mistral_large4_text", root=""),
    "muse_spark": Wrapper(("MuseSparkForConditionalGeneration",), "muse_spark_text", root="", parts=(SEES, HEARS)),
    "glm5_next": Wrapper(
        ("Glm5NextForConditionalGeneration", "Glm5NextForCausalLM"), "glm5_next_text", root="", flat=True
    ),
    "qwen4_exp": Wrapper(("Qwen4ExpForConditionalGeneration",), "qwen4_exp_text", root=""),
    "glm4v_moe": Wrapper(("Glm4vMoeForConditionalGeneration",), "glm4v_moe_text", root=""),
    "kimi_k25": Wrapper(("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"), "deepseek_v3"),
    "kimi_k3": Wrapper(("KimiK3ForConditionalGeneration",), "kimi_linear"),
    "kimi_vl": Wrapper(("KimiVLForConditionalGeneration",), "deepseek_v3"),
    "deepseek_ocr2": Wrapper(("DeepseekOcr2ForConditionalGeneration",), "deepseek_ocr2_text", root=""),
    "deepseek_vl_v2": Wrapper(
        ("DeepseekVLV2ForCausalLM", "DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM"),
        "deepseek_v2",
        LANGUAGE,
        section="language_config",
    ),
    "llama4": Wrapper(("Llama4ForConditionalGeneration",), "llama4_text"),
    "minimax_m3_vl": Wrapper(("MiniMaxM3SparseForConditionalGeneration",), "minimax_m3_vl_text"),
    "qwen3_vl_moe": Wrapper(("Qwen3VLMoeForConditionalGeneration",), "qwen3_vl_moe_text", root=""),
    # Those that hear.
    "audioflamingo3": _hearing("AudioFlamingo3ForConditionalGeneration", "qwen2"),
    "fun_asr_nano": _hearing("FunAsrNanoForConditionalGeneration", "qwen3", root=""),
    "ultravox": _hearing("UltravoxModel", "llama"),
    "glmasr": _hearing("GlmAsrForConditionalGeneration", "llama", usual=_GLM_ASR),
    "granite_speech": _hearing("GraniteSpeechForConditionalGeneration", "granite"),
    "granite_speech_plus": _hearing("GraniteSpeechPlusForConditionalGeneration", "granite"),
    "moss_transcribe_diarize": _hearing("MossTranscribeDiarizeForConditionalGeneration", "qwen3", root=""),
    "musicflamingo": _hearing("MusicFlamingoForConditionalGeneration", "qwen2"),
    "qwen2_audio": _hearing("Qwen2AudioForConditionalGeneration", "qwen2"),
    "qwen3_asr": _hearing("Qwen3ASRForConditionalGeneration", "qwen3", root=""),
    "vibevoice": _hearing("VibeVoiceForConditionalGeneration", "qwen2", root=""),
    "vibevoice_asr": _hearing("VibeVoiceAsrForConditionalGeneration", "qwen2"),
    "voxtral": _hearing("VoxtralForConditionalGeneration", "llama", usual=_VOXTRAL),
    "voxtral_realtime": _hearing(
        "VoxtralRealtimeForConditionalGeneration",
        "voxtral_realtime_text",
        usual={**_VOXTRAL, "intermediate_size": 9216, "num_hidden_layers": 26, "sliding_window": 8192},
    ),
    # Those that see, hear and speak.
    "qwen2_5_omni": _speaking("qwen2_5_omni_text", "Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel"),
    "qwen2_5_omni_thinker": Wrapper(
        ("Qwen2_5OmniThinkerForConditionalGeneration",), "qwen2_5_omni_text", root="", parts=(SEES, HEARS)
    ),
    "qwen3_omni_moe": _speaking("qwen3_omni_moe_text", "Qwen3OmniMoeForConditionalGeneration"),
    "qwen3_omni_moe_thinker": Wrapper(
        ("Qwen3OmniMoeThinkerForConditionalGeneration",), "qwen3_omni_moe_text", root="", parts=(SEES, HEARS)
    ),
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
    "granite": (32_000, 4096, 11_008, 32, 32, 2048),
    "lfm2": (65_536, 2560, 12_288, 32, 32, 128_000),
    "lfm3": (128_000, 2048, 7680, 24, 16, 128_000),
    "llama": (32_000, 4096, 11_008, 32, 32, 2048),
    "ministral3": (131_072, 4096, 14_336, 34, 32, 262_144),
    "mistral": (32_000, 4096, 14_336, 32, 32, 131_072),
    "mistral4": (131_072, 4096, 12_288, 36, 32, 1_048_576),
    "nemotron_h": (131_072, 4096, 21_504, 4, 32, 4096),
    "opt": (50_272, 768, 3072, 12, 12, 2048),
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
    "qwen3_omni_moe_text": {"num_experts": 128},
    "qwen3_vl_moe_text": {"num_experts": 60, "moe_intermediate_size": 1408},
}


def text_part(config: Config) -> tuple[str, Config]:
    """Return the ``model_type`` and the config of the language model, which is all of the model if it has no wrapper.

    Raises:
        ModelError: the language model's config is missing, elsewhere or no object, or its type is no string.
    """
    model_type = config.text("model_type")
    wrapper = WRAPPERS.get(model_type)
    if wrapper is None:
        return model_type, config
    if wrapper.flat and TEXT not in config:
        return _version(config, wrapper) if wrapper.versions else wrapper.text, config
    if TEXT not in config and (name := config.text(_ELSEWHERE)):
        told = f"the language model and its weights are elsewhere: {_ELSEWHERE} is {name[:60]!r}"
        raise config.error(told, "plan that model, with --reserve for what this one has beside it")
    text = around_text(config).section(wrapper.section)
    inner = text.text("model_type") or wrapper.text
    if inner == "deepseek_v2" and text.raw("use_mla") is False:
        inner = "deepseek"  # without latent attention it is that
    defaults = {"model_type": inner, **(dict(zip(_KEYS, _DEFAULTS[inner], strict=True)) if inner in _DEFAULTS else {})}
    defaults.update(_EXPERTS.get(inner, {}))
    defaults.update(wrapper.usual)
    return inner, text.filled(defaults)


def _version(config: Config, wrapper: Wrapper) -> str:
    """Return the ``model_type`` of the language model of a version.

    Raises:
        ModelError: the version is not known, or its language model is not.
    """
    version = config.raw("version")
    found = wrapper.versions.get(str(version or ""))
    if found is None:
        problem = f"version is {str(version)[:20]!r}, whose language model is not known"
        raise config.error(problem, f"known are {', '.join(filter(None, wrapper.versions))}")
    if not version and config.raw("query_num") == _QUERIES_OF_V2:
        raise config.error("query_num without version is a key of MiniCPM-V 2, which tpplan does not support")
    return found


def around_text(config: Config) -> Config:
    """Return the section of a config that holds the language model's, or the whole.

    Raises:
        ModelError: it is missing or no object.
    """
    wrapper = WRAPPERS.get(config.text("model_type"))
    return config.section(wrapper.within) if wrapper and wrapper.within else config


def newer_name(name: str) -> str:
    """Return the name of a tensor or module of a wrapper's language model as newer tools write it; others stay."""
    starts = ((old, new) for root in (ROOT, "") for new, old in _RENAMED[root].items())
    whole = f"{name}."  # the name of a module may be all that is renamed
    return next((f"{new}{whole.removeprefix(old)}"[:-1] for old, new in starts if whole.startswith(old)), name)


def name_within(name: str) -> str:
    """Return the name that a tensor or module of a wrapper's language model has in that alone; others stay."""
    return next((name.removeprefix(root) for root in _RENAMED if root and name.startswith(root)), name)
