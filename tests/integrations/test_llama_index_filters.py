"""Metadata filters: what they leave out has no influence through the bank either."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
)

from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, ConfigError
from mac_rag.integrations.llama_index import MACLLM, FilteredDocuments, MACNodePostprocessor, MemoryWriter
from mac_rag.model import MACModel
from tests.integrations.helpers import FACTS, QUESTION, HashEmbedding, RecordingEngine

TENANTS = {"bridge": "a", "museum": "b", "river": "a"}


def only(tenant: str) -> MetadataFilters:
    return MetadataFilters(filters=[MetadataFilter(key="tenant", value=tenant)])


def owned(*names: str) -> list[Document]:
    return [Document(id_=name, text=FACTS[name], metadata={"tenant": TENANTS[name]}) for name in names]


@pytest.fixture
def remembering(engine: RecordingEngine) -> RecordingEngine:
    MemoryWriter(engine)(owned(*FACTS))
    return engine


@pytest.fixture
def shared(engine: RecordingEngine) -> VectorStoreIndex:
    """An index and a bank of two tenants."""
    return VectorStoreIndex.from_documents(
        owned(*FACTS), transformations=[MemoryWriter(engine)], embed_model=HashEmbedding()
    )


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_a_tenant_gets_the_answers_of_a_bank_of_its_own(
    shared: VectorStoreIndex, engine: RecordingEngine, tiny_model: MACModel, tenant: str
) -> None:
    mine = owned(*(name for name, owner in TENANTS.items() if owner == tenant))
    alone = RecordingEngine(tiny_model)
    own = VectorStoreIndex.from_documents(mine, transformations=[MemoryWriter(alone)], embed_model=HashEmbedding())
    everyone = MACLLM(engine=engine)
    filtered, private = everyone.model_copy(update={"filters": only(tenant)}), MACLLM(engine=alone)
    expected = str(own.as_query_engine(llm=private).query(QUESTION))
    queries = shared.as_query_engine(llm=filtered, filters=only(tenant))
    streamed = shared.as_query_engine(llm=filtered, filters=only(tenant), streaming=True)
    assert [
        str(queries.query(QUESTION)),
        str(asyncio.run(queries.aquery(QUESTION))),
        "".join(streamed.query(QUESTION).response_gen),  # type: ignore[union-attr]
    ] == [expected] * 3
    assert filtered.complete(QUESTION).text == private.complete(QUESTION).text
    assert everyone.filters is None


def test_a_filter_that_lets_nothing_pass_leaves_the_context_alone(remembering: RecordingEngine) -> None:
    llm = MACLLM(engine=remembering, filters=only("nobody"))
    expected = remembering.answer([QUESTION], contexts=[["Context."]], use_memory=False)[0].text
    assert llm.complete(QUESTION, contexts=["Context."]).text == expected
    assert not llm.remembers
    with pytest.raises(BankError, match="passes the filters"):
        llm.complete(QUESTION)
    with pytest.raises(BankError, match="none of the documents"):
        MACLLM(engine=remembering, filters=only("nobody"), use_memory=True).complete(QUESTION)


def test_filters_follow_the_bank(remembering: RecordingEngine) -> None:
    allowed = FilteredDocuments(remembering, only("a"))
    assert [name for name in TENANTS if name in allowed] == ["bridge", "river"]
    remembering.forget("bridge")
    MemoryWriter(remembering)([Document(id_="late", text="Late news.", metadata={"tenant": "a"})])
    assert len(allowed) == 2
    assert {"late", "river"} == {name for name in remembering.bank.document_ids if name in allowed}
    assert "stranger" not in allowed


def test_filters_that_say_the_same_about_one_bank_are_equal(remembering: RecordingEngine, tiny_model: MACModel) -> None:
    """So requests of one tenant share a batch."""
    first, second, other = (FilteredDocuments(remembering, only(tenant)) for tenant in ("a", "a", "b"))
    assert first == second
    assert hash(first) == hash(second)
    assert first != other
    assert first != FilteredDocuments(RecordingEngine(tiny_model), only("a"))


KEYS = st.sampled_from(["tenant", "year", "tags", "ref_doc_id", "absent"])
NUMBERS = st.integers(1999, 2002)
SINGLE = st.one_of(
    st.builds(MetadataFilter, key=KEYS, value=st.sampled_from(["a", "b", "d0"]), operator=st.just(FilterOperator.EQ)),
    st.builds(MetadataFilter, key=KEYS, value=st.sampled_from(["a", "b", "d1"]), operator=st.just(FilterOperator.NE)),
    st.builds(
        MetadataFilter,
        key=st.just("year"),
        value=NUMBERS,
        operator=st.sampled_from([FilterOperator.GT, FilterOperator.LTE, FilterOperator.NE]),
    ),
    st.builds(
        MetadataFilter,
        key=st.sampled_from(["tenant", "absent"]),
        value=st.lists(st.sampled_from(["a", "b"]), min_size=1),
        operator=st.sampled_from([FilterOperator.IN, FilterOperator.NIN]),
    ),
    st.builds(MetadataFilter, key=KEYS, value=st.none(), operator=st.just(FilterOperator.IS_EMPTY)),
)
FILTERS = st.builds(MetadataFilters, filters=st.lists(SINGLE, max_size=3), condition=st.sampled_from(FilterCondition))
METADATA = st.fixed_dictionaries({}, optional={"tenant": st.sampled_from(["a", "b"]), "year": NUMBERS})


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metadata=st.lists(METADATA, min_size=1, max_size=4), filters=FILTERS)
def test_bank_and_store_agree(tiny_model: MACModel, metadata: list[dict[str, Any]], filters: MetadataFilters) -> None:
    engine = RecordingEngine(tiny_model)
    documents = [Document(id_=f"d{i}", text="x", metadata=values) for i, values in enumerate(metadata)]
    # Split, so that nodes name the document they are of; LlamaIndex calls the source of an unsplit one "None".
    index = VectorStoreIndex.from_documents(
        documents, transformations=[MemoryWriter(engine), SentenceSplitter()], embed_model=HashEmbedding()
    )
    store = index.vector_store
    found = store.query(VectorStoreQuery(query_embedding=[1.0] * 64, similarity_top_k=9, filters=filters)).ids
    expected = {index.docstore.get_node(name).ref_doc_id for name in found or ()}
    allowed = FilteredDocuments(engine, filters)
    assert {document.id_ for document in documents if document.id_ in allowed} == expected


def test_filters_may_be_nested(remembering: RecordingEngine) -> None:
    either = MetadataFilters(
        filters=[MetadataFilter(key="doc_id", value="museum"), MetadataFilter(key="doc_id", value="river")],
        condition=FilterCondition.OR,
    )
    both = MetadataFilters(filters=[only("a"), either])
    assert [name for name in FACTS if name in FilteredDocuments(remembering, both)] == ["river"]


def test_a_filter_that_does_not_fit_reaches_the_user(shared: VectorStoreIndex, engine: RecordingEngine) -> None:
    wrong = MetadataFilters(filters=[MetadataFilter(key="tenant", value=3, operator=FilterOperator.GT)])
    queries = shared.as_query_engine(llm=MACLLM(engine=engine, filters=wrong))
    with pytest.raises(ConfigError, match=r"do not fit document 'bridge'.*compare a key with values of its own type"):
        queries.query(QUESTION)


@pytest.mark.parametrize(
    ("operator", "value", "kind"),
    [
        (FilterOperator.IN, "ab", "a list"),
        (FilterOperator.NIN, "ab", "a list"),
        (FilterOperator.ANY, "ab", "a list"),
        (FilterOperator.ALL, "ab", "a list"),
        (FilterOperator.GT, ["a"], "a single value"),
        (FilterOperator.CONTAINS, ["a"], "a single value"),
        (FilterOperator.TEXT_MATCH, 3, "a text"),
        (FilterOperator.EQ, None, "a single value"),
        (FilterOperator.NE, None, "a single value"),
    ],
)
def test_values_that_an_operator_does_not_take_are_refused(
    engine: RecordingEngine, operator: FilterOperator, value: Any, kind: str
) -> None:
    one = MetadataFilters(filters=[MetadataFilter(key="tenant", value=value, operator=operator)])
    for filters in (one, MetadataFilters(filters=[only("a"), one], condition=FilterCondition.OR)):
        with pytest.raises(ConfigError, match=f"{operator.value!r} of 'tenant' takes {kind}, got"):
            FilteredDocuments(engine, filters)


def test_later_and_superseded_documents_have_no_influence_as_of_a_date(loaded_tiny_model: MACModel) -> None:
    engine = MACEngine(loaded_tiny_model)
    later = {"date": "2004-05", "supersedes": "old"}
    nodes = [
        TextNode(id_="old", text="Anna Berg opened the bridge.", metadata={"date": "1990"}),
        TextNode(id_="new", text="Ada Voss opened the museum.", metadata=later),
    ]
    MemoryWriter(engine)(nodes)
    scored = [NodeWithScore(node=node) for node in nodes]

    def held(as_of: str | None) -> list[str]:
        memory = MACNodePostprocessor(engine, mode="annotate", as_of=as_of)
        found = memory.postprocess_nodes(scored, query_str="Who opened the bridge?")
        return [one.node.node_id for one in found if one.node.metadata.get("mac_in_memory", True)]

    assert [held(as_of) for as_of in ("1980", "2000", "2005", None)] == [[], ["old"], ["new"], ["new"]]
    llm = MACLLM(engine=engine, as_of="2000")
    [answer] = engine.answer(["Who opened the bridge?"], allowed={"old"})
    assert llm.complete("Who opened the bridge?").text == answer.text
    with pytest.raises(BankError, match="nothing to answer from"):
        llm.model_copy(update={"as_of": "1980"}).complete("Who opened the bridge?")
