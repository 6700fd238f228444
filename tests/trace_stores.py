"""Jaeger and Tempo as their HTTP APIs answer, over spans that a test gives: what each does to OTLP on the way."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


@dataclass
class TraceStores:
    """Both, over the same spans (OTLP JSON, as `tests.otlp.span` makes them), by service."""

    spans: dict[str, list[dict[str, Any]]]
    seen: list[Mapping[str, str]] = field(default_factory=list)
    """Headers of each request."""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/jaeger/api/traces", self._jaeger_search),
                Route("/jaeger/api/traces/{trace}", self._jaeger_trace),
                Route("/tempo/api/search", self._tempo_search),
                Route("/tempo/api/traces/{trace}", self._tempo_trace),
            ]
        )

    async def _jaeger_trace(self, request: Request) -> Response:
        self.seen.append(request.headers)
        trace = request.path_params["trace"]
        found = self._jaeger(trace)
        if not found["spans"]:
            error = {"code": 404, "msg": "trace not found"}
            return JSONResponse({"data": None, "errors": [error]}, status_code=404)
        return JSONResponse({"data": [found], "total": 0, "limit": 0, "offset": 0, "errors": None})

    async def _jaeger_search(self, request: Request) -> Response:
        tags = json.loads(request.query_params["tags"])
        service = request.query_params["service"]
        hits = {
            span["traceId"]
            for span in self.spans.get(service, [])
            if all({"key": key, "value": {"stringValue": value}} in span["attributes"] for key, value in tags.items())
        }
        return JSONResponse({"data": [self._jaeger(trace) for trace in sorted(hits)], "errors": None})

    def _jaeger(self, trace: str) -> dict[str, Any]:
        made, processes = [], {}
        for number, (service, spans) in enumerate(self.spans.items(), start=1):
            processes[f"p{number}"] = {"serviceName": service, "tags": []}
            made += [_jaeger_span(span, f"p{number}") for span in spans if span["traceId"] == trace]
        return {"traceID": trace, "spans": made, "processes": processes, "warnings": None}

    async def _tempo_trace(self, request: Request) -> Response:
        self.seen.append(request.headers)
        trace = request.path_params["trace"]
        batches = [
            {
                "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]},
                "scopeSpans": [{"scope": {}, "spans": found}],
            }
            for service, spans in self.spans.items()
            if (found := [_tempo_span(span) for span in spans if span["traceId"] == trace])
        ]
        return JSONResponse({"batches": batches}) if batches else Response(status_code=404)

    async def _tempo_search(self, request: Request) -> Response:
        query = request.query_params["q"]
        hits = [
            {"traceID": span["traceId"].lstrip("0"), "startTimeUnixNano": span["startTimeUnixNano"]}
            for spans in self.spans.values()
            for span in spans
            for attribute in span["attributes"]
            if query == f"{{ span.{attribute['key']} = {json.dumps(attribute['value']['stringValue'])} }}"
        ]
        return JSONResponse({"traces": hits, "metrics": {}})


def _jaeger_span(span: Mapping[str, Any], process: str) -> dict[str, Any]:
    references = [
        {"refType": "FOLLOWS_FROM", "traceID": link["traceId"], "spanID": link["spanId"]} for link in span["links"]
    ]
    if "parentSpanId" in span:
        references.insert(0, {"refType": "CHILD_OF", "traceID": span["traceId"], "spanID": span["parentSpanId"]})
    tags = [_jaeger_tag(attribute) for attribute in span["attributes"]]
    if span["status"]:
        tags += [
            {"key": "error", "type": "bool", "value": True},
            {"key": "otel.status_code", "type": "string", "value": "ERROR"},
            {"key": "otel.status_description", "type": "string", "value": span["status"]["message"]},
        ]
    start, end = int(span["startTimeUnixNano"]) // 1000, int(span["endTimeUnixNano"]) // 1000
    logs = [
        {
            "timestamp": start,
            "fields": [
                {"key": "event", "type": "string", "value": event["name"]},
                *map(_jaeger_tag, event.get("attributes", ())),
            ],
        }
        for event in span["events"]
    ]
    return {
        "traceID": span["traceId"],
        "spanID": span["spanId"],
        "operationName": span["name"],
        "references": references,
        "startTime": start,
        "duration": end - start,
        "tags": tags,
        "logs": logs,
        "processID": process,
    }


def _jaeger_tag(attribute: Mapping[str, Any]) -> dict[str, Any]:
    ((kind, value),) = attribute["value"].items()
    if kind == "intValue":
        return {"key": attribute["key"], "type": "int64", "value": int(value)}
    return {"key": attribute["key"], "type": "string", "value": value}


def _tempo_span(span: Mapping[str, Any]) -> dict[str, Any]:
    made = {**span, "kind": "SPAN_KIND_INTERNAL"}
    for key in ("traceId", "spanId", "parentSpanId"):
        if key in span:
            made[key] = _base64(span[key])
    made["links"] = [{key: _base64(value) for key, value in link.items()} for link in span["links"]]
    failed = {**span["status"], "code": "STATUS_CODE_ERROR"}
    made["status"] = failed if span["status"] else {"code": "STATUS_CODE_UNSET"}
    return made


def _base64(text: str) -> str:
    return base64.b64encode(bytes.fromhex(text)).decode()
