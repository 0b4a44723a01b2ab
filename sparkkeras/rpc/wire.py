"""The wire format: authenticated messages of a name, a few fields and one body of any size.

Every message is sealed with AES-256-GCM (NIST SP 800-38D). The header, which holds the name of the call and the length of
the body, is encrypted and has its own authentication tag, so a peer without the run's secret cannot make the other side read
a single byte of a body. The body passes through the cipher as associated data, which authenticates it at memory speed; with
``encrypt=True`` it is encrypted as well.

A session starts with a handshake. Both sides prove that they have the run's secret, and derive one key for each direction
from the secret and from both sides' random numbers (HKDF, RFC 5869). The messages of a direction are numbered, and the
number is the nonce: a message that is repeated, out of order, from another session or from another run fails authentication.

Nothing is pickled and nothing is decompressed: a header is JSON, and a body is the bytes of arrays whose shapes the receiver
already knows.
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
"""Buffers of bytes, sent one after the other without being joined."""

TAG_BYTES = 16
"""The length of the authentication tag that follows a header and a body."""

MAX_HEADER_BYTES = 47 * 1024
"""The largest sealed header. In base64 it fits into the longest header line that Python's HTTP client and server accept."""

CHUNK_BYTES = 256 * 1024
"""Bodies are authenticated and sent in chunks of this size, so that each byte enters the processor's cache once."""

_MAGIC = b"sparkkeras/1"
_RANDOM_BYTES = 16
HELLO_BYTES = len(_MAGIC) + _RANDOM_BYTES + TAG_BYTES
"""The length of the client's handshake message, and of the server's answer to it."""


class WireError(Exception):
    """The received bytes are not a valid message of this session."""


@dataclass(frozen=True)
class Secret:
    """The key that the driver and the workers of one run share. It appears in no ``repr``.

    Attributes:
        key: 32 random bytes.
    """

    key: bytes = field(repr=False)

    @classmethod
    def fresh(cls) -> Secret:
        """A new random secret."""
        return cls(secrets.token_bytes(32))


@dataclass(frozen=True)
class Header:
    """The part of a message before its body.

    Attributes:
        name: The name of the call; empty in an answer.
        fields: Names and values that JSON supports.
        body: The length of the body in bytes.
    """

    name: str
    fields: Fields
    body: int


def encode_header(header: Header) -> bytes:
    """A header as JSON.

    Raises:
        TypeError: JSON does not support the type of a field.
        ValueError: The header is too long.
    """
    plain = json.dumps([header.name, header.body, dict(header.fields)], separators=(",", ":")).encode()
    if len(plain) + TAG_BYTES > MAX_HEADER_BYTES:
        raise ValueError(f"the fields take {len(plain)} bytes; at most {MAX_HEADER_BYTES - TAG_BYTES} are possible")
    return plain


def _decode_header(plain: bytes) -> Header:
    try:
        name, body, fields = json.loads(plain)
    except (ValueError, TypeError, RecursionError):
        raise WireError("a message header is not valid JSON of the expected form") from None
    if not isinstance(name, str) or type(body) is not int or body < 0 or not isinstance(fields, dict):
        raise WireError("a message header has fields of unexpected types")
    return Header(name, fields, body)


class Session:
    """One side of an authenticated connection. Not thread-safe."""

    def __init__(self, send: bytes, receive: bytes, encrypt: bool) -> None:
        self._sealing, self._opening = AESGCM(send), AESGCM(receive)
        self._send, self._receive = algorithms.AES(send), algorithms.AES(receive)
        self._sent = self._received = 0
        self._encrypt = encrypt

    def seal(self, header: Header) -> bytes:
        """Encrypt the next header to send. Send its body through `outgoing` before sealing the next header."""
        plain = encode_header(header)
        self._sent += 2
        return self._sealing.encrypt(_nonce(self._sent), plain, None)

    def open(self, sealed: bytes | bytearray) -> Header:
        """Decrypt the next received header. Receive its body through `incoming` before opening the next header.

        Raises:
            WireError: It is not the next header of this session.
        """
        number = self._received + 2
        try:
            plain = self._opening.decrypt(_nonce(number), bytes(sealed), None)
        except InvalidTag:
            raise WireError(
                "a message header fails authentication: it is from another run, repeated, or damaged in transit"
            ) from None
        self._received = number  # only now: a header that is not authentic must not advance the sequence number
        return _decode_header(plain)

    def outgoing(self, body: Body) -> Iterator[memoryview]:
        """The chunks to send for the body of the last sealed header, and the authentication tag at the end.

        A chunk is valid until the next one is requested.
        """
        return self._chunks(body, _nonce(self._sent + 1))  # now, not when the first chunk is requested

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

    def incoming(self) -> IncomingBody:
        """The receiver of the body of the last opened header."""
        return IncomingBody(self._receive, _nonce(self._received + 1), self._encrypt)


