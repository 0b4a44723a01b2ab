"""A monitor's server with messages that a test adds."""

from contextlib import closing, contextmanager
from urllib.parse import urlsplit

from sparkkeras.monitor.messages import Messages
from sparkkeras.monitor.server import PageServer


class MonitorServer:
    """Serves the page and the messages that were added."""

    def __init__(self, messages=(), port=0, token=None):
        self._messages = Messages()
        self._server = PageServer(self._messages, "127.0.0.1", port)
        if token is not None:
            self._server.url = self._server.url.replace(self._server.token, token)
            self._server.token = token
        self.add(messages)

    def add(self, messages):
        for message in messages:
            self._messages.add(message)

    @property
    def url(self):
        return self._server.url

    @property
    def address(self):
        """What a server has that replaces this one at the same address."""
        return {"port": urlsplit(self.url).port, "token": self._server.token}

    def close(self):
        self._server.close()


@contextmanager
def serve(messages=(), **address):
    with closing(MonitorServer(messages, **address)) as server:
        yield server
