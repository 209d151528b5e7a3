#!/usr/bin/env python3
"""A learning Ethernet switch in user space that adds delay, jitter, loss and a rate limit to each cable.

For kernels without sch_netem.  Each argument NETNS:IFNAME makes a TAP device IFNAME inside the
network namespace NETNS; this process is the other end of every one of those cables.

    netem_switch.py --control /run/x.sock h1:eth0 h2:eth0          # run (root)
    netem_switch.py --control /run/x.sock --set h1 delay_ms=20 jitter_ms=2 loss=0.01 rate_mbit=100 up=1
    netem_switch.py --control /run/x.sock --show

Settings apply to what the host sends AND to what it receives, so two hosts with delay_ms=10 each
see a round trip of 40 ms.  up=0 is a silent black hole that also takes the carrier away.
Standard library only; Linux only.
"""

import argparse
import collections
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import sys
import time
from pathlib import Path

TUNSETIFF, TUNSETOFFLOAD, TUNSETCARRIER, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454E2, 0x400454D8
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 1, 2, 4
CLONE_NEWNET = 0x40000000
VNET_HDR = 10  # struct virtio_net_hdr, copied through untouched: it carries GSO and checksum state
QUEUE_BYTES = 4 << 20  # per direction; more than this waiting is tail-dropped
libc = ctypes.CDLL(None, use_errno=True)


def open_tap(netns, name):
    """Make TAP device `name` inside `netns` and return its file descriptor."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{netns}", os.O_RDONLY)
    try:
        if libc.setns(there, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {netns}")
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
        fcntl.ioctl(fd, TUNSETVNETHDRSZ, struct.pack("i", VNET_HDR))
        fcntl.ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
        return fd
    finally:
        libc.setns(here, CLONE_NEWNET)
        os.close(here)
        os.close(there)


class Direction:
    """One direction of one cable: serialises frames at the rate, then delays them."""

    def __init__(self):
        self.free_at = 0.0  # when the transmitter is idle again
        self.last_out = 0.0  # frames never overtake each other (TCP would see reordering)
        self.backlog = collections.deque()

    def schedule(self, now, size, link):
        """When a frame of `size` bytes entering now leaves, or None if it is dropped."""
        if not link["up"] or (link["loss"] and random.random() < link["loss"]):
            return None
        while self.backlog and self.backlog[0][0] <= now:
            self.backlog.popleft()
        t = now
        if link["rate_mbit"]:
            if sum(s for _, s in self.backlog) > QUEUE_BYTES:
                return None
            t = max(now, self.free_at) + size * 8 / (link["rate_mbit"] * 1e6)
            self.free_at = t
            self.backlog.append((t, size))
        if link["delay_ms"] or link["jitter_ms"]:
            t += max(0.0, link["delay_ms"] + random.uniform(-1, 1) * link["jitter_ms"]) / 1e3
        self.last_out = t = max(t, self.last_out)
        return t


def serve(specs, control):
    names, fds, links, tx, rx = [], {}, {}, {}, {}
    for spec in specs:
        netns, ifname = spec.split(":")
        names.append(netns)
        fds[netns] = open_tap(netns, ifname)
        links[netns] = dict(
            delay_ms=0.0, jitter_ms=0.0, loss=0.0, rate_mbit=0.0, up=1, frames=0, bytes=0, dropped=0
        )
        tx[netns], rx[netns] = Direction(), Direction()
    by_fd = {fd: n for n, fd in fds.items()}
    Path(control).unlink(missing_ok=True)
    ctl = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    ctl.bind(control)
    poll = select.epoll()
    poll.register(ctl.fileno(), select.EPOLLIN)
    for fd in by_fd:
        poll.register(fd, select.EPOLLIN)
    mac_table, due, seq = {}, [], 0

    def command():
        data, peer = ctl.recvfrom(65536)
        req = json.loads(data)
        for n, changes in req.get("set", {}).items():
            links[n].update(changes)
            if "up" in changes:
                fcntl.ioctl(fds[n], TUNSETCARRIER, struct.pack("i", int(changes["up"])))
        if peer:
            ctl.sendto(json.dumps(links).encode(), peer)

    def deliver(dst, frame):
        if not links[dst]["up"]:
            return
        try:
            os.write(fds[dst], frame)
        except OSError:  # interface down or queue full: a dropped frame
            links[dst]["dropped"] += 1

    while True:
        now = time.monotonic()
        while due and due[0][0] <= now:
            _, _, dst, frame = heapq.heappop(due)
            deliver(dst, frame)
        timeout = max(0.0, due[0][0] - time.monotonic()) if due else 1.0
        for fd, _ in poll.poll(timeout if timeout > 0.0005 else 0):
            if fd == ctl.fileno():
                command()
                continue
            src = by_fd[fd]
            for _ in range(64):  # a burst, then look at the clock again
                try:
                    frame = os.read(fd, 70000)
                except (BlockingIOError, OSError):
                    break
                now = time.monotonic()
                dst_mac, src_mac = frame[VNET_HDR : VNET_HDR + 6], frame[VNET_HDR + 6 : VNET_HDR + 12]
                mac_table[src_mac] = src
                known = None if dst_mac[0] & 1 else mac_table.get(dst_mac)
                size = len(frame) - VNET_HDR
                links[src]["frames"] += 1
                links[src]["bytes"] += size
                t = tx[src].schedule(now, size, links[src])
                if t is None:
                    links[src]["dropped"] += 1
                    continue
                for dst in [known] if known else names:
                    if dst == src:
                        continue
                    t2 = rx[dst].schedule(t, size, links[dst])
                    if t2 is None:
                        links[dst]["dropped"] += 1
                    elif t2 <= now:
                        deliver(dst, frame)
                    else:
                        seq += 1
                        heapq.heappush(due, (t2, seq, dst, frame))


def ask(control, req):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    s.bind("")  # an abstract address, so that the switch can answer
    s.settimeout(5)
    s.sendto(json.dumps(req).encode(), control)
    return json.loads(s.recv(1 << 20))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--control", required=True)
    ap.add_argument("--set", nargs="+", metavar="HOST key=val")
    ap.add_argument("--show", action="store_true")
    ap.add_argument("links", nargs="*", metavar="NETNS:IFNAME")
    a = ap.parse_args()
    if a.set:
        host, *pairs = a.set
        ask(a.control, {"set": {host: {k: float(v) for k, v in (p.split("=") for p in pairs)}}})
    elif a.show:
        json.dump(ask(a.control, {}), sys.stdout, indent=1)
        print()
    else:
        serve(a.links, a.control)


if __name__ == "__main__":
    main()
