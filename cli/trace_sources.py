"""Where spans are read from: the span files of a home, Jaeger, or Tempo; each answers the same two questions."""

import base64
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from cli.errors import CtlError
from cli.spans import Event, Span, SpanStore, otlp_spans
from fleet.trace_ids import is_trace_id
from runtime.config import TraceStoreConfig

TIMEOUT_S = 15.0
"""For one answer of a trace store: it reads from an object store, which takes seconds."""
MAX_TRACES = 200
"""That one view follows links into: a job that waited for more starts than that is not read by a person."""
SERVICES = ("llmgw-worker", "llmgw-ctl", "llmgw-agent", "llmgw-gateway")
"""Jaeger searches within one service; these make the spans that carry a job's or a replica's id."""


class TraceSource(Protocol):
    """Somewhere spans are kept."""

    @property
    def place(self) -> str:
        """As a person calls it: a directory or an address."""

    async def spans(self, trace_ids: Collection[str]) -> list[Span]:
        """All spans of these traces, in the order they were kept. Raises CtlError."""

    async def trace_of(self, attribute: str, value: str) -> str:
        """The trace of the youngest span with this attribute; empty where there is none. Raises CtlError."""


async def collect(source: TraceSource, trace_id: str) -> SpanStore:
    """A trace with every trace that its spans link to, and so on."""
    store = SpanStore()
    known: set[str] = set()
    wanted = {trace_id}
    while wanted and len(known) < MAX_TRACES:
        found = await source.spans(wanted)
        store.add(found)
        known |= wanted
        # What a root links to is where the trace came from: that is named, not shown.
        wanted = {linked for span in found if span.parent_id for linked, _ in span.links} - known
    return store


@dataclass
class Files:
    """OTLP JSON lines in `*.jsonl` and the rotated `*.jsonl.1`; only lines that can matter are parsed."""

    directory: Path
    broken_lines: int = field(default=0, init=False)
    """Of those that were parsed: no OTLP JSON, such as one that a killed process left half written."""

    @property
    def place(self) -> str:
        return str(self.directory)

    async def spans(self, trace_ids: Collection[str]) -> list[Span]:
        wanted = set(trace_ids)
        return [span for span in self._matching(trace_ids) if span.trace_id in wanted]

    async def trace_of(self, attribute: str, value: str) -> str:
        text = json.dumps(value)[1:-1]
        found = [span for span in self._matching((text,)) if span.attributes.get(attribute) == value]
        return max(found, key=lambda span: span.start_ns).trace_id if found else ""

    def _matching(self, texts: Collection[str]) -> Iterator[Span]:
        """The spans of each line that has one of the texts in it."""
        needles = [text.encode() for text in texts]
        self.broken_lines = 0
        # The rotated first, so that of a span that was exported twice the later one counts.
        for file in [*sorted(self.directory.glob("*.jsonl.1")), *sorted(self.directory.glob("*.jsonl"))]:
            with file.open("rb") as lines:
                for line in lines:
                    if any(needle in line for needle in needles):
                        yield from self._parsed(line)

    def _parsed(self, line: bytes) -> list[Span]:
        store = SpanStore()
        store.read([line.decode("utf-8", errors="replace")])
        self.broken_lines += store.broken_lines
        return list(store.spans.values())


@dataclass(frozen=True)
class Jaeger:
    """The HTTP API that Jaeger's own pages use, `/api/traces`."""

    http: httpx.AsyncClient
    place: str

    async def spans(self, trace_ids: Collection[str]) -> list[Span]:
        found: list[Span] = []
        for trace_id in sorted(trace_ids):
            found += _read(self.place, _jaeger_spans, await _get(self.http, self.place, f"/api/traces/{trace_id}"))
        return found

    async def trace_of(self, attribute: str, value: str) -> str:
        found: list[Span] = []
        for service in SERVICES:
            asked = {"service": service, "tags": json.dumps({attribute: value}), "lookback": "custom", "limit": "20"}
            # Without a start it looks back an hour at most.
            asked |= {"start": "0", "end": str(2**52)}
            found += _read(self.place, _jaeger_spans, await _get(self.http, self.place, "/api/traces", asked))
        found = [span for span in found if span.attributes.get(attribute) == value]
        return max(found, key=lambda span: span.start_ns).trace_id if found else ""


@dataclass(frozen=True)
class Tempo:
    """Grafana Tempo's HTTP API: `/api/traces/{id}`, and `/api/search` with a TraceQL query."""

    http: httpx.AsyncClient
    place: str

    async def spans(self, trace_ids: Collection[str]) -> list[Span]:
        found: list[Span] = []
        for trace_id in sorted(trace_ids):
            found += _read(self.place, _tempo_spans, await _get(self.http, self.place, f"/api/traces/{trace_id}"))
        return found

    async def trace_of(self, attribute: str, value: str) -> str:
        query = f"{{ span.{attribute} = {json.dumps(value, ensure_ascii=False)} }}"
        answer = await _get(self.http, self.place, "/api/search", {"q": query, "limit": "20"})
        found = _read(self.place, _tempo_hits, answer)
        return max(found, default=(0, ""))[1]


def store_at(query: TraceStoreConfig, http: httpx.AsyncClient) -> TraceSource:
    """The trace store that server.yaml names."""
    if query.tempo:
        return Tempo(http, query.tempo.rstrip("/"))
    return Jaeger(http, query.jaeger.rstrip("/"))


