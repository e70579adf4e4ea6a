"""The data of the four example experts, and a tiny base model for them to be trained on.

In: a folder, by default the one this script lies in. Out: `NAME/train.jsonl` and `NAME/valid.jsonl`, some dozen records
for each expert; and `base/`, a Llama of random weights with two layers, and a tokenizer trained on that data. Both are
pure functions of this file, nothing is downloaded, and it takes some seconds. A model this small learns the shape of
the answers and nothing else; give a real one with `--set model.pretrained=FOLDER`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VALID_EVERY = 6
CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>")

PEOPLE = ("Ada", "Grace", "Edsger", "Barbara", "Donald", "Margaret", "Alan", "Frances")
CITIES = ("Lisbon", "Utrecht", "Oslo", "Porto", "Ghent", "Turin")
THINGS = {"product": ("name", "price", "stock"), "user": ("name", "city", "age"), "order": ("number", "total", "city")}
LABELS = {"Person": "name", "City": "name", "Company": "name", "Product": "title"}
LINKS = {("Person", "City"): "LIVES_IN", ("Person", "Company"): "WORKS_FOR", ("Company", "Product"): "MAKES"}


def json_records(chance: random.Random) -> Iterator[dict[str, Any]]:
    """Sentences to objects, and broken objects to whole ones: {"instruction", "input", "response"}."""
    for _ in range(24):
        person, city, age = chance.choice(PEOPLE), chance.choice(CITIES), chance.randint(20, 80)
        whole = {"name": person, "city": city, "age": age}
        yield {
            "instruction": "Extract the data as JSON with the keys name, city, age.",
            "input": f"{person}, who is {age}, moved to {city} last year.",
            "response": json.dumps(whole),
        }
        broken = json.dumps(whole).replace('"', "'", 2).rstrip("}")
        yield {"instruction": "Repair this JSON.", "input": broken, "response": json.dumps(whole)}


def typescript_records(chance: random.Random) -> Iterator[dict[str, Any]]:
    """Small functions and interfaces: {"messages"}."""
    for _ in range(16):
        thing = chance.choice(list(THINGS))
        keys = THINGS[thing]
        kinds = {key: "number" if key in ("price", "stock", "age", "total", "number") else "string" for key in keys}
        name = thing.capitalize()
        body = "\n".join(f"  {key}: {kind};" for key, kind in kinds.items())
        yield _chat(f"Write a TypeScript interface {name} with {', '.join(keys)}.", f"interface {name} {{\n{body}\n}}")
        key = chance.choice(keys)
        yield _chat(
            f"Write a function that sorts an array of {name} by {key}.",
            f"function by{key.capitalize()}(items: {name}[]): {name}[] {{\n"
            f"  return [...items].sort((a, b) => (a.{key} < b.{key} ? -1 : a.{key} > b.{key} ? 1 : 0));\n}}",
        )
        least = chance.randint(2, 90)
        yield _chat(
            f"Filter numbers of at least {least}.",
            f"const large = (numbers: number[]): number[] => numbers.filter((one) => one >= {least});",
        )


def neo4j_records(chance: random.Random) -> Iterator[dict[str, Any]]:
    """Questions to Cypher, under columns of their own, which the manifest maps: {"question", "schema", "cypher"}."""
    for _ in range(16):
        (left, right), link = chance.choice(list(LINKS.items()))
        key, value = LABELS[left], chance.choice(PEOPLE)
        schema = f"(:{left} {{{key}}})-[:{link}]->(:{right} {{{LABELS[right]}}})"
        asked = link.lower().replace("_", " ")
        yield {
            "question": f"What {right.lower()} is reached by {asked} from {value}?",
            "schema": schema,
            "cypher": f"MATCH (a:{left} {{{key}: '{value}'}})-[:{link}]->(b:{right}) RETURN b.{LABELS[right]}",
        }
        yield {
            "question": f"How many of {left} {asked} each {right}? The {chance.randint(2, 12)} with the most.",
            "schema": schema,
            "cypher": f"MATCH (a:{left})-[:{link}]->(b:{right}) RETURN b.{LABELS[right]}, count(a) AS n "
            "ORDER BY n DESC",
        }
        yield {
            "question": f"Make a {left} called {value}.",
            "schema": schema,
            "cypher": f"CREATE (:{left} {{{key}: '{value}'}})",
        }


def sql_records(chance: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Two tasks: to write a query, and to explain one: ("write" or "explain", {"task", "input", "output"})."""
    for _ in range(24):
        thing = chance.choice(list(THINGS))
        keys, limit = THINGS[thing], chance.randint(1, 20)
        key = chance.choice(keys)
        table = {"table": f"{thing}s", "columns": list(keys)}
        query = f"SELECT {', '.join(keys)} FROM {thing}s ORDER BY {key} DESC LIMIT {limit};"  # noqa: S608  text, never run
        words = f"the {limit} {thing}s with the highest {key}"
        yield "write", {"task": "text to sql", "input": {**table, "question": f"Show {words}."}, "output": query}
        yield "explain", {"task": "explain sql", "input": {"sql": query}, "output": f"It shows {words}."}


def _chat(asked: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def make_data(folder: Path) -> list[Path]:
    """Writes every expert's records; one in six is held out."""
    written = []
    for name, records in (("json", json_records), ("typescript", typescript_records), ("neo4j", neo4j_records)):
        written += _write(folder / name, "", list(records(random.Random(name))))  # noqa: S311
    pairs = list(sql_records(random.Random("sql")))  # noqa: S311
    for task in ("write", "explain"):
        written += _write(folder / "sql", f"{task}-", [record for kind, record in pairs if kind == task])
    return written


def _write(folder: Path, prefix: str, records: list[dict[str, Any]]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    lines = list(dict.fromkeys(json.dumps(record) for record in records))  # no copies
    parts = {
        "train": [line for number, line in enumerate(lines) if number % VALID_EVERY],
        "valid": lines[::VALID_EVERY],
    }
    for name, part in parts.items():
        (folder / f"{prefix}{name}.jsonl").write_text("".join(line + "\n" for line in part))
    return [folder / f"{prefix}{name}.jsonl" for name in parts]


def make_base_model(folder: Path, texts: list[Path]) -> None:
    """A random Llama and its tokenizer, as `transformers` saves them."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", *CONTROL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in texts], trainer)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=0,
        )
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}\n')
    model.save_pretrained(folder)


def main(folder: str | None = None) -> list[str]:
    """Makes everything; the files made."""
    place = Path(folder) if folder else HERE
    texts = make_data(place)
    make_base_model(place / "base", texts)
    return [str(path) for path in [*texts, place / "base"]]


if __name__ == "__main__":
    print("\n".join(main(*sys.argv[1:])))
