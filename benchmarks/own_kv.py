"""A memory of an LM's own keys and values against the same documents as text.

python -m benchmarks.own_kv loss --lm smollm2-135m --data FOLDER
python -m benchmarks.own_kv time --lm smollm2-135m --data FOLDER
python -m benchmarks.own_kv limits --lm smollm2-135m --data FOLDER
python -m benchmarks.own_kv crowd --lm smollm2-135m --data FOLDER
python -m benchmarks.own_kv peers --lm smollm2-135m --data FOLDER
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.harness.command import whole_numbers
from mac_rag.cli.run import run_app
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mac_rag.data.types import Document, Question
    from mac_rag.lm.decoding import Sampling
    from mac_rag.model import OwnKVModel

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
LMOption = Annotated[str, typer.Option(help="The LM, in bf16: a folder, a name on the Hub or of `mac-rag fetch`.")]
DataOption = Annotated[str, typer.Option(help="Folder of SQuAD v1.1.")]
AdapterOption = Annotated[str | None, typer.Option(help="Folder best or last of pipelines.tune_reading.")]
_PARAGRAPHS, _LONGEST = 3, 16  # in front of a question; tokens of an answer
_FITTED = 150  # paragraphs of the training split, which hold about 20,000 tokens


def _around(lm: str, data: str, adapter: str | None, sentences: str | None = None) -> tuple[OwnKVModel, Sequence[str]]:
    """The model without a codec, and texts to fit one to."""
    from mac_rag.config import BaseLMConfig
    from mac_rag.data.squad import read_squad
    from mac_rag.model import MACModel, OwnKVModel

    model = MACModel.around(
        BaseLMConfig(name=lm, dtype="bf16"), compression=None, adapter=adapter, sentence_encoder=sentences
    )
    assert isinstance(model, OwnKVModel)
    documents = read_squad(data, "qa_lt_val").documents
    return model, [document.text for document in documents[:: len(documents) // _FITTED]]


@app.command()
def loss(
    lm: LMOption,
    data: DataOption,
    adapter: AdapterOption = None,
    questions: Annotated[int, typer.Option(min=1)] = 200,
    compression: Annotated[str, typer.Option(help="Compressions, separated by commas.")] = "20,40,80",
    split: Annotated[str, typer.Option(help="A split of SQuAD.")] = "val",
) -> None:
    """Loss and F1 with the right document: nothing, its text, its keys and values as they are, and coded.

    The loss is in nats a token of the first accepted answer with its end. The 95 % interval is that of the difference
    from the text, question by question.
    """
    import statistics

    from rich.console import Console
    from rich.table import Table

    from mac_rag.data.metrics import best_over, f1
    from mac_rag.data.squad import read_squad
    from mac_rag.model import ReadRow, ReadRows

    raw, texts = _around(lm, data, adapter)
    stream = read_squad(data, split)
    asked = stream.questions[:: len(stream.questions) // questions][:questions]
    documents = {document.id: document.text for document in stream.documents}
    answers = [raw.blocks.answer(question.answers[0]) for question in asked]
    table = Table("in front of the question", "bytes a token", "loss", "beside text", "F1")
    losses: dict[str, list[float]] = {}

    def row(name: str, model: OwnKVModel, memory: bool, text: bool, size: str) -> None:
        own, scores = [], []
        for question, answer in zip(asked, answers, strict=True):
            document = documents[question.gold]
            prompt = model.fit_to_window(question.question, [document] if text else [])
            phi = None
            if memory:
                [codes] = model.amortize_rows(model.plan(document)[:1])
                phi = ReadRows([[ReadRow(model.decode(codes), 0.0)]])
            own.append(float(model._losses([prompt], [answer], phi)[0].mean()))
            [said] = model.generate([prompt], modulation=phi, max_new_tokens=16)
            scores.append(best_over(f1, said, question.answers))
        losses[name] = own
        beside = ""
        if "text" in losses:
            differences = [mine - its for mine, its in zip(own, losses["text"], strict=True)]
            margin = 1.96 * statistics.stdev(differences) / len(differences) ** 0.5
            beside = f"{statistics.mean(differences):+.3f} ± {margin:.3f}"
        figures = f"{statistics.mean(own):.3f}", beside, f"{100 * statistics.mean(scores):.1f}"
        table.add_row(name, size, *figures)
        say(" ".join((name, size, *figures)), err=True)

    row("nothing", raw, memory=False, text=False, size="0")
    row("text", raw, memory=False, text=True, size=f"{raw.raw_bytes:,}")
    row("keys and values", raw, memory=True, text=False, size=f"{raw.raw_bytes:,}")
    for factor in whole_numbers("--compression", compression):
        coded = raw.compressed(texts, factor)
        size = f"{coded.config.bytes_per_token:,}"
        row(f"coded, {factor} times smaller", coded, memory=True, text=False, size=size)
    Console().print(table)


@app.command("time")
def time_first_token(
    lm: LMOption,
    data: DataOption,
    compression: Annotated[int, typer.Option(min=1)] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Questions that are timed in each way, in turns.")] = 20,
    sizes: Annotated[
        str, typer.Option(help="Documents and tokens of each, as 3x128, separated by commas.")
    ] = "3x128,5x512,10x512",
) -> None:
    """Time to the first token: documents as text, in memory and decoded for the question, and kept decoded."""
    import statistics
    from functools import partial

    import torch
    from rich.console import Console
    from rich.table import Table

    from benchmarks.measure import timed
    from mac_rag.model import ReadRow, ReadRows

    raw, texts = _around(lm, data, None)
    model = raw.compressed(texts, compression)
    parameters = sum(parameter.numel() for parameter in model.base_lm.model.base_model.parameters())
    ids = [token for text in texts for token in model.plan(text)[0]]
    ask = "Who is named first in the context?"
    after = model.fit_to_window(ask).after_memory
    table = Table("documents", "way", "median, s", "of text", "tokens read", "GFLOP", "bytes of memory")
    for size in sizes.split(","):
        count, length = map(int, size.split("x"))
        rows = [ids[place * length : (place + 1) * length] for place in range(count)]
        codes = model.amortize_rows(rows)
        kept = ReadRows([[ReadRow(model.decode(one), -0.1 * place) for place, one in enumerate(codes)]])

        def text(rows: list[list[int]] = rows) -> None:
            prompt = [*model.blocks.opening, *(token for row in rows for token in row), *after]
            model.base_lm.generate([prompt], None, max_new_tokens=1)

        def memory(rows: ReadRows) -> None:
            model.base_lm.generate([after], model._modulation(rows), max_new_tokens=1)

        def cold(codes: list[torch.Tensor] = codes) -> None:
            memory(ReadRows([[ReadRow(model.decode(one), -0.1 * place) for place, one in enumerate(codes)]]))

        ways: dict[str, Callable[[], None]] = {
            "text": text,
            "memory, cold rows": cold,
            "memory, kept rows": partial(memory, kept),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, run in ways.items():
                elapsed, _ = timed(run)
                if turn:  # the first one warms up
                    seconds[name].append(elapsed)
        tokens = {"text": len(model.blocks.opening) + count * length + len(after)}
        assert model.codec is not None
        maps = model.codec._of_rate(codes[0].shape[1], torch.bfloat16)
        decoding = 2 * count * length * sum(decoder.numel() for _, decoder in maps)
        for name in ways:
            read = tokens.get(name, len(after))
            flops = 2 * parameters * read + (decoding if name == "memory, cold rows" else 0)
            stored = 0 if name == "text" else sum(one.numel() for one in codes)
            if name == "memory, kept rows":
                stored = sum(row.keys_values.nbytes for row in kept.rows[0])
            ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["text"], strict=True))
            table.add_row(
                size, name, f"{statistics.median(seconds[name]):.3f}", f"{ratio:.3f}", f"{read:,}",
                f"{flops / 1e9:,.0f}", f"{stored:,}",
            )  # fmt: skip
    say(f"{lm}, bf16, {torch.get_num_threads()} threads of torch; each way {rounds} times, in turns")
    Console().print(table)


def _plain(model: OwnKVModel) -> Any:
    """The same LM as transformers loads it, without adapter."""
    import torch
    from transformers import AutoModelForCausalLM

    name = model.base_lm.model.name_or_path
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, trust_remote_code=False).eval()


def _endless(model: OwnKVModel) -> Sampling:
    """Greedy, but no answer ends before it has all its tokens."""
    from mac_rag.lm.decoding import Sampling

    return Sampling(bias=tuple((token, -1e9) for token in model.base_lm.end_tokens))


def _paragraphs(data: str, count: int) -> tuple[Sequence[Document], Sequence[Question]]:
    """Paragraphs from all over the validation split, and the questions about them."""
    from mac_rag.data.squad import read_squad

    stream = read_squad(data, "val")
    chosen = stream.documents[:: len(stream.documents) // count][:count]
    held = {document.id for document in chosen}
    return chosen, [question for question in stream.questions if question.gold in held]


@app.command()
def limits(
    lm: LMOption,
    data: DataOption,
    compression: Annotated[int, typer.Option(min=1)] = 20,
    documents: Annotated[int, typer.Option(min=32, help="Paragraphs that are adapted.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each thing is measured, in turns.")] = 5,
) -> None:
    """Answering and adapting beside what the processor could do, and beside transformers.

    The floor of a token is the time in which a copy moves as many bytes as the weights and the cache have; the floor of
    reading and adapting are their products at the rate of a large product of the LM's shape.
    """
    from functools import partial

    import torch
    from rich.console import Console
    from rich.table import Table
    from torch.nn import functional
    from transformers import DynamicCache

    from benchmarks.measure import least
    from mac_rag.adapting import halves
    from mac_rag.engine import MACEngine
    from mac_rag.lm.batching import length_buckets, pad_rows
    from mac_rag.lm.continuous_batch import ContinuousBatch
    from mac_rag.model import ReadRow, ReadRows
    from mac_rag.retrieval.registry import make_encoder

    raw, texts = _around(lm, data, None, "minilm")
    model = raw.compressed(texts, compression)
    assert model.codec is not None
    assert model.config.bytes_per_token is not None
    plain = _plain(raw)
    layers = sum(parameter.numel() for parameter in plain.base_model.layers.parameters())
    head = plain.get_output_embeddings().weight.numel()
    of_codec = sum(part.numel() for part, _ in model.codec._of_rate(model.config.bytes_per_token, torch.bfloat16))
    of_encoder = sum(p.numel() for p in make_encoder("minilm")._documents.model.encoder.parameters())  # type: ignore[attr-defined]
    source, target = torch.zeros(2, 1 << 26)
    with torch.no_grad():
        copied = 2 * source.nbytes / least({"": lambda: target.copy_(source)}, rounds)[""]
        rates = {}
        for dtype in (torch.bfloat16, torch.float32):
            x, weight = (
                torch.randn(2048, model.base_lm.width, dtype=dtype),
                torch.randn(4096, model.base_lm.width, dtype=dtype),
            )
            rates[dtype] = (
                2 * x.shape[0] * weight.numel() / least({"": partial(functional.linear, x, weight)}, rounds)[""]
            )
    flops = rates[torch.bfloat16]
    console, table = Console(), Table("", "floor, ms", "transformers, ms", "ours, ms", "floor / ours")

    def row(name: str, floor: float, theirs: Callable[[], object], ours: Callable[[], object]) -> None:
        seconds = least({"theirs": theirs, "ours": ours}, rounds)
        figures = floor, seconds["theirs"], seconds["ours"]
        table.add_row(name, *(f"{1000 * figure:.1f}" for figure in figures), f"{floor / seconds['ours']:.2f}")

    def reads(lm_itself: Callable[..., Any], count: int) -> None:
        lm_itself(input_ids=torch.arange(5, 5 + count)[None], use_cache=True, logits_to_keep=1)

    def after(count: int) -> Callable[[], object]:
        cache, prompt = DynamicCache(), torch.full((1, count), 5)
        plain(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return lambda: plain(input_ids=prompt[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)

    def ours_after(prompt: Sequence[int], rows: Sequence[torch.Tensor]) -> Callable[[], object]:
        phi = ReadRows([[ReadRow(one, 0.0) for one in rows]])
        batch = ContinuousBatch()
        memory = model._modulation(phi) if rows else None
        model.base_lm.begin(batch, [prompt], memory, max_new_tokens=1000, sampling=endless)
        batch.step()  # reads the prompt
        return batch.step

    ours, endless = model.base_lm.model, _endless(model)
    ids = [token for text in texts for token in model.plan(text)[0]]
    rows = [ids[128 * place : 128 * (place + 1)] for place in range(16)]
    codes, asked = model.amortize_rows(rows), model.fit_to_window("Who is named first in the context?").after_memory
    kept = [model.decode(one) for one in codes]
    with torch.no_grad():
        for count in (32, 128, 512):
            floor = 2 * (layers * count + head) / flops
            row(f"reads {count} tokens", floor, partial(reads, plain, count), partial(reads, ours, count))
        for count in (128, 2048):
            floor = 2 * (layers + head + count * raw.raw_bytes / 2) / copied
            theirs = after(count)
            row(f"a token after {count} of text", floor, theirs, ours_after([5] * count, []))
            row(f"a token after {count} of rows", floor, theirs, ours_after(asked, kept[: count // 128]))

    @torch.no_grad()
    def answers(count: int, decoded: Sequence[torch.Tensor] | None) -> None:
        some = [model.decode(one) for one in codes[:count]] if decoded is None else decoded[:count]
        phi = ReadRows([[ReadRow(one, 0.0) for one in some]])
        model.base_lm.generate([asked], model._modulation(phi), max_new_tokens=8, sampling=endless)

    def decodes(count: int) -> None:
        for one in codes[:count]:
            model.decode(one)

    for count in (3, 16):
        decoding = 2 * count * 128 * of_codec / flops
        read = 2 * (layers * len(asked) + head) / flops
        step = 2 * (layers + head + count * 128 * raw.raw_bytes / 2) / copied
        text = [*model.blocks.opening, *(token for one in rows[:count] for token in one), *asked]

        def by_text(text: Sequence[int] = text) -> None:
            plain.generate(torch.tensor([text]), max_new_tokens=8, min_new_tokens=8, do_sample=False)

        row(f"8 tokens, {count} kept rows", read + 7 * step, by_text, partial(answers, count, kept))
        row(f"8 tokens, {count} cold rows", decoding + read + 7 * step, by_text, partial(answers, count, None))
        share = least({"": partial(decodes, count)}, rounds)[""]
        table.add_row(
            f"... decoding the {count} rows",
            f"{1000 * decoding:.1f}",
            "",
            f"{1000 * share:.1f}",
            f"{decoding / share:.2f}",
        )
    console.print(
        f"{lm}, {torch.get_num_threads()} threads; copies {copied / 1e9:.1f} GB/s; products "
        f"{flops / 1e9:.0f} GFLOP/s in bf16, {rates[torch.float32] / 1e9:.0f} in fp32"
    )
    console.print(table)

    chosen, _ = _paragraphs(data, documents)
    planned = [tokens for document in chosen for tokens in model.plan(document.text)]
    total = sum(map(len, planned))

    def alone(lm_itself: Callable[..., Any]) -> None:
        for bucket in length_buckets(list(map(len, planned)), 2048):
            batch, mask = pad_rows([planned[i] for i in bucket], 0)
            with torch.no_grad():
                lm_itself(input_ids=batch, attention_mask=mask, use_cache=True, logits_to_keep=1)

    def adapt() -> None:
        MACEngine(model).adapt(chosen)

    read_rows = model._read(planned)
    parts, encoder = [half for document in chosen for half in halves(document.text)], model.sentences
    assert encoder is not None
    ways: dict[str, Callable[[], object]] = {
        "transformers reads": partial(alone, plain),
        "our LM reads": partial(alone, ours),
        "documents are adapted": adapt,
        "... the LM": partial(model._read, planned),
        "... the codec": lambda: [model.encode(one) for one in read_rows],
        "... the sentence encoder": lambda: encoder.documents(parts),
    }
    work = dict.fromkeys(ways, 2 * layers * total / flops)
    work["... the codec"] = 2 * of_codec * total / flops
    work["... the sentence encoder"] = 2 * of_encoder * total / rates[torch.float32]
    work["documents are adapted"] = sum(work[name] for name in ways if name.startswith("..."))
    seconds = least(ways, max(2, rounds // 2))
    table = Table("", "floor, s", "s", "floor / s", "tokens a second", "of what our LM reads")
    for name in ways:
        took = seconds[name]
        table.add_row(
            name, f"{work[name]:.2f}", f"{took:.2f}", f"{work[name] / took:.2f}", f"{total / took:,.0f}",
            f"{seconds['our LM reads'] / took:.2f}",
        )  # fmt: skip
    console.print(f"{len(chosen)} paragraphs of {total:,} tokens")
    console.print(table)


@app.command()
def crowd(
    lm: LMOption,
    data: DataOption,
    adapter: AdapterOption = None,
    compression: Annotated[int, typer.Option(min=1)] = 20,
    documents: Annotated[int, typer.Option(min=32, help="Paragraphs in the bank.")] = 200,
    sizes: Annotated[str, typer.Option(help="Questions at a time, separated by commas.")] = "4,16",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Questions with different rows at a time against one after another, with rows that are kept decoded.

    A stream of 64 tokens is timed alone and beside batches of such questions: the time between two of its tokens. A
    question is timed until its first token, alone and while 8 long answers are being written: as it joins them, and as
    it would wait for their end.
    """
    import threading
    import time
    from concurrent.futures import ThreadPoolExecutor
    from itertools import pairwise
    from statistics import median

    import torch
    from rich.console import Console
    from rich.table import Table

    from benchmarks.measure import least
    from mac_rag.engine import MACEngine

    raw, texts = _around(lm, data, adapter, "minilm")
    model = raw.compressed(texts, compression)
    chosen, about = _paragraphs(data, documents)
    engine = MACEngine(model)
    engine.adapt(chosen)
    endless = _endless(model)

    def gaps(question: str) -> list[float]:
        pieces = engine.stream(question, max_new_tokens=64, sampling=endless)
        times = [time.perf_counter() for _ in pieces]
        return [later - sooner for sooner, later in pairwise(times)]

    def gaps_beside(asked: Sequence[str]) -> list[float]:
        ended = threading.Event()

        def ask() -> None:
            while not ended.is_set():
                engine.answer(asked)

        beside = threading.Thread(target=ask)
        beside.start()
        try:
            return gaps(asked[0])
        finally:
            ended.set()
            beside.join()

    def first_token(question: str) -> float:
        begun = time.perf_counter()
        engine.answer([question], max_new_tokens=1)
        return time.perf_counter() - begun

    def in_a_turn(question: str) -> float:
        begun = time.perf_counter()
        with engine.turn():  # nobody joins others from a turn of its own
            engine.answer([question], max_new_tokens=1)
        return time.perf_counter() - begun

    def answers_long(asked: Sequence[str]) -> float:
        begun = time.perf_counter()
        engine.answer(asked, max_new_tokens=64, sampling=endless)
        return time.perf_counter() - begun

    def amid(asked: Sequence[str], way: Callable[[str], float], question: str) -> tuple[float, float]:
        """Seconds of a question that comes amid long answers, and of these."""
        with ThreadPoolExecutor(1) as pool:
            others = pool.submit(answers_long, asked)
            time.sleep(long / 2)
            return way(question), others.result()

    questions = list({question.gold: question.question for question in about}.values())
    smooth = median(gaps(questions[0]))
    table = Table(
        "questions", "one after another, s", "at a time, s", "ratio", "the same answers", "as streams, s", "ratio",
        "stream beside, s a token", "of alone",
    )  # fmt: skip
    for count in whole_numbers("--sizes", sizes):
        asked = questions[:: len(questions) // count][:count]

        def alone(asked: Sequence[str] = asked) -> list[str]:
            return [engine.answer([question])[0].text for question in asked]

        def together(asked: Sequence[str] = asked) -> list[str]:
            return [answer.text for answer in engine.answer(asked)]

        def streamed(asked: Sequence[str] = asked) -> list[str]:
            with ThreadPoolExecutor(len(asked)) as pool:
                return list(pool.map(lambda question: "".join(engine.stream(question)), asked))

        same = sum(a == b for a, b in zip(alone(), together(), strict=True))
        seconds = least({"alone": alone, "together": together, "streamed": streamed}, rounds)
        gap = median(gaps_beside(asked))
        table.add_row(
            str(count), f"{seconds['alone']:.2f}", f"{seconds['together']:.2f}",
            f"{seconds['alone'] / seconds['together']:.2f}", f"{same} of {count}", f"{seconds['streamed']:.2f}",
            f"{seconds['alone'] / seconds['streamed']:.2f}", f"{gap:.3f}", f"{gap / smooth:.1f}",
        )  # fmt: skip
    say(f"{lm}, {torch.get_num_threads()} threads, {len(chosen)} paragraphs")
    Console().print(table)

    *others, asked_late = questions[:: len(questions) // 9][:9]
    for question in (*others, asked_late):  # all rows are kept decoded from here on
        first_token(question)
    long = median(answers_long(others) for _ in range(rounds))
    by_itself = median(first_token(asked_late) for _ in range(rounds))
    joining, waiting = ([amid(others, way, asked_late) for _ in range(rounds)] for way in (first_token, in_a_turn))
    table = Table("first token of a question", "s", "of alone", "8 long answers, s")
    table.add_row("alone", f"{by_itself:.2f}", "1.0", f"{long:.2f}")
    for name, found in (("joins 8 long answers", joining), ("waits for their end", waiting)):
        own, theirs = (median(column) for column in zip(*found, strict=True))
        table.add_row(name, f"{own:.2f}", f"{own / by_itself:.1f}", f"{theirs:.2f}")
    Console().print(table)


@app.command()
def peers(
    lm: LMOption,
    data: DataOption,
    adapter: AdapterOption = None,
    compression: Annotated[int, typer.Option(min=1)] = 20,
    documents: Annotated[int, typer.Option(min=32, help="Paragraphs in the bank.")] = 300,
    questions: Annotated[int, typer.Option(min=1)] = 100,
    picture: Annotated[Path | None, typer.Option(help="New file for the picture, as SVG.", dir_okay=False)] = None,
) -> None:
    """The same LM and questions: text of the first three paragraphs by transformers, their keys and values, and ours.

    The paragraphs are BM25's and the same for all. Keys and values as they are lie in a file for each paragraph, codes
    in a bank; all files are in the system's cache. The first token's time includes loading and decoding, but no search.
    LlamaIndex's LLM needs the package llama-index-llms-huggingface; its tokens come in whole words.
    """
    import time
    from statistics import mean, median
    from tempfile import TemporaryDirectory

    import torch
    from llama_index.llms.huggingface import HuggingFaceLLM
    from rich.console import Console
    from rich.table import Table
    from safetensors.torch import load_file, save_file

    from mac_rag.bank import MemoryBank
    from mac_rag.data.metrics import best_over, f1
    from mac_rag.engine import MACEngine
    from mac_rag.lm.adapter import Adapter
    from mac_rag.lm.continuous_batch import ContinuousBatch
    from mac_rag.model import ReadRow, ReadRows
    from mac_rag.retrieval.base import Hit
    from mac_rag.retrieval.bm25 import BM25Retriever

    raw, texts = _around(lm, data, adapter)
    model = raw.compressed(texts, compression)
    plain = _plain(raw)
    if adapter is not None:
        Adapter.add(Path(adapter), plain)
    chosen, about = _paragraphs(data, documents)
    asked = about[:: len(about) // (questions + 1)][: questions + 1]
    retriever = BM25Retriever()
    retriever.add(chosen)
    found = retriever.retrieve([question.question for question in asked], _PARAGRAPHS)

    class Clock:
        """Times of tokens, as a streamer of transformers: first of the prompt, then of each token."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, _: object) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            """Nothing is held back."""

    def by_text(question: str, hits: Sequence[Hit], clock: Clock) -> str:
        ids = torch.tensor([model.fit_to_window(question, [hit.text for hit in hits]).ids])
        ends = model.base_lm.end_tokens
        said = plain.generate(ids, max_new_tokens=_LONGEST, do_sample=False, eos_token_id=ends, streamer=clock)
        return model.base_lm._decoded(said[:, ids.shape[1] :])[0].strip()

    def by_llama_index(question: str, hits: Sequence[Hit], clock: Clock) -> str:
        prompt = model.base_lm.tokenizer.decode(model.fit_to_window(question, [hit.text for hit in hits]).ids)
        clock.put(None)
        said = ""
        for piece in peer.stream_complete(prompt, formatted=True):
            clock.put(None)
            said = piece.text
        return str(said).strip()

    def by_rows(question: str, rows: Sequence[torch.Tensor], hits: Sequence[Hit], clock: Clock) -> str:
        bias = [model.config.bias_scale * (hit.score - hits[0].score) for hit in hits]
        phi = ReadRows([[ReadRow(row, added) for row, added in zip(rows, bias, strict=True)]])
        ids = model.fit_to_window(question).after_memory
        clock.put(None)
        batch = ContinuousBatch()
        answers = model.base_lm.begin(batch, [ids], model._modulation(phi), max_new_tokens=_LONGEST)
        while batch:
            batch.step()
            clock.put(None)
        return str(answers.ended[0])

    peer = HuggingFaceLLM(
        context_window=model.context_window, max_new_tokens=_LONGEST, tokenizer=model.base_lm.tokenizer, model=plain,
        stopping_ids=model.base_lm.end_tokens, generate_kwargs={"do_sample": False}, device_map="cpu",
        tokenizer_kwargs={"add_special_tokens": False},
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        place = Path(folder)
        for number, document in enumerate(chosen):
            [row] = raw._read(raw.plan(document.text)[:1])
            save_file({"row": row}, place / f"{number}.safetensors")
        files = {document.id: place / f"{number}.safetensors" for number, document in enumerate(chosen)}
        bank = MemoryBank.create(place / "bank", model.fingerprint)
        engine = MACEngine(model, bank)
        engine.adapt(chosen)

        def loaded(hits: Sequence[Hit]) -> list[torch.Tensor]:
            return [load_file(files[hit.document_id])["row"] for hit in hits]

        def decoded(hits: Sequence[Hit]) -> list[torch.Tensor]:
            rows = bank.rows_of([hit.document_id for hit in hits])
            return [model.decode(codes) for codes in bank.codes([rows[hit.document_id][0] for hit in hits])]

        kept = {hit.document_id: row for hits in found for hit, row in zip(hits, decoded(hits), strict=True)}
        ways: dict[str, Callable[[str, Sequence[Hit], Clock], str]] = {
            "text, transformers": by_text,
            "text, LlamaIndex's HuggingFaceLLM": by_llama_index,
            "keys and values in files": lambda question, hits, clock: by_rows(question, loaded(hits), hits, clock),
            "ours, cold rows": lambda question, hits, clock: by_rows(question, decoded(hits), hits, clock),
            "ours, kept rows": lambda question, hits, clock: by_rows(
                question, [kept[hit.document_id] for hit in hits], hits, clock
            ),
        }
        text_bytes = mean(len(document.text.encode()) for document in chosen)
        size = {
            "text, transformers": text_bytes,
            "text, LlamaIndex's HuggingFaceLLM": text_bytes,
            "keys and values in files": mean(file.stat().st_size for file in files.values()),
            "ours, cold rows": (place / "bank").stat().st_size / len(chosen),
            "ours, kept rows": mean(row.nbytes for row in kept.values()),
        }
        first: dict[str, list[float]] = {name: [] for name in ways}
        speed: dict[str, list[float]] = {name: [] for name in ways}
        scores: dict[str, list[float]] = {name: [] for name in ways}
        for turn, (question, hits) in enumerate(zip(asked, found, strict=True)):
            for name, way in ways.items():
                clock, began = Clock(), time.perf_counter()
                said = way(question.question, hits, clock)
                if turn:  # the first one warms up
                    one, last = clock.times[1], clock.times[-1]
                    first[name].append(one - began)
                    scores[name].append(best_over(f1, said, question.answers))
                    if len(clock.times) > 2:
                        speed[name].append((len(clock.times) - 2) / (last - one))
        bank.close()
    table = Table("way", "first token, s", "of text", "tokens a second", "bytes a paragraph", "F1")
    for name in ways:
        table.add_row(
            name, f"{median(first[name]):.3f}", f"{median(first[name]) / median(first['text, transformers']):.2f}",
            f"{median(speed[name]):.0f}", f"{size[name]:,.0f}", f"{100 * mean(scores[name]):.1f}",
        )  # fmt: skip
    say(f"{lm}, {torch.get_num_threads()} threads, {len(asked) - 1} questions, {len(chosen)} paragraphs")
    Console().print(table)
    if picture is not None:
        _draw({name: (size[name], median(first[name])) for name in ways}, picture)


def _draw(ways: Mapping[str, tuple[float, float]], file: Path) -> None:
    """Bars of the seconds until the first token, with the bytes a paragraph beside them."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(7.2, 0.6 + 0.36 * len(ways)), layout="constrained")
    axes = drawing.subplots()
    colours = ["#c8553d" if name.startswith("ours") else "#2f6f8f" for name in ways]
    bars = axes.barh(list(ways), [seconds for _, seconds in ways.values()], color=colours)
    said = [f"{seconds:.2f} s, {size / 1000:,.{int(size < 10_000)}f} kB" for size, seconds in ways.values()]
    axes.bar_label(bars, said, padding=4)
    axes.set_xlabel("seconds until the first token; kilobytes of a paragraph")
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    drawing.savefig(file, format="svg", facecolor="white", metadata={"Date": None})


def main() -> None:
    run_app(app)


if __name__ == "__main__":
    main()
