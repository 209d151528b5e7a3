"""Do agents' links keep to what they promise, and does a broken watcher stay harmless?"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from allranks.run import watching as module
from allranks.run import wire
from allranks.run.members import Members
from allranks.run.roster import Hello, Seat
from allranks.run.sinks import Sink
from allranks.run.watch_seam import NoWatch
from allranks.run.watching import Watching
from allranks.run.wire import BUSY_FACTOR, LocalLink, SocketLink, silence


@pytest.fixture
def pair() -> Iterator[tuple[SocketLink, socket.socket]]:
    ours, theirs = socket.socketpair()
    link = SocketLink(ours)
    yield link, theirs
    link.close()
    theirs.close()


def test_socket_link_when_messages_are_cut_then_they_come_whole_and_in_order(
    pair: tuple[SocketLink, socket.socket],
) -> None:
    link, other = pair
    other.sendall(b'{"kind":"a"}\n{"ki')
    assert link.receive() == [{"kind": "a"}]
    other.sendall(b'nd":"b"}\n')
    assert link.receive() == [{"kind": "b"}]


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n", b"[1]\n", b'{"no":"kind"}\n', b"\xff\n"])
def test_socket_link_when_it_is_no_agent_then_it_closes_and_says_why(
    pair: tuple[SocketLink, socket.socket], said: bytes
) -> None:
    link, other = pair
    other.sendall(said)
    assert link.receive() == []
    assert "not an allranks agent" in link.closed


def test_socket_link_when_it_sends_to_one_that_has_gone_then_what_that_said_is_still_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = SocketLink(socket.create_connection(server.getsockname()))
        other, _ = server.accept()
    other.sendall(b'{"kind":"last"}\n')
    other.close()
    deadline = time.monotonic() + 20
    while not link.closed and time.monotonic() < deadline:
        link.send({"kind": "more"})
        time.sleep(0.01)
    assert link.closed and link.receive() == [{"kind": "last"}]


def test_socket_link_when_the_other_end_closes_then_what_it_said_is_still_given(
    pair: tuple[SocketLink, socket.socket],
) -> None:
    link, other = pair
    other.sendall(b'{"kind":"last"}\n')
    other.close()
    assert link.receive() == [{"kind": "last"}]
    assert link.closed == "connection closed by the other end"


def test_socket_link_when_nobody_reads_then_sending_does_not_block_and_the_link_closes_in_the_end(
    pair: tuple[SocketLink, socket.socket],
) -> None:
    link, _ = pair
    for _ in range(40):
        link.send({"kind": "big", "text": "x" * (1 << 20)})
    assert link.closed == "the other end does not read"


def test_listen_when_the_port_is_taken_then_an_error() -> None:
    with wire.listen(0) as server, pytest.raises(OSError, match="in use"):
        wire.listen(server.getsockname()[1])


def members() -> tuple[Members, LocalLink]:
    hub, own = LocalLink.pair()
    return Members((hub, Hello("a", 1, max_nodes=2, min_nodes=2)), "a:1", 1.5), own


def test_members_when_a_stranger_says_no_hello_then_it_is_closed_and_nobody_joins() -> None:
    found, _ = members()
    hub, other = LocalLink.pair()
    found.welcome(hub, "10.0.0.2", "10.0.0.1")
    other.send({"kind": "start"})
    assert found.greet("j", 0.0) == ([], [])
    assert (found.strangers, hub.closed) == ([], "no hello")


def test_members_when_a_node_is_silent_then_it_is_lost_once() -> None:
    found, _ = members()
    hub, other = LocalLink.pair()
    found.welcome(hub, "10.0.0.2", "10.0.0.1")
    other.send({"kind": "hello", **Hello("b", 1, max_nodes=2, min_nodes=2).to_json()})
    (node,), refused = found.greet("j", 0.0)
    assert (refused, node.address, found.own_address) == ([], "10.0.0.2", "10.0.0.1")
    assert [m["kind"] for m in other.receive()] == ["welcome"]
    assert found.newly_lost(hub.heard_at + 1.4) == []
    assert found.newly_lost(hub.heard_at + 1.6) == [node]
    assert node.lost_why == "silent for 1.6 s"
    assert found.newly_lost(hub.heard_at + 9) == []


def test_members_when_a_beat_tells_of_the_attempt_before_then_its_row_is_left_out() -> None:
    found, own = members()
    node = found.own
    node.begin(Seat(0, 0, node.hello), restart=1)
    rows: list[dict[str, Any]] = [{"restart": 0, "ended": [1]}, {}, {"restart": 1, "ranks": [2]}]
    seen = []
    for row in rows:
        own.send({"kind": "beat", "row": row})
        assert found.read(1.0) == []
        seen.append(node.row)
    assert seen == [{}, {}, rows[2]]


class Broken(NoWatch):
    """Fails at every tick."""

    def is_quiet(self, nodes: Any) -> bool:
        return False

    def tick(self, nodes: Any) -> Any:
        raise KeyError("bug")

    def on_exit(self, exits: Any, nodes: Any) -> Any:
        raise ValueError("another")


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_watching_when_the_watcher_fails_then_it_is_said_once_and_answers_are_empty() -> None:
    said: list[str] = []
    watching = Watching(Broken(), lambda: None, lambda text, trace: said.append(text))
    watching.start(None, None)  # type: ignore[arg-type]  # the watcher does not look
    until(lambda: not watching.is_on)
    answer = watching.on_exit([])
    assert answer.is_there
    assert answer.value is None
    assert said == ["the watcher failed (KeyError: 'bug'); the job goes on"]
    watching.close()


def test_watching_when_an_attempt_ends_badly_then_its_row_is_made_before_the_verdict() -> None:
    class Quiet(NoWatch):
        step = 7

        def row(self) -> dict[str, Any]:
            return {"step": self.step}

        def on_exit(self, exits: Any, nodes: Any) -> Any:
            return "verdict"

    watching = Watching(Quiet(), lambda: None, lambda text, trace: None)
    answer = watching.on_exit([])
    until(lambda: answer.is_there)
    assert (answer.value, watching.row) == ("verdict", {"step": 7})
    watching.close()


def test_watching_when_no_row_can_be_made_then_the_verdict_comes_all_the_same() -> None:
    class Rowless(NoWatch):
        def row(self) -> dict[str, Any]:
            raise KeyError("bug")

        def on_exit(self, exits: Any, nodes: Any) -> Any:
            return "verdict"

    watching = Watching(Rowless(), lambda: None, lambda text, trace: None)
    answer = watching.on_exit([])
    until(lambda: answer.is_there)
    assert answer.value == "verdict"
    watching.close()


def test_watching_when_the_watcher_hangs_then_closing_takes_half_a_second() -> None:
    release = threading.Event()

    class Slow(NoWatch):
        def on_exit(self, exits: Any, nodes: Any) -> Any:
            release.wait(20)

    watching = Watching(Slow(), lambda: None, lambda text, trace: None)
    answer = watching.on_exit([])
    watching.close(0.1)
    assert not answer.is_there
    release.set()
    until(lambda: answer.is_there)


def test_watching_when_an_attempt_is_over_then_its_last_row_is_kept_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Rows(NoWatch):
        def row(self) -> dict[str, Any]:
            return {"restart": 0}

    monkeypatch.setattr(module, "KEEP_ROW_S", 1e9)
    watching = Watching(Rows(), lambda: None, lambda text, trace: None)
    seen: list[dict[str, Any]] = []

    class Next(NoWatch):
        def start(self, job: Any, talk: Any) -> None:
            seen.append(watching.row)

    watching.pause(keeps_row=True)
    until(lambda: watching.row == {"restart": 0})
    watching._watch = Next()
    watching.start(None, None)  # type: ignore[arg-type]  # the watcher does not look
    until(lambda: bool(seen))
    watching._watch = Rows()
    monkeypatch.setattr(module, "KEEP_ROW_S", 0.0)
    watching.pause(keeps_row=True)
    until(lambda: not watching._is_started and watching.row == {})
    watching.close()
    assert seen == [{}]


def test_sink_when_nobody_reads_then_writing_does_not_block_and_the_loss_is_said() -> None:
    ours, theirs = socket.socketpair()
    sink = Sink(theirs.fileno(), name="stdout", limit_bytes=1 << 20)
    for _ in range(64):
        sink.write(b"x" * (1 << 16))
    got = bytearray()
    reader = threading.Thread(
        target=lambda: [got.extend(part) for part in iter(lambda: ours.recv(1 << 16), b"")]
    )
    reader.start()
    sink.close()
    theirs.close()
    reader.join(10)
    ours.close()
    assert b"bytes of stdout left out: not read in time" in got
    assert len(got) < 4 << 20


def test_silence_when_the_other_kernel_acknowledges_then_a_busy_agent_is_given_longer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        link = SocketLink(ours)
        link.send({"kind": "beat"})  # taken by the kernel; nobody reads it
        assert silence(link, link.heard_at + 1.4, 1.5) == ""
        assert silence(link, link.heard_at + 1.6, 1.5) == ""
        assert silence(link, link.heard_at + 1.5 * BUSY_FACTOR + 0.1, 1.5).startswith("silent for 7.6 s")
        theirs.close()
        link.close()


def test_silence_when_nothing_is_known_of_the_other_kernel_then_the_limit_holds(
    pair: tuple[SocketLink, socket.socket],
) -> None:
    link, _ = pair
    assert silence(link, link.heard_at + 1.4, 1.5) == ""
    assert silence(link, link.heard_at + 1.6, 1.5) == "silent for 1.6 s"
