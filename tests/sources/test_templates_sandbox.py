"""Templates are programs of strangers: none gets out, and each ends soon, whatever it tries."""

from __future__ import annotations

import resource
import time

import pytest

from penstock.errors import InputError, PenstockError
from penstock.sources.records.sandbox import (
    FIXED_DATE,
    LARGEST_TEMPLATE,
    TemplateFailedError,
    TemplateLimitError,
    compiled_template,
)
from penstock.sources.records.templates import TemplateVocabulary, row_renderer

pytestmark = pytest.mark.torture(lane="G", sample=True)

MESSAGES = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]


def rendered(source: str, **more: object) -> str:
    variables = {"messages": MESSAGES, "tools": None, "eos_token": "</s>", **more}
    return compiled_template(source, name="test").render(variables, input_size=100)


# ruff: noqa: E501  templates are lines
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ (messages|map(attribute='__class__')|list)[0].__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{0.__class__}'.format_map({'0': ''}) }}",
    "{{ range.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__ }}",
    "{{ namespace(_x=1) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ self.__init__ }}",
    "{{ self._TemplateReference__context }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{% for x in [1] %}{{ loop.__class__.__init__.__globals__ }}{% endfor %}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ joiner.__init__ }}",
    "{{ config }}{{ cycler('a') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends 'base' %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages[0].pop('role') }}",
    "{{ (1).to_bytes(10, 'big') }}",
    "{{ 'x'.encode() }}",
    "{{ 'x'.translate({}) }}",
    "{{ 'x'|urlize }}",
    "{{ dict.fromkeys([1]) }}",
    "{{ dict.mro() }}",
]

BOMBS = [
    "{% for a in range(10000) %}{% for b in range(10000) %}{% for c in range(10000) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for a in range(100000000) %}x{% endfor %}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}" + "{% set x = 'xxxxxxxx' %}" + "{% set x = m(x) %}" * 60 + "{{ x|length }}",
    "{% for x in [[1]] recursive %}{{ loop([[1], [1]]) }}{% endfor %}",
    "{{ 'a' * 1000000000 }}",
    "{{ 1000000000 * 'a' }}",
    "{{ [0] * 1000000000 }}",
    "{{ ([0] * 1000) * 1000000 }}",
    "{{ 10 ** 10 ** 8 }}",
    "{{ 10 ** 100000000 }}",
    "{% set ns = namespace(x=7) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|length }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ ns.x == ns.x }}",
    "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x|tojson }}",
    "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x|string }}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}{{ ns.x|length }}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x|replace('a', 'aa') %}{% endfor %}{{ ns.x|length }}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x]|join(ns.x) %}{% endfor %}{{ ns.x|length }}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x.join([ns.x, ns.x]) %}{% endfor %}{{ ns.x|length }}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}{{ ns.x|length }}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}{{ ns.x|length }}",
    "{% set x = 'a' %}" + "{% set x %}{{ x }}{{ x }}{{ x }}{{ x }}{% endset %}" * 40 + "{{ x|length }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ 'a'.zfill(1000000000) }}",
    "{{ 'a\t'.expandtabs(1000000000) }}",
    "{{ 'a'|center(1000000000) }}",
    "{{ 'a\nb'|indent(1000000000) }}",
    "{{ 'a'|indent('x' * 500000, true) }}",
    "{{ messages|tojson(indent=1000000000) }}",
    "{{ [1]|batch(1000000000, 'x')|list }}",
    "{{ [1]|slice(1000000000)|list }}",
    "{{ 1.5|round(1000000000, 'ceil') }}",
    "{{ lipsum(n=1000000) }}",
    "{{ strftime_now('%1000000000d') }}",
    "{{ ('a' * 400000).strip('b' * 400000 + 'a')|length }}",
    "{{ ('a' * 400000)|trim('b' * 400000 + 'a')|length }}",
    "{% for i in range(10000) %}{{ 'y' * 1000 }}{% endfor %}",
    "{% for i in range(10000) %}" + "y" * 1000 + "{% endfor %}",
    "{% set big = 'a' * 500000 %}{% for i in range(10000) %}{% set x = big[1:] %}{% endfor %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "{{ " + "-" * 100000 + "1 }}",
    "x" * (LARGEST_TEMPLATE + 1),
]  # fmt: skip


