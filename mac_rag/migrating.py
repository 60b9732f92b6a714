"""The same bank in other numbers: of another format, or in fewer bytes."""

from __future__ import annotations

from functools import partial
from itertools import islice

from mac_rag.errors import BankError
from mac_rag.memory.bank import MemoryBank
from mac_rag.memory.contents import Contents
from mac_rag.memory.views.overview import keep_rows_for, summarise
from mac_rag.model import MACModel
from mac_rag.progress import progress_bar

# Entries copied and committed at a time.
_GROUP = 512


def migrate(old: Contents, new: MemoryBank, model: MACModel, *, progress: bool = False) -> int:
    """Copies the entries of a bank to another one of the same model, in their order, with all that is known of them.

    The new bank keeps rows as an engine would: rounded, with lexical vectors as few numbers, and with what a question
    needs to know of each row. It is committed every few hundred entries; after an interruption, the same call goes on.
    The old bank does not change.

    Args:
        old: the bank, of any format.
        new: a bank that is empty or has been begun by such a call.
        model: the model of both.
        progress: shows a progress bar.

    Returns:
        The number of documents in the new bank.

    Raises:
        BankError: when the new bank holds anything but the first entries of the old one.
        FingerprintError: when another model wrote one of them.

    Examples:
        >>> from mac_rag import Document, MACModel, MemoryBank
        >>> model = MACModel.from_pretrained("mac-tiny")
        >>> old = MemoryBank(model.fingerprint)
        >>> old.put([Document("press", "Rainga Press employs 180 people.")], model.amortize(["Rainga Press."]))
        ()
        >>> migrate(old, MemoryBank(model.fingerprint, rows="int8"), model)
        1
    """
    for bank in (old, new):
        bank.check_model(model.fingerprint)
    begun = [entry.members for entry in new]
    if begun != [entry.members for entry in islice(old, len(begun))]:
        raise BankError(
            f"{new.folder or 'the new bank'} holds {len(begun):,} entries that are not the first ones of "
            f"{old.folder or 'the old bank'}: it is another bank, or the old one has changed since; choose a new folder"
        )
    keep_rows_for(new, model.aggregation)
    entries = islice(old, len(begun), None)
    with progress_bar("migrate", len(old), done=len(new), disable=not progress) as bar:
        while group := list(islice(entries, _GROUP)):
            new.restore(group, summarise=partial(summarise, model.aggregation))
            new.commit()
            bar.advance(sum(len(entry.members) for entry in group))
    new.commit()  # so that an empty bank is a bank, too
    return len(new)
