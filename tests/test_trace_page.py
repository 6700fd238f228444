"""The HTML page of a trace: whole, alone, and deaf to what spans say."""

import base64
import hashlib
import re
from html.parser import HTMLParser

from cli.span_tree import tree
from cli.spans import SpanStore
from cli.trace_page import page
from tests.otlp import line, span, store

JOB = "a" * 32
EVIL = '</script><img src=x onerror="alert(1)">&amp;$title ${total}'


class Reader(HTMLParser):
    """Collects the tags with their attributes, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, "a tag is closed that is not open"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(spans: SpanStore, title: str = "job/serve/m/1") -> tuple[str, Reader]:
    text = page(title, tree(spans, JOB))
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return text, reader


SERVED = store(
    line(
        span(JOB, 1, 0, "serve model", 0.0, 2.0),
        span(JOB, 2, 1, "registry", 0.0, 0.5, llmgw__detail="1 file"),
        span(JOB, 3, 1, "placement", 0.5, 2.0, error="timed_out: no room", links=((JOB, 2),)),
    )
)


def test_every_span_is_a_row_on_one_axis_with_its_details() -> None:
    _, reader = read(SERVED)
    rows = [attributes for tag, attributes in reader.tags if tag == "div" and "data-depth" in attributes]
    assert [row["data-depth"] for row in rows] == ["0", "1", "1"]
    assert rows[1]["style"] == "--d:1;--s:0.000000;--e:0.250000"
    assert rows[2]["class"] == "row s0 failed"
    text = " ".join(reader.text)
    for said in ("serve model", "registry", "llmgw.detail", "1 file", "timed_out: no room", "3 spans in 2.0 s"):
        assert said in text
    (link,) = [attributes["href"] for tag, attributes in reader.tags if tag == "a"]
    assert link == f"#{rows[1]['id']}"


def test_the_page_asks_the_network_for_nothing_and_runs_only_its_own_script() -> None:
    text, reader = read(SERVED)
    assert not [tag for tag, attributes in reader.tags if "src" in attributes or tag in ("link", "iframe", "img")]
    assert "http" not in re.sub(r'http-equiv="', "", text)
    (policy,) = [attributes["content"] for tag, attributes in reader.tags if attributes.get("http-equiv")]
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_what_a_span_says_stays_text_wherever_it_stands() -> None:
    hostile = store(
        line(
            span(
                JOB,
                1,
                0,
                EVIL,
                0,
                1,
                error=EVIL,
                events=({"name": EVIL, "attributes": [{"key": EVIL, "value": {"stringValue": EVIL}}]},),
                **{EVIL: EVIL},  # type: ignore[arg-type]
            ),
            service=EVIL,
        )
    )
    text, reader = read(hostile, EVIL)
    assert [tag for tag, _ in reader.tags if tag in ("img", "script")] == ["script"]
    assert not any("onerror" in attributes for _, attributes in reader.tags)
    assert text.count("&lt;/script&gt;&lt;img src=x") >= 8
    assert "".join(reader.text).count("$title ${total}") >= 8


def test_two_thousand_spans_make_a_page_of_bounded_size() -> None:
    spans = [span(JOB, 1, 0, "root", 0, 2000)]
    spans += [span(JOB, number, 1, "step", number, number + 1) for number in range(2, 2001)]
    text, reader = read(store(line(*spans)))
    assert len([1 for _, attributes in reader.tags if "data-depth" in attributes]) == 2000
    assert len(text) < 3_000_000
