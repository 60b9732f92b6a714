"""The experiments in the order of the paper: the question of each, its place in the paper, and its plots."""

from __future__ import annotations

from dataclasses import dataclass

from eval.report.plots import Bars, Heat, Lines, Plot

SCORES = ("f1", "em")


@dataclass(frozen=True)
class Experiment:
    """One section of the report.

    Attributes:
        name: name of the module, `eval.<name>`.
        source: table or figure of the paper; empty for an experiment that the paper does not have.
        drawn_only: a setting; rows that have it are points of a plot and not in the table.
    """

    name: str
    title: str
    source: str
    question: str
    plots: tuple[Plot, ...]
    drawn_only: str = ""


_SCORED = (Bars(SCORES, "F1 and exact match of each system; red with memory."),)

CATALOGUE = (
    Experiment(
        "main_table",
        "Online adaptation against the baselines",
        "Tables 1, 9 and 10",
        "One pass over a stream of documents, then questions about all of them: how do fine-tuning, compressed "
        "contexts and the memory compare?",
        _SCORED,
    ),
    *(
        Experiment(
            name,
            f"{title}: the memory with and without retrieval",
            source,
            "A retriever puts documents before the question, alone and together with the memory.",
            _SCORED,
        )
        for name, title, source in (
            ("archivalqa", "ArchivalQA-Seq", "Table 2"),
            ("squad", "SQuAD-Seq", "protocol of Table 2"),
            ("streamingqa", "StreamingQA", "protocol of Table 2"),
        )
    ),
    Experiment(
        "adaptation_cost",
        "Time and memory of adapting",
        "Figure 2",
        "What does it take to adapt to a document, and to the whole stream?",
        (
            Bars(("peak_mb",), "Peak memory of adapting to one document."),
            Bars(("minutes",), "Time of adapting to the stream."),
        ),
    ),
    Experiment(
        "retention",
        "Retention over a growing stream",
        "Figure 3",
        "How much of the F1 on the first documents is left after adapting to further documents?",
        (
            Lines("added", "retention", "F1 on the first documents, in percent of the F1 right after them.", "method"),
            Lines("added", "f1", "The F1 itself: a system that learned little has little to forget.", "method"),
        ),
    ),
    Experiment(
        "dropout_memory",
        "Memory of back-propagation dropout",
        "Figure 4 and Table 3",
        "Training with K contexts takes memory for each of them; dropping the back-propagation through a share p "
        "of them saves most of it.",
        (Lines("K", "peak_mb", "Peak memory of a training step, by the number of contexts K.", "p"),),
    ),
    Experiment(
        "hierarchical",
        "Hierarchical aggregation",
        "Figure 5",
        "Aggregating in subgroups of M takes less memory than one softmax over the whole bank. What does it cost?",
        (
            Lines("M", "f1", "F1 by the size of the subgroups; the levels are exact.", "method", log_x=2),
            Lines("M", "peak_mb", "Peak memory of aggregation.", "method", log_x=2, log_y=True),
        ),
    ),
    Experiment(
        "cross_attention",
        "Where the memory looks",
        "Figure 6",
        "The last block's attention over the document with the answer and five others: the most similar by BM25, or "
        "random ones.",
        (
            Heat("document", "token", "mass", "distractors", "Attention to each memory token of each document."),
            Bars(("gold_mass",), "Share of the attention on the document with the answer."),
        ),
        drawn_only="token",
    ),
    Experiment(
        "reduction",
        "A bank of limited size",
        "Figure 7",
        "When the bank is full, what should make room: dropping entries, averaging random ones, or averaging the most "
        "similar?",
        (Lines("entries", "f1", "F1 by the number of entries in the bank.", "method"),),
    ),
    Experiment(
        "peft",
        "Kinds of modulation",
        "Table 4",
        "The memory can modulate the LM by P-tuning v2 prefixes, by LoRA, or by FiLM.",
        _SCORED,
    ),
    Experiment("ood", "Out of distribution", "Table 5", "Trained on one data set, adapted to another.", _SCORED),
    Experiment(
        "perplexity",
        "Language modelling",
        "Table 6",
        "Perplexity of a document after its first tenth, on adapted and on unseen documents.",
        (Bars(("perplexity_adapted", "perplexity_unseen"), "Perplexity; less is better."),),
    ),
    Experiment(
        "amortization",
        "Designs of the amortization network",
        "Table 7",
        "Which network should encode a document into memory tokens?",
        _SCORED,
    ),
    Experiment(
        "quantization", "Quantised training", "Table 8", "What does training on a 4-bit base model cost?", _SCORED
    ),
    Experiment(
        "bank_size",
        "The memory as the bank grows",
        "",
        "The same questions asked of larger and larger banks.",
        (Lines("documents", "f1", "F1 by the documents in the bank.", "prior", log_x=10),),
    ),
    Experiment(
        "conflict",
        "Documents that contradict each other",
        "",
        "The retriever finds a document that is outdated or false. Is it believed, and does the memory help?",
        (Bars(("wrong_share",), "Share of the answers that repeat the wrong document; less is better."), *_SCORED),
    ),
)
