"""Templates by name: parts, loss, control tokens, options."""

from __future__ import annotations

import copy
import itertools
import pickle
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, InputError, TokenizerError
from penstock.sources import BadRowError, Part, PartKind, TemplateRenderer, TemplateVocabulary
from penstock.sources.records.templates import TEMPLATES, control_tokens_of, row_renderer
from penstock.sources.records.texts import BUILT_IN

# ruff: noqa: E501  templates are lines
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "Q2"},
    {"role": "assistant", "content": "A2"},
]


@cache
def trained(name: str, **more: Any) -> TemplateRenderer:
    return row_renderer(name, vocabulary=TemplateVocabulary.to_be_trained(name), **more)


def own(template: str, *controls: str, **more: Any) -> TemplateRenderer:
    """The renderer of a tokenizer's own template."""
    vocabulary = TemplateVocabulary(
        control_names=frozenset(["</s>", *controls]),
        end="</s>",
        special_tokens=(("eos_token", "</s>"),),
        chat_templates=(("default", template),),
    )
    return row_renderer("tokenizer", vocabulary=vocabulary, **more)


def shown(parts: tuple[Part, ...]) -> str:
    """Parts as text: controls in braces, loss between stars."""
    runs = itertools.groupby(parts, key=lambda part: part.loss)
    return "".join(
        ("*{}*" if loss else "{}").format(
            "".join(f"⟨{p.data.decode()}⟩" if p.kind is PartKind.CONTROL else p.data.decode() for p in run)
        )
        for loss, run in runs
    )


EXPECTED = {
    "chatml": (
        "⟨<|im_start|>⟩system\nBe brief.⟨<|im_end|>⟩\n⟨<|im_start|>⟩user\nQ1⟨<|im_end|>⟩\n⟨<|im_start|>⟩assistant\n"
        "*A1⟨<|im_end|>⟩*\n⟨<|im_start|>⟩user\nQ2⟨<|im_end|>⟩\n⟨<|im_start|>⟩assistant\n*A2⟨<|im_end|>⟩*\n"
    ),
    "llama": (
        "⟨<|begin_of_text|>⟩⟨<|start_header_id|>⟩system⟨<|end_header_id|>⟩\n\nBe brief.⟨<|eot_id|>⟩"
        "⟨<|start_header_id|>⟩user⟨<|end_header_id|>⟩\n\nQ1⟨<|eot_id|>⟩"
        "⟨<|start_header_id|>⟩assistant⟨<|end_header_id|>⟩\n\n*A1⟨<|eot_id|>⟩*"
        "⟨<|start_header_id|>⟩user⟨<|end_header_id|>⟩\n\nQ2⟨<|eot_id|>⟩"
        "⟨<|start_header_id|>⟩assistant⟨<|end_header_id|>⟩\n\n*A2⟨<|eot_id|>⟩*"
    ),
    "llama2": (
        "⟨[INST]⟩ <<SYS>>\nBe brief.\n<</SYS>>\n\nQ1 ⟨[/INST]⟩* A1 ⟨<|endoftext|>⟩*⟨[INST]⟩ Q2 ⟨[/INST]⟩"
        "* A2 ⟨<|endoftext|>⟩*"
    ),
    "mistral": ("⟨[INST]⟩ Be brief.\n\nQ1⟨[/INST]⟩* A1⟨<|endoftext|>⟩*⟨[INST]⟩ Q2⟨[/INST]⟩* A2⟨<|endoftext|>⟩*"),
    "phi": (
        "⟨<|system|>⟩\nBe brief.⟨<|end|>⟩\n⟨<|user|>⟩\nQ1⟨<|end|>⟩\n⟨<|assistant|>⟩\n*A1⟨<|end|>⟩*\n"
        "⟨<|user|>⟩\nQ2⟨<|end|>⟩\n⟨<|assistant|>⟩\n*A2⟨<|end|>⟩*\n⟨<|endoftext|>⟩"
    ),
    "deepseek": (
        "Be brief.⟨<｜User｜>⟩Q1⟨<｜Assistant｜>⟩*A1⟨<｜end▁of▁sentence｜>⟩*⟨<｜User｜>⟩Q2⟨<｜Assistant｜>⟩"
        "*A2⟨<｜end▁of▁sentence｜>⟩*"
    ),
    "gemma": (
        "⟨<start_of_turn>⟩user\nBe brief.\n\nQ1⟨<end_of_turn>⟩\n⟨<start_of_turn>⟩model\n*A1⟨<end_of_turn>⟩*\n"
        "⟨<start_of_turn>⟩user\nQ2⟨<end_of_turn>⟩\n⟨<start_of_turn>⟩model\n*A2⟨<end_of_turn>⟩*\n"
    ),
    "alpaca": (
        "Be brief.\n\n### Instruction:\nQ1\n\n### Response:\n*A1⟨<|endoftext|>⟩*\n\n### Instruction:\nQ2\n\n"
        "### Response:\n*A2⟨<|endoftext|>⟩*"
    ),
}


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_conversation_through_each_template(name: str):
    assert shown(trained(name).parts({"messages": MESSAGES})) == EXPECTED[name]


