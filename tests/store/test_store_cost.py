"""What `prepare` must not do because of what it costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

PREPARE_TWICE = """
import json, sys
from pathlib import Path
from penstock.sources import InputOptions, sources_from_inputs
from penstock.store import PrepareOptions, prepare
folder, store, processes = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
options = PrepareOptions(workers=2, unit_bytes=300, vocab_size=300, processes=processes)
prepare(sources_from_inputs([str(folder)]), store, options=options)
(folder / "new.txt").write_text("password = 'hunter2hunter2'  # AKIAIOSFODNN7EXAMPLE " * 10)
prepare(sources_from_inputs([str(folder)]), store, options=options)
print(json.dumps("pandas" in sys.modules))
"""


@pytest.mark.parametrize("processes", [False, True])
def test_pandas_is_not_imported(scratch: Path, corpus: Path, processes: bool):
    """Arrow does so in many innocent calls: a fifth of a second, between the last unit and the commit."""
    pytest.importorskip("pandas")
    outcome = subprocess.run(
        [sys.executable, "-c", PREPARE_TWICE, str(corpus), str(scratch / "store"), json.dumps(processes)],
        env={**os.environ, "PYTHONPATH": str(Path(penstock.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert outcome.stdout.splitlines()[-1] == "false"
