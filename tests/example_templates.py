# ruff: noqa: E501
"""Chat templates in the manner of the families that models come from, and a tokenizer of bytes that has them."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridflow.data.tokenizer import Tokenizer as OwnTokenizer

_CHATML_SYSTEM = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}"""
_CHATML_TOOL = """{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}{{ '\\n' }}<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}"""
# Thinking stays in the turns that follow the last question, and leaves all earlier ones. A last turn without thinking
# is given an empty thought.
QWEN3 = (
    _CHATML_SYSTEM
    + """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else '' %}
{%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or thought) %}<think>
{{ thought }}
</think>

{% endif %}{{ said }}{% for call in m.tool_calls or [] %}{% if (loop.first and said) or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}"""
    + _CHATML_TOOL
    + """{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
)
LLAMA3 = """{{- '<|begin_of_text|>' }}{%- if messages[0].role == 'system' or tools %}<|start_header_id|>system<|end_header_id|>

{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}
{% endif %}{% for tool in tools or [] %}{{ tool | tojson(indent=4) }}

{% endfor %}<|eot_id|>{% endif %}
{%- for m in messages %}{% if m.role in ('user', 'assistant') and not m.tool_calls %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% elif m.tool_calls %}<|start_header_id|>assistant<|end_header_id|>

{% if m.tool_calls | length != 1 %}{{ raise_exception('one tool call at once') }}{% endif %}
{%- set call = m.tool_calls[0].function %}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
# Tools and the system's text stand before the last question, so a further question moves them.
MISTRAL = """{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{- '<s>' }}
{%- for m in messages %}{% if m.role == 'user' %}{% if loop.index0 == ns.last and tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {% if loop.index0 == ns.last and system %}{{ system }}

{% endif %}{{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('ids of 9 letters') }}{% endif %}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}{{ ', ' if not loop.last }}{% endfor %}]</s>
{%- elif m.role == 'assistant' %} {{ m.content | trim }}</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}{% endfor %}"""
# The model's turn is opened with a thought, and past turns never have one.
THINKING_REMOVED = """{{- '<s>' }}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content.split('</think>')[-1] }}</s>
{%- else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|><think>
{% endif %}"""
MARKED = (
    _CHATML_SYSTEM
    + """{%- for m in messages %}
{%- if m.role == 'assistant' %}<|im_start|>assistant
{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}"""
    + _CHATML_TOOL
    + """{% elif not (m.role == 'system' and loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
)
NAMED_JSON = """{{- '<s>' }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}{% for call in m.tool_calls or [] %}<call>function<sep>{{ call.function.name }}
```json
{{ call.function.arguments | tojson }}
```</call>{% endfor %}</s>{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
PLAIN = """{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

TEMPLATES = {  # with the text of the token that ends a turn
    "qwen3": (QWEN3, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "mistral": (MISTRAL, "</s>"),
    "thinking_removed": (THINKING_REMOVED, "</s>"),
    "marked": (MARKED, "<|im_end|>"),
    "named_json": (NAMED_JSON, "</s>"),
    "plain": (PLAIN, "</s>"),
}
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>")
SPECIAL += ("<|end_header_id|>", "[INST]", "[/INST]", "<|assistant|>", "<|user|>", "<|tool|>", "<|system|>")
OWN = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]")
"""Tokens of their own that are no special tokens."""


def byte_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token for each byte, and for each mark of the templates."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_tokens([AddedToken(text, special=True) for text in SPECIAL])
    raw.add_tokens([AddedToken(text, special=False) for text in OWN])
    source, end = TEMPLATES[template]
    out = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=end)
    out.chat_template = source
    return out


def tokenizer_of(template: str) -> tuple[OwnTokenizer, int]:
    """A tokenizer with a template of TEMPLATES, and the id that ends a turn."""
    raw = byte_tokenizer(template)
    return OwnTokenizer(raw), raw.convert_tokens_to_ids(TEMPLATES[template][1])
