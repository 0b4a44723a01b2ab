"""The wire format: authentic messages arrive unchanged, and everything else is rejected."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkkeras.rpc import wire
from sparkkeras.rpc.transport import Address, Endpoint
from sparkkeras.rpc.wire import (
    CHUNK_BYTES,
    HELLO_BYTES,
    MAX_HEADER_BYTES,
    TAG_BYTES,
    Acceptor,
    Handshake,
    Header,
    Secret,
    Session,
    WireError,
)

SIZES = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5]

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


@encrypts
@pytest.mark.parametrize("size", SIZES)
def test_a_message_arrives_unchanged(encrypt, size):
    client, server = sessions(encrypt)
    body = random_bytes(size)
    opened, taken = received(server, *sent(client, body=[body]))
    assert opened == Header("update", FIELDS, size)
    assert taken == body


@encrypts
@pytest.mark.parametrize("sizes", [(0, 0), (1, 0, 2), (7, CHUNK_BYTES, 3), (CHUNK_BYTES + 1, CHUNK_BYTES - 1), (5,) * 9])
def test_parts_arrive_as_one_body(encrypt, sizes):
    client, server = sessions(encrypt)
    parts = [random_bytes(size, seed) for seed, size in enumerate(sizes)]
    opened, taken = received(server, *sent(client, body=parts))
    assert opened.body == sum(sizes)
    assert taken == b"".join(parts)


@encrypts
@pytest.mark.parametrize("step", [1, 15, 16, 17, 4096, 65537])
def test_a_body_may_arrive_in_pieces_of_any_size(encrypt, step):
    client, server = sessions(encrypt)
    body = random_bytes(5000 if step == 1 else CHUNK_BYTES + 77)
    assert received(server, *sent(client, body=[body]), step)[1] == body


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
def test_each_direction_numbers_its_own_messages(encrypt):
    client, server = sessions(encrypt)
    for number in range(20):
        for _ in range(number % 3 + 1):
            assert received(server, *sent(client, fields={"number": number}))[0].fields == {"number": number}
        opened, body = received(client, *sent(server, "", {}, [random_bytes(number, number)]))
        assert (opened.name, body) == ("", random_bytes(number, number))


@encrypts
def test_a_message_without_a_body_needs_no_tag(encrypt):
    client, server = sessions(encrypt)
    for _ in range(3):
        assert server.open(client.seal(Header("renew", {}, 0))) == Header("renew", {}, 0)
    assert received(server, *sent(client))[1] == BODY


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


# What is readable in transit


@encrypts
def test_a_body_is_readable_in_transit_unless_it_is_encrypted(encrypt):
    client, _ = sessions(encrypt)
    body = random_bytes(2 * CHUNK_BYTES + 100)
    _, rest = sent(client, body=[body])
    assert len(rest) == len(body) + TAG_BYTES
    for start in (0, CHUNK_BYTES - 8, len(body) - 16):
        assert (body[start : start + 16] in rest) != encrypt


@encrypts
def test_a_header_is_never_readable(encrypt):
    client, _ = sessions(encrypt)
    header, rest = sent(client, "shibboleth", {"password": "xyzzy-plugh"}, [])
    assert all(word not in header + rest for word in (b"shibboleth", b"password", b"xyzzy"))


@encrypts
def test_encrypted_zeros_look_like_noise(encrypt):
    client, _ = sessions(encrypt)
    _, rest = sent(client, body=[bytes(4096)])
    assert (len(set(rest[:4096])) > 200) == encrypt


# Nonces


def keystreams(encrypt):
    """The first bytes of the key stream of many messages, which identify the pair of key and nonce."""
    secret, seen = Secret.fresh(), []
    for _ in range(10):
        client, server = sessions(encrypt, secret)
        for sender in (client, server):
            for _ in range(200):
                plain = json.dumps(["push", 12, {}], separators=(",", ":")).encode()
                header, rest = sent(sender, "push", {}, [b"twelve bytes"])
                assert len(header) == len(plain) + TAG_BYTES
                seen.append(bytes(a ^ b for a, b in zip(header[:12], plain, strict=False)))
                if encrypt:
                    seen.append(bytes(a ^ b for a, b in zip(rest[:12], b"twelve bytes", strict=True)))
    return seen


@encrypts
def test_no_pair_of_key_and_nonce_is_reused(encrypt):
    """For no two messages, nor for a header and a body, the two directions, or two sessions of a run."""
    seen = keystreams(encrypt)
    assert len(seen) == (8000 if encrypt else 4000)
    assert len(set(seen)) == len(seen)


@encrypts
def test_equal_bodies_have_different_tags(encrypt):
    """A tag of equal bytes differs if and only if the nonce does."""
    secret, tags = Secret.fresh(), []
    for _ in range(10):
        for sender in sessions(encrypt, secret):
            tags += [sent(sender)[1][-TAG_BYTES:] for _ in range(200)]
    assert len(set(tags)) == len(tags) == 4000


def test_hello_messages_differ():
    secret = Secret.fresh()
    hellos = [Handshake(secret, False).hello() for _ in range(200)]
    assert len(set(hellos)) == 200
    assert {len(hello) for hello in hellos} == {HELLO_BYTES}
    assert len({hello[-TAG_BYTES:] for hello in hellos}) == 200


def test_a_handshake_does_not_contain_the_secret():
    secret = Secret.fresh()
    handshake = Handshake(secret, False)
    answer, _ = Acceptor(secret, False).accept(handshake.hello())
    assert all(secret.key[start : start + 4] not in handshake.hello() + answer for start in range(29))


def test_a_secret_is_32_random_bytes():
    keys = {Secret.fresh().key for _ in range(100)}
    assert len(keys) == 100
    assert {len(key) for key in keys} == {32}


# Messages that are rejected


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.data())
def test_a_flipped_bit_in_a_header_is_rejected(data):
    client, server = sessions()
    header, _ = sent(client)
    with pytest.raises(WireError, match="a message header fails authentication"):
        server.open(flipped(header, data.draw(bits(header))))


def test_a_rejected_header_does_not_use_up_the_sequence_number():
    client, server = sessions()
    header, rest = sent(client)
    with pytest.raises(WireError):
        server.open(flipped(header, 0))
    assert received(server, header, rest) == (HEADER, BODY)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.booleans(), st.data())
def test_a_flipped_bit_in_a_body_or_its_tag_is_rejected(encrypt, data):
    client, server = sessions(encrypt)
    header, rest = sent(client)
    with pytest.raises(WireError, match="a message body fails authentication"):
        received(server, header, flipped(rest, data.draw(bits(rest))))


@encrypts
@pytest.mark.parametrize("where", [0, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 4, 3 * CHUNK_BYTES + 5, -1])
def test_a_flipped_bit_in_any_chunk_of_a_large_body_is_rejected(encrypt, where):
    client, server = sessions(encrypt)
    header, rest = sent(client, body=[random_bytes(3 * CHUNK_BYTES + 5)])
    with pytest.raises(WireError):
        received(server, header, flipped(rest, 8 * (where % len(rest))))


@encrypts
def test_a_truncated_or_extended_or_reordered_body_is_rejected(encrypt):
    for changed in (lambda b: b[1:], lambda b: b[:32], lambda b: b + b"\0", lambda b: b"", lambda b: b[32:] + b[:32]):
        client, server = sessions(encrypt)
        header, rest = sent(client)
        with pytest.raises(WireError):
            received(server, header, changed(rest[:-TAG_BYTES]) + rest[-TAG_BYTES:])


@pytest.mark.parametrize("length", [0, 1, TAG_BYTES - 1, TAG_BYTES, TAG_BYTES + 1])
def test_a_truncated_header_is_rejected(length):
    client, server = sessions()
    with pytest.raises(WireError):
        server.open(sent(client)[0][:length])


@pytest.mark.parametrize("length", [0, 1, TAG_BYTES - 1])
def test_a_truncated_tag_is_rejected(length):
    client, server = sessions()
    header, rest = sent(client)
    server.open(header)
    incoming = server.incoming()
    incoming.take(memoryview(bytearray(BODY)))
    with pytest.raises(WireError):
        incoming.finish(rest[-TAG_BYTES:][:length])


@encrypts
def test_a_repeated_message_is_rejected(encrypt):
    client, server = sessions(encrypt)
    message = sent(client)
    received(server, *message)
    with pytest.raises(WireError):
        received(server, *message)


@encrypts
def test_a_message_repeated_much_later_is_rejected(encrypt):
    client, server = sessions(encrypt)
    first = sent(client)
    received(server, *first)
    for _ in range(300):
        received(server, *sent(client))
    with pytest.raises(WireError):
        received(server, *first)


def test_messages_out_of_order_are_rejected():
    client, server = sessions()
    sent(client)
    second = sent(client)
    with pytest.raises(WireError):
        received(server, *second)


@encrypts
def test_the_body_of_another_message_is_rejected(encrypt):
    client, server = sessions(encrypt)
    (first, one), (second, other) = sent(client), sent(client)
    with pytest.raises(WireError):
        received(server, first, other)
    with pytest.raises(WireError):
        received(server, second, one)


def test_a_body_is_not_accepted_as_a_header():
    client, server = sessions(encrypt=True)
    plain = json.dumps(["finish", 0, {}]).encode()
    _, rest = sent(client, body=[plain])
    with pytest.raises(WireError):
        server.open(rest)


@encrypts
def test_a_message_of_another_session_is_rejected(encrypt):
    secret = Secret.fresh()
    client, _ = sessions(encrypt, secret)
    _, server = sessions(encrypt, secret)
    with pytest.raises(WireError):
        received(server, *sent(client))


@encrypts
def test_a_message_of_another_run_is_rejected(encrypt):
    client, _ = sessions(encrypt)
    _, server = sessions(encrypt)
    with pytest.raises(WireError):
        received(server, *sent(client))


@encrypts
def test_a_reply_is_not_accepted_as_a_request_nor_the_reverse(encrypt):
    client, server = sessions(encrypt)
    for one in (client, server):
        with pytest.raises(WireError):
            received(one, *sent(one))


def test_sides_with_different_encrypt_settings_reject_each_other():
    secret = Secret.fresh()
    for encrypt in (False, True):
        handshake = Handshake(secret, encrypt)
        answer, server = Acceptor(secret, not encrypt).accept(handshake.hello())
        client = handshake.complete(answer)
        with pytest.raises(WireError):
            received(server, *sent(client))


# Handshakes


def test_a_hello_is_accepted_once():
    secret = Secret.fresh()
    acceptor, handshake = Acceptor(secret, False), Handshake(secret, False)
    acceptor.accept(handshake.hello())
    with pytest.raises(WireError, match="was used before"):
        acceptor.accept(handshake.hello())
    acceptor.accept(Handshake(secret, False).hello())


def test_used_hello_messages_are_remembered_for_the_whole_run():
    secret = Secret.fresh()
    acceptor = Acceptor(secret, False)
    hellos = [Handshake(secret, False).hello() for _ in range(500)]
    for hello in hellos:
        acceptor.accept(hello)
    for hello in hellos[::50]:
        with pytest.raises(WireError, match="was used before"):
            acceptor.accept(hello)


def test_a_hello_of_another_run_is_rejected():
    with pytest.raises(WireError, match="made without this run's secret"):
        Acceptor(Secret.fresh(), False).accept(Handshake(Secret.fresh(), False).hello())


def test_a_server_without_the_secret_is_rejected():
    handshake = Handshake(Secret.fresh(), False)
    other = Secret.fresh()
    answer, _ = Acceptor(other, False).accept(Handshake(other, False).hello())
    with pytest.raises(WireError):
        handshake.complete(answer)


def test_the_answer_to_another_hello_is_rejected():
    secret = Secret.fresh()
    answer, _ = Acceptor(secret, False).accept(Handshake(secret, False).hello())
    with pytest.raises(WireError):
        Handshake(secret, False).complete(answer)


def test_a_hello_is_not_accepted_as_an_answer():
    """A peer cannot impersonate the server by sending back the client's hello or another client's."""
    secret = Secret.fresh()
    handshake = Handshake(secret, False)
    for hello in (handshake.hello(), Handshake(secret, False).hello()):
        with pytest.raises(WireError):
            handshake.complete(hello)


def test_an_answer_is_not_accepted_as_a_hello():
    secret = Secret.fresh()
    acceptor = Acceptor(secret, False)
    answer, _ = acceptor.accept(Handshake(secret, False).hello())
    with pytest.raises(WireError):
        acceptor.accept(answer)


def test_a_rejected_hello_does_not_use_up_the_original():
    """Damaging a hello in transit does not lock its sender out."""
    secret = Secret.fresh()
    acceptor, handshake = Acceptor(secret, False), Handshake(secret, False)
    for bit in (8 * 12, 8 * HELLO_BYTES - 1):
        with pytest.raises(WireError):
            acceptor.accept(flipped(handshake.hello(), bit))
    acceptor.accept(handshake.hello())


def test_a_flipped_bit_in_a_handshake_is_rejected():
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


def test_the_largest_header_of_zeros_is_rejected():
    with pytest.raises(WireError):
        sessions()[1].open(bytes(MAX_HEADER_BYTES))


INVALID_HEADERS = [
    b"", b"\xff\xfe", b"[", b"null", b"1", b"{}", b"[]", b'["push"]', b'["push",1]', b'["push",1,{},0]', b'"abc"',
    b'{"a":1,"b":2,"c":3}', b'[1,1,{}]', b'[["push"],1,{}]', b'[null,1,{}]', b'["push",-1,{}]', b'["push",1.5,{}]',
    b'["push","1",{}]', b'["push",null,{}]', b'["push",true,{}]', b'["push",NaN,{}]', b'["push",1,[]]', b'["push",1,null]',
    b'["push",1,"ab"]', b"[" * 5000, b'["push",' + b"9" * 5000 + b",{}]",
]  # fmt: skip


@pytest.mark.parametrize("plain", INVALID_HEADERS, ids=lambda plain: plain[:20].decode("latin1"))
def test_an_authentic_header_of_another_form_raises_a_wire_error(plain):
    """As from an authenticated peer that runs another version."""
    client, server = sessions()
    sealed = client._sealing.encrypt(wire._nonce(2), plain, None)
    with pytest.raises(WireError):
        server.open(sealed)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(json_values)
def test_authentic_json_is_a_header_or_raises_a_wire_error(value):
    client, server = sessions()
    try:
        header = server.open(client._sealing.encrypt(wire._nonce(2), json.dumps(value).encode(), None))
    except WireError:
        return
    assert isinstance(header.name, str)
    assert isinstance(header.body, int)
    assert header.body >= 0
    assert isinstance(header.fields, dict)


# No key is shown


def objects_with(secret):
    """Objects that hold a secret."""
    return [
        secret,
        Address("socket", "driver", 4000, secret, True, 3.0),
        Handshake(secret, False),
        Acceptor(secret, False),
        *sessions(False, secret),
    ]


def test_no_repr_shows_a_key():
    secret = Secret(b"0123456789abcdefghijklmnopqrstuv")
    traces = ["0123456789", "efghij", secret.key.hex()[:12], str(list(secret.key))[1:12]]
    for thing in objects_with(secret):
        for text in (repr(thing), str(thing), f"{thing}", f"{thing!r:>5}", "%s %r" % (thing, thing), repr([thing])):  # noqa: UP031
            assert not any(trace in text for trace in traces), text
    assert "driver" in repr(objects_with(secret)[1])


def test_no_error_shows_a_key():
    secret = Secret(b"0123456789abcdefghijklmnopqrstuv")
    with pytest.raises(WireError) as caught:
        Acceptor(secret, False).accept(Handshake(Secret.fresh(), False).hello())
    assert "0123456789" not in repr(caught.value)
    with pytest.raises(AttributeError) as frozen:
        secret.key = b""
    assert "0123456789" not in str(frozen.value)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_travels_to_the_workers_can_be_pickled(protocol):
    secret = Secret.fresh()
    for thing in (
        secret,
        Address("http", "driver", 4000, secret, True, 3.0),
        Endpoint("driver", "0.0.0.0", 4000, True, 3.0, 7),
    ):
        assert pickle.loads(pickle.dumps(thing, protocol)) == thing
    address = pickle.loads(pickle.dumps(Address("http", "driver", 4000, secret), protocol))
    client = Handshake(address.secret, address.encrypt)
    client.complete(Acceptor(secret, False).accept(client.hello())[0])


def test_a_session_cannot_be_pickled():
    """A copy would reuse its nonces."""
    for session in sessions():
        assert isinstance(session, Session)
        with pytest.raises(TypeError):
            pickle.dumps(session)
