"""A LangChain app: news reports become memory, the memory retrieves, and the answers of a chain stream.

python examples/langchain_app.py
"""

from operator import itemgetter

from langchain_core.documents import Document
from langchain_core.runnables import RunnablePassthrough

from mac_rag import MACEngine, MACModel, MemoryBank
from mac_rag.data.newswire.generate import generate
from mac_rag.integrations.langchain import ChatMAC, MACRetriever, create_documents_chain, to_documents


def main() -> None:
    news = generate("test", 60)
    model = MACModel.from_pretrained("mac-tiny")
    engine = MACEngine(model, MemoryBank(model.fingerprint, keep_texts=True))
    engine.adapt(to_documents(Document(report.text, id=report.id) for report in news.documents))

    retriever = itemgetter("input") | MACRetriever(engine=engine, k=2)
    chain = RunnablePassthrough.assign(context=retriever).assign(answer=create_documents_chain(ChatMAC(engine=engine)))

    for question in news.questions[:5]:
        print(question.question, end="\n  ")
        for chunk in chain.stream({"input": question.question}):
            if "answer" in chunk:
                print(chunk["answer"].content, end="", flush=True)
        print(f"   (expected: {question.answers[0]})")


if __name__ == "__main__":
    main()
