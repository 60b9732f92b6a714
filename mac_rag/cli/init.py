"""The command `mac-rag init`: makes a memory for any causal LM, from documents like those that it will remember."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mac_rag.cli.terminal import say
from mac_rag.errors import ConfigError

_MEASURED = 50  # most documents that are held out and measured


def init(
    folder: Annotated[Path, typer.Argument(help="New folder for the model.", file_okay=False)],
    lm: Annotated[
        str,
        typer.Option(help="The LM: a folder, a repository on the Hugging Face Hub, or what `mac-rag fetch` brings."),
    ],
    documents: Annotated[
        list[Path] | None,
        typer.Option(
            help="Files or folders of documents like those that will be remembered, as `mac-rag adapt` takes them; "
            "several times. 20,000 tokens or more are advised.",
        ),
    ] = None,
    compression: Annotated[
        str,
        typer.Option(help="How many times smaller a document is than its keys and values; none keeps them whole."),
    ] = "20",
    adapter: Annotated[
        Path | None,
        typer.Option(
            help="Folder best or last of `python -m pipelines.train` with a recipe of tune_reading.", file_okay=False
        ),
    ] = None,
    sentence_encoder: Annotated[
        str,
        typer.Option(
            help="Finds documents that share no word with a question, beside BM25: minilm, contriever, dpr, "
            "sentence-transformers:MODEL, or none."
        ),
    ] = "minilm",
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], typer.Option(help="Numbers of the LM.")] = "bf16",
    quantization: Annotated[
        Literal["none", "int8", "nf4"], typer.Option(help="Load the LM in 8 or 4 bits, through bitsandbytes.")
    ] = "none",
) -> None:
    """Make a memory for any causal LM: its own keys and values. Nothing is trained.

    Checks that this LM answers from a document in memory as from its text, fits a codec to the documents, and shows on
    a tenth of them, which are held out, what the memory keeps. Then name the folder: mac-rag adapt ... --model FOLDER.
    """
    from mac_rag.config import BaseLMConfig
    from mac_rag.data.readers import find_files, read_documents
    from mac_rag.data.table import raise_error
    from mac_rag.model import MACModel, OwnKVModel

    if compression != "none" and not (compression.isdecimal() and int(compression) > 0):
        raise ConfigError(f"--compression is {compression!r}; give a number such as 20, or none")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; name a new folder")
    found = read_documents(find_files(documents, refuse=raise_error)) if documents else []
    if compression != "none" and len(found) < 2:
        raise ConfigError(
            f"--compression {compression} needs documents that the codec is fitted on, and there are {len(found)}; "
            "name some with --documents, or give --compression none"
        )
    held_out = found[9::10][:_MEASURED] or found[-1:]
    names = {document.id for document in held_out}
    model = MACModel.around(
        BaseLMConfig(name=lm, dtype=dtype, quantization=quantization),
        [document for document in found if document.id not in names] or None,
        compression=None if compression == "none" else int(compression),
        adapter=adapter,
        sentence_encoder=None if sentence_encoder == "none" else sentence_encoder,
        progress=True,
    )
    assert isinstance(model, OwnKVModel)
    say("a document in memory gives the same answer as its text")
    if held_out:
        say(str(model.kept([document.text for document in held_out])))
    model.save_pretrained(folder)
    say(f"saved in {folder}; next: mac-rag adapt FILES --bank FILE --model {folder}")
