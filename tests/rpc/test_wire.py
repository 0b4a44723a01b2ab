"""The signed messages: what goes through comes out as it went in, and nothing else goes through."""

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
    HEAD_BYTES,
    HELLO_BYTES,
    TAG_BYTES,
    Greeting,
    Head,
    Reception,
    Secret,
    Session,
    WireError,
)

SIZES = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5]

FIELDS = {"worker": 3, "rate": 0.1, "ended": None, "missing": True, "logs": {"loss": [1e-30, -2.5]}, "ä": "‰ \"' \n"}

HEAD = Head("update", FIELDS, 64)
BODY = bytes(range(64))

encrypts = pytest.mark.parametrize("encrypt", [False, True], ids=["signed", "encrypted"])


def conversation(encrypt=False, secret=None):
    """Both sides of one: the client's session and the server's."""
    secret = secret or Secret.fresh()
    greeting = Greeting(secret, encrypt)
    answer, server = Reception(secret, encrypt).welcome(greeting.hello())
    return greeting.welcomed(answer), server


def drawn(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def sent(session, name="update", fields=FIELDS, body=(BODY,)):
    """What travels of a message: the sealed head, then the body and its tag."""
    parts = [memoryview(part) for part in body]
    head = session.seal(Head(name, fields, sum(len(part) for part in parts)))
    return head, b"".join(bytes(chunk) for chunk in session.outgoing(parts))


def received(session, head, rest, step=CHUNK_BYTES):
    """The head and the body that come out, the body taken in steps, as they may come from a network."""
    opened = session.open(head)
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


# What goes through


@encrypts
@pytest.mark.parametrize("size", SIZES)
def test_a_message_comes_out_as_it_went_in(encrypt, size):
    client, server = conversation(encrypt)
    body = drawn(size)
    opened, taken = received(server, *sent(client, body=[body]))
    assert opened == Head("update", FIELDS, size)
    assert taken == body


@encrypts
@pytest.mark.parametrize("sizes", [(0, 0), (1, 0, 2), (7, CHUNK_BYTES, 3), (CHUNK_BYTES + 1, CHUNK_BYTES - 1), (5,) * 9])
def test_parts_come_out_as_one_body(encrypt, sizes):
    client, server = conversation(encrypt)
    parts = [drawn(size, seed) for seed, size in enumerate(sizes)]
    opened, taken = received(server, *sent(client, body=parts))
    assert opened.body == sum(sizes)
    assert taken == b"".join(parts)


@encrypts
@pytest.mark.parametrize("step", [1, 15, 16, 17, 4096, 65537])
def test_a_body_may_come_in_pieces_of_any_size(encrypt, step):
    client, server = conversation(encrypt)
    body = drawn(5000 if step == 1 else CHUNK_BYTES + 77)
    assert received(server, *sent(client, body=[body]), step)[1] == body


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.booleans(), st.lists(st.binary(max_size=300), max_size=5), st.integers(1, 400))
def test_any_parts_in_any_pieces(encrypt, parts, step):
    client, server = conversation(encrypt)
    assert received(server, *sent(client, body=parts), step)[1] == b"".join(parts)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.text(max_size=20), st.dictionaries(st.text(max_size=10), json_values, max_size=4))
def test_any_head(name, fields):
    client, server = conversation()
    assert server.open(client.seal(Head(name, fields, 7))) == Head(name, fields, 7)


def test_figures_that_are_not_finite_travel_too():
    client, server = conversation()
    fields = server.open(client.seal(Head("", {"loss": float("nan"), "rate": float("-inf")}, 0))).fields
    assert np.isnan(fields["loss"])
    assert fields["rate"] == float("-inf")


@encrypts
def test_many_messages_both_ways_out_of_step(encrypt):
    """Each direction counts for itself."""
    client, server = conversation(encrypt)
    for number in range(20):
        for _ in range(number % 3 + 1):
            assert received(server, *sent(client, fields={"number": number}))[0].fields == {"number": number}
        opened, body = received(client, *sent(server, "", {}, [drawn(number, number)]))
        assert (opened.name, body) == ("", drawn(number, number))


