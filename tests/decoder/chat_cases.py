"""Chat templates in the shapes that instruct models have, and small tokenizers that know their special tokens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import tokenizers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

#: Asks for the date, and whether tools are none; trims what is said.
HEADERS: Final = """
{{- bos_token }}
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|header|>system<|end_header|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: " ~ (tools | length) ~ "\\n" }}
{%- endif %}
{{- "Today Date: " + strftime_now("%d %b %Y") + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- "<|header|>" + message["role"] + "<|end_header|>\\n\\n" + message["content"] | trim + "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|header|>assistant<|end_header|>\\n\\n" }}
{%- endif %}
"""

#: Leaves blanks and line ends around its blocks to the environment.
CHATML: Final = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {% endif %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

#: Takes no system, and turns that must alternate.
REFUSING: Final = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}<|turn|>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|turn|>model\n{% endif %}"
)

#: Uses what is beyond jinja's own language, or differs from it, and special tokens with names of its own.
UNUSUAL: Final = """
{%- set found = namespace(text='') %}
{%- for message in messages | reverse %}
    {%- if loop.index > 1 %}{% break %}{% endif %}
    {%- set found.text = message.content %}
{%- endfor %}
{{- messages | tojson }}{{ {'b': '<é&>', 'a': messages[0].role} | tojson(indent=2, sort_keys=true) }}
{% generation %}{% set found_here = 1 %}{{ found.text }}{{ eos_token }}{% endgeneration %}
{{ found_here is defined }}{{ documents is none }}{{ tool_token }}{{ pad_token is defined }}
"""

TEMPLATES: Final = {"headers": HEADERS, "chatml": CHATML, "refusing": REFUSING, "unusual": UNUSUAL}

#: Where a checkpoint has its template.
PLACES: Final = ("text", "list", "file")

SPECIAL: Final = (
    "<s>",
    "</s>",
    "<tool>",
    *("<|header|>", "<|end_header|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<|turn|>", "<|end|>"),
)


def write_tokenizer(directory: Path, alphabet: Iterable[str], special: Iterable[str] = SPECIAL) -> None:
    """Write a tokenizer.json whose tokens are bytes and special ones, and which starts texts with ``<s>``."""
    tokens = [*special, *alphabet]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    start = [("<s>", tokens.index("<s>"))]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=start)
    tokenizer.save(str(directory / "tokenizer.json"))


def write_template(directory: Path, template: str, place: str, **changes: Any) -> None:
    """Write a template where checkpoints have them, beside others that do not count, and a tokenizer_config.json."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False, "special": True},
        "tool_token": "<tool>",
        "pad_token": None,
        "add_bos_token": True,
    }
    if place == "text":
        config["chat_template"] = template
    elif place == "list":
        named = {"tool_use": "{{ raise_exception('no tools') }}", "default": template}
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    else:
        config["chat_template"] = "{{ raise_exception('the file wins') }}"
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config | changes), encoding="utf-8")
