"""Builds the optional C extension `penstock._native` while the package is installed.

With the compiler that Python itself was built with, on Linux. Where there is none, or it fails, the package is
installed without the extension: everything works, `prepare` takes longer (docs/adr/0013-native.md).
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src", "penstock", "_native.c")
BUILT = SOURCE.with_suffix(".abi3.so")
OPTIONS = ["-O3", "-fPIC", "-shared", "-fvisibility=hidden"]


class NativeExtension(BuildHookInterface):  # type: ignore[misc]
    """Compiles one file into one library beside it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the files of the package are gathered."""
        problem = _compile(Path(self.root))
        if problem is not None:
            self.app.display_warning(f"installed without penstock._native: {problem}")
            return
        build_data["artifacts"].append(BUILT.as_posix())
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def _compile(root: Path) -> str | None:
    """Compiles the extension; returns why that wasn't possible, if it wasn't."""
    if sys.platform != "linux" or sys.implementation.name != "cpython":
        return "it is for CPython on Linux"
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    temporary = root / BUILT.with_suffix(".tmp")
    command = [*compiler, *OPTIONS, f"-I{sysconfig.get_paths()['include']}", str(root / SOURCE), "-o", str(temporary)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"the compiler {compiler[0]!r} can't be started ({error})"
    if run.returncode != 0:
        temporary.unlink(missing_ok=True)
        return f"{shlex.join(command)} failed: {(run.stderr.strip().splitlines() or ['no message'])[0]}"
    temporary.replace(root / BUILT)  # a process that runs meanwhile keeps the file it has open
    return None
