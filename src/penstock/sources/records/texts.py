"""The built-in templates: Jinja text as each family publishes it, and the control tokens that it writes.

Text, not code of ours: rendered by the same machinery as a tokenizer's own template. Where a family's template refuses
system messages (Mistral, Gemma 1), the later practice of the same family is taken: before the first user's words.
`bos_token` is what the tokenizer itself puts before a text (often nothing), `eos_token` the store's end token.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BUILT_IN", "PLAIN", "TOKENIZER", "BuiltIn"]

PLAIN = "plain"
TOKENIZER = "tokenizer"


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """A template by name.

    Attributes:
        text: Jinja.
        control_tokens: what a vocabulary must have.
        more_control_tokens: what is text in some vocabularies of the family; control tokens in one trained here.
        version: changes with the text; part of the store digest.
    """

    text: str
    control_tokens: tuple[str, ...] = ()
    more_control_tokens: tuple[str, ...] = ()
    version: int = 1


_SYSTEM_APART = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
)
_ALTERNATING = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) or message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('turns must be user, assistant, user, assistant…') }}{% endif %}"
)

# stanford_alpaca: prompt_input and prompt_no_input, then the answer and the end token; turns repeat without preamble.
_ALPACA = (
    "{{ bos_token }}"
    + _SYSTEM_APART
    + "{% for message in turns %}"
    + _ALTERNATING
    + "{% if message['role'] == 'user' %}"
    "{% if message['instruction'] is defined %}"
    "{% set instruction = message['instruction'] %}{% set given = message['input'] %}"
    "{% else %}{% set instruction = message['content'] %}{% set given = '' %}{% endif %}"
    "{% if loop.first %}{% if system %}{{ system }}"
    "{% elif given %}{{ 'Below is an instruction that describes a task, paired with an input that provides further"
    " context. Write a response that appropriately completes the request.' }}"
    "{% else %}{{ 'Below is an instruction that describes a task. Write a response that appropriately completes the"
    " request.' }}{% endif %}{% endif %}"
    "{{ '\n\n### Instruction:\n' + instruction + '\n\n' }}"
    "{% if given %}{{ '### Input:\n' + given + '\n\n' }}{% endif %}"
    "{{ '### Response:' }}"
    "{% else %}{{ '\n' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n' }}{% endif %}"
)

# The template that transformers documents as ChatML.
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# meta-llama/Meta-Llama-3-8B-Instruct.
_LLAMA = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim"
    " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = '<|begin_of_text|>' + content %}{% endif %}"
    "{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# meta-llama/Llama-2-7b-chat-hf.
_LLAMA2 = (
    _SYSTEM_APART + "{% for message in turns %}" + _ALTERNATING + "{% if loop.index0 == 0 and system %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

# mistralai/Mistral-7B-Instruct-v0.3, the system message before the first user's words.
_MISTRAL = (
    "{{ bos_token }}"
    + _SYSTEM_APART
    + "{% for message in turns %}"
    + _ALTERNATING
    + "{% if message['role'] == 'user' %}"
    "{% if loop.first and system %}{{ '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}"
    "{% else %}{{ '[INST] ' + message['content'] + '[/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)

# microsoft/Phi-3-mini-4k-instruct.
_PHI = (
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)

# deepseek-ai/DeepSeek-V3, without tools.
_DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}"
    "{% else %}{{ raise_exception('roles are system, user and assistant') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)

# google/gemma-3-1b-it, text only.
_GEMMA = (
    "{{ bos_token }}" + _SYSTEM_APART + "{% for message in turns %}" + _ALTERNATING + "{{ '<start_of_turn>' }}"
    "{% if message['role'] == 'assistant' %}{{ 'model\n' }}{% else %}{{ 'user\n' }}{% endif %}"
    "{% if loop.first and system %}{{ system + '\n\n' }}{% endif %}"
    "{{ message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

BUILT_IN = {
    "alpaca": BuiltIn(text=_ALPACA),
    "chatml": BuiltIn(text=_CHATML, control_tokens=("<|im_start|>", "<|im_end|>")),
    "deepseek": BuiltIn(text=_DEEPSEEK, control_tokens=("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")),
    "gemma": BuiltIn(text=_GEMMA, control_tokens=("<start_of_turn>", "<end_of_turn>")),
    "llama": BuiltIn(
        text=_LLAMA,
        control_tokens=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "llama2": BuiltIn(text=_LLAMA2, more_control_tokens=("[INST]", "[/INST]")),
    "mistral": BuiltIn(text=_MISTRAL, more_control_tokens=("[INST]", "[/INST]")),
    "phi": BuiltIn(text=_PHI, control_tokens=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
}
"""`llama` is Llama 3's; `llama2` the earlier one."""
