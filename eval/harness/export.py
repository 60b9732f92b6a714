"""Records of answers for other evaluators, which judge them by an LM of theirs: ragas and RAGChecker.

Each row of a result becomes two files. `<row>.ragas.jsonl` has a `SingleTurnSample` of ragas a line, for
`EvaluationDataset.from_jsonl`; `<row>.ragchecker.json` holds the `RAGResults` of RAGChecker, for `ragchecker-cli
--input_path`. Both formats are those of ragas 0.4.3 and RAGChecker 0.1.9.

The reference is the first accepted answer, the shortest. Retrieved documents are whole texts; the
LM may have read less if the row counts truncated prompts. Where memory alone answers, nothing was retrieved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.harness.results import Sample
from mac_rag.atomic_files import write_text
from mac_rag.data.types import Document


def export_records(folder: Path, samples: Sequence[Sample], documents: Sequence[Document]) -> list[Path]:
    """Writes the records of every row into a folder that exists; each file is whole at any time.

    Args:
        documents: the stream, which holds all retrieved documents.

    Returns:
        The files: two for each row.
    """
    texts = {document.id: document.text for document in documents}
    files: list[Path] = []
    for row in samples[0].rows if samples else ():
        lines = "".join(json.dumps(ragas_record(sample, row, texts)) + "\n" for sample in samples)
        results = {"results": [ragchecker_record(sample, row, texts) for sample in samples]}
        name = re.sub(r"[^\w.+-]+", "-", row)
        for file, content in ((f"{name}.ragas.jsonl", lines), (f"{name}.ragchecker.json", json.dumps(results) + "\n")):
            files.append(folder / file)
            write_text(files[-1], content)
    return files


def ragas_record(sample: Sample, row: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """A `SingleTurnSample` of ragas from the answer of one row; leaves out unknown fields. `texts`: documents by id."""
    verdict = sample.rows[row]
    record: dict[str, Any] = {
        "user_input": sample.question,
        "response": verdict.prediction,
        "reference": sample.answers[0],
        "retrieved_contexts": [texts[document_id] for document_id in verdict.retrieved],
        "retrieved_context_ids": list(verdict.retrieved),
    }
    if sample.document_id is not None:
        record["reference_contexts"] = [texts[sample.document_id]]
        record["reference_context_ids"] = [sample.document_id]
    return record


def ragchecker_record(sample: Sample, row: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """A `RAGResult` of RAGChecker; the arguments are those of `ragas_record`."""
    verdict = sample.rows[row]
    return {
        "query_id": sample.id,
        "query": sample.question,
        "gt_answer": sample.answers[0],
        "response": verdict.prediction,
        "retrieved_context": [{"doc_id": document_id, "text": texts[document_id]} for document_id in verdict.retrieved],
    }
