"""Groups of documents of one title, or of one story and its updates: the hardest to tell apart train together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mac_rag.data.types import Document, QADataset, Question
from pipelines.training_task import shuffled


def title_groups(data: QADataset, questions: Mapping[str, Sequence[Question]], group_size: int) -> list[list[Document]]:
    """Groups of documents with questions: a document, its later updates, and others of the same title.

    Args:
        data: the documents; those of one title stand one after another.
        questions: the questions of each document, by its id.
        group_size: number of documents at which a group is closed.
    """
    stories: dict[str, list[Document]] = {}
    for document in data.documents:
        if questions[document.id]:
            updates = document.metadata.get("updates")
            first = updates if isinstance(updates, str) else document.id  # users have other metadata of this name
            stories.setdefault(first, []).append(document)
    joined: list[list[Document]] = []
    for story in stories.values():
        title = story[0].metadata.get("title")
        if (
            joined
            and len(joined[-1]) < group_size
            and title is not None
            and joined[-1][0].metadata.get("title") == title
        ):
            joined[-1] += story
        else:
            joined.append(story)
    return joined


def drawn(
    groups: Sequence[Sequence[Document]], step: int, micro: int, size: int, *, group_size: int, seed: int, passes: int
) -> list[Document]:
    """The documents of a batch, of as few groups as hold them; a pure function of its arguments.

    Args:
        groups: groups of at most `group_size` documents, or little more.
        step, micro, size: as `pipelines.training_task.Task.batch` takes them.
        passes: forward passes of one optimiser step over all processes.
    """
    count = -(-size // group_size)
    indices = shuffled(len(groups), step, micro, count, seed=seed, per_step=count * passes)
    return [document for index in indices for document in groups[index]][:size]