def test_alpaca_as_published():
    parts = trained("alpaca").parts({"instruction": "Add.", "input": "1 2", "output": "3"})
    assert shown(parts) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a"
        " response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n"
        "### Response:\n*3⟨<|endoftext|>⟩*"
    )
    assert "paired" not in shown(trained("alpaca").parts({"instruction": "Say hi.", "output": "hi"}))


def test_what_the_tokenizer_puts_before_texts_comes_first():
    vocabulary = TemplateVocabulary(control_names=frozenset(["<s>", "</s>"]), begin=("<s>",), end="</s>")
    renderer = row_renderer("mistral", vocabulary=vocabulary)
    assert shown(renderer.parts({"prompt": "Q", "completion": "A"})) == "⟨<s>⟩[INST] Q[/INST]* A⟨</s>⟩*"
    assert shown(renderer.parts({"text": "words"})) == "⟨<s>⟩*words*"
    assert renderer.framed


def test_plain_text_and_prompts():
    renderer = trained("plain")
    assert not renderer.framed
    assert renderer.parts({"text": "a <|endoftext|> b"}) == (Part(data=b"a <|endoftext|> b"),)
    assert shown(renderer.parts({"prompt": "2+2=", "completion": "4"})) == "2+2=*4*"
    with pytest.raises(BadRowError, match="plain"):
        renderer.parts({"messages": MESSAGES})


def test_everything_may_be_learnt():
    parts = trained("chatml", loss="all").parts({"messages": MESSAGES})
    assert all(part.loss for part in parts)
    with_loss = trained("chatml").parts({"messages": MESSAGES})
    assert b"".join(part.data for part in parts) == b"".join(part.data for part in with_loss)
    assert trained("chatml", loss="all").parts({"messages": MESSAGES[:2]})


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@settings(max_examples=20)
@given(text=st.text(min_size=1, max_size=40), data=st.data())
def test_content_is_text_whatever_it_spells(name: str, text: str, data: st.DataObject):
    renderer = trained(name)
    names = sorted(renderer.vocabulary.control_names)
    pieces = data.draw(st.lists(st.one_of(st.sampled_from(names), st.just(text), st.just("\U000f0000")), min_size=1))
    hostile = "x" + "".join(pieces) + "y"
    messages = [{"role": "user", "content": hostile}, {"role": "assistant", "content": hostile}]
    parts = renderer.parts({"messages": messages})
    benign = renderer.parts({"messages": [{**message, "content": "x"} for message in messages]})
    controls = [[part.data for part in some if part.kind is PartKind.CONTROL] for some in (parts, benign)]
    assert controls[0] == controls[1]
    whole = b"".join(part.data for part in parts).decode()
    assert whole.count(hostile) == 2
    learnt = b"".join(part.data for part in parts if part.loss and part.kind is PartKind.TEXT).decode()
    assert learnt.strip() == hostile.strip()


