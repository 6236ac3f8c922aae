"""Messages between the processes of an elastic job: lines of JSON over TCP, behind a token, never pickles.

Who connects is sent a random text and answers with its HMAC under the job's token; then it asks for the same in return.
Neither sends the token. Contents travel raw, after a line that says how many bytes follow.

Where the processes of an elastic job on one node find each other: environment variables and small files.

DS_HETERO_ELASTIC_JOB      name of the job
DS_HETERO_ELASTIC_NODE     name of the node; the host's, if it is not set
DS_HETERO_ELASTIC_AGENT    name of the agent, given to its workers
DS_HETERO_ELASTIC_AGENT_PID    its process id, given to its workers
DS_HETERO_ELASTIC_CARD     what the driver calls the agent's card
DS_HETERO_ELASTIC_ROUND    number of the round, given to workers
DS_HETERO_ELASTIC_TOKEN    secret of the job; else the user's, in the cache folder
DS_HETERO_ELASTIC_SHM      folder of the shared memory; /dev/shm, if it is not set

Child processes that end with their parent, whatever ends it. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import json
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_hetero.errors import ConfigError

Message = dict[str, Any]
"""An object of JSON."""

MAX_LINE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20


class WireError(OSError):
    """The other side does not hold to the protocol, or has another token."""


class Wire:
    """One connection.

    Args:
        connected: a socket; its timeout bounds every call.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = connected.makefile("rb")

    def send(self, message: Message) -> None:
        """Send a message."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message:
        """Wait for a message.

        Raises:
            WireError: the connection has ended, or what came is no message.
        """
        line = self._file.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise WireError("the connection was closed" if len(line) < MAX_LINE_BYTES else "a line has no end")
        try:
            message = json.loads(line)
        except ValueError:
            raise WireError("what came is no JSON") from None
        if not isinstance(message, dict):
            raise WireError("what came is no object")
        return message

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` with the bytes that follow."""
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done : done + _CHUNK_BYTES])
            if not count:
                raise WireError(f"the connection was closed after {done:,} of {len(view):,} bytes")
            done += count

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self.socket.close()


def connect(host: str, port: int, token: bytes, timeout_s: float) -> Wire:
    """Connect to a server of the job, which shows that it has the token, too.

    Raises:
        OSError: nobody listens there, or it has another token.
    """
    wire = Wire(socket.create_connection((host, port), timeout=timeout_s))
    try:
        question = wire.receive().get("question")
        own = secrets.token_hex(16)
        wire.send({"answer": _answer(token, "client", question), "question": own})
        if not _is_answer(wire.receive().get("answer"), token, "server", own):
            raise WireError(f"{host}:{port} has another token: it is of another job, or of somebody else")
    except BaseException:
        wire.close()
        raise
    return wire


def welcome(connected: socket.socket, token: bytes) -> Wire:
    """The server's part of `connect`.

    Raises:
        OSError: the other side does not have the token.
    """
    wire = Wire(connected)
    question = secrets.token_hex(16)
    wire.send({"question": question})
    reply = wire.receive()
    if not _is_answer(reply.get("answer"), token, "client", question):
        wire.close()
        raise WireError("the token does not fit")
    wire.send({"answer": _answer(token, "server", reply.get("question"))})
    return wire


def _answer(token: bytes, side: str, question: object) -> str:
    return hmac.new(token, f"{side}:{question}".encode(), hashlib.sha256).hexdigest()


def _is_answer(given: object, token: bytes, side: str, question: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given, _answer(token, side, question))