@encrypts
def test_a_message_without_a_body_needs_no_tag(encrypt):
    client, server = conversation(encrypt)
    for _ in range(3):
        assert server.open(client.seal(Head("renew", {}, 0))) == Head("renew", {}, 0)
    assert received(server, *sent(client))[1] == BODY


@encrypts
def test_sending_leaves_a_body_as_it_is_and_copies_it_only_to_encrypt(encrypt):
    client, _ = conversation(encrypt)
    array = np.arange(1000, dtype=np.float32)
    view = array.data.cast("B")
    client.seal(Head("update", {}, len(view)))
    *chunks, _ = client.outgoing([view])
    assert array.tolist() == list(range(1000))
    shared = [np.shares_memory(np.frombuffer(chunk, np.uint8), array) for chunk in chunks]
    assert shared == [not encrypt]


# What can be read on the way


@encrypts
def test_a_body_is_readable_on_the_way_unless_it_is_encrypted(encrypt):
    client, _ = conversation(encrypt)
    body = drawn(2 * CHUNK_BYTES + 100)
    _, rest = sent(client, body=[body])
    assert len(rest) == len(body) + TAG_BYTES
    for start in (0, CHUNK_BYTES - 8, len(body) - 16):
        assert (body[start : start + 16] in rest) != encrypt


@encrypts
def test_a_head_is_never_readable(encrypt):
    client, _ = conversation(encrypt)
    head, rest = sent(client, "shibboleth", {"password": "xyzzy-plugh"}, [])
    assert all(word not in head + rest for word in (b"shibboleth", b"password", b"xyzzy"))


@encrypts
def test_zeros_look_like_noise_where_they_are_encrypted(encrypt):
    client, _ = conversation(encrypt)
    _, rest = sent(client, body=[bytes(4096)])
    assert (len(set(rest[:4096])) > 200) == encrypt


# Nonces


def keystreams(encrypt):
    """The first bytes that plain text was combined with, in many messages: they tell which (key, nonce) pair it was."""
    secret, seen = Secret.fresh(), []
    for _ in range(10):
        client, server = conversation(encrypt, secret)
        for sender in (client, server):
            for _ in range(200):
                plain = json.dumps(["push", 12, {}], separators=(",", ":")).encode()
                head, rest = sent(sender, "push", {}, [b"twelve bytes"])
                assert len(head) == len(plain) + TAG_BYTES
                seen.append(bytes(a ^ b for a, b in zip(head[:12], plain, strict=False)))
                if encrypt:
                    seen.append(bytes(a ^ b for a, b in zip(rest[:12], b"twelve bytes", strict=True)))
    return seen


@encrypts
def test_no_pair_of_key_and_nonce_is_used_twice(encrypt):
    """Neither for two messages, nor for a head and a body, the two directions, or two conversations of a run."""
    seen = keystreams(encrypt)
    assert len(seen) == (8000 if encrypt else 4000)
    assert len(set(seen)) == len(seen)


@encrypts
def test_equal_bodies_have_different_tags(encrypt):
    """A tag of equal bytes differs if and only if the nonce does."""
    secret, tags = Secret.fresh(), []
    for _ in range(10):
        for sender in conversation(encrypt, secret):
            tags += [sent(sender)[1][-TAG_BYTES:] for _ in range(200)]
    assert len(set(tags)) == len(tags) == 4000


def test_greetings_differ():
    secret = Secret.fresh()
    hellos = [Greeting(secret, False).hello() for _ in range(200)]
    assert len(set(hellos)) == 200
    assert {len(hello) for hello in hellos} == {HELLO_BYTES}
    assert len({hello[-TAG_BYTES:] for hello in hellos}) == 200


def test_a_greeting_says_nothing_of_the_secret():
    secret = Secret.fresh()
    greeting = Greeting(secret, False)
    answer, _ = Reception(secret, False).welcome(greeting.hello())
    assert all(secret.key[start : start + 4] not in greeting.hello() + answer for start in range(29))


def test_secrets_are_32_fresh_bytes():
    keys = {Secret.fresh().key for _ in range(100)}
    assert len(keys) == 100
    assert {len(key) for key in keys} == {32}


