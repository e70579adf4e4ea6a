"""Small tokenizers with the shape, the control tokens and the published chat template of each family."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Reference

from penstock.tokenize import Tokenizer, load_tokenizer
from penstock.tokenize.loading import CL100K_PATTERN

SAMPLE = [
    "The quick brown fox jumps over the lazy dog. user assistant system model tool\n\n",
    "def main(argument):\n    return [argument + 1, 'text']\n",
    "What is the answer? The answer is 42, I think. Hello there, how are you today?\n",
    '{"name": "get_weather", "arguments": {"city": "Paris"}}',
] * 3

# ruff: noqa: E501  templates are quoted as published
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' +"
    " message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN_25 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
QWEN_3 = r"""{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
PHI_3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}"
    "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
DEEPSEEK = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='', is_first_sp=true) %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}"
    "{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}{%- else %}"
    "{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}"
    "{{ bos_token }}{{ ns.system_prompt }}{%- for message in messages %}{%- if message['role'] == 'user' %}"
    "{%- set ns.is_tool = false -%}{{'<｜User｜>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}{%- if ns.is_tool %}"
    "{{'<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}{%- set ns.is_tool = false -%}{%- else %}"
    "{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token"
    " }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
TAGGED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


def _special(*names: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False, **flags) for name in names]


def _byte_level(pattern: str | None, added: list[AddedToken], *, nfc: bool = False) -> Reference:
    tokenizer = Reference(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level]) if split else byte_level
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    return _with(tokenizer, added)


def _sentencepiece(added: list[AddedToken], *, scheme: str) -> Reference:
    """BPE with byte fallback, as converted from SentencePiece: by Metaspace, or by normalizers as older files have it."""
    tokenizer = Reference(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if scheme == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif scheme == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    # Byte pieces are pieces of the model, not added tokens.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    return _with(Reference.from_str(json.dumps(content)), added)


def _with(tokenizer: Reference, added: list[AddedToken]) -> Reference:
    for token in added:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class Family:
    """A tokenizer and its template."""

    build: Callable[[], Reference]
    template: str
    special: dict[str, str]
    system: bool = True


QWEN_TOKENS = [
    *_special("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *(
        AddedToken(name, special=False, normalized=False)
        for name in ("<tool_call>", "</tool_call>", "<think>", "</think>")
    ),
]
LLAMA_TOKENS = _special("<s>", "</s>")
PHI_NAMES = ("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>")

FAMILIES: dict[str, Family] = {
    "llama-3": Family(
        build=lambda: _byte_level(
            CL100K_PATTERN,
            _special("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        ),
        template=LLAMA_3,
        special={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    ),
    "qwen-2.5": Family(
        build=lambda: _byte_level(CL100K_PATTERN, QWEN_TOKENS, nfc=True),
        template=QWEN_25,
        special={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    ),
    "qwen-3": Family(
        build=lambda: _byte_level(CL100K_PATTERN, QWEN_TOKENS, nfc=True),
        template=QWEN_3,
        special={"eos_token": "<|im_end|>"},
    ),
    "mistral": Family(
        build=lambda: _sentencepiece([*LLAMA_TOKENS, *_special("[INST]", "[/INST]")], scheme="first"),
        template=MISTRAL,
        special={"bos_token": "<s>", "eos_token": "</s>"},
        system=False,
    ),
    "llama-2": Family(
        build=lambda: _sentencepiece(LLAMA_TOKENS, scheme="legacy"),
        template=LLAMA_2,
        special={"bos_token": "<s>", "eos_token": "</s>"},
    ),
    "gemma": Family(
        build=lambda: _sentencepiece(_special("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), scheme="none"),
        template=GEMMA,
        special={"bos_token": "<bos>", "eos_token": "<eos>"},
        system=False,
    ),
    "phi-3": Family(
        build=lambda: _sentencepiece([*LLAMA_TOKENS, *_special(*PHI_NAMES, rstrip=True)], scheme="legacy"),
        template=PHI_3,
        special={"bos_token": "<s>", "eos_token": "<|endoftext|>"},
    ),
    "deepseek": Family(
        build=lambda: _byte_level(
            None,
            _special(
                "<｜begin▁of▁sentence｜>",
                "<｜end▁of▁sentence｜>",
                "<｜User｜>",
                "<｜Assistant｜>",
                "<｜tool▁outputs▁end｜>",
            ),
        ),
        template=DEEPSEEK,
        special={"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    ),
    "zephyr": Family(
        build=lambda: _sentencepiece(LLAMA_TOKENS, scheme="legacy"),
        template=ZEPHYR,
        special={"bos_token": "<s>", "eos_token": "</s>"},
    ),
    "tagged": Family(
        build=lambda: _byte_level(None, QWEN_TOKENS[:3]),
        template=TAGGED,
        special={"eos_token": "<|im_end|>"},
    ),
}


def write_folder(folder: Path, name: str) -> Path:
    """The family's tokenizer.json and tokenizer_config.json."""
    family = FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(built(name).to_str())
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": family.template,
        "clean_up_tokenization_spaces": False,
        **family.special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@cache
def built(name: str) -> Reference:
    return FAMILIES[name].build()


def load_both(folder: Path) -> tuple[Tokenizer, Any]:
    """Ours and `transformers`' tokenizer of a folder."""
    from transformers import PreTrainedTokenizerFast

    return load_tokenizer(str(folder)), PreTrainedTokenizerFast.from_pretrained(str(folder))