def client(query: TraceStoreConfig) -> httpx.AsyncClient:
    """A client with the headers of `headers_file`, which never stand in a command line. Raises CtlError."""
    headers: dict[str, str] = {}
    if query.headers_file is not None:
        try:
            lines = query.headers_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise CtlError(f"{query.headers_file} cannot be read: {error}; write `Name: value` lines in it") from error
        for number, line in enumerate(filter(str.strip, lines), start=1):
            name, colon, value = line.partition(":")
            if not colon:
                raise CtlError(f"{query.headers_file}: line {number} is no `Name: value`")
            headers[name.strip()] = value.strip()
    return httpx.AsyncClient(timeout=TIMEOUT_S, headers=headers)


async def _get(http: httpx.AsyncClient, place: str, path: str, asked: Mapping[str, str] | None = None) -> Any:
    """The JSON of an answer; None for 404. Raises CtlError."""
    try:
        answer = await http.get(f"{place}{path}", params=asked, headers={"Accept": "application/json"})
    except httpx.HTTPError as error:
        why = str(error) or type(error).__name__
        raise CtlError(f"the trace store at {place} does not answer: {why}") from error
    if answer.status_code == 404:
        return None
    if answer.status_code != 200:
        raise CtlError(f"the trace store at {place} answered {path} with {answer.status_code}: {answer.text[:200]}")
    try:
        return answer.json()
    except ValueError as error:
        raise CtlError(f"{place}{path} is no JSON: is that the address of a trace store's API?") from error


def _read(place: str, parse: Any, answer: Any) -> list[Any]:
    if answer is None:
        return []
    try:
        return list(parse(answer))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CtlError(f"the answer of the trace store at {place} is not what its API says: {error!r}") from error


# -- Jaeger -----------------------------------------------------------------------------------------------------------


def _jaeger_spans(answer: Mapping[str, Any]) -> Iterable[Span]:
    for trace in answer["data"] or ():
        services = {key: str(process.get("serviceName", "")) for key, process in trace.get("processes", {}).items()}
        for raw in trace["spans"]:
            yield _jaeger_span(raw, services.get(raw.get("processID", ""), ""))


def _jaeger_span(raw: Mapping[str, Any], service: str) -> Span:
    trace_id = str(raw["traceID"]).zfill(32)
    attributes = {tag["key"]: _jaeger_value(tag) for tag in raw.get("tags", ())}
    failed = attributes.pop("error", False) in (True, "true") or attributes.get("otel.status_code") == "ERROR"
    references = [
        (reference["refType"], str(reference["traceID"]).zfill(32), str(reference["spanID"]).zfill(16))
        for reference in raw.get("references", ())
    ]
    # The first CHILD_OF in the same trace is the parent; everything else was a link.
    parent = next((one for one in references if one[0] == "CHILD_OF" and one[1] == trace_id), None)
    start = int(raw["startTime"]) * 1000
    return Span(
        trace_id=trace_id,
        span_id=str(raw["spanID"]).zfill(16),
        parent_id=parent[2] if parent is not None else "",
        name=raw["operationName"],
        service=service,
        start_ns=start,
        end_ns=start + int(raw["duration"]) * 1000,
        attributes=attributes,
        error=str(attributes.get("otel.status_description", "")) if failed else None,
        events=tuple(map(_jaeger_event, raw.get("logs", ()))),
        links=tuple(one[1:] for one in references if one is not parent),
    )


def _jaeger_event(raw: Mapping[str, Any]) -> Event:
    fields = {entry["key"]: _jaeger_value(entry) for entry in raw.get("fields", ())}
    return Event(name=str(fields.pop("event", "event")), time_ns=int(raw.get("timestamp", 0)) * 1000, attributes=fields)


def _jaeger_value(entry: Mapping[str, Any]) -> Any:
    return int(entry["value"]) if entry.get("type") == "int64" else entry["value"]


# -- Tempo ------------------------------------------------------------------------------------------------------------


def _tempo_spans(answer: Mapping[str, Any]) -> Iterable[Span]:
    """OTLP in protobuf's own JSON: `batches` instead of `resourceSpans`, ids in base64, enums by name."""
    trace = answer.get("trace", answer)
    batches = trace["resourceSpans"] if "resourceSpans" in trace else trace["batches"]
    for batch in batches:
        for scope in batch.get("scopeSpans", ()):
            for raw in scope.get("spans", ()):
                span = {**raw, "traceId": _hex(raw["traceId"]), "spanId": _hex(raw["spanId"])}
                if raw.get("parentSpanId"):
                    span["parentSpanId"] = _hex(raw["parentSpanId"])
                span["links"] = [
                    {"traceId": _hex(link["traceId"]), "spanId": _hex(link["spanId"])} for link in raw.get("links", ())
                ]
                status = raw.get("status", {})
                if status.get("code") == "STATUS_CODE_ERROR":
                    span["status"] = {**status, "code": 2}
                elif isinstance(status.get("code"), str):
                    span["status"] = {}
                scoped = {"spans": [span]}
                yield from otlp_spans(
                    {"resourceSpans": [{"resource": batch.get("resource", {}), "scopeSpans": [scoped]}]}
                )


def _tempo_hits(answer: Mapping[str, Any]) -> Iterable[tuple[int, str]]:
    for hit in answer.get("traces") or ():
        yield int(hit.get("startTimeUnixNano", 0)), str(hit["traceID"]).zfill(32)


def _hex(text: str) -> str:
    """An id that stands there as hex or, as protobuf's JSON has it, in base64."""
    if len(text) in (16, 32) and (is_trace_id(text) or all(char in "0123456789abcdef" for char in text)):
        return text
    return base64.b64decode(text, validate=True).hex()
