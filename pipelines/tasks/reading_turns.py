"""Steps between those of meta-training in which the LM alone reads documents, without memory."""

from __future__ import annotations

from pydantic import Field

from mac_rag.config import BaseLMConfig, Config
from mac_rag.lm.base_lm import BaseLM
from pipelines.corpora.qa_data import ContextConfig, DataConfig
from pipelines.tasks.tune_qa import TuneConfig, TuneTask
from pipelines.trainer import TrainerConfig

EVERY = 3  # each so many-th step is one of these: most steps go to what is new to the LM


class ReadingTurns(Config):
    """How the LM goes on reading while it learns to use memory. What is not said here is as in `TuneConfig`.

    A step has as many questions as the others of the training have at most.

    Attributes:
        context: what stands in front of them.
        question_blind, sequence_length: see `pipelines.tasks.tune_qa.TuneConfig`.
    """

    context: ContextConfig = ContextConfig()
    question_blind: float = Field(0.0, ge=0, le=1)
    sequence_length: int = Field(512, ge=16)


def reading_task(turns: ReadingTurns, base_lm: BaseLM, data: DataConfig, trainer: TrainerConfig) -> TuneTask:
    """The task of these steps, around an LM that is trained elsewhere.

    Raises:
        ConfigError: as `TuneTask`.
    """
    config = TuneConfig(
        base_lm=BaseLMConfig(name="(the one of the model)"),
        prompt=base_lm.prompts.format,
        data=data,
        context=turns.context,
        question_blind=turns.question_blind,
        sequence_length=turns.sequence_length,
        trainer=trainer,
    )
    return TuneTask(config, base_lm)