HOSTILE = "a</s>b<|x|>c"
FOLLOWED = {
    "trimmed": "{% for m in messages %}<|x|>{{ m.content | trim }}</s>{% endfor %}",
    "stripped": "{% for m in messages %}<|x|>{{ m['content'].strip() }}</s>{% endfor %}",
    "upper": "{% for m in messages %}<|x|>{{ m.content | upper }}</s>{% endfor %}",
    "json": "{% for m in messages %}<|x|>{{ m.content | tojson }}</s>{% endfor %}",
    "twice": "{% for m in messages %}<|x|>{{ m.content }}{{ m.content }}</s>{% endfor %}",
    "macro": "{% macro say(m) %}<|x|>{{ m.content }}</s>{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
    "split": "{% for m in messages %}<|x|>{{ m.content.split('</think>')[-1].lstrip('\n') }}</s>{% endfor %}",
    "replaced": "{% for m in messages %}<|x|>{{ m.content.replace('q', 'r') }}</s>{% endfor %}",
    "namespace": "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t ~ '<|x|>' ~ m.content ~ '</s>' %}"
    "{% endfor %}{{ ns.t }}",
}
NOT_FOLLOWED = {
    "cut": "{% for m in messages %}<|x|>{{ m.content[1:-1] }}</s>{% endfor %}",
    "first letter": "{% for m in messages %}<|x|>{{ m.content[0] }}{{ m.content[1:] }}!{{ m.content|length }}</s>{% endfor %}",
    "backwards": "{% for m in messages %}<|x|>{{ m.content | reverse }}</s>{% endfor %}",
    "controls between lines": "{% for m in messages %}{% for l in m.content.split(' ') %}<|x|>{{ l }}{% endfor %}</s>{% endfor %}",
    "escaped": "{% for m in messages %}<|x|>{{ m.content | tojson(ensure_ascii=True) }}</s>{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_templates_that_change_content_are_followed(name: str):
    renderer = own(FOLLOWED[name], "<|x|>")
    row = {"messages": [{"role": "user", "content": f" {HOSTILE} "}, {"role": "assistant", "content": f"{HOSTILE}\n"}]}
    parts = renderer.parts(row)
    assert [part.data for part in parts if part.kind is PartKind.CONTROL] == [b"<|x|>", b"</s>"] * 2
    expected = HOSTILE.upper() if name == "upper" else HOSTILE
    learnt = b"".join(part.data for part in parts if part.loss and part.kind is PartKind.TEXT).decode()
    assert expected in learnt
    assert [part.loss for part in parts if part.kind is PartKind.CONTROL] == [False, False, False, True]


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_templates_that_cannot_be_followed_are_refused_by_name(name: str):
    with pytest.raises(InputError, match="tokenizer"):
        own(NOT_FOLLOWED[name], "<|x|>")


def test_words_that_a_template_looks_for_are_text_where_content_spells_them():
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' and '</think>' in m.content %}<think>"
        "{{ m.content.split('</think>')[0].rstrip() }}</think>{{ m.content.split('</think>')[1].lstrip() }}</s>"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    renderer = own(template, "<think>", "</think>")
    row = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "why\n</think>\n\nso"}]}
    assert shown(renderer.parts(row)) == "Q⟨</s>⟩⟨<think>⟩*why</think>so⟨</s>⟩*"
    quoted = {"messages": [{"role": "user", "content": "a</think>"}, {"role": "assistant", "content": "</think>"}]}
    controls = [part.data for part in renderer.parts(quoted) if part.kind is PartKind.CONTROL]
    assert b"</think>" not in controls


