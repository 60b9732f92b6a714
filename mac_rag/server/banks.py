"""`/v1/banks` and `/v1/jobs`: banks, their documents, uploads, and the jobs that adapt to them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import UploadFile

from mac_rag.atomic_files import make_folder, private
from mac_rag.data.conversion.converter import SUFFIXES
from mac_rag.data.provenance import Member
from mac_rag.data.readers import ROWS, read_good_documents
from mac_rag.data.types import Document
from mac_rag.errors import DataError
from mac_rag.server.api_errors import APIError
from mac_rag.server.catalog import ServedBank
from mac_rag.server.keys import Principal
from mac_rag.server.requests import (
    Admin,
    DocumentIds,
    NewBank,
    NewDocuments,
    Reader,
    SearchRequest,
    StrictRoute,
    Writer,
)
from mac_rag.server.service import Job, LeftOut, Service

_PIECE = 1 << 20
_MOST_FILES = 100


def routes(service: Service) -> APIRouter:
    """The routes of one server."""
    router = APIRouter(prefix="/v1", route_class=StrictRoute)

    @router.get("/banks")
    async def list_banks(request: Request, who: Reader) -> dict[str, Any]:
        """The banks that the key may use."""
        found = await service.reads.run(lambda _: [bank.info() for bank in service.banks(who)], request)
        return {"object": "list", "data": found}

    @router.post("/banks", status_code=201)
    async def create_bank(body: NewBank, who: Admin) -> dict[str, Any]:
        """Makes an empty bank."""

        def work(_: object) -> dict[str, Any]:
            bank = service.create_bank(body.name, who, retriever=body.retriever, keep_texts=body.keep_texts)
            return bank.info()

        return await service.writes.run(work)

    @router.get("/banks/{name}")
    async def bank_info(name: str, request: Request, who: Reader) -> dict[str, Any]:
        """The size and the settings of a bank."""
        bank = service.bank(name, who)
        return await service.reads.run(lambda _: bank.info(), request)

    @router.delete("/banks/{name}")
    async def delete_bank(name: str, who: Admin) -> dict[str, Any]:
        """Deletes a bank and all of its documents."""
        service.bank(name, who)

        def work(_: object) -> None:
            service.catalog.delete(name)
            service.audit.note(who.name, "bank.delete", name)

        await service.writes.run(work)
        return {"name": name, "object": "bank", "deleted": True}

    @router.post("/banks/{name}/backup")
    async def back_up(name: str, who: Admin) -> dict[str, Any]:
        """Copies the last commit to the server's folder of backups."""
        service.bank(name, who)

        def work(_: object) -> dict[str, Any]:
            label, documents = service.catalog.back_up(name)
            service.audit.note(who.name, "bank.backup", name, backup=label)
            return {"backup": label, "documents": documents}

        return await service.writes.run(work)

    @router.post("/banks/{name}/compact")
    async def compact(name: str, who: Admin) -> dict[str, Any]:
        """Makes the bank's file as small as its contents."""
        bank = service.bank(name, who)

        def work(_: object) -> dict[str, Any]:
            bank.compact()
            service.audit.note(who.name, "bank.compact", name)
            return bank.info()

        return await service.writes.run(work)

    @router.post("/banks/{name}/documents", response_model=None)
    async def put(name: str, body: NewDocuments, who: Writer) -> Response:
        """Remembers documents: all of them, or none if there is an error. With `wait` false, as a job."""
        bank = service.bank(name, who)
        documents = _documents(service, body)
        if not body.wait:
            job = service.jobs.start(bank, who.name, lambda _: documents, lambda: None)
            return JSONResponse(job.described(), 202)

        def work(_: object) -> dict[str, Any]:
            with service.metrics.part("adapt"):
                report = bank.put(documents)
            counts = {"added": report.added, "updated": report.updated, "unchanged": report.unchanged}
            service.audit.note(who.name, "documents.put", name, **counts)
            return {**counts, "forgotten": list(report.forgotten), "documents": len(bank)}

        return JSONResponse(await service.writes.run(work))

    @router.post("/banks/{name}/files", status_code=202)
    async def upload(name: str, request: Request, who: Writer) -> dict[str, Any]:
        """Remembers files (multipart/form-data) of all kinds that `mac-rag adapt` reads, as a job."""
        bank = service.bank(name, who)
        uploads = Uploads(service.uploads, service.limits.document_characters)
        try:
            async with request.form(max_files=_MOST_FILES, max_fields=_MOST_FILES) as form:
                files = [part for _, part in form.multi_items() if isinstance(part, UploadFile)]
                for file in files:
                    pieces = iter(partial(file.file.read, _PIECE), b"")
                    await service.writes.run(partial(_keep, uploads, file.filename or "", pieces))
            if not files:
                raise APIError(400, "the body has no files; send some as multipart/form-data", param="file")
            return service.jobs.start(bank, who.name, uploads.read, uploads.remove).described()
        except BaseException:
            uploads.remove()
            raise

    @router.get("/banks/{name}/documents")
    async def list_documents(
        name: str,
        request: Request,
        who: Reader,
        after: Annotated[str | None, Query(max_length=4096)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> dict[str, Any]:
        """A page of documents without their texts, oldest first. For the next page, give the last id as `after`."""
        bank = service.bank(name, who)
        page, more = await service.reads.run(lambda _: bank.listing(after, limit), request)
        return {"object": "list", "data": page, "has_more": more}

    @router.get("/banks/{name}/document")
    async def get_document(name: str, request: Request, who: Reader, id: str) -> dict[str, Any]:
        """One document. Its id is a parameter, because an id may hold any characters."""
        bank = service.bank(name, who)
        return await service.reads.run(lambda _: bank.document(id), request)

    @router.delete("/banks/{name}/document")
    async def delete_document(name: str, who: Writer, id: str) -> dict[str, Any]:
        """Deletes one document."""
        gone = await _forget(service, name, [id], who)
        if not gone:
            raise APIError(404, f"there is no document {id!r:.200} in this bank", code="document_not_found")
        return {"deleted": gone}

    @router.post("/banks/{name}/documents/delete")
    async def delete_documents(name: str, body: DocumentIds, who: Writer) -> dict[str, Any]:
        """Deletes documents; unknown ids are ignored."""
        if len(body.ids) > service.limits.documents:
            raise APIError(
                400,
                f"the request has {len(body.ids):,} ids, and {service.limits.documents:,} are the most; send several",
                param="ids",
            )
        return {"deleted": await _forget(service, name, body.ids, who)}

    @router.post("/banks/{name}/search")
    async def search(name: str, body: SearchRequest, request: Request, who: Reader) -> dict[str, Any]:
        """The documents that the bank's retriever finds."""
        bank = service.bank(name, who)
        if bank.retriever == "none":
            raise APIError(400, f"bank {name} has no retriever; make a bank that has one, such as bm25", param="name")
        service.checked_question(body.query)

        def work(_: object) -> list[dict[str, Any]]:
            allowed = bank.allowed(body.filters)
            hits = service.asking.search(bank, body.query, body.k, allowed, body.as_of)
            return [
                {"id": hit.document_id, "score": hit.score, "text": hit.text, "metadata": dict(hit.metadata)}
                for hit in hits
            ]

        return {"object": "list", "data": await service.questions.run(work, request)}

    @router.get("/jobs")
    def list_jobs(who: Reader) -> dict[str, Any]:
        """Jobs on banks that the key may use, the newest first."""
        return {"object": "list", "data": [job.described() for job in service.jobs.all() if who.sees(job.bank)]}

    @router.get("/jobs/{job_id}")
    def get_job(job_id: str, who: Reader) -> dict[str, Any]:
        """State and progress of a job."""
        return _job(service, job_id, who).described()

    @router.delete("/jobs/{job_id}")
    def cancel_job(job_id: str, who: Writer) -> dict[str, Any]:
        """Ends a job after the documents that it is writing now; these stay in the bank."""
        job = _job(service, job_id, who)
        job.cancelled.set()
        return job.described()

    return router


def _documents(service: Service, body: NewDocuments) -> list[Document]:
    """The documents of a body, each of them checked.

    Raises:
        APIError: for too many documents, or one that is too long.
        MACError: as `Member.of`.
    """
    most, characters = service.limits.documents, service.limits.document_characters
    if len(body.documents) > most:
        raise APIError(
            400,
            f"the request has {len(body.documents):,} documents, and {most:,} are the most; send several requests",
            param="documents",
        )
    documents = [Document(one.id, one.text, one.metadata) for one in body.documents]
    for number, document in enumerate(documents):
        if len(document.text) > characters:
            raise APIError(
                400, f"document {number} has more than {characters:,} characters; split it", param="documents"
            )
        Member.of(document)
    return documents


def _keep(uploads: Uploads, name: str, pieces: Iterator[bytes], _: object) -> None:
    uploads.add(name, pieces)


async def _forget(service: Service, name: str, ids: Iterable[str], who: Principal) -> list[str]:
    bank: ServedBank = service.bank(name, who)
    wanted = list(ids)

    def work(_: object) -> list[str]:
        gone = bank.forget(wanted)
        if gone:
            service.audit.note(who.name, "documents.delete", name, ids=gone)
        return gone

    return await service.writes.run(work)


def _job(service: Service, job_id: str, who: Principal) -> Job:
    job = service.jobs.get(job_id)
    if job is None or not who.sees(job.bank):
        raise APIError(404, "this key may see no such job; GET /v1/jobs lists those it may see", code="job_not_found")
    return job


# Endings that `mac_rag.data.readers` tells apart; a file with any other ending is read as text.
_ENDINGS = (*ROWS, ".json", *SUFFIXES)


@dataclass(frozen=True)
class Upload:
    """An uploaded file.

    Attributes:
        name: the client's name of it.
        path: the file on the server, which has a name of the server's choice.
    """

    name: str
    path: Path


class Uploads:
    """A folder for the files of one request.

    Args:
        root: the server's folder of uploads.
        characters: longest document in characters.
    """

    def __init__(self, root: Path, characters: int) -> None:
        self._characters = characters
        make_folder(root)
        self._folder = root / token_hex(12)
        make_folder(self._folder)
        self._files: list[Upload] = []

    def add(self, name: str, data: Iterator[bytes]) -> None:
        """Keeps a file."""
        shown = PurePosixPath(name.replace("\\", "/")).name or "unnamed"
        ending = PurePosixPath(shown).suffix.lower()
        path = self._folder / f"{len(self._files)}{ending if ending in _ENDINGS else '.txt'}"
        with open(path, "xb", opener=private) as file:
            for piece in data:
                file.write(piece)
        self._files.append(Upload(shown, path))

    def read(self, left_out: LeftOut) -> Iterator[Document]:
        """The documents of all files. `left_out` gets what cannot be read, under the client's name of the file."""
        for upload in self._files:

            def refuse(error: DataError, upload: Upload = upload) -> None:
                left_out.add(upload.name, str(error).replace(str(upload.path), upload.name))

            def notify(_: Path, notice: str, upload: Upload = upload) -> None:
                left_out.add_part(upload.name, notice)

            for _, document in read_good_documents([upload.path], refuse, notify=notify):
                if upload.path.suffix not in ROWS:
                    document = Document(upload.name, document.text, document.metadata)
                if len(document.text) > self._characters:
                    left_out.add(document.id, f"it has more than {self._characters:,} characters; split it")
                else:
                    yield document

    def remove(self) -> None:
        """Removes the files."""
        shutil.rmtree(self._folder, ignore_errors=True)
