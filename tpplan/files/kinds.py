"""What a document is that somebody took for another one."""

from __future__ import annotations

PLAN, DEVICES, CONFIG = "a plan", "a devices file", "a model's config.json"

#: What a document has on top, where only these keys are known.
_KEYS = {
    PLAN: ("$schema", "format_version", "model", "request", "devices", "splits", "memory"),
    DEVICES: ("format_version", "devices", "links"),
}
_DEVICES_SCHEMA = "urn:tpplan:devices-file:1"

#: What else is beside a model's config.json, by a key that only it has.
_OTHERS = {
    "weight_map": "an index of safetensors files",
    "added_tokens": "a tokenizer.json",
    "tokenizer_class": "a tokenizer_config.json",
    "peft_type": "the config of an adapter",
    "_from_model_config": "a generation_config.json",
    "image_processor_type": "a preprocessor_config.json",
    "share_basis": "a report on a plan, such as tpplan plan --json prints",
}


def mistaken(data: object, wanted: str) -> str:
    """Return that a document is another one than was wanted, or nothing where that cannot be told."""
    found, keys = _kind(data), _KEYS.get(wanted, ())
    if found not in {"", wanted}:
        return f"is {found}, expected {wanted}"
    if keys and isinstance(data, dict) and data.keys().isdisjoint(keys):
        return f"has none of the keys of {wanted}, which are {', '.join(keys[:-1])} and {keys[-1]}"
    return ""


def _kind(data: object) -> str:
    """Return what a document seems to be by keys that only that has, or nothing."""
    if not isinstance(data, dict):
        return ""
    if "model_type" in data or "architectures" in data:
        return CONFIG  # whatever else it has: only this kind may have keys that tpplan does not know
    if "splits" in data:
        return PLAN
    if "devices" in data and "model" not in data and data.get("$schema", _DEVICES_SCHEMA) == _DEVICES_SCHEMA:
        return DEVICES
    return next((_OTHERS[key] for key in _OTHERS if key in data), "")
