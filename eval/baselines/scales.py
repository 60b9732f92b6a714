"""The two scales of the baselines: how they are trained and searched for any machine, and in the paper.

`eval.harness.scales` holds the two scales of the experiments.
"""

from __future__ import annotations

from pydantic import Field

from eval.baselines.camels_training import CamelsConfig
from eval.baselines.ccm_system import CCMConfig
from eval.harness.scales import Scale
from mac_rag.config import BaseLMConfig, Config, EncoderConfig


class BaselineSetup(Config):
    """Training and search of all baselines at one scale.

    Attributes:
        training_documents: at most this many documents of the training split; CaMeLS, CCM and the few-shot examples
            come from them.
        validation_documents: length of the validation stream that learning rates are searched on.
        rates: learning rates of Adam to search among.
        retention_rate: the one learning rate of Adam in the experiment on retention, fixed as in the paper.
        camels: meta-training of CaMeLS.
        ccm: training of CCM.
    """

    training_documents: int = Field(ge=8)
    validation_documents: int = Field(ge=1)
    rates: tuple[float, ...] = Field(min_length=1)
    retention_rate: float = Field(gt=0)
    camels: CamelsConfig
    ccm: CCMConfig


# An LM of a million parameters needs larger steps than those of the paper to change at all.
TINY_SCALE = BaselineSetup(
    training_documents=4000,
    validation_documents=100,
    rates=(6.5e-6, 2.5e-5, 1e-4, 3e-4),
    retention_rate=1e-4,
    camels=CamelsConfig(steps=120, accumulate=1, inner_rate=0.03, learning_rate=3e-4, reset_every=4, clip=1.0),
    ccm=CCMConfig(steps=400),
)
# CaMeLS: 50 epochs of 21,000 documents, 24 documents a step, on DistilGPT2, the proxy of the whole GPT-2 family. The
# proxy is tuned on questions first, like the LM that it stands for.
PAPER_SCALE = BaselineSetup(
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
)
SCALES: dict[Scale, BaselineSetup] = {"tiny": TINY_SCALE, "paper": PAPER_SCALE}
