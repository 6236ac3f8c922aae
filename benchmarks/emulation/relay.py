"""The switch of an emulated network: a process that owns a network namespace per node; see `network`.

The namespaces have no names. They and every device in them exist as long as this process, or one that entered them,
so that nothing is left behind whatever ends the program, SIGKILL included. Others enter through /proc/<pid>/fd/<fd>.

    relay   every node has a TUN device for each of its links, and this process carries the packets between them: each
            waits for the sender's link, the link of the pair, the delay of the pair and the receiver's link
    veth    every node has a veth pair to a bridge, shaped in the kernel by tc's token bucket; no delay

Only the standard library is imported, so that it starts at once and the relay keeps up.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import heapq
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from typing import Any

DEVICE = "eth0"
MTU = 65000  # few, large packets: what segmentation offload makes of a stream
SUBNET_BITS = 16
FRAMING_BYTES = 38  # Ethernet header, checksum, preamble and gap of one packet on a wire
QUEUE_BYTES = 16 << 20  # of every link; a shorter one drops packets of an all-to-all, and TCP then waits 200 ms

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_TFD_NONBLOCK, _TFD_ABSTIME = 0o4000, 1
_libc = ctypes.CDLL(None, use_errno=True)


def address(node: int, link: int = 0) -> str:
    """Return the node's IPv4 address on one of its links; each link has a subnet, so that packets leave by it."""
    return f"10.{77 + link}.{node >> 8}.{(node & 255) + 1}"


def device_of(link: int) -> str:
    """Return the name of a node's device for one of its links."""
    return f"{DEVICE.rstrip('0')}{link}"


def enter_namespace(path: str) -> None:
    """Move the calling thread, and the processes and threads that it starts later, into a network namespace."""
    fd = os.open(path, os.O_RDONLY)
    try:
        _check(_libc.setns(fd, _CLONE_NEWNET), f"setns({path})")
    finally:
        os.close(fd)


def main() -> None:
    """Make the network that argv[1] describes, print one line of JSON when it is ready, and serve it until killed."""
    config = json.loads(sys.argv[1])
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != config["parent"]:
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    if config["method"] == "veth":
        namespaces = _make_veth(config["rate_bit_per_s"])
        _announce(namespaces)
        signal.pause()
    else:
        namespaces, tuns = _make_tuns(config["rate_bit_per_s"], config["links"])
        _real_time()
        _announce(namespaces)
        Relay(tuns, config).run()


