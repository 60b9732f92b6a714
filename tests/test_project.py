"""What holds the project together: pinned dependencies, commands that answer --help at once, recipes that load."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from pipelines.recipe import recipe_names
from pipelines.tasks.registry import TASK_KINDS, load_task
from tests.helpers import HEAVY

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = sorted(
    f"{path.parent.name}.{path.stem}"
    for folder in ("pipelines", "eval", "benchmarks")
    for path in (ROOT / folder).glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text()
)
# What a GPU build of PyTorch adds differs from machine to machine; build tools are the environment's own.
UNPINNED = re.compile(r"mac-rag|pip|setuptools|nvidia-.*|cuda-.*|triton")


class TestConstraints:
    LINES = tuple(line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#"))

    def test_each_line_is_an_exact_public_version(self) -> None:
        assert [line for line in self.LINES if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)] == []

    def test_every_dependency_is_pinned_to_a_version_it_allows(self) -> None:
        pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in self.LINES)}
        direct = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
        waiting, seen = [Requirement(text) for text in direct], set()
        while waiting:
            requirement = waiting.pop()
            name = canonicalize_name(requirement.name)
            if str(requirement) in seen or UNPINNED.fullmatch(name):
                continue
            seen.add(str(requirement))
            assert name in pins, f"constraints.txt does not pin {name}"
            assert requirement.specifier.contains(pins[name], prereleases=True), (
                f"{requirement}, but pinned {pins[name]}"
            )
            try:
                needed = map(Requirement, requires(name) or ())
            except PackageNotFoundError:  # an extra that is not installed here
                continue
            extras = ("", *requirement.extras)
            waiting += [r for r in needed if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras)]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


# Each command in a process of its own, forked from one that has imported what all of them need.
_HELP = """
import io, json, os, runpy, sys
from contextlib import redirect_stdout
import rich.markdown, rich.markup, typer.rich_utils
import eval.harness.benchmark, pipelines.recipe
for module in {modules!r}:
    if os.fork():
        os.wait()
        continue
    sys.argv, said, code = [module, "--help"], io.StringIO(), None
    try:
        with redirect_stdout(said):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    heavy = [name for name in {heavy!r} if name in sys.modules]
    print(json.dumps([module, code, said.getvalue(), heavy]), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, tuple[int | None, str, list[str]]]:
    """Of each command with --help its exit code, what it says, and the heavy modules that it has imported."""
    finished = python(_HELP.format(modules=COMMANDS, heavy=HEAVY))
    assert finished.returncode == 0, finished.stderr
    return {module: (code, said, heavy) for module, code, said, heavy in map(json.loads, finished.stdout.splitlines())}


@pytest.mark.parametrize("module", COMMANDS)
def test_help_of_every_command_imports_nothing_heavy(module: str, helps: dict[str, Any]) -> None:
    code, said, heavy = helps[module]
    assert not code
    assert "Usage" in said
    assert heavy == []


@pytest.mark.parametrize("name", sorted({*recipe_names()} - {"my-lm", "my-lm-reading"}))
def test_every_recipe_is_read_by_its_task(name: str) -> None:
    """Those for an LM of one's own are not complete without it; see test_my_lm.py and test_tune_reading.py."""
    task, recipe = load_task(name, None)
    assert isinstance(recipe, TASK_KINDS[task].config)


class TestRecipes:
    def load(self, *overrides: str, name: str = "mac-tiny/pretrain") -> Any:
        return load_task(name, list(overrides))[1]

    def test_set_overrides_one_value(self) -> None:
        changed = self.load("trainer.steps=7", "trainer.betas=[0.8, 0.9]")
        assert changed.trainer.steps == 7
        assert changed.trainer.betas == (0.8, 0.9)
        assert changed.trainer.batch_size == self.load().trainer.batch_size

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("trainer.steps", "--set takes name=value, got 'trainer.steps'"),
            ("trainer.stepz=7", r"trainer\.stepz.*got 7"),
            ("trainer.steps=many", r"trainer\.steps.*got 'many'"),
            ("trainer.steps.more=1", "'steps' holds no further values"),
            ("trainer.steps=[1", "not valid YAML"),
        ],
    )
    def test_a_wrong_override_is_named(self, override: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            self.load(override)

    def test_an_empty_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "empty.yaml").write_text("# nothing yet\n")
        with pytest.raises(ConfigError, match=r"empty\.yaml"):
            self.load(name=str(tmp_path / "empty.yaml"))


class TestReadme:
    """Its code runs in `tests/test_docs.py`."""

    TEXT = (ROOT / "README.md").read_text()

    def test_its_recipes_exist(self) -> None:
        recipes = set(re.findall(r"--config ([\w./-]+)", self.TEXT))
        assert recipes <= set(recipe_names())

    def test_its_links_lead_somewhere(self) -> None:
        links = re.findall(r"\]\((?!http)([^)#]+)", self.TEXT)
        assert [link for link in links if not (ROOT / link).exists()] == []

    def test_it_is_short(self) -> None:
        assert len(self.TEXT.split()) <= 1_000


def examples(docstring: str | None) -> list[doctest.Example]:
    """The doctest examples in the section `Examples:` of a docstring."""
    _, _, section = inspect.cleandoc(docstring or "").partition("\nExamples:\n")
    return doctest.DocTestParser().get_examples(re.split(r"\n(?=\S)", section)[0])


def public_classes() -> list[type]:
    parts = ("", ".integrations.llama_index", ".integrations.langchain", ".bank", ".retrieval")
    modules = (f"mac_rag{part}" for part in parts)
    public = (getattr(module, name) for module in map(importlib.import_module, modules) for name in module.__all__)
    return sorted({value for value in public if isinstance(value, type)}, key=lambda cls: cls.__name__)


class TestPublicNames:
    @pytest.mark.parametrize("cls", public_classes())
    def test_every_public_class_shows_an_example_that_doctest_runs(self, cls: type) -> None:
        assert examples(cls.__doc__), f"the docstring of {cls.__name__} has no example after 'Examples:'"

    def test_all_of_them_can_be_imported(self) -> None:
        import mac_rag

        for name in mac_rag.__all__:
            assert getattr(mac_rag, name) is not None
            assert name in dir(mac_rag)
        assert mac_rag.MACEngine is MACEngine
        assert mac_rag.__version__ == PROJECT["version"]

    def test_an_unknown_one_is_named(self) -> None:
        with pytest.raises(ImportError, match="MACEngin"):
            exec("from mac_rag import MACEngin")

    def test_importing_the_package_imports_nothing_heavy(self) -> None:
        finished = python(f"import mac_rag, sys; print([name for name in {HEAVY!r} if name in sys.modules])")
        assert finished.stdout.strip() == "[]", finished.stderr

    @pytest.mark.parametrize(
        ("folder", "module"), [("langchain", "langchain_core"), ("llama_index", "llama_index.core")]
    )
    def test_an_integration_without_its_framework_names_the_extra(self, folder: str, module: str) -> None:
        finished = python(f"import sys; sys.modules[{module!r}] = None; import mac_rag.integrations.{folder}")
        assert f"pip install 'mac-rag[{folder.replace('_', '-')}]'" in finished.stderr.splitlines()[-1]
