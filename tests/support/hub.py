"""The Hugging Face Hub's refusals, from a server on this machine: ``from support.hub import hub, REFUSED``.

The client is the real ``huggingface_hub``, in a process whose HF_ENDPOINT is this server. Only the server is fake: it
answers with the Hub's status and ``X-Error-Code``, from which the client chooses its error
(huggingface_hub/utils/_http.py, hf_raise_for_status).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from support.commands import environment

# By the model's name: status and X-Error-Code.
REFUSED = {
    "meta-llama/Llama-2-70b-hf": (401, "GatedRepo"),  # without a login
    "meta-llama/Llama-3-8b": (403, "GatedRepo"),  # with one whose account has not accepted the licence
    "nobody/nothing": (401, "RepoNotFound"),
}
CLOSE = "close"  # a request for it, after which nothing listens there


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name = self.path.strip("/").partition("/resolve/")[0]
        if name == CLOSE:
            self.server.shutdown()
            self.server.server_close()
        status, code = REFUSED.get(name, (404, "RepoNotFound"))
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *unused: object) -> None:
        pass


@contextlib.contextmanager
def hub(home: Path) -> Iterator[dict[str, str]]:
    """The environment of a process for which this is the Hub, with an empty cache and no login."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    without = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "TRANSFORMERS_OFFLINE")
    try:
        given = {name: value for name, value in environment().items() if name not in without}
        yield given | {"HF_HOME": str(home), "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    finally:
        server.shutdown()
        server.server_close()
