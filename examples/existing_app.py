"""An existing VectorStoreIndex app, and MAC in it: the five lines that end in "# MAC".

    python examples/existing_app.py

The embedding stands for your own and tells nothing about the texts, so that memory has to find what fits.
"""

from llama_index.core import Document, MockEmbedding, VectorStoreIndex

from mac_rag.data.newswire.generate import generate
from mac_rag.integrations.llama_index import MACLLM, MACNodePostprocessor, MACSynthesizer, MemoryWriter  # MAC


def main() -> None:
    news = generate("test", 60)
    documents = [Document(id_=report.id, text=report.text) for report in news.documents]

    llm = MACLLM(model="mac-tiny")  # MAC
    index = VectorStoreIndex.from_documents(
        documents,
        embed_model=MockEmbedding(embed_dim=8),
        transformations=[MemoryWriter(llm.engine)],  # MAC
    )
    queries = index.as_query_engine(
        llm=llm,
        similarity_top_k=60,
        node_postprocessors=[MACNodePostprocessor(llm.engine, top_n=2)],  # MAC
        response_synthesizer=MACSynthesizer(llm),  # MAC
    )

    for question in news.questions[:5]:
        response = queries.query(question.question)
        attention = response.source_nodes[0].metadata["mac_attention"]
        print(f"{question.question}\n  {response}   (expected: {question.answers[0]}; attention {attention:.2f})")


if __name__ == "__main__":
    main()
