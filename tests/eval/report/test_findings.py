"""Each check of a finding on rows made by hand: where it holds, where it does not, and where it cannot be told."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.harness.bootstrap import paired_interval
from eval.harness.results import Row
from eval.report.collect import ResultFile
from eval.report.findings import (
    FINE_TUNING,
    Check,
    ahead,
    falling,
    most_kept,
    nearest_best,
    retained,
    retrieval_gains,
    verdict,
)
from tests.eval.helpers import result, samples, scored


def result_file(*rows: Row) -> ResultFile:
    return ResultFile(Path("r.json"), result("any", rows))


def measured(name: str, settings: dict[str, str | int | float], **measures: float) -> Row:
    return Row(name=name, settings=settings, measures=measures)


@pytest.mark.parametrize(("mac", "holds"), [(0.31, True), (0.3, False), (0.25, False)])
def test_ahead_of_every_other(mac: float, holds: bool) -> None:
    rows = (scored("Uniform", 0.2), scored("a row", 0.3, method="CaMeLS"), scored("MAC", mac), scored("RAG", 0.9))
    check = ahead(("MAC",), FINE_TUNING)(result_file(*rows))
    assert (check.held == check.of == 1) is holds
    assert f"MAC {100 * mac:.1f}, best other a row 30.0" in check.numbers


def test_a_tie_holds_only_where_ties_are_allowed() -> None:
    rows = result_file(scored("P-tuning v2", 0.3), scored("LoRA", 0.3))
    assert ahead(("P-tuning v2",), ("LoRA",), ties=True)(rows).held
    assert not ahead(("P-tuning v2",), ("LoRA",))(rows).held


def test_less_is_better_for_perplexity() -> None:
    rows = [measured(name, {"method": name}, perplexity=value) for name, value in (("MAC", 9.0), ("Uniform", 11.0))]
    assert ahead(("MAC",), ("Uniform",), "perplexity", less=True)(result_file(*rows)).held
    assert not ahead(("Uniform",), ("MAC",), "perplexity", less=True)(result_file(*rows)).held


def test_a_difference_has_its_interval_if_the_samples_are_there(tmp_path: Path) -> None:
    ours, theirs = [1.0, 0.5, 1.0, 0.0], [0.0, 0.5, 1.0, 0.25]
    rows = (scored("MAC", 0.625), scored("Uniform", 0.4375))
    written = result("main_table", rows).write(tmp_path / "r.json", samples({"MAC": ours, "Uniform": theirs}))
    interval = paired_interval(ours, theirs)
    numbers = ahead(("MAC",), FINE_TUNING)(ResultFile(tmp_path / "r.json", written)).numbers
    assert f"difference +18.8, 95 % {100 * interval.low:+.1f} to {100 * interval.high:+.1f}" in numbers


@pytest.mark.parametrize(("camels", "holds"), [(70.8, True), (97.0, False)])
def test_retention_is_compared_at_the_last_point(camels: float, holds: bool) -> None:
    rows = [
        scored(f"{name} {added}", 0.5, method=name, added=added).model_copy(
            update={"measures": {"retention": value, "f1_before_adaptation": 0.125}}
        )
        for name, last in (("MAC", 96.2), ("CaMeLS", camels))
        for added, value in ((0, 100.0), (700, 10.0), (1400, last))
    ]
    check = retained(result_file(*rows))
    assert (check.held == check.of == 1) is holds
    assert "after 1,400 more documents: MAC 96.2 % (F1 50.0)" in check.numbers
    assert check.numbers.endswith("F1 12.5 before any document")


@pytest.mark.parametrize(
    ("peaks", "holds"), [((90, 70, 60), True), ((90, 70, 71), False), ((90, 90.5, 80), True), ((90, 90, 90), False)]
)
def test_memory_falls_with_p(peaks: tuple[float, ...], holds: bool) -> None:
    rows = [measured(f"{p}", {"K": 4, "p": p}, peak_mb=peak) for p, peak in reversed(list(zip((0, 0.5, 0.75), peaks)))]
    single = [measured(f"one {p}", {"K": 1, "p": p}, peak_mb=50.0) for p in (0, 0.5)]  # nothing to drop
    assert verdict([falling(result_file(*rows, *single))]) == ("yes" if holds else "no")


def test_rows_without_a_data_set_belong_to_that_of_the_result() -> None:
    whole = result_file(measured("one", {"dataset": "squad"}, peak_mb=1.0), measured("all", {}, peak_mb=2.0))
    assert [part.where for part in whole.by_dataset()] == ["squad", "newswire"]


@pytest.mark.parametrize(("share", "memory", "holds"), [(93.2, 34.4, True), (89.0, 34.4, False), (95.0, 100.0, False)])
def test_subgroups_of_16_keep_most(share: float, memory: float, holds: bool) -> None:
    rows = [measured(f"{m}", {"M": m}, f1_kept=50.0, memory_kept=10.0) for m in (2, 64)]
    assert verdict([most_kept(result_file(*rows, measured("16", {"M": 16}, f1_kept=share, memory_kept=memory)))]) == (
        "yes" if holds else "no"
    )


@pytest.mark.parametrize(("nearest", "expected"), [((0.36, 0.4), "yes"), ((0.34, 0.4), "partly"), ((0.3, 0.1), "no")])
def test_nearest_averaging_is_first_at_every_size(nearest: tuple[float, float], expected: str) -> None:
    rows = [
        scored(f"{method} {entries}", f1, method=method, entries=entries)
        for entries, best in zip((128, 256), nearest)
        for method, f1 in (("random pruning", 0.3), ("random averaging", 0.35), ("nearest averaging", best))
    ]
    assert verdict([nearest_best(result_file(*rows))]) == expected


@pytest.mark.parametrize(("together", "expected"), [(0.61, "yes"), (0.6, "partly")])
def test_every_retriever_gains(together: float, expected: str) -> None:
    rows = (scored("MAC", 0.9), scored("bm25", 0.5), scored("bm25 + MAC", 0.7))
    check = retrieval_gains(result_file(*rows, scored("dpr", 0.6), scored("dpr + MAC", together)))
    assert verdict([check]) == expected


@pytest.mark.parametrize(
    "check", [ahead(("MAC",), FINE_TUNING), retained, falling, most_kept, nearest_best, retrieval_gains]
)
def test_a_check_without_its_rows_makes_no_comparison(check) -> None:  # type: ignore[no-untyped-def]
    assert check(result_file()).of == 0
    assert check(result_file(scored("MAC", 0.9))).of == 0


def test_the_verdict_counts_the_comparisons_that_hold() -> None:
    yes, no, some = Check(2, 2, "", ""), Check(0, 1, "", ""), Check(1, 2, "", "")
    assert [verdict(checks) for checks in ([], [yes, yes], [no], [yes, no], [some])] == [
        "not run",
        "yes",
        "no",
        "partly",
        "partly",
    ]
