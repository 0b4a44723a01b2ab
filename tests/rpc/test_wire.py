"""The wire format: authentic messages arrive unchanged, and everything else is rejected."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkkeras.rpc import wire
from sparkkeras.rpc.transport import Address
from sparkkeras.rpc.wire import (
    CHUNK_BYTES,
    HELLO_BYTES,
    TAG_BYTES,
    Acceptor,
    Handshake,
    Header,
    Secret,
    WireError,
)

FIELDS = {"worker": 3, "rate": 0.1, "ended": None, "missing": True, "logs": {"loss": [1e-30, -2.5]}, "ä": "‰ \"' \n"}

HEADER = Header("update", FIELDS, 64)
BODY = bytes(range(64))

encrypts = pytest.mark.parametrize("encrypt", [False, True], ids=["authenticated", "encrypted"])


def sessions(encrypt=False, secret=None):
    """Both sides of a session: the client's and the server's."""
    secret = secret or Secret.fresh()
    handshake = Handshake(secret, encrypt)
    answer, server = Acceptor(secret, encrypt).accept(handshake.hello())
    return handshake.complete(answer), server


def random_bytes(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def sent(session, name="update", fields=FIELDS, body=(BODY,)):
    """The bytes of a message: the sealed header, and the body with its tag."""
    parts = [memoryview(part) for part in body]
    header = session.seal(Header(name, fields, sum(len(part) for part in parts)))
    return header, b"".join(bytes(chunk) for chunk in session.outgoing(parts))


def received(session, header, rest, step=CHUNK_BYTES):
    """The header and the body of a message; the body arrives in steps, as from a network."""
    opened = session.open(header)
    incoming, body = session.incoming(), bytearray(rest[:-TAG_BYTES])
    for start in range(0, len(body), step):
        incoming.take(memoryview(body)[start : start + step])
    incoming.finish(rest[-TAG_BYTES:])
    return opened, bytes(body)


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def bits(data):
    return st.integers(0, 8 * len(data) - 1)


# Messages that arrive


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.booleans(), st.lists(st.binary(max_size=300), max_size=5), st.integers(1, 400))
def test_any_parts_arrive_in_any_pieces(encrypt, parts, step):
    client, server = sessions(encrypt)
    assert received(server, *sent(client, body=parts), step)[1] == b"".join(parts)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.text(max_size=20), st.dictionaries(st.text(max_size=10), json_values, max_size=4))
def test_any_header_arrives_unchanged(name, fields):
    client, server = sessions()
    assert server.open(client.seal(Header(name, fields, 7))) == Header(name, fields, 7)


def test_fields_may_be_nan_or_infinite():
    client, server = sessions()
    fields = server.open(client.seal(Header("", {"loss": float("nan"), "rate": float("-inf")}, 0))).fields
    assert np.isnan(fields["loss"])
    assert fields["rate"] == float("-inf")


@encrypts
def test_sending_does_not_change_a_body_and_copies_it_only_to_encrypt(encrypt):
    client, _ = sessions(encrypt)
    array = np.arange(1000, dtype=np.float32)
    view = array.data.cast("B")
    client.seal(Header("update", {}, len(view)))
    *chunks, _ = client.outgoing([view])
    assert array.tolist() == list(range(1000))
    shared = [np.shares_memory(np.frombuffer(chunk, np.uint8), array) for chunk in chunks]
    assert shared == [not encrypt]


# Nonces


@encrypts
def test_no_pair_of_key_and_nonce_is_reused(encrypt):
    """For no two messages, nor for a header and a body, the two directions, or two sessions of a run.

    Equal bytes have different ciphertexts and tags if and only if keys or nonces differ.
    """
    secret, seen = Secret.fresh(), []
    body = b'["push",12,{'  # as the header begins
    for _ in range(10):
        for sender in sessions(encrypt, secret):
            for _ in range(200):
                header, rest = sent(sender, "push", {}, [body])
                seen += [header[: len(body)], rest[-TAG_BYTES:]]
                if encrypt:
                    seen.append(rest[: len(body)])
    assert len(set(seen)) == len(seen) == (12_000 if encrypt else 8000)


def test_secrets_and_hello_messages_are_random():
    keys = {Secret.fresh().key for _ in range(100)}
    assert (len(keys), {len(key) for key in keys}) == (100, {32})
    secret = Secret.fresh()
    hellos = [Handshake(secret, False).hello() for _ in range(200)]
    assert {len(hello) for hello in hellos} == {HELLO_BYTES}
    assert len({hello[-TAG_BYTES:] for hello in hellos}) == 200


# Messages that are rejected


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.data())
def test_a_flipped_bit_in_a_header_is_rejected_and_does_not_use_up_the_sequence_number(data):
    client, server = sessions()
    header, rest = sent(client)
    with pytest.raises(WireError, match="header fails authentication"):
        server.open(flipped(header, data.draw(bits(header))))
    assert received(server, header, rest) == (HEADER, BODY)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.booleans(), st.data())
def test_a_flipped_bit_in_a_body_or_its_tag_is_rejected(encrypt, data):
    client, server = sessions(encrypt)
    header, rest = sent(client)
    with pytest.raises(WireError, match="body fails authentication"):
        received(server, header, flipped(rest, data.draw(bits(rest))))


@encrypts
@pytest.mark.parametrize("where", [CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 4])
def test_a_flipped_bit_in_any_chunk_of_a_large_body_is_rejected(encrypt, where):
    client, server = sessions(encrypt)
    header, rest = sent(client, body=[random_bytes(3 * CHUNK_BYTES + 5)])
    with pytest.raises(WireError):
        received(server, header, flipped(rest, 8 * where))


@encrypts
def test_a_truncated_or_extended_or_reordered_body_is_rejected(encrypt):
    for damaged in (
        lambda body, tag: body[1:] + tag,
        lambda body, tag: body[:32] + tag,
        lambda body, tag: body + b"\0" + tag,
        lambda body, tag: tag,
        lambda body, tag: body[32:] + body[:32] + tag,
        lambda body, tag: body + tag[:-1],
        lambda body, tag: b"",
    ):
        client, server = sessions(encrypt)
        header, rest = sent(client)
        with pytest.raises(WireError):
            received(server, header, damaged(rest[:-TAG_BYTES], rest[-TAG_BYTES:]))


@encrypts
def test_another_server_with_the_same_secret_rejects_a_recorded_session(encrypt):
    secret = Secret.fresh()
    handshake = Handshake(secret, encrypt)
    hello = handshake.hello()
    answer, _ = Acceptor(secret, encrypt).accept(hello)
    _, other = Acceptor(secret, encrypt).accept(hello)
    with pytest.raises(WireError):
        received(other, *sent(handshake.complete(answer)))


@encrypts
def test_sides_with_different_encrypt_settings_reject_each_other(encrypt):
    secret = Secret.fresh()
    handshake = Handshake(secret, encrypt)
    answer, server = Acceptor(secret, not encrypt).accept(handshake.hello())
    with pytest.raises(WireError):
        received(server, *sent(handshake.complete(answer)))


@encrypts
def test_a_message_that_is_not_the_next_of_its_session_is_rejected(encrypt):
    secret = Secret.fresh()
    client, server = sessions(encrypt, secret)
    first, *others, last = [sent(client, body=[b'["finish",0,{}]']) for _ in range(302)]
    attacks = {
        "one that overtakes": others[0],
        "a body as a header": (first[1], b""),
        "a reply": sent(server),
        "one of another session": sent(sessions(encrypt, secret)[0]),
        "one of another run": sent(sessions(encrypt)[0]),
    }
    for message in attacks.values():
        with pytest.raises(WireError):
            received(server, *message)
    with pytest.raises(WireError):
        received(client, *first)  # a request as a reply
    received(server, *first)
    with pytest.raises(WireError):
        received(server, *first)
    for message in others:
        received(server, *message)
    with pytest.raises(WireError):
        received(server, *first)
    with pytest.raises(WireError):
        received(server, last[0], first[1])


# Handshakes


def test_a_hello_is_accepted_once():
    """In the whole run, and not if it is an answer."""
    secret = Secret.fresh()
    acceptor = Acceptor(secret, False)
    hellos = [Handshake(secret, False).hello() for _ in range(500)]
    answers = [acceptor.accept(hello)[0] for hello in hellos]
    for hello in hellos[::50]:
        with pytest.raises(WireError, match="was used before"):
            acceptor.accept(hello)
    with pytest.raises(WireError):
        acceptor.accept(answers[0])


def test_a_hello_of_another_run_is_rejected():
    with pytest.raises(WireError, match="without this run's secret"):
        Acceptor(Secret.fresh(), False).accept(Handshake(Secret.fresh(), False).hello())


def test_another_answer_is_rejected():
    """A peer cannot impersonate the server, for example by sending back the client's hello or another client's."""
    secret, stranger = Secret.fresh(), Secret.fresh()
    handshake, other = Handshake(secret, False), Handshake(secret, False)
    for answer in (
        Acceptor(stranger, False).accept(Handshake(stranger, False).hello())[0],
        Acceptor(secret, False).accept(other.hello())[0],
        handshake.hello(),
        other.hello(),
    ):
        with pytest.raises(WireError):
            handshake.complete(answer)


def test_a_flipped_bit_in_a_handshake_is_rejected():
    """And does not lock out the sender of the original."""
    secret = Secret.fresh()
    for bit in range(8 * HELLO_BYTES):
        handshake, acceptor = Handshake(secret, False), Acceptor(secret, False)
        with pytest.raises(WireError):
            acceptor.accept(flipped(handshake.hello(), bit))
        answer, _ = acceptor.accept(handshake.hello())
        with pytest.raises(WireError):
            handshake.complete(flipped(answer, bit))


# Arbitrary bytes


@settings(deadline=None, max_examples=300, derandomize=True)
@given(st.binary(max_size=200))
def test_any_bytes_but_a_header_raise_a_wire_error(junk):
    with pytest.raises(WireError):
        sessions()[1].open(junk)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(st.binary(max_size=80) | st.binary(min_size=HELLO_BYTES - 12, max_size=HELLO_BYTES - 12).map(b"sparkkeras/1".__add__))
def test_any_bytes_but_a_handshake_raise_a_wire_error(junk):
    secret = Secret.fresh()
    with pytest.raises(WireError):
        Acceptor(secret, False).accept(junk)
    with pytest.raises(WireError):
        Handshake(secret, False).complete(junk)


INVALID_HEADERS = [
    b"\xff\xfe", b"[", b'["push",1,{},0]', b'[1,1,{}]', b'["push",-1,{}]', b'["push",1.5,{}]', b'["push",true,{}]',
    b'["push",1,[]]', b"[" * 5000, b'["push",' + b"9" * 5000 + b",{}]",
]  # fmt: skip


@pytest.mark.parametrize("plain", INVALID_HEADERS, ids=lambda plain: plain[:20].decode("latin1"))
def test_an_authentic_header_of_another_form_raises_a_wire_error(plain):
    """As from an authenticated peer that runs another version."""
    client, server = sessions()
    sealed = client._sealing.encrypt(wire._nonce(2), plain, None)
    with pytest.raises(WireError):
        server.open(sealed)


# No key is shown


def test_no_repr_shows_a_key():
    secret = Secret(b"0123456789abcdefghijklmnopqrstuv")
    traces = ["0123456789", "efghij", secret.key.hex()[:12], str(list(secret.key))[1:12]]
    address = Address("socket", "driver", 4000, secret, True, 3.0)
    assert "driver" in repr(address)
    for thing in (secret, address, Handshake(secret, False), Acceptor(secret, False), *sessions(False, secret)):
        assert not any(trace in f"{thing!r} {thing}" for trace in traces)


def test_a_session_cannot_be_pickled():
    """A copy would reuse its nonces."""
    with pytest.raises(TypeError):
        pickle.dumps(sessions()[0])
