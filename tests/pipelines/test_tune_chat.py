"""Tuning an instruct LM: training sequences are conversations of its chat template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipelines.tasks.tune_qa import TuneConfig, TuneTask


def test_tuning_reads_conversations_and_learns_answers_with_their_ends(model_folder: Callable[[str], Path]) -> None:
    task = TuneTask(
        TuneConfig.parse(
            {
                "base_lm": {"name": str(model_folder("instruct"))},
                "prompt": {"chat": True, "system": "Answer in a few words."},
                "data": {"name": "newswire", "documents": 12, "validation_documents": 2},
                "context": {"retriever": "bm25", "k": [1]},
                "questions_per_context": 2,
                "sequence_length": 1024,
                "trainer": {"steps": 1, "batch_size": 2, "learning_rate": 0.001},
            },
            "recipe",
        )
    )
    for sequence in task.batch(0, 0, 2):
        assert sequence.labels[-1] != -100
        learned = task.encoder.tokenizer.decode([label for label in sequence.labels if label != -100])
        text = task.encoder.tokenizer.decode(sequence.ids)
        assert text.startswith("<|im_start|>system\nAnswer in a few words.<|im_end|>\n<|im_start|>user\n")
        assert learned.count("<|im_end|>") == text.count("<|im_start|>assistant\n") == 2
        assert learned.endswith("<|im_end|>")
        assert "<|im_start|>" not in learned
    assert set(task.validate()) >= {"em", "f1"}
