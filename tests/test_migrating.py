"""A bank in other numbers: the same entries, also after an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.unbounded import UnboundedBank
from mac_rag import migrating
from mac_rag.config import AttentionConfig
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, FingerprintError, ModelLoadError
from mac_rag.memory import MemoryBank
from mac_rag.memory.contents import Contents
from mac_rag.memory.rows import RowLayout
from mac_rag.memory.storage.repair import verify
from mac_rag.memory.views.overview import layout_for
from mac_rag.memory.views.projection import ProjectedBank
from mac_rag.migrating import migrate
from mac_rag.model import MACModel
from pipelines.tasks.fit_rows import fit_quantizer
from tests.cli.helpers import refusal, run
from tests.memory.helpers import rounded
from tests.pipelines.helpers import command

STREAM = generate("test", 12)
TEXTS = [document.text for document in STREAM.documents]


@pytest.fixture
def old(loaded_tiny_model: MACModel, tmp_path: Path) -> MemoryBank:
    """A bank as older versions wrote it, with texts, a document of several rows, a merged and a deleted one."""
    model, bank = loaded_tiny_model, MemoryBank.create(tmp_path / "old", loaded_tiny_model.fingerprint, keep_texts=True)
    phi = model.amortize([*TEXTS, TEXTS[0]])
    bank.put([Document(each.id, each.text, {"n": 1}) for each in STREAM.documents], phi, [1] * (len(TEXTS) - 1) + [2])
    ids = bank.document_ids
    bank.merge(ids[1:3], phi[1:3].mean(0, keepdim=True))
    bank.delete(ids[5])
    bank.commit()
    assert bank.layout == RowLayout()
    return bank


def described(bank: Contents) -> list[object]:
    return [(entry.members, entry.texts, entry.rows) for entry in bank]


@pytest.fixture
def quantized_model(loaded_tiny_model: MACModel, monkeypatch: pytest.MonkeyPatch) -> MACModel:
    """The model with codebooks."""
    texts = [document.text for document in generate("train", 80).documents]
    quantizer = fit_quantizer(loaded_tiny_model, texts, 16)
    monkeypatch.setattr(loaded_tiny_model.aggregation, "quantizer", quantizer)
    return loaded_tiny_model


def test_into_product_codes_and_back(old: MemoryBank, quantized_model: MACModel, tmp_path: Path) -> None:
    """The rows are the nearest that the codebooks have, and a question reads them as it reads them as numbers."""
    model, questions = quantized_model, [question.question for question in STREAM.questions[:4]]
    with MemoryBank.create(tmp_path / "new", model.fingerprint, keep_texts=True, rows="pq") as new:
        assert migrate(old, new, model) == len(old)
    new = MemoryBank.open(tmp_path / "new")
    assert described(new) == described(old)
    assert new.nbytes < old.nbytes / 6
    assert new.quantizer is not None
    expected = rounded(new.layout, old.phi, new.quantizer)
    torch.testing.assert_close(new.phi, expected, rtol=1e-5, atol=1e-5)
    assert verify(tmp_path / "new").clean
    back = MemoryBank(model.fingerprint, keep_texts=True, rows="fp32")
    migrate(new, back, model)
    torch.testing.assert_close(back.phi, expected, rtol=1e-5, atol=1e-5)
    for attention in (AttentionConfig(), AttentionConfig(cache_bytes=0), AttentionConfig(strategy="preselect")):
        plain, found = (MACEngine(model, bank, attention=attention).aggregate(questions) for bank in (back, new))
        # Keys of the document prior have 8 bits of precision, and the prior is sharp.
        torch.testing.assert_close(found, plain, rtol=0.02, atol=0.02)
    whole = ProjectedBank(model.aggregation, new, device="cpu")
    with torch.no_grad():
        question = model.input_encoder([model.input_encoder.ids(text) for text in questions])
        bounded, unbounded = (model.aggregation(question, view)[0] for view in (whole, UnboundedBank(whole)))
    torch.testing.assert_close(bounded, unbounded, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_keeps_its_codebooks(quantized_model: MACModel, tmp_path: Path) -> None:
    model, quantizer = quantized_model, quantized_model.aggregation.quantizer
    assert quantizer is not None
    model.save_pretrained(tmp_path / "model")
    loaded = MACModel.from_pretrained(tmp_path / "model", device="cpu").aggregation.quantizer
    assert loaded is not None
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in quantizer.tensors.items())
    file = tmp_path / "model" / "rows.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match=r"rows.safetensors is damaged: .*; fit it again"):
        MACModel.from_pretrained(tmp_path / "model", device="cpu")


@pytest.mark.parametrize("rows", [None, "int8", "fp32"])
def test_the_same_entries(old: MemoryBank, loaded_tiny_model: MACModel, tmp_path: Path, rows: str | None) -> None:
    model = loaded_tiny_model
    with MemoryBank.create(tmp_path / "new", model.fingerprint, keep_texts=True, rows=rows) as new:  # type: ignore[arg-type]
        assert migrate(old, new, model) == len(old)
    new = MemoryBank.open(tmp_path / "new")
    assert described(new) == described(old)
    assert new.layout == layout_for(model.aggregation).model_copy(update={"dtype": rows or "bf16"})
    assert torch.equal(new.phi, rounded(new.layout, old.phi))
    assert verify(tmp_path / "new").clean


def test_what_it_knows_of_rows_is_what_a_reader_computes(
    old: MemoryBank, loaded_tiny_model: MACModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions get the same answers, and the first one reads no row that cannot matter."""
    model, questions = loaded_tiny_model, [question.question for question in STREAM.questions[:4]]
    new = MemoryBank(model.fingerprint, keep_texts=True, rows="fp32")
    migrate(old, new, model)
    for attention in (AttentionConfig(), AttentionConfig(cache_bytes=0), AttentionConfig(strategy="preselect")):
        expected, found = (MACEngine(model, bank, attention=attention).aggregate(questions) for bank in (old, new))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    read = []
    take = Contents.take
    monkeypatch.setattr(Contents, "take", lambda self, index: read.append(len(index)) or take(self, index))
    MACEngine(model, new, attention=AttentionConfig(cache_bytes=0))._reader._projected()
    assert not read


