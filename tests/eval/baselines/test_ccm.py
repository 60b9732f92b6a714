"""CCM: compression and answers against the LM in one plain pass, its retriever, and its training."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median

import pytest
import torch

from eval.baselines.ccm import CCM, CCMConfig, CCMSystem, compressible, generate_after, train, trained_ccm
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document
from mac_rag.errors import BankError
from mac_rag.model import MACModel

STREAM = generate("train", 6, seed=1)
ASKED = [question.question for question in STREAM.questions]
CONFIG = CCMConfig(tokens=3, steps=3, batch_size=4, learning_rate=1e-2)


@pytest.fixture
def ccm(tiny_model: MACModel) -> CCM:
    """With an update that is not zero."""
    torch.manual_seed(0)
    made = CCM(tiny_model.base_lm, tokens=3)
    for up in made.compressor.up:
        torch.nn.init.normal_(up, std=0.5)
    return made.eval().requires_grad_(False)


def plain_answer(model: MACModel, ccm: CCM, text: str, question: str, longest: int) -> str:
    """Token by token, each time in one pass over document, vectors, question and answer so far.

    A mask hides the document from all that follows the vectors, and the update changes queries and values by hand.
    """
    lm, prompts = model.base_lm.model, model.base_lm.prompts
    read, asked = prompts.prompt_start([text]), prompts.question(question)
    start, stop = len(read), len(read) + len(ccm.compressor.vectors)

    def changed(down: torch.Tensor, up: torch.Tensor):  # type: ignore[no-untyped-def]
        def hook(_: object, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            output = output.clone()
            output[:, start:stop] += inputs[0][:, start:stop] @ down @ up
            return output

        return hook

    names = zip(ccm.compressor.names, ccm.compressor.down, ccm.compressor.up)
    hooks = [lm.get_submodule(name).register_forward_hook(changed(down, up)) for name, down, up in names]
    embed = lm.get_input_embeddings()
    answer: list[int] = []
    while len(answer) < longest:
        behind = embed(torch.tensor([asked + answer]))
        states = torch.cat([embed(torch.tensor([read])), ccm.compressor.vectors[None], behind], 1)
        mask = torch.ones(states.shape[1], states.shape[1]).tril()
        mask[stop:, :start] = 0
        logits = lm(inputs_embeds=states, attention_mask=(1 - mask)[None, None] * -1e30).logits[0, -1]
        token = int(logits.argmax())
        if token == model.base_lm.tokenizer.eos_token_id:
            break
        answer.append(token)
    for hook in hooks:
        hook.remove()
    text = model.base_lm.tokenizer.decode(answer, skip_special_tokens=True)
    return text.strip()


@torch.no_grad()
def test_answers_equal_one_plain_pass(tiny_model: MACModel, ccm: CCM) -> None:
    """Batches of different lengths included: padding changes nothing."""
    base_lm = tiny_model.base_lm
    texts = [document.text[: 40 + 30 * index] for index, document in enumerate(STREAM.documents)]
    compressed = ccm.compress(base_lm, [base_lm.prompts.prompt_start([text]) for text in texts])
    prompts = [base_lm.prompts.question(question) for question in ASKED]
    answers = generate_after(base_lm, compressed, prompts, max_new_tokens=6)
    assert answers == [plain_answer(tiny_model, ccm, text, asked, 6) for text, asked in zip(texts, ASKED)]
    shuffled = list(range(len(texts)))
    random.Random(0).shuffle(shuffled)
    assert generate_after(
        base_lm, compressed[torch.tensor(shuffled)], [prompts[i] for i in shuffled], max_new_tokens=6
    ) == [answers[i] for i in shuffled]


@torch.no_grad()
def test_the_loss_is_the_mean_over_the_answers_tokens(tiny_model: MACModel, ccm: CCM) -> None:
    base_lm = tiny_model.base_lm
    documents = [base_lm.prompts.prompt_start([document.text]) for document in STREAM.documents[:3]]
    prompts = [base_lm.prompts.question(question) for question in ASKED[:3]]
    answers = [base_lm.prompts.answer(question.answers[0]) for question in STREAM.questions[:3]]
    sums = [
        ccm.answer_loss(base_lm, [document], [prompt], [answer]) * len(answer)
        for document, prompt, answer in zip(documents, prompts, answers)
    ]
    together = ccm.answer_loss(base_lm, documents, prompts, answers)
    torch.testing.assert_close(together, sum(sums) / sum(map(len, answers)))


def test_a_system_answers_behind_the_document_that_its_retriever_ranks_first(tiny_model: MACModel, ccm: CCM) -> None:
    base_lm = tiny_model.base_lm
    system = CCMSystem(base_lm, ccm, max_new_tokens=5, batch_size=4)
    with pytest.raises(BankError, match="adapt to some first"):
        system.answer(ASKED)
    system.adapt(STREAM.documents[:2])
    system.adapt(STREAM.documents[2:])
    with torch.no_grad():
        scores = ccm.retriever(ASKED) @ ccm.retriever([document.text for document in STREAM.documents]).T
    found = [STREAM.documents[index].text for index in scores.argmax(1)]
    assert system.answer(ASKED) == [plain_answer(tiny_model, ccm, text, q, 5) for text, q in zip(found, ASKED)]


def test_long_documents_are_compressed_in_parts(tiny_model: MACModel, ccm: CCM) -> None:
    long = " ".join(f"Rain fell on Kell {number}." for number in range(300))
    parts = compressible(tiny_model.base_lm, long)
    assert len(parts) > 1
    assert all(len(ids) <= tiny_model.base_lm.context_window // 2 for ids, _ in parts)
    assert "".join(text for _, text in parts).strip() == long
    system = CCMSystem(tiny_model.base_lm, ccm)
    system.adapt([Document("long", long)])
    assert len(system.answer(["What fell on Kell 7?"])) == 1


def test_training_is_repeatable_lowers_the_loss_and_is_cached(tiny_model: MACModel, tmp_path: Path) -> None:
    base_lm = tiny_model.base_lm
    before = {name: weight.clone() for name, weight in base_lm.model.state_dict().items()}
    made = [trained_ccm(base_lm, STREAM, CONFIG, seed=3, folder=folder) for folder in (None, tmp_path, tmp_path)]
    for name, weight in made[0].state_dict().items():
        assert all(torch.equal(weight, other.state_dict()[name]) for other in made[1:])
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    torch.manual_seed(0)
    losses = train(CCM(base_lm, tokens=3), base_lm, STREAM, CONFIG.model_copy(update={"steps": 12}))
    assert median(losses[6:]) < median(losses[:6])  # at this learning rate a single step may go astray
    assert all(torch.equal(weight, before[name]) for name, weight in base_lm.model.state_dict().items())