# What does not go through


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.data())
def test_a_flipped_bit_in_a_head_is_refused(data):
    client, server = conversation()
    head, _ = sent(client)
    with pytest.raises(WireError, match="a head that does not open"):
        server.open(flipped(head, data.draw(bits(head))))


def test_a_head_that_is_refused_does_not_spend_the_number_of_the_true_one():
    client, server = conversation()
    head, rest = sent(client)
    with pytest.raises(WireError):
        server.open(flipped(head, 0))
    assert received(server, head, rest) == (HEAD, BODY)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.booleans(), st.data())
def test_a_flipped_bit_in_a_body_or_its_tag_is_refused(encrypt, data):
    client, server = conversation(encrypt)
    head, rest = sent(client)
    with pytest.raises(WireError, match="a body that is not the one that was sent"):
        received(server, head, flipped(rest, data.draw(bits(rest))))


@encrypts
@pytest.mark.parametrize("where", [0, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 4, 3 * CHUNK_BYTES + 5, -1])
def test_a_flipped_bit_in_any_chunk_of_a_large_body_is_refused(encrypt, where):
    client, server = conversation(encrypt)
    head, rest = sent(client, body=[drawn(3 * CHUNK_BYTES + 5)])
    with pytest.raises(WireError):
        received(server, head, flipped(rest, 8 * (where % len(rest))))


@encrypts
def test_a_body_that_is_cut_or_longer_or_in_another_order_is_refused(encrypt):
    for changed in (lambda b: b[1:], lambda b: b[:32], lambda b: b + b"\0", lambda b: b"", lambda b: b[32:] + b[:32]):
        client, server = conversation(encrypt)
        head, rest = sent(client)
        with pytest.raises(WireError):
            received(server, head, changed(rest[:-TAG_BYTES]) + rest[-TAG_BYTES:])


@pytest.mark.parametrize("length", [0, 1, TAG_BYTES - 1, TAG_BYTES, TAG_BYTES + 1])
def test_a_head_that_is_cut_is_refused(length):
    client, server = conversation()
    with pytest.raises(WireError):
        server.open(sent(client)[0][:length])


@pytest.mark.parametrize("length", [0, 1, TAG_BYTES - 1])
def test_a_tag_that_is_cut_is_refused(length):
    client, server = conversation()
    head, rest = sent(client)
    server.open(head)
    incoming = server.incoming()
    incoming.take(memoryview(bytearray(BODY)))
    with pytest.raises(WireError):
        incoming.finish(rest[-TAG_BYTES:][:length])


@encrypts
def test_a_message_that_comes_again_is_refused(encrypt):
    client, server = conversation(encrypt)
    message = sent(client)
    received(server, *message)
    with pytest.raises(WireError):
        received(server, *message)


@encrypts
def test_a_message_that_comes_much_later_is_refused(encrypt):
    client, server = conversation(encrypt)
    first = sent(client)
    received(server, *first)
    for _ in range(300):
        received(server, *sent(client))
    with pytest.raises(WireError):
        received(server, *first)


def test_messages_in_another_order_are_refused():
    client, server = conversation()
    sent(client)
    second = sent(client)
    with pytest.raises(WireError):
        received(server, *second)


@encrypts
def test_the_body_of_another_message_is_refused(encrypt):
    client, server = conversation(encrypt)
    (first, one), (second, other) = sent(client), sent(client)
    with pytest.raises(WireError):
        received(server, first, other)
    with pytest.raises(WireError):
        received(server, second, one)


def test_a_head_is_no_body_and_a_body_is_no_head():
    client, server = conversation(encrypt=True)
    plain = json.dumps(["finish", 0, {}]).encode()
    _, rest = sent(client, body=[plain])
    with pytest.raises(WireError):
        server.open(rest)


@encrypts
def test_a_message_of_another_conversation_is_refused(encrypt):
    secret = Secret.fresh()
    client, _ = conversation(encrypt, secret)
    _, server = conversation(encrypt, secret)
    with pytest.raises(WireError):
        received(server, *sent(client))


