"""Time of a question from banks of a hundred to a million documents: `python -m benchmarks.scale --help`."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eval.harness.command import SeedOption
from eval.harness.streams import DataOption
from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from mac_rag.bank import MemoryBank
    from mac_rag.model import AmortizedModel

_GROUP = 2048  # documents of a bank that are put at a time
_ADAPTED = 20_000  # largest number of documents that are adapted to; the others are mixtures of them
_READ_WHOLE = 6000  # largest bank that is also read as a whole, and the published way
_CHANGED = 5  # documents that are deleted, and adapted to again


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of the banks. A bank that is there is used again.")],
    documents: Annotated[
        list[int] | None, typer.Option(min=1, help="Size of a bank; may be repeated.", show_default="100, 2,000, 6,000")
    ] = None,
    model: Annotated[str, typer.Option(help="A MAC model: a name or a folder.")] = "mac-small",
    data: DataOption = None,
    rows: Annotated[Literal["bf16", "int8", "pq", "fp32"], typer.Option(help="Numbers of the banks' rows.")] = "bf16",
    questions: Annotated[int, typer.Option(min=2, help="Questions, each asked alone.")] = 20,
    seed: SeedOption = 0,
) -> None:
    """Time opening a bank, questions and changes, each bank in a process of its own, from the disk.

    A bank has the documents of a data set, those of its test stream first. Beyond 20,000 it has mixtures of them
    (`benchmarks.large_banks.mixed_documents`). Banks of up to 6,000 documents also aggregate the same questions over
    all rows, as if no document prior told which rows can matter, and as the published implementation does it
    (`benchmarks.published`); the difference is that of phi*.
    """
    from benchmarks.measure import in_child

    sizes = sorted(set(documents or (100, 2000, 6000)))
    prefix = f"{model.replace('/', '-')}-{rows}"
    adapted = min(_ADAPTED, sizes[-1])
    real = folder / f"{prefix}-{adapted}"
    in_child(_adapt, real, adapted, model, data, rows, seed)
    for count in sizes:
        place = folder / f"{prefix}-{count}"
        in_child(_fill, place, count, real, model, rows, seed)
        row = in_child(_measure, place, count, model, data, questions, seed, whole=count <= _READ_WHOLE)
        row |= in_child(_change, place, count, model, data, questions, seed)
        if count <= _READ_WHOLE:
            row |= in_child(_published, place, count, model, data, questions, seed)
        say(" | ".join([f"documents {count:,}", *(f"{name} {value:,.4g}" for name, value in row.items())]))


def _adapt(place: Path, count: int, model: str, data: str | None, rows: Any, seed: int) -> None:
    """Makes a bank of the documents of a data set: those of its test stream, then those of its other splits."""
    from eval.harness.streams import named_data, open_stream
    from mac_rag.data import SPLITS, load_dataset
    from mac_rag.data.types import Document
    from mac_rag.engine import MACEngine
    from mac_rag.errors import DataError
    from mac_rag.model import AmortizedModel

    if _holds(place, count):
        return
    documents = list(open_stream(data, "test", count, 1, seed=seed, scale="tiny")[0].documents)
    if data is not None:
        name, files = named_data(data)
        for split in SPLITS[name]:
            documents += () if split in ("test", "all") else load_dataset(name, split, files).documents
    if len(documents) < count:
        raise DataError(f"{data} has {len(documents):,} documents; give --documents at most so many")
    loaded = AmortizedModel.from_pretrained(model, device="cpu")
    with _opened(place, loaded, rows) as bank:
        # The same paragraph may have the same id in two splits.
        numbered = [Document(f"{number}", each.text) for number, each in enumerate(documents[:count])]
        MACEngine(loaded, bank).adapt(numbered, progress=True)


def _holds(place: Path, count: int) -> bool:
    """True if a bank is complete."""
    from mac_rag.bank import MemoryBank

    return MemoryBank.exists(place) and len(MemoryBank.open(place)) == count


def _opened(place: Path, model: AmortizedModel, rows: Any) -> MemoryBank:
    """A bank to go on with, or a new one."""
    from mac_rag.bank import MemoryBank

    if MemoryBank.exists(place):
        return MemoryBank.open(place, write=True)
    return MemoryBank.create(place, model.fingerprint, rows=rows)


def _fill(place: Path, count: int, real: Path, model: str, rows: Any, seed: int) -> None:
    """Makes a bank of another's rows and of mixtures of them, unless it is complete; continues an unfinished one."""
    from benchmarks.large_banks import mixed_documents
    from mac_rag.bank import MemoryBank
    from mac_rag.bank.overview import put_with_overview
    from mac_rag.data.types import Document
    from mac_rag.model import AmortizedModel
    from mac_rag.progress import progress_bar

    if _holds(place, count):
        return
    loaded = AmortizedModel.from_pretrained(model, device="cpu")
    originals = MemoryBank.open(real)
    documents = [Document(entry.document_id, "") for entry in originals]
    lexical = loaded.aggregation.lexical_vectors
    with _opened(place, loaded, rows) as bank, progress_bar("fill", count, done=len(bank)) as bar:
        for group, phi in mixed_documents(documents, originals.phi, lexical, len(bank), count, _GROUP, seed):
            put_with_overview(bank, loaded.aggregation, group, phi, [1] * len(group))
            bank.commit()
            bar.advance(len(group))


