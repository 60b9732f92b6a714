"""`mac-rag serve` answers --help at once."""

from __future__ import annotations

import subprocess
import sys


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from mac_rag.cli.main import app
for command in (["serve"], ["mcp"], ["key", "add"]):
    try:
        app([*command, "--help"])
    except SystemExit as end:
        assert not end.code
heavy = {"torch", "transformers", "fastapi", "starlette", "uvicorn", "mcp", "prometheus_client", "numpy"}
print(sorted(heavy & set(sys.modules)))
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Usage" in finished.stdout
    assert finished.stdout.splitlines()[-1] == "[]", finished.stderr
