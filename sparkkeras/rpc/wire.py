"""Calls as signed bytes: a name, a few fields, and one body of any size.

Every message is sealed with AES-256-GCM (NIST SP 800-38D). The head, which names the call and the length of its body, is
encrypted and has a tag of its own, so nobody without the run's key can make the other side read a single byte of a body.
The body goes through the cipher as associated data, which signs it at the speed of memory; with ``encrypt`` it is
encrypted as well.

A conversation begins with a handshake that proves, on both sides, the possession of the run's secret, and derives from it
and from both sides' random numbers a key for each direction (HKDF, RFC 5869). Messages in a direction are numbered, and the
number is the nonce: one that comes twice, out of turn, from another conversation or from another run does not open.

Nothing is pickled and nothing is decompressed: a head is JSON, a body is the bytes of arrays whose shapes the receiver
knows.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

Fields = Mapping[str, Any]
Body = Sequence[memoryview]
"""Buffers of bytes, which are sent one after the other without being joined."""

TAG_BYTES = 16
"""What is appended to a head and to a body."""

HEAD_BYTES = 48 * 1024
"""A sealed head has this many bytes at most: in base64, what Python's HTTP client takes for a line."""

CHUNK_BYTES = 256 * 1024
"""A body is signed and sent in chunks of this size, so that it goes through the processor's cache once."""

_MAGIC = b"sparkkeras/1"
_RANDOM_BYTES = 16
HELLO_BYTES = len(_MAGIC) + _RANDOM_BYTES + TAG_BYTES
"""The length of a greeting, and of the answer to it."""


class WireError(Exception):
    """What came is no message of the peer that this conversation is with."""


@dataclass(frozen=True)
class Secret:
    """What the members of one run know and nobody else does. It shows in no repr.

    Attributes:
        key: 32 random bytes.
    """

    key: bytes = field(repr=False)

    @classmethod
    def fresh(cls) -> Secret:
        """A new one."""
        return cls(secrets.token_bytes(32))

    def __str__(self) -> str:
        return "Secret()"


@dataclass(frozen=True)
class Head:
    """What a message says before its body.

    Attributes:
        name: What is called for; empty in an answer.
        fields: Names and values that JSON knows.
        body: The length of the body in bytes.
    """

    name: str
    fields: Fields
    body: int


def encoded(head: Head) -> bytes:
    """A head as JSON.

    Raises:
        TypeError: JSON does not know something in it.
        ValueError: It is too long.
    """
    plain = json.dumps([head.name, head.body, dict(head.fields)], separators=(",", ":")).encode()
    if len(plain) + TAG_BYTES > HEAD_BYTES:
        raise ValueError(f"{len(plain)} bytes of fields, where {HEAD_BYTES - TAG_BYTES} are possible")
    return plain


def _decoded(plain: bytes) -> Head:
    try:
        name, body, fields = json.loads(plain)
    except (ValueError, TypeError, RecursionError):
        raise WireError("a head that is no head") from None
    if not isinstance(name, str) or type(body) is not int or body < 0 or not isinstance(fields, dict):
        raise WireError("a head of another form")
    return Head(name, fields, body)


class Session:
    """One side of a conversation. Not for two threads at a time."""

    def __init__(self, send: bytes, receive: bytes, encrypt: bool) -> None:
        self._sealing, self._opening = AESGCM(send), AESGCM(receive)
        self._send, self._receive = algorithms.AES(send), algorithms.AES(receive)
        self._sent = self._received = 0
        self._encrypt = encrypt

    def seal(self, head: Head) -> bytes:
        """The next head to send, encrypted; the body that it announces is sent through `outgoing` before the next one."""
        plain = encoded(head)
        self._sent += 2
        return self._sealing.encrypt(_nonce(self._sent), plain, None)

    def open(self, sealed: bytes | bytearray) -> Head:
        """The head that came next; its body is received through `incoming` before the next one.

        Raises:
            WireError: It is not the next head of this conversation.
        """
        number = self._received + 2
        try:
            plain = self._opening.decrypt(_nonce(number), bytes(sealed), None)
        except InvalidTag:
            raise WireError("a head that does not open: another run's, repeated, or damaged on its way") from None
        self._received = number  # only now: a stranger's head must not put the conversation out of step
        return _decoded(plain)

    def outgoing(self, body: Body) -> Iterator[memoryview]:
        """What to send for the body that the last sealed head announced: its chunks, and a tag at the end.

        Each is good until the next is asked for.
        """
        return self._chunks(body, _nonce(self._sent + 1))  # now, not when the first chunk is asked for

    def _chunks(self, body: Body, nonce: bytes) -> Iterator[memoryview]:
        cipher = Cipher(self._send, modes.GCM(nonce)).encryptor()
        scratch = memoryview(bytearray(CHUNK_BYTES)) if self._encrypt else memoryview(b"")
        for part in body:
            for start in range(0, len(part), CHUNK_BYTES):
                chunk = part[start : start + CHUNK_BYTES]
                if self._encrypt:
                    yield scratch[: cipher.update_into(chunk, scratch)]
                else:
                    yield chunk  # while it is still in the processor's cache
                    cipher.authenticate_additional_data(chunk)
        cipher.finalize()
        yield memoryview(cipher.tag)

    def incoming(self) -> Incoming:
        """What takes the body that the last opened head announced."""
        return Incoming(self._receive, _nonce(self._received + 1), self._encrypt)


