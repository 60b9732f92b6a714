"""A result of every experiment of the catalogue, made by hand."""

from __future__ import annotations

from pathlib import Path

from eval.harness.results import Row
from tests.eval.helpers import result, samples, scored

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
