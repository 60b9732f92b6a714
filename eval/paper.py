"""Every experiment of the paper, and then the report: `python -m eval.paper --help`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eval.harness.scales import Scale
from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from eval.harness.paper_plan import Step, StepRecord
    from eval.harness.results import Commit, Result

_JOBS = 4  # steps of the tiny scale at once; each takes about a gigabyte


def main(
    scale: Annotated[
        Scale,
        typer.Option(
            help="tiny runs on any machine, in a quarter of an hour on two cores; paper needs GPUs, --data, and models "
            "of its recipes."
        ),
    ] = "tiny",
    data: Annotated[
        Path | None,
        typer.Option(
            help="At the paper's scale, a folder with folders streamingqa, squad and archivalqa, or some of them."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of every experiment.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for results, logs and the report.")] = Path("results/paper"),
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Run nothing, but show each step's command, the trained models that it needs, and how to train them.",
        ),
    ] = False,
) -> None:
    """Run every experiment of the paper, and make the report. The tiny scale runs up to four at once.

    A step is not repeated if its result exists and comes from the same command, commit and model. An interrupted run
    therefore continues where it stopped. A step that fails is reported, and the other steps run.
    """
    from eval.harness.paper_plan import steps
    from eval.harness.results import writable_folder
    from eval.report.__main__ import write_report
    from mac_rag.errors import DataError

    planned = steps(scale, data, seed)
    if dry_run:
        show_plan(planned, scale, data, output)
        return
    writable_folder(output, "--output")
    records = run_steps(planned, output, jobs=min(_JOBS, cores()) if scale == "tiny" else 1)
    failed = [record for record in records if record.status == "failed"]
    counts = {status: sum(record.status == status for record in records) for status in ("done", "failed", "not run")}
    say(", ".join(f"{count} {status}" for status, count in counts.items()))
    for record in failed:
        say(f"failed: {record.name}: {record.reason}; see {output / record.name}.log", err=True)
    try:
        write_report([output], output / "report.html")
    except DataError as error:
        say(f"No report: {error}", lines=True, err=True)
    if failed:
        raise typer.Exit(1)


def show_plan(planned: Sequence[Step], scale: Scale, data: Path | None, output: Path) -> None:
    """Shows what would run, with the folder of the data sets and that of the results."""
    from eval.harness.paper_plan import models_needed, models_to_train

    needs = {step.name: models_needed(step) if scale == "paper" else [] for step in planned}
    models = models_to_train(path for paths in needs.values() for path in paths)
    if models:
        say("First, train:")
    for model in models:
        say(f"    {model.command((data or Path('DATA')) / model.dataset)}")
    for number, step in enumerate(planned, 1):
        say(f"[{number}/{len(planned)}] {step.name}")
        say(f"    {step.shown(output)}")
        if needs[step.name]:
            say(f"    needs {', '.join(needs[step.name])}")
        if step.missing:
            say(f"    data that you bring: {step.missing}")
    waiting = sum(bool(step.missing) for step in planned)
    say(f"{len(planned)} steps: {waiting} wait for data; {len(models)} models to train first")


def run_steps(planned: Sequence[Step], output: Path, jobs: int = 1) -> list[StepRecord]:
    """Runs steps in subprocesses, each with a log beside its result in a folder that exists.

    Args:
        jobs: how many steps run side by side; they share the CPU's cores.

    Returns:
        The outcome of each step, in order. The folder's file of records is updated after every step.
    """
    from eval.harness.paper_plan import StepRecord, read_records, write_records
    from eval.harness.results import checkout

    records = {record.name: record for record in read_records(output)}
    commit = checkout()
    if commit is not None and commit.dirty:
        say("The checkout has uncommitted changes: finished steps are kept though the code may differ.")
    environment = {"OMP_NUM_THREADS": str(max(1, cores() // jobs)), **os.environ}

    def run(number: int, step: Step) -> StepRecord:
        head = f"[{number}/{len(planned)}] {step.name}"
        record = StepRecord(name=step.name, experiment=step.experiment, status="not run", reason=step.missing)
        if step.missing:
            say(f"{head}: not run: {step.missing}")
            return record
        if finished(step, output, commit):
            say(f"{head}: done before")
            return record.model_copy(update={"status": "done"})
        say(head)
        began = time.perf_counter()
        reason = run_step(step, output, environment)
        minutes = (time.perf_counter() - began) / 60
        record = record.model_copy(update={"status": "failed" if reason else "done", "reason": reason})
        say(f"{head}: {record.status} in {minutes:.1f} min{f': {reason}' if reason else ''}")
        return record

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for future in as_completed([pool.submit(run, *pair) for pair in enumerate(planned, 1)]):
                records[future.result().name] = future.result()
                write_records(output, [records[step.name] for step in planned if step.name in records])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [records[step.name] for step in planned]


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_step(step: Step, output: Path, environment: Mapping[str, str]) -> str:
    """Runs one step, with a log of everything that it prints; returns why it failed, or ""."""
    log, result = output / f"{step.name}.log", step.result(output)
    # The result of an earlier run must not pass for the result of this one.
    before = result.stat().st_mtime_ns if result.exists() else None
    with log.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-m", *step.command(output)]
        process = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if process.returncode:
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or [f"exit code {process.returncode}"])[-1]
    if not result.exists() or result.stat().st_mtime_ns == before:
        return f"it wrote no {result}"
    return ""


@cache
def answer_digest(name: str) -> str | None:
    """The answer digest of a model; None if it cannot be loaded."""
    from mac_rag.errors import MACError
    from mac_rag.model import MACModel

    try:
        return MACModel.from_pretrained(name).answer_digest
    except MACError:
        return None


def finished(step: Step, output: Path, commit: Commit | None) -> bool:
    """True if the result of a step exists and comes from the same command, commit and model."""
    from eval.harness.results import Result
    from mac_rag.errors import DataError

    try:
        result: Result = Result.read(step.result(output))
    except DataError:
        return False
    if (result.command, result.git) != (step.shown(output), commit):
        return False
    return result.model is None or answer_digest(result.model.name) == result.model.answer_digest


if __name__ == "__main__":
    run_command(main)