def _measure(
    place: Path, count: int, model: str, data: str | None, questions: int, seed: int, *, whole: bool
) -> dict[str, float]:
    import numpy

    from benchmarks.measure import memory, timed
    from eval.harness.streams import open_stream
    from mac_rag.bank import MemoryBank
    from mac_rag.engine import MACEngine
    from mac_rag.model import AmortizedModel

    loaded = AmortizedModel.from_pretrained(model, device="cpu")
    stream, _ = open_stream(data, "test", min(count, 100), questions, seed=seed, scale="tiny")
    asked = [question.question for question in stream.questions]
    before = memory("VmRSS")
    opening, bank = timed(lambda: MemoryBank.open(place))
    engine = MACEngine(loaded, bank)
    first, _ = timed(partial(engine.aggregate, asked[:1]))
    later = [timed(partial(engine.aggregate, [one]))[0] for one in asked[1:]]
    answering = [timed(partial(engine.answer, [one]))[0] for one in asked[1:]]  # phi* is remembered
    files = [place, *place.parent.glob(f"{place.name}-*")]
    found = {
        "KiB a document": sum(file.stat().st_size for file in files) / count / 1024,
        "opening s": opening,
        "first s": first,
        "later s": statistics.median(later),
        "99th percentile s": float(numpy.quantile(later, 0.99)),
        "generating s": statistics.median(answering),
        "memory GiB": (memory("VmHWM") - before) / 2**30,
    }
    del engine  # else the summaries of all rows would be in memory twice
    return found | _whole(loaded, bank, asked) if whole else found


def _change(place: Path, count: int, model: str, data: str | None, questions: int, seed: int) -> dict[str, float]:
    """Documents are deleted, and adapted to again; the first question after each change is asked at once."""
    from benchmarks.measure import timed
    from eval.harness.streams import open_stream
    from mac_rag.bank import MemoryBank
    from mac_rag.data.types import Document
    from mac_rag.engine import MACEngine
    from mac_rag.model import AmortizedModel

    loaded = AmortizedModel.from_pretrained(model, device="cpu")
    stream, _ = open_stream(data, "test", min(count, 100), questions, seed=seed, scale="tiny")
    bank = MemoryBank.open(place, write=True)
    engine = MACEngine(loaded, bank)
    ask = partial(engine.aggregate, [stream.questions[0].question])
    ask()
    seconds: dict[str, list[float]] = {}
    changed = min(_CHANGED, count)
    for number in range(changed):
        name = str(number * (count // changed))
        again = Document(name, stream.documents[number].text)
        steps: dict[str, Callable[[], object]] = {
            "deleting one": partial(engine.forget, name),
            "question after it": ask,
            "adapting one": partial(engine.adapt, [again]),
            "question after that": ask,
        }
        for step, run in steps.items():
            seconds.setdefault(f"{step} s", []).append(timed(run)[0])
    return {step: statistics.median(of) for step, of in seconds.items()} | {"closing s": timed(bank.close)[0]}


def _whole(model: AmortizedModel, bank: MemoryBank, asked: Sequence[str]) -> dict[str, float]:
    """The same questions from all rows, without the bounds of the view."""
    import torch

    from benchmarks.large_banks import UnboundedBank
    from benchmarks.measure import timed
    from mac_rag.bank.projection import ProjectedBank

    network = model.aggregation
    view = ProjectedBank(network, bank, device="cpu")
    unbounded = UnboundedBank(view)
    seconds, differences = [], []
    with torch.no_grad():
        for text in asked[1:6]:
            question = model.input_encoder([model.input_encoder.ids(text)])
            taken, expected = timed(partial(_phi, network, question, unbounded))
            seconds.append(taken)
            differences.append(float((_phi(network, question, view) - expected).norm() / expected.norm()))
    return {"all rows s": statistics.median(seconds), "difference": max(differences)}


def _published(place: Path, count: int, model: str, data: str | None, questions: int, seed: int) -> dict[str, float]:
    """The same questions as the published implementation aggregates them: all rows are projected for each."""
    import torch

    from benchmarks.measure import timed
    from benchmarks.published import attend
    from eval.harness.streams import open_stream
    from mac_rag.bank import MemoryBank
    from mac_rag.model import AmortizedModel
    from mac_rag.nn.memory_tokens import MemoryTokens

    loaded = AmortizedModel.from_pretrained(model, device="cpu")
    stream, _ = open_stream(data, "test", min(count, 100), questions, seed=seed, scale="tiny")
    phi = MemoryTokens.split(MemoryBank.open(place).phi, loaded.config.lexical_vectors)
    seconds = []
    with torch.no_grad():
        for question in stream.questions[1:4]:
            ids = loaded.input_encoder.ids(question.question)
            seconds.append(timed(partial(attend, loaded.aggregation, loaded.input_encoder([ids]), phi))[0])
    return {"published s": statistics.median(seconds)}


def _phi(network: Any, question: Any, view: Any) -> Tensor:
    phi: Tensor = network(question, view)[0]
    return phi


if __name__ == "__main__":
    run_command(main)
