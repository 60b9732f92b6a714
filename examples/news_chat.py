"""A chat over a stream of news: each report is remembered as it comes in, and the chat knows it at once.

    python examples/news_chat.py

Reports are found by BM25, which follows the engine, and ranked together with memory. Answers stream.
"""

import asyncio

from llama_index.core.chat_engine import CondensePlusContextChatEngine

from mac_rag.data.newswire.generate import generate
from mac_rag.engine import MACEngine
from mac_rag.integrations.llama_index import MACLLM, MACNodePostprocessor, MACRetriever
from mac_rag.retrieval import BM25Retriever


async def main() -> None:
    news = generate("test", 40)
    questions = news.questions_by_document()
    reports = BM25Retriever()
    engine = MACEngine("mac-tiny", retriever=reports)
    chat = CondensePlusContextChatEngine.from_defaults(
        retriever=MACRetriever(reports, similarity_top_k=5),
        llm=MACLLM(engine=engine),
        skip_condense=True,  # the model cannot rewrite follow-up questions
        node_postprocessors=[MACNodePostprocessor(engine, top_n=2)],
    )
    for number, report in enumerate(news.documents, 1):
        await asyncio.to_thread(engine.adapt, [report])
        if number % 10 == 0:
            [question] = questions[report.id]
            print(f"after {number} reports: {question.question}\n  ", end="")
            response = await chat.astream_chat(question.question)
            async for token in response.async_response_gen():
                print(token, end="", flush=True)
            print(f"   (expected: {question.answers[0]})")


if __name__ == "__main__":
    asyncio.run(main())
