"""Records from the command line: one command from a file to a store, for files like those of four experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.store import document_text, open_store
from penstock.tokenize import train_tokenizer

EXPERTS: dict[str, list[dict[str, Any]]] = {
    "json": [
        {"task": "Extract as JSON.", "input": {"text": f"Ann is {n}."}, "output": {"name": "Ann", "age": n}}
        for n in range(8)
    ],
    "typescript": [
        {"instruction": f"Write a type with {n} fields.", "input": "", "output": f"type T{n} = {{ a: number }};"}
        for n in range(8)
    ],
    "neo4j": [
        {"prompt": f"Who knows person {n}?", "completion": f"MATCH (p)-[:KNOWS]->({{id: {n}}}) RETURN p"}
        for n in range(8)
    ],
    "sql": [
        {"messages": [{"role": "user", "content": f"Rows of t{n}? <|im_end|>"},
                      {"role": "assistant", "content": f"SELECT * FROM t{n};"}]}
        for n in range(8)
    ],
}  # fmt: skip


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def chatml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = train_tokenizer(
        [b"select rows from a table"], vocab_size=265, control_tokens=["<|im_start|>", "<|im_end|>"]
    )
    (folder / "tokenizer.json").write_bytes(tokenizer.spec.source_json)
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|endoftext|>"}))
    return folder


def test_four_experts_files_become_a_store(penstock, chatml_folder: Path, tmp_path: Path):
    for expert, rows in EXPERTS.items():
        write_jsonl(tmp_path / f"{expert}.jsonl", [*rows, {"foo": 1}])
    files = [f"{expert}.jsonl" for expert in EXPERTS]
    facts = penstock(
        "prepare", *files, "--out", "s", "--tokenizer", chatml_folder, "--template", "tokenizer", "--json"
    ).json
    assert facts["documents"] == 32
    assert facts["skipped"] == {"no-record": 4}
    assert penstock("verify", "s", "--json").json["ok"]
    with open_store(tmp_path / "s") as store:
        tokenizer = store.tokenizer()
        controls = tokenizer.spec.control_tokens
        for number in range(32):
            ids = store.document_tokens(number)
            assert int((ids == controls["<|im_start|>"]).sum()) == int((ids == controls["<|im_end|>"]).sum()) == 2
            assert ids[-1] == tokenizer.end_id
            text = document_text(store, number, tokenizer)
            assert text.count("<|im_end|>") == 2 + ("Rows of" in text), "a quoted control is text"


def test_fields_are_named_and_mistakes_too(penstock, chatml_folder: Path, tmp_path: Path):
    write_jsonl(tmp_path / "rows.jsonl", [{"question_text": f"Q{n}", "reply": f"A{n}"} for n in range(4)])
    words = ["prepare", "rows.jsonl", "--tokenizer", chatml_folder, "--template"]
    mapped = ["--field-map", "instruction=question_text", "--field-map", "response=reply"]
    assert penstock(*words, "chatml", *mapped, "--out", "s", "--json").json["documents"] == 4
    failed = penstock(*words, "llama", "--out", "other", expect=1)
    failed.assert_one_error()
    assert "<|begin_of_text|>" in failed.err
    assert not (tmp_path / "other").exists()


def test_only_changed_records_are_encoded_again(penstock, chatml_folder: Path, tmp_path: Path):
    """Loss runs are taken over with the tokens: their hash covers how a record is divided."""
    rows = EXPERTS["sql"]
    options = ["--tokenizer", chatml_folder, "--template", "tokenizer", "--json"]
    write_jsonl(tmp_path / "chat.jsonl", rows)
    penstock("prepare", "chat.jsonl", "--out", "s", *options)
    changed = {"messages": [{"role": "user", "content": "New?"}, {"role": "assistant", "content": "SELECT 1;"}]}
    write_jsonl(tmp_path / "chat.jsonl", [*rows[:3], changed, *rows[4:]])
    again = penstock("prepare", "chat.jsonl", "--out", "s", *options).json
    fresh = penstock("prepare", "chat.jsonl", "--out", "fresh", *options).json
    assert again["documents_reused"] == len(rows) - 1
    assert (again["version"], again["digest"]) == (2, fresh["digest"])
    assert penstock("verify", "s", "--json").json["ok"]
    with open_store(tmp_path / "s") as mixed, open_store(tmp_path / "fresh") as whole:
        for name in ("loss_documents", "loss_starts", "loss_runs"):
            assert mixed.arrays[name].tolist() == whole.arrays[name].tolist()
        assert len(mixed.arrays["loss_documents"]) == len(rows)


def test_loss_without_a_template_is_refused(penstock, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"text": "some text"}\n')
    refused = penstock("prepare", "rows.jsonl", "--loss", "all", "--out", "s", expect=1)
    refused.assert_one_error()
    assert "--template" in refused.err
