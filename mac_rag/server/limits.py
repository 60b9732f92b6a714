"""What one client can ask of the server at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of requests. Whatever is beyond one of them is refused before anything is computed.

    Attributes:
        body_bytes: largest body of a request.
        body_seconds: the longest time that a client takes to send a body.
        question_characters: longest question, conversation or search.
        document_characters: longest document.
        documents: most documents in the body of one request; uploaded files may hold more.
        answer_tokens: longest answer.
        pending: questions that wait or are answered at a time; one more is refused with 429.
        writes: changes of banks that wait or run at a time.
        jobs: jobs that wait or run at a time.
        question_seconds: the longest time that a question waits and is answered.
        requests_per_minute: of one key; 0 for any number.
    """

    body_bytes: int = 64 << 20
    body_seconds: float = 120.0
    question_characters: int = 20_000
    document_characters: int = 4_000_000
    documents: int = 1_000
    answer_tokens: int = 512
    pending: int = 64
    writes: int = 16
    jobs: int = 16
    question_seconds: float = 60.0
    requests_per_minute: int = 1_200
