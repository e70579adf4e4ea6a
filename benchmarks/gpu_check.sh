#!/usr/bin/env bash
# A short check of the whole path on a machine with a GPU, run from the source tree: bash benchmarks/gpu_check.sh [OUT]
# Wheels for packages that the machine lacks may lie in .carry/wheels.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/gpu-check}
mkdir -p "$out"
if [ -d .carry/wheels ]; then python3 -m pip install -q --no-index --no-deps .carry/wheels/*.whl; fi
export PYTHONPATH=src PYTHONUNBUFFERED=1
work=$(mktemp -d)

echo "== doctor"; python3 -m penstock doctor
echo "== prepare"; python3 -m penstock prepare stdlib: --out "$work/store" --vocab-size 16384
python3 -m penstock verify "$work/store"
python3 -m penstock bench load --store "$work/store" --skip litdata --skip datasets || true

echo "== train, 124M-class, bf16"
python3 -m penstock train --data "$work/store" --out "$work/small" --set model.preset=small --set seq_len=1024 \
  --set batch_rows=64 --set steps=60 --set eval_every_steps=30 --set checkpoint_every_steps=30
cp "$work/small/manifest.json" "$out/manifest.json"; cp "$work/small/report.html" "$out/report.html"

echo "== resume, deterministic: whole against stopped and resumed"
common=(--data "$work/store" --set steps=20 --set seq_len=256 --set batch_rows=16 --set checkpoint_every_steps=5 --deterministic)
python3 -m penstock train "${common[@]}" --out "$work/whole" >/dev/null
python3 -m penstock train "${common[@]}" --out "$work/cut" --set stop_after_steps=7 >/dev/null || true
python3 -m penstock train "${common[@]}" --out "$work/cut" --resume >/dev/null
python3 - "$work" <<'PY'
import json, sys
def losses(run):
    records = [json.loads(line) for line in open(f"{sys.argv[1]}/{run}/records.jsonl")]
    return {r["step"]: r["loss"] for r in records if r["kind"] == "step"}
whole, cut = losses("whole"), losses("cut")
print("bit-identical" if whole == cut else f"DIFFERENT: {[(k, whole[k], cut.get(k)) for k in whole if whole[k] != cut.get(k)][:3]}")
steps = [json.loads(line) for line in open(f"{sys.argv[1]}/small/records.jsonl")]
steps = [r for r in steps if r["kind"] == "step"][20:]
seconds, tokens, stall = (sum(r[k] for r in steps) for k in ("seconds", "tokens", "data_seconds"))
print(f"steady: {tokens / seconds:,.0f} tokens/s, data stall {100 * stall / seconds:.2f} %")
PY
