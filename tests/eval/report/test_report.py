"""The page of results made by hand, and each check of a finding: where it holds and where not."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from eval.harness.bootstrap import paired_interval
from eval.harness.paper_plan import StepRecord, write_records
from eval.harness.results import Data, Model, Row
from eval.harness.scales import command_of
from eval.report.catalogue import CATALOGUE
from eval.report.collect import ResultFile, collect
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
from eval.report.page import page
from eval.report.summary import checked
from eval.report.tables import published
from tests.eval.helpers import COMMIT, Command, result, samples, scored
from tests.helpers import Elements

BASELINES = {"zero-shot": 0.05, "5-shot": 0.1, "Uniform": 0.2, "Salient Spans": 0.22, "CaMeLS": 0.3}


def every_result(folder: Path) -> None:
    """Writes them; all findings hold but two: LoRA is ahead, and out of distribution CaMeLS is on newswire."""
    table = {
        name: scored(name, f1, method=name)
        for name, f1 in {
            "zero-shot": 0.05,
            "5-shot": 0.1,
            **BASELINES,
            "MAC": 0.5,
            "CCM + encoder retriever": 0.4,
        }.items()
    }
    result("main_table", list(table.values()), not_run={"CaMeLS on a GPU": "there is none"}).write(
        folder / "main_table.json", samples({name: [row.f1 or 0.0] * 3 for name, row in table.items()})
    )
    made = {
        "archivalqa": [scored("bm25 top-5", 0.6), scored("bm25 top-5 + MAC", 0.7)],
        "adaptation_cost": [
            Row(name=name, settings={"method": name}, measures={"peak_mb": mb, "minutes": mb / 10})
            for name, mb in {"Uniform": 80.0, "CaMeLS": 300.0, "MAC": 40.0}.items()
        ],
        "retention": [
            scored(f"{name} +{added}", 0.5 - added * loss / 200, method=name, added=added).model_copy(
                update={"measures": {"retention": 100 - added * loss}}
            )
            for name, loss in {"Uniform": 0.03, "CaMeLS": 0.02, "MAC": 0.003}.items()
            for added in (0, 200, 600, 1000, 1400)
        ],
        "dropout_memory": [
            Row(name=f"K={k}, p={p}", settings={"K": k, "p": p}, measures={"peak_mb": 50 + k * (1 - p) * 10})
            for k in (1, 4, 16, 32)
            for p in (0.0, 0.5, 0.75)
        ],
        "hierarchical": [
            scored("full", 0.5, method="full").model_copy(update={"measures": {"peak_mb": 200.0}}),
            *(
                scored(f"hierarchical, M = {m}", 0.4 + m / 1000, method="hierarchical", M=m).model_copy(
                    update={"measures": {"peak_mb": 10.0 + m, "f1_kept": 95.0, "memory_kept": 30.0}}
                )
                for m in (4, 16, 64)
            ),
        ],
        "cross_attention": [
            *(Row(name=f"{kind} distractors", measures={"gold_mass": 0.6}) for kind in ("bm25", "random")),
            *(
                Row(
                    name=f"{kind}, {document}, token {token}",
                    settings={"distractors": kind, "document": document, "token": token},
                    measures={"mass": (0.5 if document == "gold" else 0.1) / token},
                )
                for kind in ("bm25", "random")
                for document in ("gold", *(f"distractor {n}" for n in range(1, 6)))
                for token in range(1, 9)
            ),
        ],
        "reduction": [
            scored(f"{method}, {entries} entries", f1 * entries / 512, method=method, entries=entries)
            for method, f1 in {"random pruning": 0.3, "random averaging": 0.35, "nearest averaging": 0.5}.items()
            for entries in (384, 256, 128)
        ],
        "peft": [scored("P-tuning v2", 0.4, method="P-tuning v2"), scored("LoRA", 0.45, method="LoRA")],
        "ood": [
            scored(f"{dataset}: {method}", f1, dataset=dataset, method=method)
            for dataset, mac in (("newswire", 0.2), ("squad", 0.3))
            for method, f1 in {"MAC": mac, "CaMeLS": 0.25}.items()
        ],
        "perplexity": [
            Row(
                name=name,
                settings={"method": name},
                measures={"perplexity_adapted": value, "perplexity_unseen": 1.2 * value},
            )
            for name, value in {"Uniform": 20.0, "Salient Spans": float("inf"), "MAC": 10.0}.items()
        ],
        "amortization": [
            scored(name, f1, method=name)
            for name, f1 in {"encoder-only": 0.3, "decoder-only": 0.2, "encoder-decoder": 0.4}.items()
        ],
        "bank_size": [
            scored(f"{n} documents, {prior} prior", f1 / n**0.1, prior=prior).model_copy(update={"documents": n})
            for prior, f1 in {"with": 0.9, "without": 0.8}.items()
            for n in (32, 256, 1665, 5000)
        ],
    }
    for name, rows in made.items():
        result(name, rows, **({"data": None} if name == "ood" else {})).write(folder / f"{name}.json")


LINKS = ("href", "src", "xlink:href")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("results")
    every_result(folder)
    steps = [
        StepRecord(name="quantization", experiment="quantization", status="not run", reason="needs a GPU"),
        StepRecord(name="ood-squad", experiment="ood", status="failed", reason="no <b>memory</b>"),
    ]
    write_records(folder, steps)
    return folder, page(collect([folder]))


class TestPage:
    def test_ids_are_unique_and_links_have_targets(self, made: tuple[Path, str]) -> None:
        parsed = Elements(made[1])
        assert [name for name, count in Counter(parsed.values("id")).items() if count > 1] == []
        assert {link[1:] for link in parsed.values(*LINKS) if link.startswith("#")} <= set(parsed.values("id"))

    def test_shows_every_experiment_and_draws_it(self, made: tuple[Path, str]) -> None:
        folder, text = made
        run = {path.stem for path in folder.glob("*.json")} - {"steps"}
        sections = dict(re.findall(r'<section id="([a-z_]+)">(.*?)</section>', text, flags=re.DOTALL))
        for experiment in CATALOGUE:
            if experiment.name in run:
                assert sections[experiment.name].count("<svg") == len(experiment.plots), experiment.name
                assert COMMIT.commit[:12] in sections[experiment.name]
                assert f"python -m eval.{experiment.name}" in sections[experiment.name]
            else:
                assert f"python -m {' '.join(command_of(experiment.name))}" in sections["missing"]

    def test_says_what_was_not_run_and_what_failed(self, made: tuple[Path, str]) -> None:
        assert "quantization: not run, needs a GPU" in made[1]
        assert "ood-squad: failed, no &lt;b&gt;memory&lt;/b&gt;" in made[1]
        assert "CaMeLS on a GPU: there is none" in made[1]

    def test_equal_results_give_equal_pages(self, made: tuple[Path, str], tmp_path: Path) -> None:
        (tmp_path / "retention.json").write_bytes((made[0] / "retention.json").read_bytes())
        assert page(collect([tmp_path])) == page(collect([tmp_path]))


def test_findings_are_checked_one_by_one(made: tuple[Path, str]) -> None:
    verdicts = {entry.finding.claim: entry.verdict for entry in checked(collect([made[0]]))}
    assert Counter(verdicts.values()) == {"yes": len(verdicts) - 3, "no": 1, "partly": 1, "not run": 1}
    assert verdicts["P-tuning v2 is at or above LoRA."] == "no"
    assert verdicts["Out of distribution MAC is ahead of CaMeLS."] == "partly"
    assert verdicts["Training on a 16-bit base model is better than on a 4-bit one."] == "not run"


class TestPublished:
    def section(self, folder: Path, **changes: object) -> str:
        result("main_table", [scored("MAC", 0.2)], **changes).write(folder / "main_table.json")
        return page(collect([folder])).split("<details>")[0]

    DATA = Data(name="streamingqa", split="test", source="folder", documents=1665, questions=1665)
    MODEL = Model(
        name="xl",
        fingerprint="ab",
        answer_digest="cd",
        device="cuda",
        config={"base_lm": {"name": "openai-community/gpt2-xl"}},
    )

    def test_is_shown_beside_ours_for_the_same_data_and_base_lm(self, tmp_path: Path) -> None:
        text = self.section(tmp_path, data=self.DATA, model=self.MODEL, scale="paper")
        assert "paper F1\u00a0%" in text
        assert '<td class="of-paper">15.4</td>' in text
        assert '<td class="of-paper">9.0</td>' in text

    def test_is_not_shown_beside_other_data_or_another_base_lm(self, tmp_path: Path) -> None:
        assert "paper F1\u00a0%" not in self.section(tmp_path)
        assert "paper F1\u00a0%" not in self.section(tmp_path, data=self.DATA)
        assert "paper F1\u00a0%" not in self.section(tmp_path, model=self.MODEL)

    def test_each_row_is_whole_and_belongs_to_an_experiment(self) -> None:
        names = {experiment.name for experiment in CATALOGUE}
        for entry in published():
            assert entry.experiment in names
            for row in entry.rows:
                assert len(row) == len(entry.key) + len(entry.figures)
            assert len({row[: len(entry.key)] for row in entry.rows}) == len(entry.rows)


class TestCollection:
    def test_shows_the_newest_of_a_kind(self, tmp_path: Path) -> None:
        for name, created, f1 in (("a", "2026-02-01", 0.7), ("b", "2026-01-01", 0.6)):
            result("peft", [scored("LoRA", f1)], created=created).write(tmp_path / f"{name}.json")
        squad = Data(name="squad", split="dev", source="folder", documents=1, questions=1)
        result("peft", [scored("LoRA", 0.5)], data=squad).write(tmp_path / "c.json")
        files = collect([tmp_path]).of("peft")
        assert [file.path.name for file in files] == ["a.json", "c.json"]

    def test_results_on_several_data_sets_differ_by_their_data_option(self, tmp_path: Path) -> None:
        for name in ("squad", "archivalqa"):
            result("ood", [scored(name, 0.5)], data=None, config={"data": f"data/{name}"}).write(
                tmp_path / f"ood-{name}.json"
            )
        assert len(collect([tmp_path]).of("ood")) == 2

    def test_says_which_files_it_left_out(self, tmp_path: Path) -> None:
        result("peft", [scored("LoRA", 0.5)]).write(tmp_path / "a.json")
        (tmp_path / "old.json").write_text('{"schema_version": 2}')
        text = page(collect([tmp_path]))
        assert "Left out: " in text
        assert "old.json has schema version 2" in text


class TestCommand:
    def test_writes_the_page(self, command: Command, tmp_path: Path) -> None:
        result("peft", [scored("LoRA", 0.4), scored("P-tuning v2", 0.5)], not_run={"FiLM": "no time"}).write(
            tmp_path / "peft.json"
        )
        written = tmp_path / "out" / "all.html"
        code, shown, _ = command("eval.report.__main__", tmp_path, "--output", written)
        assert code == 0
        assert shown == f"Report: {written}\n"
        shown, missing = written.read_text().split("What was not run</h2>")
        assert '<td>P-tuning v2</td><td class="best">25.0</td><td class="best">50.0</td><td>50.0</td>' in shown
        assert "FiLM: no time" in shown
        assert "python -m eval.variants quantization" in missing

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("nowhere",), "nowhere is no folder of results"),
            ((".",), "no result in .; python -m eval.paper makes them"),
            ((".", "--output", "report.txt"), "--output must end in .html"),
        ],
    )
    def test_refusals(self, command: Command, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
        code, _, errors = command("eval.report.__main__", *arguments)
        assert code == 1
        assert message in errors
        assert not list(tmp_path.iterdir())


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
