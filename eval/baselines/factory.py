"""The factory of all compared systems: makes one by its name, after the training and the search that it needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from eval.baselines.methods import FINE_TUNING, METHODS
from eval.harness.systems import MACSystem, System
from mac_rag.errors import ConfigError

if TYPE_CHECKING:
    from eval.baselines.scales import BaselineSetup
    from eval.baselines.weighting import TokenWeighting
    from mac_rag.data.types import QADataset
    from mac_rag.lm.base_lm import BaseLM
    from mac_rag.model import MACModel


# Examples in a few-shot prompt, and documents in front of a question for the retriever alone.
_EXAMPLES, _K = 5, 5


class SystemFactory:
    """Makes the systems of a comparison around one model.

    Args:
        model: the MAC model; all systems share its base LM.
        setup: training and search of the baselines.
        training_set: loads the training data; called when a system needs it.
        validation_set: loads the validation stream; called when a learning rate is searched.
        folder: cache of the trained networks; None for no cache.
        tuning_steps: steps of tuning fine-tuned LMs on questions and answers, before they are asked; 0 for none.
        retriever: name of the retriever of the method `retriever`.
        batch_size: questions of one generation.
        seed: random seed of all training.
        lm: name or folder of the LM that fine-tuning updates and CCM compresses with; None for the model's own. Where
            that is quantised, it is loaded once more, without quantisation.

    Attributes:
        searched: F1 by learning rate, for each method whose learning rate was searched.
    """

    def __init__(
        self,
        model: MACModel,
        setup: BaselineSetup,
        training_set: Callable[[], QADataset],
        validation_set: Callable[[], QADataset],
        *,
        folder: Path | None = None,
        tuning_steps: int = 0,
        retriever: str = "bm25",
        batch_size: int = 32,
        seed: int = 0,
        lm: str | None = None,
    ) -> None:
        self.model = model
        self.setup = setup
        self.searched: dict[str, dict[float, float]] = {}
        self._make_training_set = training_set
        self._make_validation_set = validation_set
        self._folder = folder
        self._tuning_steps = tuning_steps
        self._retriever = retriever
        self._batch_size = batch_size
        self._seed = seed
        self._lm = lm

    @cached_property
    def unquantized_lm(self) -> BaseLM:
        """The LM of the baselines, frozen, in the dtype of the model's: quantised weights cannot be updated.

        Raises:
            ConfigError: for a quantised LM that the model's checkpoint holds in no other form, or an LM with another
                tokenizer than the model's.
            ModelLoadError: when there is no such LM.
        """
        own = self.model.config.base_lm
        if self._lm is None and own.quantization == "none":
            return self.model.base_lm
        from eval.baselines.camels import check_proxy
        from mac_rag.lm.base_lm import BaseLM

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

    @cached_property
    def training_set(self) -> QADataset:
        return self._make_training_set()

    @cached_property
    def validation_set(self) -> QADataset:
        return self._make_validation_set()

    def make(self, method: str, *, learning_rate: float | None = None, trained: bool = True) -> System:
        """A new system that has seen no document of the stream.

        Args:
            method: one of `METHODS`.
            learning_rate: learning rate of fine-tuning; None to search it on the validation stream, once a method.
            trained: False leaves the networks of CaMeLS and CCM untrained, where only the cost of running them matters.

        Raises:
            ConfigError: for an unknown method, or a method that does not work with this model.
        """
        if method in FINE_TUNING:
            return self._fine_tuning(method, learning_rate, trained)
        if method in ("zero-shot", "few-shot"):
            from eval.baselines.prompting import FewShot, drawn_examples

            count = _EXAMPLES if method == "few-shot" else 0
            examples = drawn_examples(self.training_set.questions, count, self._seed) if count else []
            return FewShot(self.model, examples, batch_size=self._batch_size)
        if method == "retriever":
            from eval.baselines.prompting import RetrieverOnly
            from mac_rag.retrieval.registry import make_retriever

            retriever = make_retriever(self._retriever, progress=True)
            if retriever is None:
                raise ConfigError(f"the method retriever needs a retriever, got {self._retriever!r}")
            return RetrieverOnly(self.model, retriever, self._retriever, _K, batch_size=self._batch_size)
        if method == "ccm":
            return self._ccm(trained)
        if method == "mac":
            return MACSystem(self.model, batch_size=self._batch_size)
        raise ConfigError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")

    def _fine_tuning(self, method: str, learning_rate: float | None, trained: bool) -> System:
        from eval.baselines.finetuning import FineTuning, search_learning_rate

        weighting = self._weighting(method, trained)

        def make(rate: float) -> FineTuning:
            return FineTuning(
                self.unquantized_lm,
                weighting,
                rate,
                max_new_tokens=self.model.config.max_new_tokens,
                batch_size=self._batch_size,
                tuning_steps=self._tuning_steps,
                training_questions=self.training_set.questions if self._tuning_steps else (),
                seed=self._seed,
            )

        if learning_rate is None:
            if method not in self.searched:
                stream = self.validation_set
                _, self.searched[method] = search_learning_rate(
                    make, self.setup.rates, stream.documents, stream.questions
                )
            f1_by_rate = self.searched[method]
            learning_rate = max(f1_by_rate, key=lambda rate: f1_by_rate[rate])
        return make(learning_rate)

    def _weighting(self, method: str, trained: bool) -> TokenWeighting:
        if method == "uniform":
            from eval.baselines.weighting import UniformWeights

            return UniformWeights()
        if method == "salient-spans":
            from eval.baselines.spans import salient_spans

            return salient_spans()
        return self._camels(trained)

    def _camels(self, trained: bool) -> TokenWeighting:
        from eval.baselines.camels import CamelsWeights, check_proxy, new_network
        from eval.baselines.camels_training import trained_network
        from mac_rag.lm.base_lm import BaseLM

        config, base_lm = self.setup.camels, self.unquantized_lm
        proxy = base_lm
        if config.proxy is not None:
            proxy = BaseLM.load(config.proxy, base_lm.prompts.format, base_lm.device)
            check_proxy(proxy, base_lm)
        if not trained:
            return CamelsWeights(new_network(proxy))
        return CamelsWeights(trained_network(proxy, self.training_set, config, seed=self._seed, folder=self._folder))

    def _ccm(self, trained: bool) -> System:
        from eval.baselines.ccm import CCM
        from eval.baselines.ccm_system import CCMSystem, trained_ccm

        config, base_lm = self.setup.ccm, self.unquantized_lm
        if trained:
            ccm = trained_ccm(base_lm, self.training_set, config, seed=self._seed, folder=self._folder)
        else:
            ccm = CCM(base_lm, tokens=config.tokens, encoder=config.encoder)
        return CCMSystem(base_lm, ccm, max_new_tokens=self.model.config.max_new_tokens, batch_size=self._batch_size)
