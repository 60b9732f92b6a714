"""The factory of all compared systems: makes one by its name, after the training and the search that it needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from pydantic import Field

from eval.baselines.camels import CamelsConfig, CamelsWeights, check_proxy, new_network, trained_network
from eval.baselines.ccm import CCM, CCMConfig, CCMSystem, trained_ccm
from eval.baselines.finetuning import FineTuning, TokenWeighting, UniformWeights, salient_spans, search_learning_rate
from eval.baselines.options import FINE_TUNING, METHODS
from eval.baselines.prompting import FewShot, RetrieverOnly, drawn_examples
from eval.harness.paper_plan import FIRST, PROXY, QUESTIONS, trained_on
from eval.harness.scales import Protocol, Scale, Setup
from eval.harness.streams import named_data, open_stream
from eval.harness.systems import MACSystem, System
from mac_rag.config import BaseLMConfig, Config, EncoderConfig
from mac_rag.data.types import QADataset
from mac_rag.errors import ConfigError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.model import AmortizedModel

# Examples in a few-shot prompt, and documents before a question for the retriever alone.
_EXAMPLES, _K = 5, 5


class BaselineSetup(Config):
    """Training and search of all baselines at one scale; `eval.harness.scales` holds the scales of the experiments.

    Attributes:
        training_documents: largest number of documents of the training split, from which CaMeLS, CCM and the few-shot
            examples come.
        validation_documents: length of the validation stream on which learning rates are searched.
        rates: learning rates of Adam to try.
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
    camels=CamelsConfig(steps=120, accumulate=1, inner_rate=0.03, learning_rate=3e-4, padded=None, clip=1.0),
    ccm=CCMConfig(steps=400),
)
# CaMeLS: 50 epochs of StreamingQA's questions, of another set's accordingly, 24 documents a step, on DistilGPT2,
# the proxy of the whole GPT-2 family. It is tuned on the data set's questions first (`open_factory` names it).
PAPER_SCALE = BaselineSetup(
    training_documents=21_000,
    validation_documents=200,
    rates=(1.6e-6, 6.5e-6, 2.5e-5, 1e-4),
    retention_rate=6.5e-6,
    camels=CamelsConfig(steps=50 * QUESTIONS[FIRST] // 24),
    ccm=CCMConfig(
        encoder=EncoderConfig(design="encoder-only", name="google-t5/t5-base"),
        tokens=24,
        steps=32_800,
        batch_size=32,
        learning_rate=1e-4,
    ),
)
SCALES: dict[Scale, BaselineSetup] = {"tiny": TINY_SCALE, "paper": PAPER_SCALE}


class SystemFactory:
    """Makes the systems of a comparison around one model, whose base LM they share.

    Args:
        training_set: loads the training data; called once a system needs it.
        validation_set: loads the validation stream; called once a learning rate is searched.
        folder: cache of the trained networks; None for no cache.
        lm: name or folder of the LM that fine-tuning updates and CCM compresses with; None for the model's own, which
            is loaded once more without quantisation if it is quantised.
        lora_rank: rank of low-rank updates that fine-tuning trains in place of all weights; those of a model's own
            quantised LM too (QLoRA).
        protocol: how answers are decoded (`eval.harness.published`).

    Attributes:
        searched: F1 by learning rate, for each method whose learning rate was searched.
    """

    def __init__(
        self,
        model: AmortizedModel,
        setup: BaselineSetup,
        training_set: Callable[[], QADataset],
        validation_set: Callable[[], QADataset],
        *,
        folder: Path | None = None,
        batch_size: int = 32,
        seed: int = 0,
        lm: str | None = None,
        lora_rank: int | None = None,
        protocol: Protocol = "strict",
    ) -> None:
        self.model = model
        self.setup = setup
        self._lora_rank = lora_rank
        self._protocol = protocol
        self.searched: dict[str, dict[float, float]] = {}
        self._make_training_set = training_set
        self._make_validation_set = validation_set
        self._folder = folder
        self._batch_size = batch_size
        self._seed = seed
        self._lm = lm

    @cached_property
    def unquantized_lm(self) -> BaseLM:
        """The LM of the baselines, frozen, in the dtype of the model's: quantised weights cannot be updated.

        Raises:
            ConfigError: for a quantised LM that the model's checkpoint holds in no other form, or an LM with another
                tokenizer.
            ModelLoadError: if there is no such LM.
        """
        own = self.model.config.base_lm
        if self._lm is None and own.quantization == "none":
            return self.model.base_lm
        if self._lm is None and own.name.startswith("./"):
            raise ConfigError(
                f"the model's LM is in {own.quantization}, whose weights cannot be updated, and its checkpoint holds "
                "no others; give the LM as it was before, the tuned one: --lm FOLDER"
            )
        changes: dict[str, str | None] = {"quantization": "none"}
        if self._lm is not None:
            changes |= {"name": self._lm, "revision": None, "gguf_file": None}
        base_lm = self.model.base_lm
        whole = BaseLM.load(own.model_copy(update=changes), base_lm.prompts.format, base_lm.device)
        check_proxy(whole, base_lm)
        return whole

    @property
    def _updated_lm(self) -> BaseLM:
        """The LM of fine-tuning: with low-rank updates, the model's own, quantised or not."""
        return self.unquantized_lm if self._lora_rank is None or self._lm is not None else self.model.base_lm

    @cached_property
    def training_set(self) -> QADataset:
        return self._make_training_set()

    @cached_property
    def validation_set(self) -> QADataset:
        return self._make_validation_set()

    def make(self, method: str, *, learning_rate: float | None = None, trained: bool = True) -> System:
        """Makes a new system, which has seen no document of the stream.

        Args:
            method: one of `METHODS`.
            learning_rate: learning rate of fine-tuning; None searches it on the validation stream, once per method.
            trained: False leaves the networks of CaMeLS and CCM untrained, if only the cost of running them matters.
        """
        if method in FINE_TUNING:
            return self._fine_tuning(method, learning_rate, trained)
        if method in ("zero-shot", "few-shot"):
            count = _EXAMPLES if method == "few-shot" else 0
            examples = drawn_examples(self.training_set.questions, count, self._seed) if count else []
            return FewShot(self.model, examples, batch_size=self._batch_size, protocol=self._protocol)
        if method == "retriever":
            return RetrieverOnly(self.model, _K, batch_size=self._batch_size, protocol=self._protocol)
        if method == "ccm":
            return self._ccm(trained)
        if method == "mac":
            return MACSystem(self.model, batch_size=self._batch_size, protocol=self._protocol)
        raise ConfigError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")

    def _fine_tuning(self, method: str, learning_rate: float | None, trained: bool) -> System:
        weighting = self._weighting(method, trained)

        def make(rate: float) -> FineTuning:
            return FineTuning(
                self._updated_lm,
                weighting,
                rate,
                lora_rank=self._lora_rank,
                max_new_tokens=self.model.config.max_new_tokens,
                batch_size=self._batch_size,
                protocol=self._protocol,
            )

        if learning_rate is None:
            if method not in self.searched:
                stream = self.validation_set
                rates = self.setup.rates
                self.searched[method] = search_learning_rate(make, rates, stream.documents, stream.questions)[1]
            f1_by_rate = self.searched[method]
            learning_rate = max(f1_by_rate, key=lambda rate: f1_by_rate[rate])
        return make(learning_rate)

    def _weighting(self, method: str, trained: bool) -> TokenWeighting:
        if method == "uniform":
            return UniformWeights()
        if method == "salient-spans":
            return salient_spans()
        config, base_lm = self.setup.camels, self._updated_lm
        proxy = base_lm
        if config.proxy is not None:
            proxy = BaseLM.load(config.proxy, base_lm.prompts.format, base_lm.device)
            check_proxy(proxy, base_lm)
        if not trained:
            return CamelsWeights(new_network(proxy))
        return CamelsWeights(trained_network(proxy, self.training_set, config, seed=self._seed, folder=self._folder))

    def _ccm(self, trained: bool) -> System:
        config, base_lm = self.setup.ccm, self.unquantized_lm
        if trained:
            ccm = trained_ccm(base_lm, self.training_set, config, seed=self._seed, folder=self._folder)
        else:
            ccm = CCM(base_lm, tokens=config.tokens, encoder=config.encoder)
        return CCMSystem(base_lm, ccm, max_new_tokens=self.model.config.max_new_tokens, batch_size=self._batch_size)


def open_factory(
    setup: Setup,
    path: Path,
    *,
    scale: Scale,
    data: str | None,
    seed: int,
    device: str | None,
    batch_size: int,
    lm: str | None = None,
    lora_rank: int | None = None,
    unrelated: Path | None = None,
    protocol: Protocol = "strict",
) -> SystemFactory:
    """Makes the factory of systems around the model of a command's setup; the arguments are the command's options.

    Args:
        path: the result file; trained networks are cached in `trained/` beside it.
        unrelated: file of CaMeLS's unrelated texts; None for training documents.

    Raises:
        ModelLoadError: if there is no such model.
    """
    baselines = SCALES[scale]
    changes: dict[str, object] = {"lora_rank": lora_rank, "unrelated": None if unrelated is None else str(unrelated)}
    if scale == "paper":
        name = FIRST if data is None else named_data(data)[0]
        name = name if name in QUESTIONS else FIRST
        steps = baselines.camels.steps * QUESTIONS[name] // QUESTIONS[FIRST]
        changes |= {"proxy": BaseLMConfig(name=trained_on(PROXY, name)), "steps": max(1, steps)}
    baselines = baselines.model_copy(update={"camels": baselines.camels.model_copy(update=changes)})

    def dataset(split: str, documents: int) -> QADataset:
        return open_stream(data, split, documents, seed=seed, scale=scale)[0]

    return SystemFactory(
        AmortizedModel.from_pretrained(setup.model, device=device),
        baselines,
        lambda: dataset("train", baselines.training_documents),
        lambda: dataset("val", baselines.validation_documents),
        folder=path.parent / "trained",
        batch_size=batch_size,
        seed=seed,
        lm=setup.lm if lm is None else lm,
        lora_rank=lora_rank,
        protocol=protocol,
    )


def searched_notes(factory: SystemFactory) -> list[str]:
    """The searched learning rates, as notes for the result."""
    return [
        f"{method}: F1 on {len(factory.validation_set.documents):,} validation documents by learning rate: "
        + ", ".join(f"{rate:g}: {100 * f1:.1f} %" for rate, f1 in f1_by_rate.items())
        for method, f1_by_rate in factory.searched.items()
    ]
