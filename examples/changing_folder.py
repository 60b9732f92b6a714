"""An ingestion pipeline that follows a changing folder: new, changed and deleted files reach index and memory.

    python examples/changing_folder.py [FOLDER]

Without a folder it makes one and changes it. On a folder of yours, call `follow` whenever something may have changed.
"""

import sys
import tempfile
from pathlib import Path

from llama_index.core import MockEmbedding, SimpleDirectoryReader
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore

from mac_rag.data.newswire.generate import generate
from mac_rag.engine import MACEngine
from mac_rag.integrations.llama_index import MACVectorStore, MemoryWriter


def follow(pipeline: IngestionPipeline, engine: MACEngine, folder: Path) -> None:
    """Brings index and memory to the state of the folder; what has not changed costs nothing."""
    # A file's path is its id, which must stay the same as long as the file does.
    files = SimpleDirectoryReader(str(folder), filename_as_id=True).load_data() if any(folder.iterdir()) else []
    pipeline.run(documents=files)
    print(f"{len(engine.bank)} documents in memory: {sorted(Path(name).name for name in engine.bank.document_ids)}")


def main(folder: Path | None = None) -> None:
    engine = MACEngine("mac-tiny")
    pipeline = IngestionPipeline(
        transformations=[MemoryWriter(engine), SentenceSplitter(), MockEmbedding(embed_dim=8)],
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
        vector_store=MACVectorStore(SimpleVectorStore(), engine),  # what is deleted there, the memory forgets
    )
    if folder is not None:
        return follow(pipeline, engine, folder)

    news = generate("test", 4)
    first, second, third, fourth = (report.text for report in news.documents)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "first.txt").write_text(first)
        (folder / "second.txt").write_text(second)
        follow(pipeline, engine, folder)
        print(f"{news.questions[1].question}\n  {engine.answer([news.questions[1].question])[0].text}")

        (folder / "third.txt").write_text(third)
        (folder / "second.txt").write_text(fourth)
        (folder / "first.txt").unlink()
        follow(pipeline, engine, folder)
        print(f"{news.questions[3].question}\n  {engine.answer([news.questions[3].question])[0].text}")
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
