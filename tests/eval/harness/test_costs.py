"""What an answer costs: operations until its first token against a count by hand, and the peak memory of a call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from eval.harness.allocations import allocated_peak
from eval.harness.costs import Costs, flops
from mac_rag.data.newswire.generate import generate
from mac_rag.engine import MACEngine
from mac_rag.model import MACModel
from mac_rag.nn.cpu_linear import use_onednn

STREAM = generate("test", 6, seed=1)
QUESTIONS = [question.question for question in STREAM.questions]


@pytest.mark.parametrize("onednn", [False, True])
def test_products_are_counted_whichever_kernel_computes_them(onednn: bool) -> None:
    layer = nn.Sequential(nn.Linear(2048, 1024))
    if onednn:
        use_onednn(layer)
    assert flops(lambda: layer(torch.zeros(3, 2, 2048))) == 2 * 6 * 2048 * 1024


def test_the_lm_costs_what_its_weights_and_its_attention_cost(tiny_model: MACModel) -> None:
    engine = MACEngine(tiny_model)
    engine.adapt(STREAM.documents)
    costs = Costs(engine, QUESTIONS[:1])
    lm, config = tiny_model.base_lm.model, tiny_model.base_lm.model.config
    prompt = tiny_model.fit_to_window(QUESTIONS[0], [STREAM.documents[0].text])
    head = config.vocab_size * config.hidden_size
    weights = sum(layer.weight.numel() for layer in lm.modules() if isinstance(layer, nn.Linear)) - head

    def expected(readings: int, prefix: int) -> float:
        length, width = len(prompt.ids), config.num_attention_heads * (config.hidden_size // config.num_attention_heads)
        attention = 4 * config.num_hidden_layers * width * length * (prefix + length)
        return readings * (2 * weights * length + 2 * head + attention) / 1e9

    alone = costs.measures([prompt], None)
    assert alone == {"lm_tokens": len(prompt.ids), "gflop": pytest.approx(expected(1, 0))}
    both = costs.measures([prompt], 0.5)
    assert both["lm_tokens"] == 2 * len(prompt.ids)
    assert both["gflop"] > expected(2, tiny_model.modulation.prefix_length)
    bare = tiny_model.fit_to_window(QUESTIONS[0])
    assert costs.measures([bare], 0.5)["lm_tokens"] == len(bare.ids)  # nothing in front, so memory alone answers
    assert costs.measures([bare, prompt], None)["lm_tokens"] == (len(bare.ids) + len(prompt.ids)) / 2


def test_a_larger_bank_costs_more_and_a_question_asked_before_no_less(model_folder: Callable[[str], Path]) -> None:
    from mac_rag.config import AggregationConfig
    from tests.helpers import mac_config

    plain = AggregationConfig(blocks=1, heads=2, head_width=8)  # without a prior every question attends to all
    model = MACModel.from_config(mac_config(model_folder("llama"), aggregation=plain))
    of_memory = []
    for count in (2, 6):
        engine = MACEngine(model)
        engine.adapt(STREAM.documents[:count])
        engine.answer(QUESTIONS)
        prompts = [model.fit_to_window(question) for question in QUESTIONS]
        of_memory.append(Costs(engine, QUESTIONS).measures(prompts, 1.0)["gflop"])
    # Attention from T = 4 tokens to 4 of each of 4 documents more, by 2 heads of width 8.
    assert of_memory[1] - of_memory[0] == pytest.approx(4 * 4 * (4 * 4) * 16 / 1e9)


def test_the_lm_runs_over_a_memory_in_the_prompt(model_folder: Callable[[str], Path]) -> None:
    from mac_rag.config import AggregationConfig, ModulationConfig
    from tests.helpers import mac_config

    slots = AggregationConfig(blocks=1, heads=2, head_width=8, prior_width=8, slots=3)
    kind = ModulationConfig(kind="prompt", entry_layer=1)
    folder = model_folder("prefix_lm")
    model = MACModel.from_config(mac_config(folder, aggregation=slots, modulation=kind), device="cpu")
    engine = MACEngine(model)
    engine.adapt(STREAM.documents)
    costs = Costs(engine, QUESTIONS[:1])
    prompts = [model.fit_to_window(QUESTIONS[0], texts) for texts in ([], [STREAM.documents[0].text])]
    for prompt, weight, readings in ((prompts[0], 1.0, 1), (prompts[1], 1.0, 1), (prompts[1], 0.5, 2)):
        measured = costs.measures([prompt], weight)
        assert measured["lm_tokens"] == readings * len(prompt.ids) + 3 * 4
        assert measured["gflop"] > costs.measures([prompt], None)["gflop"]


CPU = torch.device("cpu")


def test_the_peak_counts_tensors_that_are_held_at_once() -> None:
    held = torch.ones(1000)

    def work() -> Tensor:
        first = torch.ones(50_000)
        second = first + 1  # 400 kB with the first
        del first
        third = torch.ones(20_000)  # 280 kB with the second
        return second.sum() + third.sum() + held.sum()

    result, peak = allocated_peak(work, CPU)
    assert result == 100_000 + 20_000 + 1000
    assert 400_000 <= peak < 410_000


def test_memory_allocated_before_does_not_count() -> None:
    before = [torch.ones(100_000)]

    def work() -> None:
        before.clear()
        torch.ones(150_000)

    assert 200_000 <= allocated_peak(work, CPU)[1] <= 600_000