class Incoming:
    """A body on its way in."""

    def __init__(self, key: algorithms.AES, nonce: bytes, encrypt: bool) -> None:
        self._cipher = Cipher(key, modes.GCM(nonce)).decryptor()
        self._encrypt = encrypt

    def take(self, chunk: memoryview) -> None:
        """Check a chunk that has come, and decrypt it where it lies."""
        if self._encrypt:
            self._cipher.update_into(chunk, chunk)
        else:
            self._cipher.authenticate_additional_data(chunk)

    def finish(self, tag: bytes | bytearray) -> None:
        """The end of the body. Before this nothing that came may be used.

        Raises:
            WireError: The body is not the one that was sent.
        """
        try:
            self._cipher.finalize_with_tag(bytes(tag))
        except (InvalidTag, ValueError):  # the latter for a tag of another length
            raise WireError("a body that is not the one that was sent") from None


class Greeting:
    """The client's side of the handshake."""

    def __init__(self, secret: Secret, encrypt: bool) -> None:
        self._secret, self._encrypt = secret, encrypt
        self._random = secrets.token_bytes(_RANDOM_BYTES)

    def hello(self) -> bytes:
        """What to send first."""
        return _signed(self._secret, b"hello", self._random)

    def welcomed(self, answer: bytes) -> Session:
        """The conversation, once the server has answered.

        Raises:
            WireError: The one that answered does not have the secret.
        """
        theirs = _checked(self._secret, b"welcome" + self._random, answer)
        there, back = _keys(self._secret, self._random, theirs)
        return Session(there, back, self._encrypt)


class Reception:
    """The server's side of all handshakes of one run. A greeting is good once."""

    def __init__(self, secret: Secret, encrypt: bool) -> None:
        self._secret, self._encrypt = secret, encrypt
        self._seen: set[bytes] = set()
        self._lock = threading.Lock()

    def welcome(self, hello: bytes) -> tuple[bytes, Session]:
        """The answer to a greeting, and the conversation that begins with it.

        Raises:
            WireError: It is no greeting of this run, or one that was here before.
        """
        random = _checked(self._secret, b"hello", hello)
        with self._lock:
            if random in self._seen:
                raise WireError("a greeting that was here before")
            self._seen.add(random)
        mine = secrets.token_bytes(_RANDOM_BYTES)
        there, back = _keys(self._secret, random, mine)
        return _signed(self._secret, b"welcome" + random, mine), Session(back, there, self._encrypt)


def _signed(secret: Secret, purpose: bytes, random: bytes) -> bytes:
    """Magic, random, tag. The key is a new one for each random, so the nonce may be constant."""
    tag = AESGCM(_derived(secret, random, purpose, 32)).encrypt(_nonce(0), b"", _MAGIC + random)
    return _MAGIC + random + tag


def _checked(secret: Secret, purpose: bytes, message: bytes) -> bytes:
    random = message[len(_MAGIC) : -TAG_BYTES]
    if len(message) != HELLO_BYTES or not message.startswith(_MAGIC):
        raise WireError("no greeting of sparkkeras")
    try:
        AESGCM(_derived(secret, random, purpose, 32)).decrypt(_nonce(0), message[-TAG_BYTES:], _MAGIC + random)
    except InvalidTag:
        raise WireError("a greeting that does not have this run's secret") from None
    return random


def _keys(secret: Secret, client: bytes, server: bytes) -> tuple[bytes, bytes]:
    """The keys from the client to the server and back."""
    both = _derived(secret, client + server, b"session", 64)
    return both[:32], both[32:]


def _derived(secret: Secret, salt: bytes, purpose: bytes, length: int) -> bytes:
    return HKDF(SHA256(), length, salt, _MAGIC + b" " + purpose).derive(secret.key)


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")