class IncomingBody:
    """Authenticates, and where needed decrypts, a body while it arrives."""

    def __init__(self, key: algorithms.AES, nonce: bytes, encrypt: bool) -> None:
        self._cipher = Cipher(key, modes.GCM(nonce)).decryptor()
        self._encrypt = encrypt

    def take(self, chunk: memoryview) -> None:
        """Authenticate a received chunk, and decrypt it in place."""
        if self._encrypt:
            self._cipher.update_into(chunk, chunk)
        else:
            self._cipher.authenticate_additional_data(chunk)

    def finish(self, tag: bytes | bytearray) -> None:
        """Verify the whole body. Nothing that was received may be used before this.

        Raises:
            WireError: The body is not the one that was sent.
        """
        try:
            self._cipher.finalize_with_tag(bytes(tag))
        except (InvalidTag, ValueError):  # the latter for a tag of another length
            raise WireError("a message body fails authentication: it is not the one that was sent") from None


class Handshake:
    """The client's side of one handshake."""

    def __init__(self, secret: Secret, encrypt: bool) -> None:
        self._secret, self._encrypt = secret, encrypt
        self._random = secrets.token_bytes(_RANDOM_BYTES)

    def hello(self) -> bytes:
        """The first message, which the client sends."""
        return _authenticated(self._secret, b"hello", self._random)

    def complete(self, answer: bytes) -> Session:
        """The session, from the server's answer to `hello`.

        Raises:
            WireError: The answer does not prove that the server has the secret.
        """
        server_random = _verified(self._secret, b"welcome" + self._random, answer)
        to_server, to_client = _keys(self._secret, self._random, server_random)
        return Session(to_server, to_client, self._encrypt)


class Acceptor:
    """The server's side of all handshakes of one run. It accepts each client's hello once."""

    def __init__(self, secret: Secret, encrypt: bool) -> None:
        self._secret, self._encrypt = secret, encrypt
        self._seen: set[bytes] = set()
        self._lock = threading.Lock()

    def accept(self, hello: bytes) -> tuple[bytes, Session]:
        """The answer to a client's hello, and the session that starts with it.

        Raises:
            WireError: The hello does not prove that the client has this run's secret, or it was used before.
        """
        client_random = _verified(self._secret, b"hello", hello)
        with self._lock:
            if client_random in self._seen:
                raise WireError("a handshake message was used before")
            self._seen.add(client_random)
        server_random = secrets.token_bytes(_RANDOM_BYTES)
        to_server, to_client = _keys(self._secret, client_random, server_random)
        answer = _authenticated(self._secret, b"welcome" + client_random, server_random)
        return answer, Session(to_client, to_server, self._encrypt)


def _authenticated(secret: Secret, purpose: bytes, random: bytes) -> bytes:
    """Magic, random number, tag. The key is a new one for each random number, so the nonce may be constant."""
    tag = AESGCM(_derived(secret, random, purpose, 32)).encrypt(_nonce(0), b"", _MAGIC + random)
    return _MAGIC + random + tag


def _verified(secret: Secret, purpose: bytes, message: bytes) -> bytes:
    """The random number of a handshake message whose tag is valid."""
    random = message[len(_MAGIC) : -TAG_BYTES]
    if len(message) != HELLO_BYTES or not message.startswith(_MAGIC):
        raise WireError("the received bytes are not a handshake message of sparkkeras")
    try:
        AESGCM(_derived(secret, random, purpose, 32)).decrypt(_nonce(0), message[-TAG_BYTES:], _MAGIC + random)
    except InvalidTag:
        raise WireError("a handshake message was made without this run's secret") from None
    return random


def _keys(secret: Secret, client: bytes, server: bytes) -> tuple[bytes, bytes]:
    """The key from the client to the server, and the key back."""
    both = _derived(secret, client + server, b"session", 64)
    return both[:32], both[32:]


def _derived(secret: Secret, salt: bytes, purpose: bytes, length: int) -> bytes:
    """A key derived from the secret by HKDF."""
    return HKDF(SHA256(), length, salt, _MAGIC + b" " + purpose).derive(secret.key)


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")