def test_a_template_may_refuse_a_record():
    renderer = own("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
                   "{{ m.content }}</s>{% endfor %}")  # fmt: skip
    with pytest.raises(BadRowError, match="no system") as raised:
        renderer.parts({"messages": MESSAGES})
    assert raised.value.reason == "template-refused"
    with pytest.raises(BadRowError) as raised:
        renderer.parts({"messages": MESSAGES[1:2]})
    assert raised.value.reason == "no-assistant-turn"
    hidden = own("{% for m in messages %}{{ m.content if m.role == 'user' or loop.length < 3 }}</s>{% endfor %}")
    with pytest.raises(BadRowError) as raised:
        hidden.parts({"messages": [*MESSAGES[1:3], MESSAGES[3]]})
    assert raised.value.reason == "no-assistant-turn"


def test_names_are_checked():
    with pytest.raises(ConfigError, match="chatlm") as raised:
        trained("chatlm")
    assert "chatml" in raised.value.hint.split(",")[0]
    with pytest.raises(ConfigError, match="some"):
        trained("chatml", loss="some")
    with pytest.raises(TokenizerError, match=r"<\|im_start\|>"):
        row_renderer("chatml", vocabulary=TemplateVocabulary(control_names=frozenset(["<|endoftext|>"])))
    with pytest.raises(TokenizerError, match="no chat template"):
        row_renderer("tokenizer", vocabulary=TemplateVocabulary(control_names=frozenset(["</s>"]), end="</s>"))
    with pytest.raises(TokenizerError, match="no tokenizer"):
        control_tokens_of("tokenizer")
    several = TemplateVocabulary(control_names=frozenset(["</s>"]), chat_templates=(("rag", "x"), ("tool_use", "y")))
    with pytest.raises(TokenizerError, match="rag"):
        row_renderer("tokenizer", vocabulary=several)


def test_the_template_for_tools_is_taken_where_there_are_tools():
    plain, tools = (
        "{% for m in messages %}{{ m.content }}</s>{% endfor %}",
        "T{% for m in messages %}{{ m.content }}</s>{% endfor %}",
    )
    vocabulary = TemplateVocabulary(
        control_names=frozenset(["</s>"]), end="</s>", chat_templates=(("default", plain), ("tool_use", tools))
    )
    renderer = row_renderer("tokenizer", vocabulary=vocabulary)
    row = {"messages": MESSAGES}
    assert shown(renderer.parts({**row, "tools": [{"name": "f"}]})) == "T" + shown(renderer.parts(row))


def test_columns():
    renderer = trained("chatml", field_map=(("response", "reply"), ("instruction", "ask")))
    assert set(renderer.columns(["id", "ask", "reply", "input", "junk"])) == {"ask", "reply", "input"}
    assert {"ask", "reply", "messages"} <= set(renderer.columns(None) or ())
    with pytest.raises(InputError, match="reply") as raised:
        renderer.columns(["ask", "answer"])
    assert "answer" in raised.value.hint
    with pytest.raises(InputError) as raised:
        trained("chatml").columns(["a", "b"])
    assert "a, b" in raised.value.hint


def test_a_renderer_is_data():
    renderer = trained("chatml")
    renderer.parts({"messages": MESSAGES})
    for other in (pickle.loads(pickle.dumps(renderer)), copy.deepcopy(renderer)):
        assert other == renderer
        assert other.parts({"messages": MESSAGES}) == renderer.parts({"messages": MESSAGES})
    assert len(pickle.dumps(renderer)) < 2000


def test_options_say_what_decides_the_content():
    options = [trained(name).options() for name in TEMPLATES if name != "tokenizer"]
    options += [trained("chatml", loss="all").options(), trained("chatml", field_map=(("text", "t"),)).options()]
    options += [own("{% for m in messages %}{{ m.content }}</s>{% endfor %}").options()]
    options += [own("{% for m in messages %}{{ m.content }}</s>\n{% endfor %}").options()]
    assert len({repr(sorted(each.items())) for each in options}) == len(options)
    assert all(each["kind"] == "template" for each in options)
