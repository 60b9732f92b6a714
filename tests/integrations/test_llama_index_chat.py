"""MACLLM around an instruct LM: LlamaIndex's components work, and all that they say reaches the LM."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import PromptTemplate, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.evaluation import CorrectnessEvaluator, FaithfulnessEvaluator, RelevancyEvaluator
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.schema import QueryBundle

from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError, MACError, PromptError
from mac_rag.integrations.llama_index import MACLLM, MACSynthesizer
from mac_rag.lm.decoding import Sampling
from mac_rag.model import MACModel
from tests.integrations.helpers import FACTS, QUESTION, Script, scored, scripted

LLMFactory = Callable[..., tuple[MACLLM, Script]]


@pytest.fixture
def make_llm(chat_checkpoint: Path) -> LLMFactory:
    """Makes a MACLLM whose LM follows a script; its memory holds two facts."""

    def make(replies: Mapping[str, str] = {}, *, remember: bool = True, **options: Any) -> tuple[MACLLM, Script]:
        engine, script = scripted(MACModel.from_pretrained(chat_checkpoint, device="cpu"), replies)
        if remember:
            engine.adapt([Document(name, FACTS[name]) for name in ("bridge", "museum")])
        return MACLLM(engine=engine, **{"max_new_tokens": 150, **options}), script

    return make


def test_a_chat_reaches_the_lm_as_a_conversation_behind_the_memory(make_llm: LLMFactory) -> None:
    llm, script = make_llm({"led by": "Peter Holm"})
    said = [
        ChatMessage(role=MessageRole.SYSTEM, content="Be brief."),
        ChatMessage(role=MessageRole.USER, content=QUESTION),
        ChatMessage(role=MessageRole.ASSISTANT, content="Anna Berg"),
        ChatMessage(role=MessageRole.USER, content="And who is the museum led by? <|im_end|>"),
    ]
    assert llm.chat(said).message.content == "Peter Holm"
    assert script.turns() == [(message.role.value, message.content) for message in said]
    assert script.prefixes == [llm.engine.model.config.tokens]
    end = llm.engine.model.base_lm.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert script.ids[-1].count(end) == 4  # one ends each message; what the user typed is text
    assert script.prompts[-1].count("<|im_end|>") == 5


def test_memory_is_asked_the_slot_or_the_last_message(make_llm: LLMFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make_llm()
    asked: list[str] = []
    aggregate = llm.engine._reader.aggregate

    def asking(questions: Sequence[str], *arguments: Any, **options: Any) -> Any:
        asked.extend(questions)
        return aggregate(questions, *arguments, **options)

    monkeypatch.setattr(llm.engine._reader, "aggregate", asking)
    llm.predict(PromptTemplate("Answer {query_str} from {context_str} now."), query_str=QUESTION, context_str="Text.")
    llm.predict(PromptTemplate("Say something about {topic}."), topic="bridges")
    llm.complete("Write a poem.")
    llm.chat([ChatMessage(content="Hello."), ChatMessage(role="assistant", content="Hi."), ChatMessage(content="Who?")])
    assert asked == [QUESTION, "Say something about bridges.", "Write a poem.", "Who?"]
    long = "This is a long story about nothing. " * 60 + "Where is the bridge?"
    llm.complete(long)
    assert asked[-1] == long
    with pytest.raises(PromptError, match=r"the conversation takes \d+ tokens, but the LM's window leaves room for"):
        llm.complete("word " * 5000)


def test_with_an_empty_memory_the_lm_answers_alone_unless_memory_is_required(make_llm: LLMFactory) -> None:
    llm, script = make_llm({"Hello": "Hi."}, remember=False)
    assert llm.complete("Hello").text == "Hi."
    assert script.prefixes == [0]
    with pytest.raises(BankError):
        llm.model_copy(update={"use_memory": True}).complete("Hello")


def test_a_template_reaches_the_lm_with_its_wording(make_llm: LLMFactory, index: VectorStoreIndex) -> None:
    llm, script = make_llm({"Answer like a pirate": "Arr, Anna Berg", "Context information": "Anna Berg"})
    own = PromptTemplate("Answer like a pirate.\nTexts: {context_str}\nAsked: {query_str}\n")
    engine = index.as_query_engine(llm=llm, similarity_top_k=1, text_qa_template=own)
    assert str(engine.query(QUESTION)) == "Arr, Anna Berg"
    assert script.turns() == [("user", f"Answer like a pirate.\nTexts: {FACTS['bridge']}\nAsked: {QUESTION}")]
    assert str(index.as_query_engine(llm=llm, similarity_top_k=1).query(QUESTION)) == "Anna Berg"
    (system, words), (user, turn) = script.turns()  # LlamaIndex's own template for chat models
    assert (system, user) == ("system", "user")
    assert words.startswith("You are an expert Q&A system")
    assert FACTS["bridge"] in turn
    assert f"Query: {QUESTION}" in turn


def test_without_wording_a_question_has_the_form_of_the_training(make_llm: LLMFactory) -> None:
    llm, script = make_llm({"bridge": "Anna Berg"})
    prompts = llm.engine.model.base_lm.prompts
    expected = prompts.tokenizer.decode(prompts.prompt(QUESTION, list(FACTS.values())))
    assert MACSynthesizer(llm).synthesize(QUESTION, scored(*FACTS)).response == "Anna Berg"
    assert llm.complete(QUESTION, contexts=list(FACTS.values())).text == "Anna Berg"
    slots = PromptTemplate("{context_str}\n\n{query_str}")
    assert llm.predict(slots, query_str=QUESTION, context_str=list(FACTS.values())) == "Anna Berg"
    assert script.prompts == [expected] * 3
    llm.complete(QUESTION)
    assert script.prompts[-1] == prompts.tokenizer.decode(prompts.prompt(QUESTION))


def test_a_context_beyond_the_window_is_cut_in_its_template(make_llm: LLMFactory) -> None:
    llm, script = make_llm({"Asked": "Anna Berg"})
    context = FACTS["bridge"] + " It rained." * 4000
    own = PromptTemplate("Texts: {context_str}\nAsked: {query_str}\nAnswer it.")
    assert llm.predict(own, query_str=QUESTION, context_str=context) == "Anna Berg"
    ((_, turn),) = script.turns()
    assert turn.startswith(f"Texts: {FACTS['bridge']} It rained.")
    assert turn.endswith(f"\nAsked: {QUESTION}\nAnswer it.")
    model = llm.engine.model
    room = model.context_window - 150
    assert room - 20 < len(model.base_lm.prompts.texts.ids(turn)) <= room


def test_rerank_and_evaluators(make_llm: LLMFactory) -> None:
    llm, script = make_llm(
        {
            "relevance score": "Doc: 2, Relevance: 9\nDoc: 1, Relevance: 3",
            "information is supported": "YES",
            "in line with the context": "YES",
            "output a single score": "4.5\nIt is right.",
            "## User Query": "4.5\nIt is right.",
        }
    )
    ranked = LLMRerank(llm=llm, top_n=2).postprocess_nodes(
        scored(*FACTS), query_bundle=QueryBundle("Who leads the museum?")
    )
    assert [(scored.node.node_id, scored.score) for scored in ranked] == [("museum", 9.0), ("bridge", 3.0)]
    contexts = list(FACTS.values())
    assert FaithfulnessEvaluator(llm=llm).evaluate(response="Anna Berg", contexts=contexts).passing
    assert RelevancyEvaluator(llm=llm).evaluate(query=QUESTION, response="Anna Berg", contexts=contexts).passing
    verdict = CorrectnessEvaluator(llm=llm).evaluate(query=QUESTION, response="Anna Berg", reference="Anna Berg")
    assert (verdict.score, verdict.passing) == (4.5, True)
    assert script.turns()[0][0] == "system"  # the instructions of the evaluator
    assert all(prefix == llm.engine.model.config.tokens for prefix in script.prefixes)


@pytest.mark.parametrize("mode", ["condense_question", "condense_plus_context", "context", "simple"])
def test_chat_engines(mode: Any, make_llm: LLMFactory, index: VectorStoreIndex) -> None:
    llm, script = make_llm({"tandalone": "Who leads the museum of Sola?", "": "Peter Holm"})
    system = {} if mode == "condense_question" else {"system_prompt": "Speak like a sailor."}
    chat = index.as_chat_engine(mode, llm=llm, similarity_top_k=1, **system)
    assert str(chat.chat(QUESTION)) == "Peter Holm"
    streamed = chat.stream_chat("And the museum?")
    assert "".join(streamed.response_gen).strip() == "Peter Holm"
    if mode == "condense_question":
        assert any(f"user: {QUESTION}" in prompt and "And the museum?" in prompt for prompt in script.prompts)
        assert "Query: Who leads the museum of Sola?" in script.prompts[-1]
        return
    turns = script.turns()
    assert turns[0][0] == "system"
    assert "Speak like a sailor." in turns[0][1]
    assert [text for role, text in turns if role == "assistant"] == ["Peter Holm"]
    assert turns[-1] == ("user", "And the museum?") or "And the museum?" in turns[-1][1]
    assert (FACTS["museum"] in script.prompts[-1]) == (mode != "simple")


class Opening(BaseModel):
    """An opening."""

    who: str
    what: str


def test_structured_output_by_text(make_llm: LLMFactory) -> None:
    llm, script = make_llm({"JSON schema": '{"who": "Anna Berg", "what": "a bridge"}'})
    template = PromptTemplate("Find the opening: {text}")
    expected = Opening(who="Anna Berg", what="a bridge")
    program = LLMTextCompletionProgram.from_defaults(output_cls=Opening, llm=llm, prompt=template)
    assert program(text=FACTS["bridge"]) == expected
    assert llm.structured_predict(Opening, template, text=FACTS["bridge"]) == expected
    assert asyncio.run(llm.astructured_predict(Opening, template, text=FACTS["bridge"])) == expected
    assert llm.as_structured_llm(Opening).complete("Find it.").raw == expected
    parsed = PromptTemplate("{context_str}\n{query_str}", output_parser=PydanticOutputParser(Opening))
    said = llm.predict(parsed, query_str="Find it.", context_str=FACTS["river"])
    assert Opening.model_validate_json(said) == expected
    assert script.prompts[0].count(FACTS["bridge"]) == 1


def test_predicting_in_all_four_ways_and_without_blocking(make_llm: LLMFactory) -> None:
    llm, script = make_llm({"bridge": "Anna Berg of Norrland"})
    template = ChatPromptTemplate(
        [ChatMessage(role="system", content="Be {mood}."), ChatMessage(content="{query_str}?")]
    )
    values = {"mood": "brief", "query_str": "Whose bridge"}
    seen: set[str] = set()
    llm.engine.model.base_lm.model.register_forward_pre_hook(lambda *a: seen.add(threading.current_thread().name))

    async def both() -> tuple[str, list[str]]:
        answer = await llm.apredict(template, **values)
        return answer, [piece async for piece in await llm.astream(template, **values)]

    answer, pieces = asyncio.run(both())
    assert threading.main_thread().name not in seen
    streamed = list(llm.stream(template, **values))
    assert llm.predict(template, **values) == answer == "".join(pieces) == "".join(streamed) == "Anna Berg of Norrland"
    assert len(streamed) > 3
    assert script.prompts == script.prompts[:1] * 4
    assert script.turns() == [("system", "Be brief."), ("user", "Whose bridge?")]


def test_options_of_a_call_and_of_the_llm(chat_checkpoint: Path) -> None:
    model = MACModel.from_pretrained(chat_checkpoint, device="cpu")
    llm = MACLLM(model, max_new_tokens=12)
    warm = {"temperature": 2.0, "top_p": 0.9, "seed": 3}
    first = llm.complete("Who?", **warm).text
    assert first == llm.complete("Who?", **warm).text
    assert first == "".join(piece.delta or "" for piece in llm.stream_complete("Who?", **warm))
    assert first == llm.chat([ChatMessage(content="Who?")], **warm).message.content
    assert first != llm.complete("Who?").text
    assert first == MACLLM(model, max_new_tokens=12, sampling=Sampling(2.0, 0.9, 3)).complete("Who?").text
    stop = first[2:4]
    assert llm.complete("Who?", **warm, stop=stop).text == first.split(stop)[0].strip()
    assert llm.complete("Who?", **warm, stop=["never", stop]).text == first.split(stop)[0].strip()
    assert len(llm.complete("Who?", **warm, max_tokens=3).text) < len(first)
    with pytest.raises(ConfigError, match="top_p is 2"):
        llm.complete("Who?", temperature=1.0, top_p=2)
    with pytest.raises(MACError, match="does not support frequency_penalty=1, max_tokens=0"):
        llm.complete("Who?", frequency_penalty=1, max_tokens=0)


def test_what_is_no_conversation_is_an_error(make_llm: LLMFactory) -> None:
    llm, _ = make_llm()
    with pytest.raises(MACError, match="not of the role 'tool'"):
        llm.chat([ChatMessage(content="Who?"), ChatMessage(role="tool", content="42")])
    with pytest.raises(MACError, match="a message of the user holds image"):
        llm.chat([ChatMessage(blocks=[ImageBlock(url="http://localhost/x.png")])])
    with pytest.raises(PromptError, match="is from assistant; end the conversation with a message from the user"):
        llm.chat([ChatMessage(content="Who?"), ChatMessage(role="assistant", content="Me.")])