PREFIX = "DS_HETERO_ELASTIC_"
JOB, NODE, AGENT, ROUND = PREFIX + "JOB", PREFIX + "NODE", PREFIX + "AGENT", PREFIX + "ROUND"
AGENT_PID = PREFIX + "AGENT_PID"
CARD = PREFIX + "CARD"
TOKEN, SHM, SILENCE = PREFIX + "TOKEN", PREFIX + "SHM", PREFIX + "SILENCE_S"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """A node of a job."""

    job: str
    node: str
    folder: Path  # of its segments and small files, in shared memory

    @staticmethod
    def of_environment(variables: Mapping[str, str] | None = None) -> NodePlace | None:
        """The node of this process; None in a job that is not elastic.

        Raises:
            ConfigError: a name has characters that a file's must not have.
        """
        variables = os.environ if variables is None else variables
        job = variables.get(JOB)
        if job is None:
            return None
        return NodePlace.of(job, variables.get(NODE) or socket.gethostname(), variables)

    @staticmethod
    def of(job: str, node: str, variables: Mapping[str, str] | None = None) -> NodePlace:
        """The node of a name; see `of_environment`."""
        variables = os.environ if variables is None else variables
        for what, name in (("job", job), ("node", node)):
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{name!r} cannot be the name of a {what}: letters, digits, '_', '.' and '-', at most 64."
                )
        root = Path(variables.get(SHM, "/dev/shm")) / f"ds_hetero-{os.getuid()}"
        return NodePlace(job=job, node=node, folder=root / job / node)

    def make(self) -> None:
        """Make the folder, which nobody else may read."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def address(self) -> tuple[str, int] | None:
        """Where the node's keeper listens; None where none has ever run."""
        content = self.read("keeper.json")
        return None if content is None else (content["host"], content["port"])

    def read(self, name: str) -> Message | None:
        """A small file; None where there is none that is whole."""
        try:
            content = json.loads((self.folder / name).read_text())
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def write(self, name: str, content: Mapping[str, object]) -> None:
        """Replace a small file; a reader gets the old or the new content."""
        draft = self.folder / f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
        draft.write_text(json.dumps(content))
        os.replace(draft, self.folder / name)

    def show_life(self, worker: str, pid: int, round_number: int, *, has_stepped: bool) -> None:
        """Write the sign of life of a worker, at which its agent looks.

        Args:
            has_stepped: it has done an optimizer step in this round.
        """
        self.write(f"beat-{worker}.json", {"pid": pid, "round": round_number, "has_stepped": has_stepped})

    def remove(self, name: str) -> None:
        """Delete a small file if it is there."""
        (self.folder / name).unlink(missing_ok=True)


def token_of(job: str, variables: Mapping[str, str] | None = None) -> bytes:
    """The token of a job: from the secret that is set, or the one that this user's cache folder keeps.

    Nodes that do not share a home folder need the variable.

    Raises:
        ConfigError: the secret is too short, or cannot be kept.
    """
    variables = os.environ if variables is None else variables
    secret = variables.get(TOKEN)
    if secret is None:
        secret = _kept_secret(Path(variables.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_hetero")
    if len(secret) < 16:
        raise ConfigError(f"{TOKEN} must have 16 characters or more; it has {len(secret)}.")
    return hmac.new(secret.encode(), job.encode(), hashlib.sha256).digest()


def _kept_secret(folder: Path) -> str:
    path = folder / "elastic-token"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".elastic-token.{secrets.token_hex(8)}"
        with open(os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):  # another process was first, and its secret counts
            os.link(draft, path)
        draft.unlink()
        return path.read_text(encoding="ascii")
    except OSError as error:
        raise ConfigError(
            f"no token for the job can be kept in {folder}: {error}. Set {TOKEN} to the same secret of 16 characters "
            "or more on all nodes."
        ) from error


_PR_SET_PDEATHSIG = 1


def end_with_agent() -> None:
    """As `end_with_parent`, for a worker; at once where its agent was killed while the worker still imported."""
    end_with_parent()
    agent = os.environ.get(AGENT_PID)
    if agent is not None and state_of(int(agent)) in "XZ":
        os._exit(1)


def state_of(pid: int) -> str:
    """The state of a process as the kernel writes it, such as T for stopped; X where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def stopped_children(parent: int) -> list[int]:
    """Process ids of the children of a process that are stopped."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):  # it has ended meanwhile
            state, of = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(of) == parent and state in "Tt":
                found.append(int(entry.name))
    return found


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