@encrypts
def test_a_message_of_another_run_is_refused(encrypt):
    client, _ = conversation(encrypt)
    _, server = conversation(encrypt)
    with pytest.raises(WireError):
        received(server, *sent(client))


@encrypts
def test_an_answer_is_not_taken_for_a_request_nor_the_other_way_round(encrypt):
    client, server = conversation(encrypt)
    for one in (client, server):
        with pytest.raises(WireError):
            received(one, *sent(one))


def test_who_encrypts_and_who_does_not_cannot_mistake_each_other():
    secret = Secret.fresh()
    for encrypt in (False, True):
        greeting = Greeting(secret, encrypt)
        answer, server = Reception(secret, not encrypt).welcome(greeting.hello())
        client = greeting.welcomed(answer)
        with pytest.raises(WireError):
            received(server, *sent(client))


# Handshakes


def test_a_greeting_is_good_once():
    secret = Secret.fresh()
    reception, greeting = Reception(secret, False), Greeting(secret, False)
    reception.welcome(greeting.hello())
    with pytest.raises(WireError, match="was here before"):
        reception.welcome(greeting.hello())
    reception.welcome(Greeting(secret, False).hello())


def test_a_greeting_is_remembered_for_the_whole_run():
    secret = Secret.fresh()
    reception = Reception(secret, False)
    hellos = [Greeting(secret, False).hello() for _ in range(500)]
    for hello in hellos:
        reception.welcome(hello)
    for hello in hellos[::50]:
        with pytest.raises(WireError, match="was here before"):
            reception.welcome(hello)


def test_a_greeting_of_another_run_is_refused():
    with pytest.raises(WireError, match="does not have this run's secret"):
        Reception(Secret.fresh(), False).welcome(Greeting(Secret.fresh(), False).hello())


def test_a_server_without_the_secret_is_refused():
    greeting = Greeting(Secret.fresh(), False)
    other = Secret.fresh()
    answer, _ = Reception(other, False).welcome(Greeting(other, False).hello())
    with pytest.raises(WireError):
        greeting.welcomed(answer)


def test_the_answer_to_another_greeting_is_refused():
    secret = Secret.fresh()
    answer, _ = Reception(secret, False).welcome(Greeting(secret, False).hello())
    with pytest.raises(WireError):
        Greeting(secret, False).welcomed(answer)


def test_a_greeting_is_no_answer_to_itself_or_another():
    """Nobody can pose as the server by sending back what came, or what another member sent."""
    secret = Secret.fresh()
    greeting = Greeting(secret, False)
    for hello in (greeting.hello(), Greeting(secret, False).hello()):
        with pytest.raises(WireError):
            greeting.welcomed(hello)


def test_an_answer_is_no_greeting():
    secret = Secret.fresh()
    reception = Reception(secret, False)
    answer, _ = reception.welcome(Greeting(secret, False).hello())
    with pytest.raises(WireError):
        reception.welcome(answer)


def test_a_refused_greeting_does_not_spend_the_true_one():
    """Who damages a greeting on its way does not lock its sender out."""
    secret = Secret.fresh()
    reception, greeting = Reception(secret, False), Greeting(secret, False)
    for bit in (8 * 12, 8 * HELLO_BYTES - 1):
        with pytest.raises(WireError):
            reception.welcome(flipped(greeting.hello(), bit))
    reception.welcome(greeting.hello())


def test_a_flipped_bit_in_a_handshake_is_refused():
    secret = Secret.fresh()
    for bit in range(8 * HELLO_BYTES):
        greeting, reception = Greeting(secret, False), Reception(secret, False)
        with pytest.raises(WireError):
            reception.welcome(flipped(greeting.hello(), bit))
        answer, _ = reception.welcome(greeting.hello())
        with pytest.raises(WireError):
            greeting.welcomed(flipped(answer, bit))


# Anything at all


@settings(deadline=None, max_examples=300, derandomize=True)
@given(st.binary(max_size=200))
def test_nothing_but_a_wire_error_comes_of_bytes_that_are_no_head(junk):
    with pytest.raises(WireError):
        conversation()[1].open(junk)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(st.binary(max_size=80) | st.binary(min_size=HELLO_BYTES - 12, max_size=HELLO_BYTES - 12).map(b"sparkkeras/1".__add__))
