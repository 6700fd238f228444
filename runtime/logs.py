"""Log lines of every process, as text or JSON, each with the trace and span in whose course it was written.

The ids come from the current context: in an activity, a background task, a request, and a workflow (whose logger is
silent during a replay). Values that look like secrets are masked: a library's message may quote a header or a URL.
"""

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

from opentelemetry import trace

from runtime.config import LogConfig

SECRETS = re.compile(r"(?i)((?:bearer|basic)\s+|\bhf_)[^\s'\",]+|(://[^/\s:@]*:)[^/\s@]+(?=@)")
"""An authorization, a password in a URL, a hub's token."""

OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "trace_id", "span_id", "node"}
"""What every record has: all else was given as `extra`."""

QUIET = {"httpx": logging.WARNING, "httpcore": logging.WARNING}
"""httpx logs each request."""


def install(
    config: LogConfig, *, node: str = "", quiet: Mapping[str, int] | None = None, stream: TextIO | None = None
) -> None:
    """Send this process's log to `stream`, stderr by default, as `config` says. `quiet`: least levels by logger."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(InTrace(node))
    handler.setFormatter(JsonLines() if config.format == "json" else TextLines())
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)
    for name, level in {**QUIET, **(quiet or {})}.items():
        logging.getLogger(name).setLevel(level)


class InTrace(logging.Filter):
    """Gives each record its node, and the ids of the span it is written in; "" outside any."""

    def __init__(self, node: str = "") -> None:
        super().__init__()
        self._node = node

    def filter(self, record: logging.LogRecord) -> bool:
        found = trace.get_current_span().get_span_context()
        record.node = self._node
        record.trace_id = f"{found.trace_id:032x}" if found.is_valid else ""
        record.span_id = f"{found.span_id:016x}" if found.is_valid else ""
        return True


class TextLines(logging.Formatter):
    """`2026-12-01 04:13:03,120 INFO agent node=n1 engine launched trace_id=… span_id=…`, without what is not there."""

    def format(self, record: logging.LogRecord) -> str:
        node = f"node={said} " if (said := getattr(record, "node", "")) else ""
        trace_id = getattr(record, "trace_id", "")
        ids = f" trace_id={trace_id} span_id={getattr(record, 'span_id', '')}" if trace_id else ""
        line = f"{self.formatTime(record)} {record.levelname} {record.name} {node}{record.getMessage()}{ids}"
        return masked(f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line)


class JsonLines(logging.Formatter):
    """An object a line: time (RFC 3339), level, logger, message; where there are any, node, ids, fields and error."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": masked(record.getMessage()),
        }
        for key in ("node", "trace_id", "span_id"):
            if value := getattr(record, key, ""):
                line[key] = value
        if fields := {key: masked(str(value)) for key, value in vars(record).items() if key not in OWN}:
            line["fields"] = fields
        if record.exc_info:
            line["error"] = masked(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def masked(text: str) -> str:
    """Without what looks like a secret."""
    return SECRETS.sub(lambda found: f"{found[1] or found[2]}…", text)
