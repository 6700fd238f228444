"""Trace ids out of W3C traceparents, as records and jobs keep them."""


def trace_id_of(traceparent: str) -> str:
    """The trace id; empty where there is none, or where sampling left the trace out, so that nobody looks for it."""
    fields = traceparent.split("-")
    if len(fields) != 4 or not is_trace_id(fields[1]):
        return ""
    try:
        recorded = int(fields[3], 16) & 1
    except ValueError:
        return ""
    return fields[1] if recorded else ""


def is_trace_id(text: str) -> bool:
    """32 lower case hex digits."""
    return len(text) == 32 and all(char in "0123456789abcdef" for char in text)
