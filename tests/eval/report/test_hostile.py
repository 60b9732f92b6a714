"""A report shows hostile titles, answers, commits and file names as text, and its policy allows no script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eval.harness.paper_plan import StepRecord, write_records
from eval.harness.results import Commit, Data, Model, Quote, Row, Sample, Verdict
from eval.report.collect import collect
from eval.report.page import page
from mac_rag.data.types import Question
from tests.eval.helpers import result, scored
from tests.helpers import Elements

ATTACKS = [
    "<script>alert(1)</script> </style></title></svg><script src=//evil.example/x.js></script>",
    "\"><img src=x onerror=alert(1)> ' onmouseover='alert(1) <base href=//evil.example><form action=//evil.example>",
    "javascript:alert(1) [click](javascript:alert(1)) `</code><script>` **x** {{7*7}} ${7*7} $\\frac{ $x$",
    "]]></text><script>alert(1)</script><!-- --></svg><iframe srcdoc='<script>alert(1)</script>'>",
    "<svg onload=alert(1)><a xlink:href='javascript:alert(1)'>x</a></svg> &lt;script&gt;alert(1)&lt;/script&gt; &#60;",
    "line\nbreak | pipe \n# heading\n- item url(https://evil.example/a.png) @import 'https://evil.example/a.css'",
]
# What a page of harmless results consists of; anything else was made by a value.
PLAIN = {
    "html", "head", "meta", "title", "style", "body", "header", "p", "h1", "ul", "li", "b", "nav", "a", "main",
    "section", "h2", "h3", "div", "span", "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "dl",
    "dt", "dd", "code", "figure", "figcaption", "footer", "q", "mark",
}  # fmt: skip
SVG = {"svg", "g", "defs", "path", "use", "text", "clippath", "rect", "image"}


def hostile(folder: Path, text: str) -> None:
    """Results with this text wherever a result, a sample, a step or a file has one."""
    rows = [
        scored(text, 0.4, method=text, dataset=text),
        scored(f"MAC {text}", 0.5, method=f"MAC {text}", dataset=text),
        scored(f"MAC {text} 2", 0.3, method=f"MAC {text}", dataset=f"{text} 2"),
    ]
    rows = [row.model_copy(update={"measures": {text: 1.0, "peak_mb": 5.0, "minutes": 3.0}}) for row in rows]
    heat = [
        Row(
            name=f"{text} {n}", settings={"distractors": text, "document": text, "token": n}, measures={"mass": 0.1 * n}
        )
        for n in (1, 2)
    ]
    lines = [scored(f"{text} {n}", 0.1 * n, method=text, added=n) for n in (0, 1)]
    lines = [row.model_copy(update={"measures": {"retention": 50.0 + row.settings["added"]}}) for row in lines]
    everything = {
        "created": text, "command": text, "config": {text: text}, "versions": {text: text}, "notes": (text,),
        "quotes": (Quote(question=text, answer="script alert", document_id=text, sentence=text),),
        "not_run": {text: text}, "git": Commit(commit=text, dirty=True),
        "model": Model(
            name=text, fingerprint=text, answer_digest=text, device=text, config={"base_lm": {"name": text}}
        ),
        "data": Data(name=text, split=text, source=text, documents=1, questions=1),
    }  # fmt: skip
    said = Verdict(prediction=text, em=0.0, f1=0.0, em_prefix=0.0, retrieved=(text,), truncated=False)
    samples = [Sample.of(Question(text, text, (text,), text), {row.name: said for row in rows})]
    name = re.sub(r"[/\0]", "_", text)[:100]
    result("main_table", rows, **everything).write(folder / f"{name}.json", samples)
    result(text, rows, **everything).write(folder / f"{name} 2.json")
    result("cross_attention", heat, **everything).write(folder / f"{name} 3.json")
    result("retention", lines, **everything).write(folder / f"{name} 4.json")
    (folder / f"{name} 5.json").write_text('{"schema_version": 1}')
    write_records(folder, [StepRecord(name=text, experiment="peft", status="failed", reason=text)])


@pytest.mark.filterwarnings("ignore:constrained_layout not applied")  # of names that are longer than a plot
@pytest.mark.parametrize("text", ATTACKS)
def test_no_value_becomes_markup(text: str, tmp_path: Path) -> None:
    hostile(tmp_path, text)
    written = page(collect([tmp_path]))
    elements = Elements(written)
    assert {tag for tag, _ in elements.found} <= PLAIN | SVG
    assert sum(tag == "svg" for tag, _ in elements.found) >= 3
    assert not elements.comments
    for tag, attributes in elements.found:
        assert not [name for name in attributes if name.startswith("on") or name in ("srcdoc", "action", "formaction")]
        for name in ("href", "src", "xlink:href"):
            assert attributes.get(name, "#").startswith(("#", "data:image/png;base64,")), (tag, attributes)
        assert "evil.example" not in attributes.get("style", "")
    styles = re.findall(r"<style[^>]*>(.*?)</style>", written, flags=re.DOTALL)
    assert not [style for style in styles if "evil" in style or "alert" in style]
    as_read = " ".join(elements.text.split())
    assert " ".join(text.split()) in as_read
    drawn = " ".join(re.findall(r"<svg.*?</svg>", written, flags=re.DOTALL))
    assert " ".join(text.split())[:20] in " ".join(Elements(drawn).text.split())


def test_the_policy_comes_before_everything_that_it_governs(tmp_path: Path) -> None:
    result("peft", [scored("LoRA", 0.4)]).write(tmp_path / "a.json")
    elements = Elements(page(collect([tmp_path])))
    assert [tag for tag, _ in elements.found[:4]] == ["html", "head", "meta", "meta"]
    policy = elements.found[3][1]
    assert policy["http-equiv"] == "Content-Security-Policy"
    rules = dict(rule.split(" ", 1) for rule in policy["content"].split("; "))
    assert rules["default-src"] == "'none'"  # and so no script, frame, font, connection or object
    assert rules.keys() == {"default-src", "style-src", "img-src", "base-uri", "form-action"}
    assert (rules["img-src"], rules["base-uri"], rules["form-action"]) == ("data:", "'none'", "'none'")
