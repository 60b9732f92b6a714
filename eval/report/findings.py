"""The findings of the paper, checked one by one on our own results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from eval.harness.results import Row
from eval.report.collect import Collection, ResultFile
from eval.report.figures import figure, label, with_figure, written

FINE_TUNING = ("Uniform", "Salient Spans", "CaMeLS")
# Percent of the F1 that count as "most of the accuracy"; the paper keeps 93.2 % with subgroups of 16.
MOST = 90.0
# Relative difference that an allocator may cause between two measurements of one peak.
SLACK = 0.01


@dataclass(frozen=True)
class Check:
    """A finding checked on one result.

    Attributes:
        held, of: comparisons that come out as in the paper, of all comparisons; 0 of 0 if the result lacks their rows.
        numbers: the compared figures, as text.
        where: data set and scale of the result.
    """

    held: int
    of: int
    numbers: str
    where: str


NOTHING = Check(0, 0, "", "")


@dataclass(frozen=True)
class Finding:
    """A claim of the paper with its own figures, and a check of it on the results of some experiments."""

    claim: str
    paper: str
    experiments: tuple[str, ...]
    check: Callable[[ResultFile], Check]

    def checks(self, collection: Collection) -> list[Check]:
        """Checks each result, and each data set in it, that has the rows to compare."""
        results = [result for experiment in self.experiments for result in collection.of(experiment)]
        parts = [part for result in results for part in result.by_dataset()]
        return [check for check in map(self.check, parts) if check.of]


def verdict(checks: Sequence[Check]) -> Literal["yes", "no", "partly", "not run"]:
    """The verdict on a finding: yes if all comparisons come out as in the paper, no if none does."""
    held, of = sum(check.held for check in checks), sum(check.of for check in checks)
    if not of:
        return "not run"
    return "yes" if held == of else "partly" if held else "no"


def named(rows: Sequence[Row], *methods: str) -> list[Row]:
    """Selects the rows of some methods, by their setting `method`, or by their name if they have no such setting."""
    wanted = {method.lower() for method in methods}
    return [row for row in rows if str(row.settings.get("method", row.name)).lower() in wanted]


def ahead(
    winners: tuple[str, ...], others: tuple[str, ...], value: str = "f1", *, less: bool = False, ties: bool = False
) -> Callable[[ResultFile], Check]:
    """A check that the best row of one method (`winners`) is ahead of every row of others.

    Args:
        value: name of the compared figure.
        less: True if less is better.
        ties: True if an equal figure is enough.
    """

    def check(file: ResultFile) -> Check:
        rows = with_figure(file.result.rows, value)
        ours, theirs = named(rows, *winners), named(rows, *others)
        if not ours or not theirs:
            return NOTHING
        best, rival = (_best(group, value, less) for group in (ours, theirs))
        lead = (figure(best, value) or 0) - (figure(rival, value) or 0)
        if less:
            lead = -lead
        holds = lead >= 0 if ties else lead > 0
        return Check(int(holds), 1, f"{label(value)}: {_against(file, best, rival, value)}", _where(file))

    return check


def _best(rows: Sequence[Row], value: str, less: bool) -> Row:
    return (min if less else max)(rows, key=lambda row: figure(row, value) or 0)


def _against(file: ResultFile, best: Row, rival: Row, value: str) -> str:
    text = f"{best.name} {written(value, figure(best, value))}, best other {rival.name} "
    text += written(value, figure(rival, value))
    gap = file.difference(best, rival) if value == "f1" else None
    if gap is not None:
        text += f" (difference {100 * gap.mean:+.1f}, 95 % {100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
    return text


def _where(file: ResultFile) -> str:
    scale = f", {file.result.scale} scale" if file.result.scale else ""
    protocol = "" if file.result.protocol == "strict" else f", {file.result.protocol} protocol"
    return f"{file.where}{scale}{protocol}"


def retained(file: ResultFile) -> Check:
    """Checks that MAC retains more than fine-tuning at the last point of the curves."""
    rows = with_figure(file.result.rows, "added", "retention")
    last = max((figure(row, "added") or 0 for row in rows), default=0)
    rows = [row for row in rows if figure(row, "added") == last]
    ours, theirs = named(rows, "MAC"), named(rows, *FINE_TUNING)
    if not ours or not theirs:
        return NOTHING
    values = {row.settings["method"]: figure(row, "retention") or 0 for row in [*ours, *theirs]}
    numbers = ", ".join(
        f"{row.settings['method']} {figure(row, 'retention'):.1f} % (F1 {written('f1', figure(row, 'f1'))})"
        for row in [*ours, *theirs]
    )
    before = figure(ours[0], "f1_before_adaptation")
    if before is not None:
        # A system that learned nothing retains everything, so retention means nothing without this F1.
        numbers += f"; F1 {before:.1f} before any document"
    holds = all(values["MAC"] > value for name, value in values.items() if name != "MAC")
    return Check(int(holds), 1, f"after {last:,.0f} more documents: {numbers}", _where(file))


def falling(file: ResultFile) -> Check:
    """Checks that memory falls from each p to the next, at each K above 1 with several p."""
    rows = with_figure(file.result.rows, "K", "p", "peak_mb")
    lines, held = [], 0
    for size in sorted({figure(row, "K") or 0 for row in rows}):
        by_p = sorted((row for row in rows if figure(row, "K") == size), key=lambda row: figure(row, "p") or 0)
        peaks = [figure(row, "peak_mb") or 0 for row in by_p]
        if len(peaks) < 2 or size < 2:
            continue
        steady = all(after <= before * (1 + SLACK) for before, after in pairwise(peaks))
        if steady and peaks[-1] < peaks[0]:
            held += 1
        steps = " → ".join(f"{peak:,.0f}" for peak in peaks)
        lines.append(f"K = {size:g}: {steps} MB")
    points = ", ".join(f"{p:g}" for p in sorted({figure(row, "p") or 0 for row in rows}))
    return Check(held, len(lines), f"p = {points}; " + "; ".join(lines), _where(file))


def most_kept(file: ResultFile) -> Check:
    """Checks that subgroups of 16, or of the nearest measured size, keep most of the F1 in less memory."""
    rows = with_figure(file.result.rows, "M", "f1_kept", "memory_kept")
    if not rows:
        return NOTHING
    row = min(rows, key=lambda row: abs((figure(row, "M") or 0) - 16))
    share, memory = figure(row, "f1_kept") or 0, figure(row, "memory_kept") or 0
    numbers = f"M = {figure(row, 'M'):g}: {share:.1f} % of the F1 in {memory:.1f} % of the memory"
    return Check(int(share >= MOST and memory < 100), 1, f"{numbers} (at least {MOST:g} % count as most)", _where(file))


def nearest_best(file: ResultFile) -> Check:
    """Checks at each size of the bank that nearest averaging has the highest F1."""
    methods = ("random pruning", "random averaging", "nearest averaging")
    rows = named(with_figure(file.result.rows, "entries", "f1"), *methods)
    parts, held = [], 0
    for size in sorted({figure(row, "entries") or 0 for row in rows}, reverse=True):
        scores = {str(row.settings["method"]): figure(row, "f1") or 0 for row in rows if figure(row, "entries") == size}
        if set(scores) == set(methods):
            if scores["nearest averaging"] >= max(scores.values()):
                held += 1
            parts.append(f"{size:,.0f} entries: " + ", ".join(f"{name} {score:.1f}" for name, score in scores.items()))
    return Check(held, len(parts), "F1 %; " + "; ".join(parts), _where(file))


def retrieval_gains(file: ResultFile) -> Check:
    """Checks for every retriever and k that the memory raises the F1 over the same prompts without it."""
    rows = file.result.rows
    pairs = list(_pairs(rows))
    numbers = "; ".join(
        f"{without.name} {figure(without, 'f1'):.1f} → {figure(together, 'f1'):.1f}" + _interval(together)
        for without, together in pairs
    )
    held = sum((together.f1 or 0) > (without.f1 or 0) for without, together in pairs)
    return Check(held, len(pairs), f"F1 %; {numbers}", _where(file))


def _pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    by_name = {row.name: row for row in rows if row.f1 is not None}
    for name, row in by_name.items():
        if f"{name} + MAC" in by_name:
            yield row, by_name[f"{name} + MAC"]


def _interval(row: Row) -> str:
    return f" (95 % {100 * row.gain.f1.low:+.1f} to {100 * row.gain.f1.high:+.1f})" if row.gain else ""


FINDINGS = (
    Finding(
        "MAC is ahead of all fine-tuning baselines.",
        "In every model and data set of Table 1; GPT2-XL on StreamingQA: F1 15.38 against 11.67 of CaMeLS.",
        ("main_table",),
        ahead(("MAC",), FINE_TUNING),
    ),
    Finding(
        "After 1,400 more documents MAC retains more than fine-tuning.",
        "96.2 % of the F1, CaMeLS 70.8 % (Figure 3).",
        ("retention",),
        retained,
    ),
    Finding(
        "The memory of training falls with the share p of dropped back-propagation.",
        "Falling in Figure 4, whose numbers the paper does not print.",
        ("dropout_memory",),
        falling,
    ),
    Finding(
        "Hierarchical aggregation keeps most of the accuracy.",
        "M = 16 keeps 93.2 % in 34.4 % of the memory (Figure 5).",
        ("hierarchical",),
        most_kept,
    ),
    Finding(
        "Averaging nearest neighbours is the best way to make room in the bank.",
        "Best of the three in Figure 7, whose numbers the paper does not print.",
        ("reduction",),
        nearest_best,
    ),
    Finding(
        "P-tuning v2 is at or above LoRA.",
        "F1 15.38 against 15.15 (Table 4).",
        ("peft",),
        ahead(("P-tuning v2",), ("LoRA",), ties=True),
    ),
    Finding(
        "A retriever with MAC is above the retriever alone.",
        "All nine pairs of Table 2; BM25 top-5: F1 71.83 → 74.89.",
        ("archivalqa", "squad", "streamingqa"),
        retrieval_gains,
    ),
    Finding(
        "MAC takes less time to adapt to the stream than CaMeLS.",
        "2.5 against 28.58 minutes (Figure 2).",
        ("adaptation_cost",),
        ahead(("MAC",), ("CaMeLS",), "minutes", less=True),
    ),
    Finding(
        "Out of distribution MAC is ahead of CaMeLS.",
        "F1 10.47 against 8.63 on SQuAD, 13.73 against 13.43 on ArchivalQA (Table 5).",
        ("ood",),
        ahead(("MAC",), ("CaMeLS",)),
    ),
    *(
        Finding(
            f"MAC has the lowest perplexity on {documents} documents.",
            f"{ours} against {theirs} of the best baseline (Table 6).",
            ("perplexity",),
            ahead(("MAC",), FINE_TUNING, f"perplexity_{documents}", less=True),
        )
        for documents, ours, theirs in (("adapted", 10.91, 11.31), ("unseen", 12.71, 13.89))
    ),
    Finding(
        "The encoder-decoder is the best design of the amortization network.",
        "F1 15.38 against 15.01 and 14.87 (Table 7).",
        ("amortization",),
        ahead(("encoder-decoder",), ("encoder-only", "decoder-only")),
    ),
    Finding(
        "Training on a 16-bit base model is better than on a 4-bit one.",
        "F1 27.20 against 21.79 on StreamingQA (Table 8).",
        ("quantization",),
        ahead(("16bit",), ("4bit",)),
    ),
    Finding(
        "MAC is ahead of compressed contexts with a trained retriever.",
        "F1 27.20 against 25.98 of CCM (Table 9).",
        ("main_table",),
        ahead(("MAC",), ("CCM + encoder retriever",)),
    ),
    Finding(
        "Without the documents few questions can be answered.",
        "GPT2-XL: F1 7.12 zero-shot, 10.78 five-shot, 15.38 with MAC (Table 10).",
        ("main_table",),
        ahead(("MAC",), ("zero-shot", "5-shot")),
    ),
)
