"""The numbers that a bank keeps its rows in, from the option of a command to what a question reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.large_banks import UnboundedBank
from mac_rag.bank import MemoryBank
from mac_rag.bank.bank import Contents
from mac_rag.bank.overview import put_with_overview
from mac_rag.bank.projection import ProjectedBank
from mac_rag.bank.reader import BankReader
from mac_rag.bank.verify import verify
from mac_rag.config import AttentionConfig
from mac_rag.data.newswire.generate import generate
from mac_rag.engine import MACEngine
from mac_rag.errors import ModelLoadError
from mac_rag.model import MACModel
from pipelines.fit_rows import fit_quantizer
from tests.bank.helpers import rounded
from tests.cli.helpers import refusal, run
from tests.pipelines.helpers import command

STREAM = generate("test", 12)
DOCUMENTS = list(STREAM.documents)
QUESTIONS = [question.question for question in STREAM.questions[:4]]


@pytest.fixture
def quantized_model(loaded_tiny_model: MACModel, monkeypatch: pytest.MonkeyPatch) -> MACModel:
    """The model with codebooks."""
    texts = [document.text for document in generate("train", 80).documents]
    quantizer = fit_quantizer(loaded_tiny_model, texts, 16)
    monkeypatch.setattr(loaded_tiny_model.aggregation, "quantizer", quantizer)
    return loaded_tiny_model


def test_codes_are_read_as_the_numbers_that_they_stand_for(quantized_model: MACModel, tmp_path: Path) -> None:
    """The rows are the nearest that the codebooks have."""
    model = quantized_model
    phi = model.amortize([document.text for document in DOCUMENTS])
    with MemoryBank.create(tmp_path / "bank", model.fingerprint, rows="pq") as bank:
        put_with_overview(bank, model.aggregation, DOCUMENTS, phi, [1] * len(DOCUMENTS))
        bank.commit()
    coded, whole = MemoryBank.open(tmp_path / "bank"), MemoryBank(model.fingerprint, rows="fp32")
    expected = rounded(coded.layout, phi, coded.quantizer)
    torch.testing.assert_close(coded.phi, expected, rtol=1e-5, atol=1e-5)
    put_with_overview(whole, model.aggregation, DOCUMENTS, coded.phi, [1] * len(DOCUMENTS))
    assert coded.nbytes < whole.nbytes / 6
    assert verify(tmp_path / "bank").clean
    for attention in (AttentionConfig(), AttentionConfig(cache_bytes=0), AttentionConfig(strategy="preselect")):
        plain, found = (MACEngine(model, each, attention=attention).aggregate(QUESTIONS) for each in (whole, coded))
        # Keys of the document prior have 8 bits of precision, and the prior is sharp.
        torch.testing.assert_close(found, plain, rtol=0.02, atol=0.02)
    view = ProjectedBank(model.aggregation, coded, device="cpu")
    with torch.no_grad():
        question = model.input_encoder([model.input_encoder.ids(text) for text in QUESTIONS])
        bounded, unbounded = (model.aggregation(question, each)[0] for each in (view, UnboundedBank(view)))
    torch.testing.assert_close(bounded, unbounded, rtol=1e-4, atol=1e-5)


def test_a_bank_knows_what_a_reader_computes(loaded_tiny_model: MACModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions get the same answers, and the first one reads no row that cannot matter."""
    model = loaded_tiny_model
    phi = model.amortize([document.text for document in DOCUMENTS])
    bare, known = MemoryBank(model.fingerprint), MemoryBank(model.fingerprint, rows="fp32")
    bare.put(DOCUMENTS, phi)
    put_with_overview(known, model.aggregation, DOCUMENTS, phi, [1] * len(DOCUMENTS))
    for attention in (AttentionConfig(), AttentionConfig(cache_bytes=0), AttentionConfig(strategy="preselect")):
        expected, found = (MACEngine(model, each, attention=attention).aggregate(QUESTIONS) for each in (bare, known))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    read = []
    take = Contents.take
    monkeypatch.setattr(Contents, "take", lambda self, index: read.append(len(index)) or take(self, index))
    BankReader(model, known, AttentionConfig(cache_bytes=0))._projected()
    assert not read


def test_a_checkpoint_keeps_its_codebooks(quantized_model: MACModel, tmp_path: Path) -> None:
    model, quantizer = quantized_model, quantized_model.aggregation.quantizer
    model.save_pretrained(tmp_path / "model")
    loaded = MACModel.from_pretrained(tmp_path / "model", device="cpu").aggregation.quantizer
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in quantizer.tensors.items())
    file = tmp_path / "model" / "rows.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match=r"rows.safetensors is damaged: .*; fit it again"):
        MACModel.from_pretrained(tmp_path / "model", device="cpu")


def test_a_bank_keeps_the_numbers_that_it_was_made_with(tmp_path: Path, tiny_checkpoint: Path) -> None:
    documents, bank, new = tmp_path / "documents.jsonl", tmp_path / "bank", tmp_path / "new"
    documents.write_text('{"id": "a", "text": "A storm has hit Wunville."}')
    model = ["--model", str(tiny_checkpoint)]
    run("adapt", documents, "--bank", bank, *model, "--rows", "fp32", "--keep-texts")
    message = refusal("adapt", documents, "--bank", bank, *model, "--rows", "int8")
    assert "keeps its rows as fp32" in message
    assert "mac-rag bank rebuild --rows int8" in message
    rebuild = ["bank", "rebuild", "--bank", bank, "--into", new, *model]
    assert "holds 1 documents" in run(*rebuild, "--rows", "int8").output
    info = run("bank", "info", "--bank", new).output
    assert "rows           int8" in info
    assert "KiB a document" in info
    assert "begun with rows as int8" in refusal(*rebuild, "--rows", "bf16")


def test_product_codes_by_command(tmp_path: Path, quantized_model: MACModel) -> None:
    """They take a model with codebooks, which the command that fits them writes beside its weights."""
    documents, model = tmp_path / "documents.jsonl", tmp_path / "model"
    documents.write_text('{"id": "a", "text": "A storm has hit Wunville."}')
    quantized_model.aggregation.quantizer = None
    quantized_model.save_pretrained(model)
    adapt = ["adapt", documents, "--bank", tmp_path / "bank", "--model", model, "--keep-texts", "--rows", "pq"]
    assert "has no codebooks to keep rows as 'pq'; fit them with python -m pipelines.fit_rows" in refusal(*adapt)
    assert not (tmp_path / "bank").exists()
    recipe = "--config", "mac-tiny/train-more", "--set", "data.documents=80"
    result = command("pipelines.fit_rows", *recipe, "--model", str(model), "--code-bytes", "16")
    assert "16 bytes for each memory token, fitted to 80 documents of newswire" in result.output
    run(*adapt)
    assert "rows           pq, 16 bytes a token" in run("bank", "info", "--bank", tmp_path / "bank").output
    rebuilt = ["bank", "rebuild", "--bank", tmp_path / "bank", "--into", tmp_path / "new", "--model", model]
    run(*rebuilt, "--rows", "pq")
    assert torch.equal(MemoryBank.open(tmp_path / "new").phi, MemoryBank.open(tmp_path / "bank").phi)
    assert "begun with rows as pq" in refusal(*rebuilt, "--rows", "int8")
