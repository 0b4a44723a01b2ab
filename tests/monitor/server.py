"""A server of the page as the monitor is one, with messages that a test adds."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tests.monitor.pages import POLICY, page

MOST = 500  # messages in a response


class MonitorServer(ThreadingHTTPServer):
    """Serves the page and the messages in `messages`."""

    daemon_threads = True

    def __init__(self, messages=(), port=0, identity="first"):
        super().__init__(("127.0.0.1", port), Handler)
        self.messages = list(messages)
        self.identity = identity

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/token/"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        parts = urlsplit(self.path)
        if parts.path == "/token/":
            self.answer(page(nonce="n0nce"), "text/html; charset=utf-8")
        elif parts.path == "/token/messages":
            self.answer(json.dumps(self.batch(int(parse_qs(parts.query)["after"][0]))), "application/json")
        else:
            self.send_error(404)

    def batch(self, after):
        messages = self.server.messages[after : after + MOST]
        end = after + len(messages)
        return {"next": end, "messages": messages, "more": end < len(self.server.messages), "server": self.server.identity}

    def answer(self, text, kind):
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY.format(nonce="n0nce"))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@contextmanager
def serve(messages=(), **settings):
    with MonitorServer(messages, **settings) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
