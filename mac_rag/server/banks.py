"""`/v1/banks` and `/v1/jobs`: banks, their documents, uploads, and the jobs that adapt to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from starlette.datastructures import UploadFile

from mac_rag.data.provenance import Member
from mac_rag.data.types import Document
from mac_rag.retrieval.base import Hit
from mac_rag.server.api_errors import APIError, no_such_bank
from mac_rag.server.catalog import ServedBank, no_such_document
from mac_rag.server.jobs import Job, Upload
from mac_rag.server.keys import Principal
from mac_rag.server.requests import (
    Admin,
    DocumentIds,
    LongRoute,
    NewBank,
    NewDocuments,
    NewName,
    Reader,
    SearchRequest,
    StrictRoute,
    Writer,
)
from mac_rag.server.service import Service

_MOST_FILES = 100
_FOUND_CHARACTERS = 2_000_000  # of all texts that a search finds


def routes(service: Service) -> APIRouter:
    """The routes of one server."""
    router, long = APIRouter(prefix="/v1", route_class=StrictRoute), APIRouter(route_class=LongRoute)

    @router.get("/banks", response_model=None)
    async def list_banks(request: Request, who: Reader) -> Response:
        """The banks that the key may use. One that could not be opened has the state broken."""
        return await service.reads.respond(lambda _: {"object": "list", "data": service.infos(who)}, request)

    @router.post("/banks", status_code=201)
    async def create_bank(body: NewBank, who: Admin) -> dict[str, Any]:
        """Makes an empty bank."""
        make = partial(service.create_bank, body.name, who, retriever=body.retriever, keep_texts=body.keep_texts)
        return await service.writes.run(lambda _: make().info())

    @router.get("/banks/{name}")
    async def bank_info(name: str, request: Request, who: Reader) -> dict[str, Any]:
        """The size and the settings of a bank."""
        bank = service.bank(name, who)
        return await service.reads.run(lambda _: bank.info(), request)

    @router.patch("/banks/{name}")
    async def rename_bank(name: str, body: NewName, who: Admin) -> dict[str, Any]:
        """Gives a bank another name. While a job waits or runs on the bank, this is refused."""
        return await service.writes.run(lambda _: service.rename_bank(name, body.name, who).info())

    @router.delete("/banks/{name}")
    async def delete_bank(name: str, who: Admin) -> dict[str, Any]:
        """Deletes a bank and all of its documents, also one that could not be opened."""
        if not who.sees(name):
            raise no_such_bank(name)

        def work(_: object) -> None:
            service.jobs.cancel_all_of(name)
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

    @long.post("/banks/{name}/documents", response_model=None, responses={202: {"description": "The job."}})
    async def put(name: str, body: NewDocuments, who: Writer) -> Response:
        """Remembers documents: all of them, or none if there is an error. With `wait` false, as a job."""
        bank = service.bank(name, who)
        if not body.wait:

            def start(_: object) -> dict[str, Any]:
                return _started(service, bank, who, lambda upload: upload.add_documents(_documents(service, body)))

            return await service.writes.respond(start, status=202)

        def work(_: object) -> dict[str, Any]:
            documents = _documents(service, body)
            with service.metrics.part("adapt"):
                report = bank.put(documents, cancelled=service.stopping.is_set)
            counts = {"added": report.added, "updated": report.updated, "unchanged": report.unchanged}
            service.audit.note(who.name, "documents.put", name, **counts)
            return {**counts, "forgotten": list(report.forgotten), "documents": len(bank)}

        return await service.writes.respond(work)

    @long.post("/banks/{name}/files", status_code=202)
    async def upload(name: str, request: Request, who: Writer) -> dict[str, Any]:
        """Remembers files (multipart/form-data) of all kinds that `mac-rag adapt` reads, as a job."""
        bank = service.bank(name, who)
        async with request.form(max_files=_MOST_FILES, max_fields=_MOST_FILES) as form:
            files = [part for _, part in form.multi_items() if isinstance(part, UploadFile)]
            if not files:
                raise APIError(400, "the body has no files; send some as multipart/form-data", param="file")

            def keep(upload: Upload) -> None:
                for file in files:
                    upload.add_file(file.filename or "", file.file.read)

            return await service.writes.run(lambda _: _started(service, bank, who, keep))

    @router.get("/banks/{name}/documents", response_model=None)
    async def list_documents(
        name: str,
        request: Request,
        who: Reader,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        """A page of documents without their texts, oldest first. For the next page, give the last id as `after`."""
        bank = service.bank(name, who)

        def work(_: object) -> dict[str, Any]:
            page, more = bank.listing(after, limit)
            return {"object": "list", "data": page, "has_more": more}

        return await service.reads.respond(work, request)

    @router.get("/banks/{name}/document", response_model=None)
    async def get_document(name: str, request: Request, who: Reader, id: str) -> Response:
        """One document. Its id is a parameter, because an id may hold any characters."""
        bank = service.bank(name, who)
        return await service.reads.respond(lambda _: bank.document(id), request)

    @router.delete("/banks/{name}/document")
    async def delete_document(name: str, who: Writer, id: str) -> dict[str, Any]:
        """Deletes one document."""
        gone = await service.writes.run(lambda _: service.forget(name, [id], who))
        if not gone:
            raise no_such_document(id)
        return {"deleted": gone}

    @router.post("/banks/{name}/documents/delete")
    async def delete_documents(name: str, body: DocumentIds, who: Writer) -> dict[str, Any]:
        """Deletes documents; unknown ids are ignored."""
        return {"deleted": await service.writes.run(lambda _: service.forget(name, body.ids, who))}

    @router.post("/banks/{name}/search", response_model=None)
    async def search(name: str, body: SearchRequest, request: Request, who: Reader) -> Response:
        """The documents that the bank's retriever finds. Of long texts, only the beginning: `truncated` is true."""
        bank = service.bank(name, who)
        if bank.retriever == "none":
            raise APIError(400, f"bank {name} has no retriever; make a bank that has one, such as bm25", param="name")
        service.checked_question(body.query)

        allowed = await service.reads.run(partial(bank.allowed, body.filters), request)

        def work(_: object) -> dict[str, Any]:
            hits = service.asking.search(bank, body.query, body.k, allowed, body.as_of)
            return {"object": "list", "data": found(hits, _FOUND_CHARACTERS, metadata=True)}

        return await service.questions.respond(work, request)

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
        """Ends a job. Documents that it has written stay in the bank."""
        job = _job(service, job_id, who)
        service.jobs.cancel(job)
        return job.described()

    router.include_router(long)
    return router


