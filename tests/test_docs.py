"""README, quickstart and guides do what they say: their code runs as it stands, and prints what the page shows.

The blocks of a page run in the order in which they stand, in one empty folder. Python blocks share their names; a bash
block runs line by line and stops at the first error. A `text` block right behind another block is what that one prints,
where `...` stands for anything. A block behind the comment `<!-- not run: reason -->` is left out.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
GUIDES = sorted(path.name for path in (ROOT / "docs" / "guides").glob("*.md"))
PAGES = ("README.md", "docs/index.md", "docs/quickstart.md", *(f"docs/guides/{name}" for name in GUIDES))
LANGUAGES = {"python", "bash", "text"}
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page, line: where it opens.
        language: what stands behind the fence.
        text: its content.
        not_run: the reason why it is left out; None if it runs.
        output: what it prints, if the page shows it.
    """

    page: str
    line: int
    language: str
    text: str
    not_run: str | None = None
    output: str | None = None


def read_blocks(page: str, text: str) -> list[Block]:
    """The blocks of a page, each with the output that the page shows for it."""
    blocks: list[Block] = []
    before = ""  # the last line that is not empty
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if not line.startswith("```"):
            before = line if line.strip() else before
            continue
        content = []
        for _, inner in lines:
            if inner == "```":
                break
            content.append(inner)
        language = line.removeprefix("```")
        assert language in LANGUAGES, f"{page}:{number}: a block of {language or 'no language'}; known are {LANGUAGES}"
        reason = NOT_RUN.fullmatch(before)
        block = Block(page, number, language, "\n".join(content) + "\n", reason[1] if reason else None)
        if language != "text":
            blocks.append(block)
        elif before == "```" and blocks[-1].output is None:
            blocks[-1] = Block(**{**vars(blocks[-1]), "output": block.text})
        before = "```"
    return blocks


class Runner:
    """Runs the blocks of one page in the current folder: Python in this process, commands in bash.

    Args:
        shims: a folder on the PATH for the command `mac-rag`.
    """

    def __init__(self, shims: Path) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
        module, function = scripts["mac-rag"].split(":")
        shims.mkdir(exist_ok=True)
        command = f"from {module} import {function}; {function}()"
        (shims / "mac-rag").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{command}" "$@"\n')
        (shims / "mac-rag").chmod(0o755)
        path = f"{shims}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}

    def run(self, block: Block) -> str:
        """Runs a block; returns what it prints.

        Raises:
            AssertionError: when a command fails, or the output is not the one that the page shows.
        """
        where, printed = f"{block.page}:{block.line}", io.StringIO()
        if block.language == "python":
            code = "\n" * block.line + block.text  # a traceback names the line of the page
            with contextlib.redirect_stdout(printed), warnings.catch_warnings(action="ignore"):
                exec(compile(code, block.page, "exec"), self.names)
        else:
            script = ["bash", "-c", f"set -e -o pipefail\n{block.text}"]
            done = subprocess.run(script, capture_output=True, text=True, env=self.environment)
            assert done.returncode == 0, f"{where} failed\n{done.stdout}{done.stderr}"
            printed.write(done.stdout)
        if block.output is not None:
            wanted, got = stripped(block.output), stripped(printed.getvalue())
            assert doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS), (
                f"{where} shows\n{wanted}\nbut prints\n{got}"
            )
        return printed.getvalue()


def stripped(text: str) -> str:
    """Without blanks at the ends of lines."""
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines()) + "\n"


def run_page(page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs a page in the folder `tmp_path / "page"`; returns what its blocks print."""
    folder = tmp_path / "page"
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")
    runner = Runner(tmp_path / "bin")
    return [runner.run(block) for block in read_blocks(page, text) if block.not_run is None]


@pytest.mark.slow
def test_every_block_runs_page_after_page_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new user reads: nothing that an earlier page leaves behind is in the way of a later one."""
    for page in PAGES:
        assert run_page(page, (ROOT / page).read_text(), tmp_path, monkeypatch), page


def test_few_blocks_are_left_out_and_each_has_a_reason() -> None:
    blocks = [block for page in PAGES for block in read_blocks(page, (ROOT / page).read_text())]
    left_out = [block for block in blocks if block.not_run is not None]
    assert len(left_out) <= 12
    assert len(left_out) <= len(blocks) / 5
    assert [block for block in left_out if block.language != "bash" or len(str(block.not_run).split()) < 3] == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    """Those too that are not run, or are named in a sentence."""
    modules = set(re.findall(r"-m ((?:pipelines|eval|benchmarks)[\w.]*)", (ROOT / page).read_text()))
    assert {module for module in modules if importlib.util.find_spec(module) is None} == set()


class TestHarness:
    """A page that is wrong fails."""

    @pytest.mark.parametrize(
        "text",
        [
            "```python\nimport mac_rag.missing\n```\n",
            "```python\nprint(1)\n```\n\n```text\n2\n```\n",
            "```bash\nfalse\ntrue\n```\n",
            "```bash\nfalse | cat\n```\n",
            "```bash\nmac-rag bank info --bank missing\n```\n",
            "```bash\npython -m eval.compare missing.json missing.json\n```\n",
            "```bash\necho one\n```\n\n```text\ntwo\n```\n",
            "```yaml\na: 1\n```\n",
        ],
    )
    def test_it_notices_what_is_wrong(self, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises((AssertionError, ImportError)):
            run_page("page.md", text, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tour.ipynb", "variants.ipynb"])
def test_a_notebook_runs_from_top_to_bottom(tmp_path: Path, name: str) -> None:
    """And it prints what it shows."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "examples" / name, as_version=4)
    shown = [printed(cell) for cell in notebook.cells]
    # Accelerate imports DeepSpeed where it is installed, and that prints the time unless it is told the device.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute(env=environment)
    assert [printed(cell) for cell in notebook.cells] == shown
    assert any(shown)


def printed(cell: Any) -> str:
    """What a cell of a notebook has printed."""
    return "".join(output.text for output in cell.get("outputs", ()) if output.get("name") == "stdout")