def test_an_interrupted_migration_goes_on(
    old: MemoryBank, loaded_tiny_model: MACModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrating, "_GROUP", 4)
    model, commit = loaded_tiny_model, MemoryBank.commit

    def fails(self: MemoryBank) -> None:
        commit(self)
        raise KeyboardInterrupt

    with MemoryBank.create(tmp_path / "new", model.fingerprint, keep_texts=True) as new:
        with monkeypatch.context() as patch:
            patch.setattr(MemoryBank, "commit", fails)
            with pytest.raises(KeyboardInterrupt):
                migrate(old, new, model)
        assert 0 < len(new) < len(old)
    with MemoryBank.open(tmp_path / "new", write=True) as new:
        migrate(old, new, model)
        assert described(new) == described(old)
        new.delete(new.document_ids[0])
        with pytest.raises(BankError, match="not the first ones"):
            migrate(old, new, model)


def test_other_models_are_refused(old: MemoryBank, loaded_tiny_model: MACModel) -> None:
    with pytest.raises(FingerprintError):
        migrate(old, MemoryBank("f00d"), loaded_tiny_model)


def test_the_command(tmp_path: Path, tiny_checkpoint: Path) -> None:
    documents, bank, new = tmp_path / "documents.jsonl", tmp_path / "bank", tmp_path / "new"
    documents.write_text('{"id": "a", "text": "A storm has hit Wunville."}')
    model = ["--model", str(tiny_checkpoint)]
    run("adapt", documents, "--bank", bank, *model, "--rows", "fp32")
    assert "keeps its rows as fp32" in refusal("adapt", documents, "--bank", bank, *model, "--rows", "int8")
    assert "holds 1 documents" in run("bank", "migrate", "--bank", bank, "--into", new, *model, "--rows", "int8").output
    info = run("bank", "info", "--bank", new).output
    assert "rows           int8" in info
    assert "KiB a document" in info
    assert "begun with rows as int8" in refusal("bank", "migrate", "--bank", bank, "--into", new, *model)
    assert "old bank's folder" in refusal("bank", "migrate", "--bank", bank, "--into", bank / "x", *model)


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