def found(hits: Sequence[Hit], characters: int, *, metadata: bool = False) -> list[dict[str, Any]]:
    """Hits as clients see them, each with its share of so many characters."""
    share = characters // max(1, len(hits))
    return [
        {
            "id": hit.document_id,
            "score": hit.score,
            "text": hit.text[:share],
            "truncated": len(hit.text) > share,
            **({"metadata": dict(hit.metadata)} if metadata else {}),
        }
        for hit in hits
    ]


def _documents(service: Service, body: NewDocuments) -> list[Document]:
    """The documents of a body, each of them checked by `Limits.fault_of` and `Member.of`."""
    documents = [Document(one.id, one.text, one.metadata) for one in body.documents]
    for number, document in enumerate(documents):
        fault = service.limits.fault_of(document)
        if fault is not None:
            raise APIError(400, f"document {number}: {fault}", param="documents")
        Member.of(document)
    return documents


def _started(service: Service, bank: ServedBank, who: Principal, keep: Callable[[Upload], object]) -> dict[str, Any]:
    """Starts a job whose documents or files are kept by `keep`."""
    upload = Upload(service.jobs.uploads)
    try:
        keep(upload)
        return service.jobs.start(bank, who.name, upload).described()
    except BaseException:
        upload.remove()
        raise


def _job(service: Service, job_id: str, who: Principal) -> Job:
    job = service.jobs.get(job_id)
    if job is None or not who.sees(job.bank):
        raise APIError(404, "this key may see no such job; GET /v1/jobs lists those it may see", code="job_not_found")
    return job
