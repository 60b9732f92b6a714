"""What the baselines are trained and searched with: at our scale for `mac-tiny`, and at the paper's."""

from __future__ import annotations

from pydantic import Field

from eval.baselines.camels_training import CamelsConfig
from eval.baselines.ccm_system import CCMConfig
from mac_rag.config import BaseLMConfig, Config, EncoderConfig


class BaselineSetup(Config):
    """The baselines at one scale.

    Attributes:
        training_documents: of the training set that CaMeLS, CCM and few-shot examples come from, at most.
        validation_documents: of the stream on which learning rates are searched.
        rates: of Adam, to search among.
        retention_rate: of Adam, fixed for all in the experiment on retention, as in the paper.
        examples: in front of a question in few-shot prompts.
        k: documents in front of a question for the retriever alone.
    """

    training_documents: int = Field(ge=8)
    validation_documents: int = Field(ge=1)
    rates: tuple[float, ...] = Field(min_length=1)
    retention_rate: float = Field(gt=0)
    examples: int = Field(5, ge=1)
    k: int = Field(5, ge=1)
    camels: CamelsConfig
    ccm: CCMConfig


SETUPS = {
    # An LM of a million parameters needs larger steps than those of the paper to change at all. Four questions on each
    # document of the newswire.
    "tiny": BaselineSetup(
        training_documents=4000,
        validation_documents=100,
        rates=(6.5e-6, 2.5e-5, 1e-4, 3e-4),
        retention_rate=1e-4,
        camels=CamelsConfig(steps=120, accumulate=1, inner_rate=0.03, learning_rate=3e-4, reset_every=4, clip=1.0),
        ccm=CCMConfig(steps=400),
    ),
    # CaMeLS: 50 epochs of 21,000 documents, 24 documents a step, on DistilGPT2, the proxy of the whole GPT-2 family.
    # It starts where the LM that it stands for starts, so it is tuned on questions first.
    "paper": BaselineSetup(
        training_documents=21_000,
        validation_documents=200,
        rates=(1.6e-6, 6.5e-6, 2.5e-5, 1e-4),
        retention_rate=6.5e-6,
        camels=CamelsConfig(proxy=BaseLMConfig(name="runs/distilgpt2/tune_qa/best"), steps=43_750),
        ccm=CCMConfig(
            encoder=EncoderConfig(design="encoder-only", name="google-t5/t5-base"),
            tokens=24,
            steps=32_800,
            batch_size=32,
            learning_rate=1e-4,
        ),
    ),
}
