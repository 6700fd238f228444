"""Answers /health with 200."""

import argparse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--metrics-port", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    with ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Health) as server:
        server.serve_forever()
