"""An agent with a long memory: what leaves its short-term memory becomes memory tokens, and comes back when it matters.

    python examples/agent_memory.py

The agent's LM is a script, so that the example runs anywhere; put an LM with function calling of your own in its place.
"""

import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.core.memory import Memory

from mac_rag.bank import MemoryBank
from mac_rag.engine import MACEngine
from mac_rag.integrations.llama_index import MACMemoryBlock
from mac_rag.model import MACModel

SAID = [
    "A storm has hit Wunville, and 120 people have left their homes.",
    "Irene Searkwell struck the first goal of the match.",
    "Rainga Press employs 180 people.",
]


def reply(messages: list[ChatMessage], **_: object) -> ChatMessage:
    """The script: it thanks for news, and quotes what it was reminded of when it is asked."""
    asked = messages[-1].content or ""
    reminded = next((m.content for m in messages if "<memory>" in (m.content or "")), "nothing")
    text = f"I was reminded of:\n{reminded}" if asked.endswith("?") else "Thank you."
    return ChatMessage(role="assistant", content=text)


async def main() -> None:
    model = MACModel.from_pretrained("mac-tiny")
    engine = MACEngine(model, MemoryBank(model.fingerprint, keep_texts=True))
    memory = Memory.from_defaults(
        session_id="anna",
        token_limit=60,
        chat_history_token_ratio=0.4,  # what is beyond it is flushed into the block
        token_flush_size=20,
        memory_blocks=[MACMemoryBlock(engine, token_limit=20)],
    )
    agent = FunctionAgent(llm=MockFunctionCallingLLM(response_generator=reply, is_chat_model=True), tools=[])
    for text in [*SAID, "Which town did the storm hit?"]:
        print(f"user: {text}")
        print(f"agent: {await agent.run(text, memory=memory)}")
    print(f"{len(engine.bank)} messages became memory tokens")


if __name__ == "__main__":
    asyncio.run(main())