@pytest.mark.parametrize("source", ESCAPES, ids=range(len(ESCAPES)))
def test_nothing_leads_out(source: str):
    try:
        text = rendered(source)
    except (TemplateFailedError, TemplateLimitError, InputError):
        return
    # Jinja shows what isn't there as nothing.
    for word in ("class", "function", "module", "object at", "root:", "mro", "globals"):
        assert word not in text, text


@pytest.mark.parametrize("source", BOMBS, ids=range(len(BOMBS)))
def test_everything_ends_soon_and_small(source: str):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    with pytest.raises((TemplateFailedError, TemplateLimitError, InputError)) as raised:
        rendered(source)
    assert str(raised.value)
    assert "\n" not in str(raised.value)
    assert time.process_time() - started < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize(
    "source",
    ["{% for a in range(10000) %}" * 3 + "{% endfor %}" * 3, "{{ 'a' * 10 ** 9 }}", "{{ messages[0]", "{% x %}"],
)
def test_a_renderer_names_the_template_that_was_stopped(source: str):
    vocabulary = TemplateVocabulary(
        control_names=frozenset(["</s>"]), end="</s>", chat_templates=(("default", source),)
    )
    with pytest.raises(InputError, match="tokenizer") as raised:
        row_renderer("tokenizer", vocabulary=vocabulary)
    assert isinstance(raised.value, PenstockError)
    assert raised.value.hint


def test_what_templates_of_chat_models_use_is_there():
    source = (
        "{%- set ns = namespace(n=0, found=false) -%}{%- for m in messages if m.role != 'system' -%}"
        "{%- set ns.n = ns.n + loop.index0 * 2 -%}{{ loop.first }}{{ loop.last }}{{ m['content']|trim|upper }}"
        "{%- if loop.index0 == 5 -%}{%- break -%}{%- endif -%}{{ m.get('name', 'none') }}{{ ' ' ~ m.role ~ 1 }}"
        "{%- endfor -%}{{ ns.n }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
        "{{ {'b': [1, 'é<'], 'a': none}|tojson }}{{ {'b': 1}|tojson(indent=2) }}{{ messages[::-1][0].role }}"
        "{% macro show(x, function=none) %}<{{ x }}>{% endmacro %}{{ show('y', function=3) }}{{ 'a-b'.split('-')[-1] }}"
        "{{ ['x', 'y']|join(', ') }}{{ 'k' in {'k': 1} }}{{ {'k': 2}.items()|list }}{{ strftime_now('%d %b %Y') }}"
        "{{ range(3)|list }}{{ undefined_thing is defined }}{{ 'abc'|replace('b', '-') }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 5 }}"
    )
    assert rendered(source) == (
        "TrueFalseQUESTIONnone user1FalseTrueANSWERnone assistant121"
        '{"b": [1, "é<"], "a": null}{\n  "b": 1\n}assistant<y>bx, yTrue[(\'k\', 2)]'
        f"{FIXED_DATE:%d %b %Y}[0, 1, 2]Falsea-c3332"
    )


def test_long_conversations_are_no_bombs():
    source = (
        "{% for message in messages %}{% for other in messages %}{% endfor %}{{ '<|im_start|>' + message['role'] + '\n'"
        " + message['content'].strip().split('</think>')[-1] + '<|im_end|>' + '\n' }}{% endfor %}"
    )
    messages = [{"role": "user", "content": f"{number} " * 500} for number in range(200)]
    size = sum(len(message["content"]) for message in messages)
    text = compiled_template(source, name="long").render({"messages": messages}, input_size=size)
    assert text.count("<|im_start|>") == 200
    large = [{"role": "user", "content": "word " * 1_000_000}]
    assert len(compiled_template(source, name="long").render({"messages": large}, input_size=5_000_000)) > 4_999_000


def test_a_template_is_the_same_tomorrow():
    assert rendered("{{ strftime_now('%Y-%m-%d %H:%M:%S %A') }}") == "2024-07-26 00:00:00 Friday"
