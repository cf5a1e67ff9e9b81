"""What only the real network has: its daemon, hostile streams, addresses, and hivemind's own programs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import free_port
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from swarm_harness import TTL_MAX_S, Libp2pHarness, eventually

from dipaco_p2p.clock import SystemClock
from dipaco_p2p.errors import ConfigError, EnvironmentUnfit, Refused, Unreachable
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm import frames
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.frames import read_frame
from dipaco_p2p.swarm.hivemind import libp2p
from dipaco_p2p.swarm.hivemind.daemon import PORT_LOOK_S, sweep_stale_sockets, wait_port_free
from dipaco_p2p.swarm.hivemind.dht import hash_key, node_id_of

NOBODY = f"/ip4/127.0.0.1/tcp/1/p2p/{Signer(bytes([9]) * 32).peer}"


@pytest.fixture
def net(tmp_path: Path) -> Libp2pHarness:
    """The real network only."""
    return Libp2pHarness(tmp_path)


async def echo(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
    return Reply(header, body)


def child_pids(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_hostile_streams_are_answered_or_cut_and_harm_nobody(net: Any) -> None:
    server, client = await net.join(), await net.join()
    server.serve("echo", echo)

    async def send(data: bytes) -> str:
        """The reason with which the server refuses `data`; empty if it hangs up without a word."""
        reader, writer = await client._daemon.open_stream(server.peer)
        try:
            writer.write(data)
            async with asyncio.timeout(10):
                return (await read_frame(reader.readexactly)).header["reason"]
        except (ConnectionError, asyncio.IncompleteReadError):
            return ""
        finally:
            writer.close()

    def prefix(header_bytes: int, body_bytes: int) -> bytes:
        return struct.pack(">3sBBII", b"DPP", 1, 0, header_bytes, body_bytes)

    assert await send(b"GET / HTTP/1.1\r\n\r\n") == "malformed"
    assert await send(prefix(2, 2**32 - 1) + b"{}") == "oversize"
    assert await send(prefix(2, 0) + b"[]") == "malformed"
    assert await send(prefix(2, 0) + b"{}") == "malformed"
    # Slow senders: half a prefix, half a header, nothing; the server hangs up when its second is over.
    assert await asyncio.gather(*map(send, (b"DPP\x01", prefix(100, 0) + b"{", b""))) == ["", "", ""]
    assert server.statistics().calls_broken == 3
    assert await client.call(server.peer, "echo", {"n": 1}, b"x", timeout_s=5) == Reply({"n": 1}, b"x")


async def test_a_node_that_names_itself_at_every_place_takes_no_records_away(net: Any) -> None:
    """Attack: one key answers each search with five nodes next to the key, all of them itself, and says that it has
    stored what it is brought. Records of those who have no node were with it alone."""
    honest, liar = [await net.join() for _ in range(4)], await net.join()
    key, me = "dipaco/test/peers", PeerID.from_base58(liar.peer).to_bytes()
    near = [int.from_bytes(hash_key(key), "big") ^ distance for distance in range(1, 6)]
    places = {"nearest_node_ids": [one.to_bytes(20, "big") for one in near], "nearest_peer_ids": [me] * len(near)}

    async def find(data: bytes, caller: object) -> bytes:
        count = len(dht_pb2.FindRequest.FromString(data).keys)
        results = [dht_pb2.FindResult(type=dht_pb2.NOT_FOUND, **places) for _ in range(count)]
        return bytes(dht_pb2.FindResponse(results=results).SerializeToString())

    async def store(data: bytes, caller: object) -> bytes:
        count = len(dht_pb2.StoreRequest.FromString(data).keys)
        return bytes(dht_pb2.StoreResponse(store_ok=[True] * count).SerializeToString())

    liar._p2p._client.control.unary_handlers |= {"DHTProtocol.rpc_find": find, "DHTProtocol.rpc_store": store}
    guest = await net.join(client_mode=True)
    assert await guest.put(key, {}, ttl_s=TTL_MAX_S)

    async def is_seen() -> bool:
        return guest.peer in await honest[-1].get(key)

    await eventually(is_seen)


async def test_a_node_that_names_nodes_that_nobody_runs_takes_no_records_away(net: Any) -> None:
    """Attack: one key answers each search with twenty ids that lie next to the key, of peers that it made up. Who has a
    node kept its own record; of who has none, nobody heard any more."""
    honest, liar = [await net.join() for _ in range(3)], await net.join()
    key = "dipaco/test/peers"
    at, number = int.from_bytes(hash_key(key), "big"), itertools.count()

    async def find(data: bytes, caller: object) -> bytes:
        """Others each time: whoever did not answer is not asked again soon."""
        made_up = sorted(
            (PeerID(b"%38d" % next(number)) for _ in range(500)), key=lambda one: at ^ int(node_id_of(one))
        )
        ids, peers = ([to_bytes(one) for one in made_up[:20]] for to_bytes in (node_bytes, PeerID.to_bytes))
        count = len(dht_pb2.FindRequest.FromString(data).keys)
        result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND, nearest_node_ids=ids, nearest_peer_ids=peers)
        return bytes(dht_pb2.FindResponse(results=[result] * count).SerializeToString())

    liar._p2p._client.control.unary_handlers["DHTProtocol.rpc_find"] = find
    guest = await net.join(client_mode=True)
    assert await guest.put(key, {}, ttl_s=TTL_MAX_S)
    assert guest.peer in await honest[0].get(key)


def node_bytes(peer: PeerID) -> bytes:
    return bytes(node_id_of(peer).to_bytes())


async def test_the_daemon_offers_no_upnp_relay_or_quic_and_sees_no_ctrl_c(net: Any) -> None:
    ordinary = asyncio.subprocess.create_subprocess_exec

    swarm = await net.join()
    # Other tests of the session may have programs running: ours is the daemon.
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in child_pids(os.getpid())}
    [(pid, words)] = [(pid, words) for pid, words in lines.items() if words[0].endswith("p2pd")]
    assert {"-natPortMap=0", "-relay=0", "-relayService=0", "-autoRelay=0", "-autonat=0"} <= set(words)
    assert all("/tcp/" in address and address.endswith(swarm.peer) for address in swarm.addresses)
    assert os.getsid(pid) == pid != os.getsid(0), "Ctrl-C in our terminal must not reach it"
    assert asyncio.subprocess.create_subprocess_exec is ordinary


async def test_joining_needs_one_seed_that_answers(net: Any) -> None:
    first, second = await net.join(), await net.join()
    liar = second.addresses[0].replace(second.peer, Signer(bytes([8]) * 32).peer)
    joined = await net.join(initial_peers=(NOBODY, liar, *first.addresses))
    await first.put("dipaco/x", {}, ttl_s=20)
    assert first.peer in await joined.get("dipaco/x")
    with pytest.raises(Unreachable, match="no answer from /ip4/127.0.0.1/tcp/1/"):
        await net.join(initial_peers=[NOBODY, liar])
    for malformed in ("", "/ip4/127.0.0.1/tcp/1", NOBODY[:-1], "/ip4/127.0.0.1/udp/1/quic" + NOBODY[20:]):
        with pytest.raises(ConfigError):
            await net.join(initial_peers=[malformed])


async def test_a_taken_port_is_named(net: Any) -> None:
    port = (await net.join()).addresses[0].split("/")[4]
    with pytest.raises(EnvironmentUnfit, match=f"port {port} is taken") as unfit:
        await net.join(listen=f"/ip4/127.0.0.1/tcp/{port}")
    assert "another port" in unfit.value.hint
    with pytest.raises(ConfigError):
        await net.join(listen="/ip4/127.0.0.1/udp/0/quic")


async def test_a_port_that_is_taken_for_a_moment_only_is_waited_for() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    waiting = asyncio.create_task(wait_port_free("127.0.0.1", port))
    await asyncio.sleep(2 * PORT_LOOK_S)
    assert not waiting.done()
    server.close()
    await waiting
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(EnvironmentUnfit, match="is taken"):
        await wait_port_free("127.0.0.1", taken.getsockname()[1])


async def test_a_wrong_clock_is_called_by_its_name(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from hivemind.dht import protocol

    answers = protocol.DHTProtocol.rpc_ping

    async def late(self: Any, *args: Any) -> Any:
        response = await answers(self, *args)
        response.dht_time -= 60
        return response

    monkeypatch.setattr(protocol.DHTProtocol, "rpc_ping", late)
    await net.join()
    with pytest.raises(EnvironmentUnfit, match="clock of this machine differs"):
        await net.join()


async def test_what_is_given_up_keeps_no_connection_to_the_daemon(net: Any) -> None:
    seed, peer = await net.join(), await net.join()
    requests = [
        peer._daemon.ways,
        lambda: peer.connect(seed.addresses[0], timeout_s=5),
        lambda: peer.call(seed.peer, "echo", {}, timeout_s=5),
    ]
    for request in requests:
        for turns in range(12):  # each later than the one before: opened, asked, answered
            task = asyncio.create_task(request())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.collect()
    assert [str(each.message) for each in caught if each.category is ResourceWarning] == []


async def test_what_is_announced_is_told_before_what_the_machine_knows(tmp_path: Path) -> None:
    places = ["/ip4/203.0.113.5/tcp/443", "/dns4/run.example.org/tcp/443"]
    swarm = await libp2p.open_libp2p(tmp_path / "key", announce=places, clock=SystemClock())
    try:
        assert list(swarm.addresses[:2]) == [f"{place}/p2p/{swarm.peer}" for place in places]
        assert len(swarm.addresses) > 2
    finally:
        await swarm.close()
    with pytest.raises(ConfigError, match="not a TCP address: 203.0.113.5:443"):
        await libp2p.open_libp2p(tmp_path / "key", announce=["203.0.113.5:443"], clock=SystemClock())


async def test_all_addresses_of_a_machine_are_those_of_both_families(tmp_path: Path) -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").read_text():
        pytest.skip("this machine has no IPv6")
    port = free_port()
    seed = await libp2p.open_libp2p(tmp_path / "seed", listen=f"/ip4/0.0.0.0/tcp/{port}", clock=SystemClock())
    joined = []
    try:
        for kind, host in (("ip4", "127.0.0.1"), ("ip6", "::1")):
            address = f"/{kind}/{host}/tcp/{port}/p2p/{seed.peer}"
            assert address in seed.addresses
            guest = await libp2p.open_libp2p(
                tmp_path / kind, initial_peers=[address], client_mode=True, clock=SystemClock()
            )
            joined.append(guest)
            assert host in str(await guest.places(seed.peer))
    finally:
        for swarm in (*joined, seed):
            await swarm.close()


async def test_a_peer_that_does_not_listen_calls_is_called_and_publishes(net: Any) -> None:
    seed, guest = await net.join(), await net.join(client_mode=True)
    seed.serve("echo", echo)
    guest.serve("echo", echo)
    assert guest.addresses == ()
    assert await guest.call(seed.peer, "echo", {"n": 1}, timeout_s=5) == Reply({"n": 1})
    assert await seed.call(guest.peer, "echo", {"n": 2}, timeout_s=5) == Reply({"n": 2})
    assert await guest.put("dipaco/x", {"n": 3}, ttl_s=20)
    assert (await seed.get("dipaco/x"))[guest.peer].body == {"n": 3}


async def test_a_crowd_of_keys_at_one_address_keeps_no_other_address_out(
    net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine all calls come from the loopback address, which has no limit; here it counts as one of a home."""
    seen: list[str] = []

    def host(place: str) -> str:
        seen.append(place)
        return "" if is_elsewhere else "203.0.113.7"

    monkeypatch.setattr(libp2p, "host_of", host)
    monkeypatch.setattr(frames, "INBOUND_CALLS_MAX", 4)
    monkeypatch.setattr(frames, "INBOUND_CALLS_PER_PEER_MAX", 1)
    seed, others = await net.join(), [await net.join() for _ in range(4)]
    end, is_elsewhere, inside = asyncio.Event(), False, list[PeerId]()

    async def waiting(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        inside.append(peer)
        await end.wait()
        return Reply({})

    async def are_inside() -> bool:
        return len(inside) == (3 if is_elsewhere else 2)

    seed.serve("wait", waiting)
    crowd = [asyncio.create_task(other.call(seed.peer, "wait", {}, timeout_s=20)) for other in others[:2]]
    await eventually(are_inside)
    with pytest.raises(Refused) as caught:
        await others[2].call(seed.peer, "wait", {}, timeout_s=20)
    assert caught.value.reason == Reason.BUSY
    assert all(place.startswith("/ip4/127.0.0.1/tcp/") for place in seen), seen
    is_elsewhere = True
    honest = asyncio.create_task(others[3].call(seed.peer, "wait", {}, timeout_s=20))
    await eventually(are_inside)
    end.set()
    assert await asyncio.gather(honest, *crowd) == [Reply({})] * 3


async def test_a_restarted_peer_is_found_at_its_new_addresses(net: Any) -> None:

    seed, caller, owner = [await net.join() for _ in range(3)]
    owner.serve("echo", echo)
    assert await caller.call(owner.peer, "echo", {}, timeout_s=5)
    await owner.close()
    again = await libp2p.open_libp2p(net._folder / "2.key", clock=SystemClock(), ttl_max_s=TTL_MAX_S)
    net.swarms.append(again)
    again.serve("echo", echo)
    assert again.peer == owner.peer and again.addresses != owner.addresses
    known = (*owner.addresses, *again.addresses)
    assert await caller.call(again.peer, "echo", {"n": 1}, timeout_s=10, addresses=known) == Reply({"n": 1})


async def test_hivemind_dht_joins_the_same_dht_and_our_records_stay(net: Any, tmp_path: Path) -> None:
    seed = await net.join()
    await seed.put("dipaco/x", {"n": 1}, ttl_s=50)
    command = [sys.executable, "-m", "hivemind.hivemind_cli.run_dht", "--host_maddrs", "/ip4/127.0.0.1/tcp/0"]
    log = (tmp_path / "log").open("wb")
    # A session of its own: this program forks, so it is ended as a group.
    foreign = subprocess.Popen(
        [*command, "--initial_peers", *seed.addresses], stdout=log, stderr=log, start_new_session=True
    )
    try:

        async def joined() -> bool:
            assert foreign.poll() is None, (tmp_path / "log").read_text()
            return "2 DHT nodes" in (tmp_path / "log").read_text()

        await eventually(joined)
        assert not seed._node.protocol.routing_table.uid_to_peer_id, "it has chosen where its node is"
        late = await net.join()
        assert await late.put("dipaco/x", {"n": 2}, ttl_s=50)
        assert {record.body["n"] for record in (await seed.get("dipaco/x")).values()} == {1, 2}
    finally:
        os.killpg(foreign.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(foreign.wait, 10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(foreign.pid, signal.SIGKILL)
        foreign.wait()
        log.close()


PROGRAM = """
import asyncio, sys
from pathlib import Path
from dipaco_p2p.clock import SystemClock
from dipaco_p2p.swarm.hivemind.libp2p import open_libp2p

async def main():
    await open_libp2p(Path(sys.argv[1]), ttl_max_s=60, clock=SystemClock())
    print("open", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_killed_program_leaves_no_daemon_and_its_sockets_are_swept(net: Any, tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "victim.key")]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, env=os.environ | {"PYTHONPATH": root})
    assert victim.stdout is not None and await asyncio.to_thread(victim.stdout.readline) == b"open\n"
    daemons = child_pids(victim.pid)
    assert len(daemons) == 1
    alive = await net.join()
    victim.kill()
    victim.wait()
    victim.stdout.close()

    async def gone() -> bool:
        return not any(map(is_running, daemons))

    await eventually(gone)
    sweep_stale_sockets()
    assert sweep_stale_sockets() == 0
    alive.serve("echo", echo)
    assert await (await net.join()).call(alive.peer, "echo", {}, timeout_s=5) == Reply()


def test_the_sweep_spares_sockets_that_somebody_holds_and_files_that_are_none(tmp_path: Path) -> None:
    def bound(name: str) -> socket.socket:
        held = socket.socket(socket.AF_UNIX)
        held.bind(str(tmp_path / name))
        return held

    with bound("hivemind-p2pd-listening.sock") as listening, bound("hivemind-p2pd-bound.sock"):
        listening.listen()
        bound("hivemind-p2pclient-dead.sock").close()
        (tmp_path / "hivemind-file.sock").write_text("")
        assert sweep_stale_sockets(tmp_path) == 1
        names = {"hivemind-p2pd-listening.sock", "hivemind-p2pd-bound.sock", "hivemind-file.sock"}
        assert set(os.listdir(tmp_path)) == names


def test_the_adapter_leaves_logging_and_the_event_loop_alone() -> None:
    code = (
        "import asyncio, logging\n"
        "import dipaco_p2p.swarm.hivemind.libp2p\n"
        "assert not logging.getLogger().handlers and not logging.getLogger('hivemind').handlers\n"
        "assert logging.getLevelName(30) == 'WARNING'\n"
        "assert type(asyncio.new_event_loop()).__module__.startswith('asyncio')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
