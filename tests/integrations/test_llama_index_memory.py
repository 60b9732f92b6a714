"""MemoryWriter fills the bank inside ingestion pipelines; MACNodePostprocessor ranks nodes by it."""

from __future__ import annotations

import asyncio
import copy
import pickle
from pathlib import Path

import pytest
import torch
from llama_index.core import Document
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.ingestion.pipeline import get_transformation_hash
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import MetadataMode

from mac_rag.errors import BankError, DocumentError, MACError
from mac_rag.integrations.llama_index import MemoryWriter
from mac_rag.memory.bank import MemoryBank
from mac_rag.model import MACModel
from tests.integrations.helpers import FACTS, HashEmbedding, RecordingEngine, facts

# -- MemoryWriter --


class CountingEngine(RecordingEngine):
    """Notes how many rows of memory tokens each call of `adapt` writes."""

    def adapt(self, documents, **options):  # type: ignore[no-untyped-def]
        report = super().adapt(documents, **options)
        self.written = [*getattr(self, "written", []), report.rows]
        return report


@pytest.fixture
def counting(tiny_model: MACModel) -> CountingEngine:
    return CountingEngine(tiny_model)


def test_a_pipeline_fills_the_bank_and_hands_nodes_on(engine: RecordingEngine) -> None:
    documents = [Document(id_="bridge", text=FACTS["bridge"], metadata={"date": "3 May 2004"})]
    nodes = IngestionPipeline(transformations=[MemoryWriter(engine), HashEmbedding()]).run(documents=documents)
    assert [(node.node_id, node.get_content(MetadataMode.NONE)) for node in nodes] == [("bridge", FACTS["bridge"])]
    assert nodes[0].embedding is not None
    (entry,) = engine.bank
    assert (entry.document_id, entry.metadata) == ("bridge", {"date": "3 May 2004"})
    expected = engine.model.amortize([FACTS["bridge"]])
    torch.testing.assert_close(entry.phi, expected.cpu(), rtol=2**-7, atol=1e-5)  # it is kept in bf16


def test_only_changed_documents_are_adapted(counting: CountingEngine) -> None:
    pipeline = IngestionPipeline(transformations=[MemoryWriter(counting)])
    pipeline.run(documents=facts())
    before = {entry.document_id: entry.phi for entry in counting.bank}
    for _ in range(3):
        pipeline.run(documents=facts())
    assert counting.written == [3, 0]  # from then on, they come from the cache
    pipeline.run(documents=facts(museum="The museum of Sola is closed."))
    assert sum(counting.written) == 4
    after = {entry.document_id: entry.phi for entry in counting.bank}
    assert {name for name in FACTS if not torch.equal(before[name], after[name])} == {"museum"}


def test_the_cache_never_hides_that_the_bank_lacks_something(counting: CountingEngine, tmp_path: Path) -> None:
    pipeline = IngestionPipeline(transformations=[MemoryWriter(counting)])
    for _ in range(3):
        pipeline.run(documents=facts())
    counting.forget("museum")
    pipeline.run(documents=facts())
    assert sorted(counting.bank.document_ids) == sorted(FACTS)
    pipeline.persist(str(tmp_path))
    counting.bank = MemoryBank(counting.model.fingerprint)
    reloaded = IngestionPipeline(transformations=[MemoryWriter(counting)])
    reloaded.load(str(tmp_path))
    reloaded.run(documents=facts())
    assert sorted(counting.bank.document_ids) == sorted(FACTS)


@pytest.mark.parametrize("model", ["tiny_model", "other_model"])
def test_two_banks_can_share_a_cache(engine: RecordingEngine, model: str, request: pytest.FixtureRequest) -> None:
    other = RecordingEngine(request.getfixturevalue(model))
    first, second = MemoryWriter(engine), MemoryWriter(other)
    assert first.to_dict()["fingerprint"] == engine.model.fingerprint
    assert get_transformation_hash(facts(), first) != get_transformation_hash(facts(), second)
    IngestionPipeline(transformations=[first, second]).run(documents=facts())
    assert len(engine.bank) == len(other.bank) == len(FACTS)


def test_asynchronous_pipelines_leave_the_event_loop_free(tiny_model: MACModel) -> None:
    class SlowEngine(RecordingEngine):
        def adapt(self, documents, **options):  # type: ignore[no-untyped-def]
            self.asked.append(("adapt", None))
            assert self.gate.wait(timeout=20), "the event loop was blocked"
            return super().adapt(documents, **options)

    engine = SlowEngine(tiny_model)

    async def held_up() -> None:
        engine.gate.clear()
        run = IngestionPipeline(transformations=[MemoryWriter(engine)]).arun(documents=facts())
        task = asyncio.create_task(run)
        while not engine.asked:
            await asyncio.sleep(0.001)
        engine.gate.set()
        await task

    asyncio.run(held_up())
    assert len(engine.bank) == len(FACTS)


def test_parts_of_a_document_need_ids_of_their_own(engine: RecordingEngine) -> None:
    splitter = SentenceSplitter(chunk_size=24, chunk_overlap=0)
    parts = splitter([Document(id_="news", text=" ".join(FACTS.values()))])
    assert len(parts) > 1
    with pytest.raises(BankError, match=r"'news'.*before the splitter"):
        MemoryWriter(engine)(parts)
    assert len(engine.bank) == 0
    MemoryWriter(engine, filed_by="node")(parts)
    assert engine.bank.document_ids == [part.node_id for part in parts]


def test_one_part_stands_for_its_document(engine: RecordingEngine) -> None:
    (part,) = SentenceSplitter()([Document(id_="bridge", text=FACTS["bridge"])])
    MemoryWriter(engine)([part])
    assert engine.bank.document_ids == ["bridge"]


def test_bad_nodes_are_named(engine: RecordingEngine) -> None:
    with pytest.raises(DocumentError, match="'blank'"):
        MemoryWriter(engine)([*facts(), Document(id_="blank", text="  ")])
    assert len(engine.bank) == 0


def test_workers_of_their_own_are_refused(engine: RecordingEngine) -> None:
    writer = MemoryWriter(engine)
    with pytest.raises(MACError, match="num_workers"):
        pickle.dumps(writer)
    assert copy.deepcopy(writer).engine is engine
    again = MemoryWriter.from_dict(writer.to_dict(), engine=engine)
    assert again.to_dict() == writer.to_dict()
