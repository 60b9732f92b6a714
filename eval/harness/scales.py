"""The two scales of every experiment: `tiny` for any machine, and the paper's.

There are no published checkpoints of the paper's models. `runs/<preset>/train/best` is what
`python -m pipelines.train --config <preset>/train --output runs/<preset>/train --set
base_lm.name=runs/<preset>/tune_qa/best` leaves, and `runs/<preset>/tune_qa/best` what `<preset>/tune_qa` leaves in the
same way. `python -m eval.paper --scale paper --dry-run` lists all of these commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Scale = Literal["tiny", "paper"]
Protocol = Literal["strict", "published"]  # see `eval.harness.published`
# Experiments that share a command, whose first argument names them.
_SHARED = {
    "hierarchical": "aggregation", "reduction": "aggregation",
    "peft": "variants", "amortization": "variants", "quantization": "variants",
}  # fmt: skip


def command_of(experiment: str) -> tuple[str, ...]:
    """The module of an experiment, and the argument that names the experiment if the module runs several.

    Examples:
        >>> command_of("retention"), command_of("peft")
        (('eval.retention',), ('eval.variants', 'peft'))
    """
    return (f"eval.{_SHARED[experiment]}", experiment) if experiment in _SHARED else (f"eval.{experiment}",)


@dataclass(frozen=True)
class Setup:
    """The model and the sizes of one experiment at one scale; the command's options override them.

    Attributes:
        model: name or folder of a MAC model; a preset's name if the experiment trains models itself.
        documents: documents of the test stream, from its beginning.
        questions: at most this many questions, drawn by the seed; None for all.
        lm: folder of the unquantised LM that the model was made around, from which baselines start; None for the
            model's own.
    """

    model: str
    documents: int
    questions: int | None = None
    lm: str | None = None

    def override(
        self, *, model: str | None = None, documents: int | None = None, questions: int | None = None
    ) -> Setup:
        """Returns a copy with every argument that is not None replaced. Setting `model` also resets `lm`."""
        return Setup(
            self.model if model is None else model,
            self.documents if documents is None else documents,
            self.questions if questions is None else questions,
            self.lm if model is None else None,
        )

    def options(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a command's parameters with this model and these sizes, as the result file names them."""
        return {**parameters, "model": self.model, "documents": self.documents, "questions": self.questions}


TINY_SCALE: dict[str, Setup] = {
    "main_table": Setup("mac-tiny", 1665),
    "adaptation_cost": Setup("mac-tiny", 200),
    "retention": Setup("mac-tiny", 1600),
    "dropout_memory": Setup("mac-tiny", 256),
    "hierarchical": Setup("mac-tiny", 512, 128),
    "cross_attention": Setup("mac-tiny", 512, 25),
    "reduction": Setup("mac-tiny", 512, 256),
    "peft": Setup("mac-tiny", 256),
    "ood": Setup("mac-tiny", 512, 512),
    "perplexity": Setup("mac-tiny", 256),
    "amortization": Setup("mac-tiny", 256),
    "quantization": Setup("mac-tiny", 256),
    "conflict": Setup("mac-tiny", 1665, 128),
}
# GPT2-XL, tuned by gpt2-xl/tune_qa. MAC is trained around it in 4 bit; the baselines update it without quantisation.
_XL = "runs/gpt2-xl/tune_qa/best"
# The models of the paper's tables and figures, and its streams of 1,665 documents.
PAPER_SCALE: dict[str, Setup] = {
    "main_table": Setup("runs/gpt2-xl/train/best", 1665, lm=_XL),  # tables 1, 9 and 10
    "adaptation_cost": Setup("runs/gpt2-xl/train/best", 1665, lm=_XL),  # figure 2
    "retention": Setup("runs/gpt2-xl/train/best", 1600, lm=_XL),  # figure 3
    "dropout_memory": Setup("llama2-7b", 1665),  # table 3, on StreamingQA; figure 4 is of GPT2-XL (--model gpt2-xl)
    "hierarchical": Setup("runs/gpt2-xl/train/best", 1665),  # figure 5, on ArchivalQA-Seq
    # Figure 6, on StreamingQA, a mean of 25 questions.
    "cross_attention": Setup("runs/gpt2-large/train/best", 1665, 25),
    # Figure 7, on StreamingQA: 75 % of its stream are the paper's 1,250 entries.
    "reduction": Setup("runs/llama2-7b/train/best", 1665),
    "peft": Setup("gpt2-xl", 1665),  # table 4, on StreamingQA, without FiLM
    "ood": Setup("runs/gpt2-xl/train/best", 1665, lm=_XL),  # table 5, from StreamingQA to SQuAD and ArchivalQA
    "perplexity": Setup("gpt2-large", 1665),  # table 6, on StreamingQA
    "amortization": Setup("gpt2-xl", 1665),  # table 7, on StreamingQA
    "quantization": Setup("llama2-7b", 1665),  # table 8, on all three data sets
    "conflict": Setup("runs/llama2-7b/train/best", 1665),
}
SCALES: dict[Scale, dict[str, Setup]] = {"tiny": TINY_SCALE, "paper": PAPER_SCALE}