def _announce(namespaces: list[int]) -> None:
    print(json.dumps({"namespaces": [f"/proc/{os.getpid()}/fd/{fd}" for fd in namespaces]}), flush=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _new_namespace() -> int:
    _check(_libc.unshare(_CLONE_NEWNET), "unshare(CLONE_NEWNET)")
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _ip(*words: object) -> None:
    _tool("ip", *words)


def _tool(*words: object) -> None:
    completed = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if completed.returncode:
        raise OSError(completed.returncode, f"{' '.join(map(str, words))}: {completed.stderr.strip()}")


def _prepare_node() -> None:
    _ip("link", "set", "lo", "up")
    # What arrives on one link may have been sent on another.
    for which in ("all", "default"):
        with contextlib.suppress(OSError), open(f"/proc/sys/net/ipv4/conf/{which}/rp_filter", "w") as setting:
            setting.write("0")
    # bbr, the default on some machines, may mistake a shaped link for a slower one. Containers may refuse the change.
    with contextlib.suppress(OSError), open("/proc/sys/net/ipv4/tcp_congestion_control", "w") as setting:
        setting.write("reno")


def _real_time() -> None:
    """Ask for a real-time priority; without the right to it, packets wait for a turn on the CPU."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    except OSError as error:
        if error.errno != errno.EPERM:
            raise


# --- veth and token bucket --------------------------------------------------------------------------


def _make_veth(rates_bit_per_s: list[float]) -> list[int]:
    """Make namespaces with veth pairs to a bridge, and limit their rates."""
    switch = _new_namespace()
    _ip("link", "add", "br0", "type", "bridge")
    _ip("link", "set", "br0", "mtu", MTU, "up")
    nodes = []
    for node, rate in enumerate(rates_bit_per_s):
        nodes.append(_new_namespace())
        _check(_libc.setns(switch, _CLONE_NEWNET), "setns")
        inside = f"/proc/{os.getpid()}/fd/{nodes[-1]}"
        _ip("link", "add", f"port{node}", "type", "veth", "peer", "name", DEVICE, "netns", inside)
        _ip("link", "set", f"port{node}", "mtu", MTU, "master", "br0", "up")
        _shape(f"port{node}", rate)  # what the node receives
        _check(_libc.setns(nodes[-1], _CLONE_NEWNET), "setns")
        _prepare_node()
        _ip("address", "add", f"{address(node)}/{SUBNET_BITS}", "dev", DEVICE)
        _ip("link", "set", DEVICE, "mtu", MTU, "up")
        _shape(DEVICE, rate)  # what it sends
    return nodes


def _shape(device: str, rate_bit_per_s: float) -> None:
    burst_bytes = max(2 * MTU, int(rate_bit_per_s / 8 / 250))  # one tick of a 250 Hz kernel
    _tool(
        *("tc", "qdisc", "replace", "dev", device, "root", "tbf"),
        *("rate", f"{int(rate_bit_per_s)}bit", "burst", f"{burst_bytes}b", "limit", f"{QUEUE_BYTES}b"),
    )


# --- TUN devices and the relay ----------------------------------------------------------------------


def _make_tuns(rates_bit_per_s: list[float], links: int) -> tuple[list[int], list[int]]:
    """Make namespaces and TUN devices; return namespaces by node, and devices by node and link."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    namespaces, tuns = [], []
    for index, rate in enumerate(rates_bit_per_s):
        node, link = divmod(index, links)
        device = device_of(link)
        if link == 0:
            namespaces.append(_new_namespace())
            _prepare_node()
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
        _ip("address", "add", f"{address(node, link)}/{SUBNET_BITS}", "dev", device)
        _ip("link", "set", device, "mtu", MTU, "txqueuelen", 1000, "up")
        _shape(device, rate)  # so that TCP feels a full link, as it feels that of a network card
        tuns.append(tun)
    _check(_libc.setns(home, _CLONE_NEWNET), "setns")
    return namespaces, tuns


class _TimerSpec(ctypes.Structure):
    """struct itimerspec of time.h."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Relay:
    """Carries IPv4 packets between the TUN devices at the requested rates and with the requested delays.

    If nodes have several links, a node means one link of a node here. A link is represented by the time until which it
    is busy. A packet that would wait in a queue longer than `QUEUE_BYTES` is dropped, as by a switch. SIGUSR1 requests
    one line of JSON on the packets so far.
    """

    def __init__(self, tuns: list[int], config: dict[str, Any]) -> None:
        self._tuns = tuns
        nodes = range(len(tuns))
        places = [divmod(node, config["links"]) for node in nodes]
        self._node_of = {bytes(map(int, address(*place).split("."))): node for node, place in enumerate(places)}
        self._delay_s: list[list[float]] = config["delay_s"]
        self._rate = [rate / 8 for rate in config["rate_bit_per_s"]]
        pairs = config["pair_bit_per_s"]
        self._pair_rate = [[pairs[i][j] / 8 if pairs and pairs[i][j] else None for j in nodes] for i in nodes]
        self._sent_at = [0.0 for _ in nodes]
        self._received_at = [0.0 for _ in nodes]
        self._passed_at = [[0.0 for _ in nodes] for _ in nodes]
        self._waiting: list[tuple[float, int, int, bytes]] = []  # (due, sequence number, receiver, packet)
        self._packets = self._dropped = 0
        self._late_s = 0.0

    def run(self) -> None:
        """Carry packets until SIGTERM."""
        signal.signal(signal.SIGUSR1, lambda *_: self._report())
        timer = _libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_NONBLOCK)
        poll = select.epoll()
        sender_of = {tun: node for node, tun in enumerate(self._tuns)}
        for fd in (timer, *self._tuns):
            poll.register(fd, select.EPOLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == timer:
                    os.read(timer, 8)
                else:
                    self._read(fd, sender_of[fd])
            self._deliver()
            if self._waiting:
                due = self._waiting[0][0]
                spec = _TimerSpec(0, 0, int(due), max(1, int(due % 1 * 1e9)))
                _libc.timerfd_settime(timer, _TFD_ABSTIME, ctypes.byref(spec), None)

    def _report(self) -> None:
        mean_s = self._late_s / max(1, self._packets)
        print(json.dumps({"packets": self._packets, "dropped": self._dropped, "mean_late_s": mean_s}), flush=True)

    def _read(self, tun: int, sender: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(tun, 65536)
            except BlockingIOError:
                return
            receiver = self._node_of.get(packet[16:20])
            if receiver is not None:
                self._schedule(packet, sender, receiver)

    def _schedule(self, packet: bytes, sender: int, receiver: int) -> None:
        """Compute when a packet arrives, and queue it."""
        size, now = len(packet) + FRAMING_BYTES, time.monotonic()
        at = max(self._sent_at[sender], now)
        if (at - now) * self._rate[sender] > QUEUE_BYTES:
            self._dropped += 1
            return
        at = self._sent_at[sender] = at + size / self._rate[sender]
        if pair_rate := self._pair_rate[sender][receiver]:
            at = self._passed_at[sender][receiver] = max(self._passed_at[sender][receiver], at) + size / pair_rate
        at += self._delay_s[sender][receiver]
        # The receiver's link carries a packet while it arrives, so only a busy or a slower one delays it.
        transfer_s = size / self._rate[receiver]
        due = max(self._received_at[receiver], at - transfer_s) + transfer_s
        if (due - at) * self._rate[receiver] > QUEUE_BYTES:
            self._dropped += 1
            return
        self._received_at[receiver] = due
        self._packets += 1
        heapq.heappush(self._waiting, (due, self._packets, receiver, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now + 20e-6:
            due, _, receiver, packet = heapq.heappop(self._waiting)
            try:
                os.write(self._tuns[receiver], packet)
            except BlockingIOError:
                self._dropped += 1
            self._late_s += max(0.0, now - due)


if __name__ == "__main__":
    main()