def test_nothing_but_a_wire_error_comes_of_bytes_that_are_no_greeting(junk):
    secret = Secret.fresh()
    with pytest.raises(WireError):
        Reception(secret, False).welcome(junk)
    with pytest.raises(WireError):
        Greeting(secret, False).welcomed(junk)


def test_heads_as_large_as_they_may_be_do_not_open_either():
    with pytest.raises(WireError):
        conversation()[1].open(bytes(HEAD_BYTES))


NO_HEADS = [
    b"", b"\xff\xfe", b"[", b"null", b"1", b"{}", b"[]", b'["push"]', b'["push",1]', b'["push",1,{},0]', b'"abc"',
    b'{"a":1,"b":2,"c":3}', b'[1,1,{}]', b'[["push"],1,{}]', b'[null,1,{}]', b'["push",-1,{}]', b'["push",1.5,{}]',
    b'["push","1",{}]', b'["push",null,{}]', b'["push",true,{}]', b'["push",NaN,{}]', b'["push",1,[]]', b'["push",1,null]',
    b'["push",1,"ab"]', b"[" * 5000, b'["push",' + b"9" * 5000 + b",{}]",
]  # fmt: skip


@pytest.mark.parametrize("plain", NO_HEADS, ids=lambda plain: plain[:20].decode("latin1"))
def test_a_well_signed_head_of_another_form_is_a_wire_error(plain):
    """As from a member that runs another version."""
    client, server = conversation()
    sealed = client._sealing.encrypt(wire._nonce(2), plain, None)
    with pytest.raises(WireError):
        server.open(sealed)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(json_values)
def test_well_signed_json_is_a_head_or_a_wire_error(value):
    client, server = conversation()
    try:
        head = server.open(client._sealing.encrypt(wire._nonce(2), json.dumps(value).encode(), None))
    except WireError:
        return
    assert isinstance(head.name, str)
    assert isinstance(head.body, int)
    assert head.body >= 0
    assert isinstance(head.fields, dict)


# What shows


def shown(secret):
    """Things that know a secret."""
    return [
        secret,
        Address("socket", "driver", 4000, secret, True, 3.0),
        Greeting(secret, False),
        Reception(secret, False),
        *conversation(False, secret),
    ]


def test_no_key_shows_in_words():
    secret = Secret(b"0123456789abcdefghijklmnopqrstuv")
    traces = ["0123456789", "efghij", secret.key.hex()[:12], str(list(secret.key))[1:12]]
    for thing in shown(secret):
        for words in (repr(thing), str(thing), f"{thing}", f"{thing!r:>5}", "%s %r" % (thing, thing), repr([thing])):  # noqa: UP031
            assert not any(trace in words for trace in traces), words
    assert "driver" in repr(shown(secret)[1])


def test_no_key_shows_in_errors():
    secret = Secret(b"0123456789abcdefghijklmnopqrstuv")
    with pytest.raises(WireError) as caught:
        Reception(secret, False).welcome(Greeting(Secret.fresh(), False).hello())
    assert "0123456789" not in repr(caught.value)
    with pytest.raises(AttributeError) as frozen:
        secret.key = b""
    assert "0123456789" not in str(frozen.value)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_travels_to_the_workers_comes_back_from_a_pickle(protocol):
    secret = Secret.fresh()
    for thing in (
        secret,
        Address("http", "driver", 4000, secret, True, 3.0),
        Endpoint("driver", "0.0.0.0", 4000, True, 3.0, 7),
    ):
        assert pickle.loads(pickle.dumps(thing, protocol)) == thing
    address = pickle.loads(pickle.dumps(Address("http", "driver", 4000, secret), protocol))
    client = Greeting(address.secret, address.encrypt)
    client.welcomed(Reception(secret, False).welcome(client.hello())[0])


def test_a_session_stays_where_it_is():
    """A copy would use its nonces again."""
    for session in conversation():
        assert isinstance(session, Session)
        with pytest.raises(TypeError):
            pickle.dumps(session)
