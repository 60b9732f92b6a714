"""A plan in words and tables, as JSON, and the table of all presets in the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mac_rag.lm.base_lm import BaseLM
from mac_rag.model.presets import PRESETS, preset
from pipelines.planning.advice import Advice
from pipelines.planning.answering import Asking, answering_memory, row_bytes
from pipelines.planning.memory import GIB, RESERVED, Memory, smallest_gpu
from pipelines.planning.subject import Subject, subject
from pipelines.planning.training import trained_numbers, training_of
from pipelines.planning.weights import BASE_LM, weights_by_part

ROWS = ("bf16", "int8")  # how a bank keeps documents


@dataclass(frozen=True)
class Plan:
    """Sizes and memory of one subject.

    Attributes:
        name: the subject.
        settings: the sizes of a training step, in words.
        parameters: part -> number of weights.
        trained: part -> those of them that the training changes.
        document: kind of rows -> bytes of a document in a bank; empty where an LM is tuned alone.
        training: memory of the training.
        answering: memory of answering; None where an LM is tuned alone.
        asking: how the model is asked.
    """

    name: str
    settings: str
    parameters: Mapping[str, int]
    trained: Mapping[str, int]
    document: Mapping[str, int]
    training: Memory
    answering: Memory | None
    asking: Asking

    def as_json(self, gpu: int | None, help_: Sequence[Advice]) -> dict[str, Any]:
        """The plan as plain values, bytes everywhere.

        Args:
            gpu: bytes of a GPU; None for none.
            help_: what would help.
        """
        uses = {"training": self.training, "answering": self.answering}
        values: dict[str, Any] = {
            "name": self.name,
            "settings": self.settings,
            "parameters": dict(self.parameters),
            "trained": dict(self.trained),
            "bytes_per_document": dict(self.document),
            "asking": asdict(self.asking),
            "reserved": RESERVED,
            "gpu": gpu,
        }
        for use, memory in uses.items():
            if memory is not None:
                fits = None if gpu is None else memory.fits(gpu)
                values[use] = {"parts": memory.parts, "total": memory.total, "fits": fits}
        values["advice"] = [{"settings": each.settings, "total": each.memory.total} for each in help_]
        return values


def make_plan(of: Subject, asking: Asking, document_tokens: int | None = None) -> Plan:
    """The plan of a subject.

    Args:
        of: the subject.
        asking: how its model is asked.
        document_tokens: as `training_memory` takes it.

    Raises:
        ConfigError, ModelLoadError: as `Subject.empty` and `training_memory`.
    """
    model = of.empty()
    parameters, document, answering = {}, {}, None
    if isinstance(model, BaseLM):
        parameters = {BASE_LM: sum(weight.numel() for weight in model.parameters())}
    else:
        parameters = {part.name: part.count for part in weights_by_part(model)}
        document = {rows: row_bytes(model, rows) for rows in ROWS}
        answering = answering_memory(model, asking)
    training = training_of(model, of.recipe, document_tokens)  # from here on the model is prepared for it
    trained = trained_numbers(model, of.recipe)
    return Plan(of.name, of.settings, parameters, trained, document, training, answering, asking)


def text_lines(plan: Plan, gpu: int | None, help_: Sequence[Advice]) -> Iterator[str]:
    """The plan for people.

    Args:
        plan: the plan.
        gpu: bytes of a GPU; None for none.
        help_: what would help where the training does not fit.
    """
    yield plan.name
    yield ""
    yield from _table(
        ["weights", "all", "trained"],
        [[part, number(count), number(plan.trained.get(part, 0))] for part, count in plan.parameters.items()],
    )
    if plan.document:
        sizes = ", ".join(f"{size:,} bytes in {rows}" for rows, size in plan.document.items())
        yield from ("", f"A document in a bank takes {sizes}.")
    yield from ("", f"Training, {plan.settings}:")
    yield from _memory(plan.training, gpu)
    if plan.answering is not None:
        asking = plan.asking
        yield ""
        yield (
            f"Answering, {asking.questions:,} questions at once, {asking.context:,} tokens of context, "
            f"{asking.documents:,} documents in the bank:"
        )
        yield from _memory(plan.answering, gpu)
    if help_:
        yield from ("", "What makes the training smaller:")
        yield from _table(
            ["options", "in all", ""],
            [[each.settings, gib(each.memory.total), _verdict(each.memory, gpu)] for each in help_],
        )


def _memory(memory: Memory, gpu: int | None) -> Iterator[str]:
    kinds = memory.kinds
    rows = [
        [name, *(gib(part[kind]) if part.get(kind) else "" for kind in kinds), gib(sum(part.values()))]
        for name, part in memory.parts.items()
        if any(part.values())
    ]
    total = ["in all", *(gib(memory.of(kind)) for kind in kinds), gib(memory.total)]
    yield from _table(["GiB", *kinds, "in all"], [*rows, total])
    if gpu is not None:
        yield f"{_verdict(memory, gpu)}, with {gib(RESERVED)} GiB for CUDA and the allocator"


def _verdict(memory: Memory, gpu: int | None) -> str:
    if gpu is None:
        return ""
    return f"{'fits' if memory.fits(gpu) else 'does not fit'} into {gib(gpu)} GiB"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        cells = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip()


def preset_table() -> Iterator[str]:
    """The plans of all presets as a table in Markdown; see `docs/guides/presets.md`."""
    yield "| preset | LM | trained | T | KB a document | training | GiB | GPU | answering, GiB |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name in PRESETS:
        of = subject(name)
        plan = make_plan(of, Asking())
        config, trainer = preset(name), of.recipe.trainer
        assert plan.answering is not None
        gpu = smallest_gpu(plan.training)
        cells = [
            f"`{name}`",
            number(plan.parameters[BASE_LM]) + (", 4 bit" if config.base_lm.quantization == "nf4" else ""),
            number(sum(plan.trained.values())),
            str(config.tokens),
            " / ".join(f"{size / 1000:.0f}" for size in plan.document.values()),
            f"{trainer.batch_size} × {trainer.accumulate}, {trainer.precision}",
            gib(plan.training.total),
            "several" if gpu is None else str(gpu),
            gib(plan.answering.total),
        ]
        yield f"| {' | '.join(cells)} |"


def gib(size: int) -> str:
    """Bytes in GiB, with two decimals below 10 GiB and one above."""
    return f"{size / GIB:.{1 if size >= 10 * GIB else 2}f}"


def number(count: int) -> str:
    """A number of weights: 135 M, 6.7 B."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} B"
    return f"{count / 1e6:.1f} M" if count else "0"
