"""Environment variables and small files by which the processes of an elastic job on one node find each other.

    DS_HETERO_ELASTIC_JOB          name of the job
    DS_HETERO_ELASTIC_NODE         name of the node; default: the host's
    DS_HETERO_ELASTIC_AGENT        name of the agent, set for its workers
    DS_HETERO_ELASTIC_AGENT_PID    process id of the agent, set for its workers
    DS_HETERO_ELASTIC_CARD         the driver's name of the agent's GPU
    DS_HETERO_ELASTIC_ROUND        number of the round, set for workers
    DS_HETERO_ELASTIC_TOKEN        secret of the job; default: a secret in the user's cache folder
    DS_HETERO_ELASTIC_SHM          folder of the shared memory; default: /dev/shm

    file of a node        written by     content
    node_server.json      node server    its address and process id
    rendezvous-AGENT.json agent          address of the node server that serves its rendezvous
    beat-WORKER.json      worker         heartbeat
    end-WORKER.json       worker         reason of its end
    broken-ROUND.json     agent          the round is over
    done-AGENT.json       worker         the script has finished
    own-*.seg             worker         segments of this node: parts of saves
    from-*.seg            node server    copies of other nodes' segments
    got-*.seg             worker         parts fetched from other nodes

Every user of the machine can create files in shared memory: see `ds_hetero.common.private_files`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_hetero.common.private_files import expect_own_folders, make_cache_folder, make_own_folders, open_file, read_text
from ds_hetero.elastic.node.wire import Message, parse_message
from ds_hetero.errors import ConfigError

PREFIX = "DS_HETERO_ELASTIC_"
JOB, NODE, AGENT, ROUND = PREFIX + "JOB", PREFIX + "NODE", PREFIX + "AGENT", PREFIX + "ROUND"
AGENT_PID = PREFIX + "AGENT_PID"
CARD = PREFIX + "CARD"
TOKEN, SHM, SILENCE = PREFIX + "TOKEN", PREFIX + "SHM", PREFIX + "SILENCE_S"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


_SPARE_BYTES = 4096  # a page of shared memory
_NUM_SPARES = 8  # chosen, never measured
_SMALL_FILES = (
    *("beat-*.json", "end-*.json", "broken-*.json", "done-*.json", "rendezvous-*.json"),
    *(".got-*", ".*.json.*.*", "warm.sock*"),  # locks, drafts of processes that were killed, sockets
)


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """A node of a job, and its folder in shared memory.

    The small JSON files by which processes find each other can be written even when saves fill the shared memory: each
    file then takes one of the pages that `stock_spares` has reserved. So such a job still reports its state.
    """

    job: str
    node: str
    folder: Path  # of its segments and small files
    root: Path | None = None  # of the shared memory, to which other users write, too; None: the parent of ``folder``

    @staticmethod
    def of_environment(variables: Mapping[str, str] | None = None) -> NodePlace | None:
        """Return the node of this process; None in a job that is not elastic.

        Raises:
            ConfigError: a name has characters that are not allowed in file names.
        """
        variables = os.environ if variables is None else variables
        job = variables.get(JOB)
        if job is None:
            return None
        return NodePlace.of(job, variables.get(NODE) or socket.gethostname(), variables)

    @staticmethod
    def of(job: str, node: str, variables: Mapping[str, str] | None = None) -> NodePlace:
        """Return the node named ``node`` of the job ``job``. Raises `ConfigError`: see `of_environment`."""
        variables = os.environ if variables is None else variables
        for kind, name in (("job", job), ("node", node)):
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{name!r} cannot be the name of a {kind}: use at most 64 letters, digits, '_', '.' and '-', the "
                    "first a letter or a digit."
                )
        root = Path(variables.get(SHM, "/dev/shm"))
        place = NodePlace(job=job, node=node, folder=root / f"ds_hetero-{os.geteuid()}" / job / node, root=root)
        expect_own_folders(root, *place._parts)
        return place

    @property
    def _root(self) -> Path:
        """The folder of the shared memory."""
        return self.folder.parent if self.root is None else self.root

    @property
    def _parts(self) -> tuple[str, ...]:
        """Names of the folders from the shared memory to the node's folder."""
        return self.folder.relative_to(self._root).parts

    def make(self) -> None:
        """Create the folder, which no other user may read.

        Raises:
            ConfigError: another user has created it, or a folder above it.
            OSError: it cannot be created.
        """
        make_own_folders(self._root, *self._parts)
        self.stock_spares()

    def clear(self) -> None:
        """Delete heartbeats, end marks, locks, sockets and drafts that an earlier job of this name has left.

        Segments (parts of saves) and reserved pages stay.
        """
        for pattern in _SMALL_FILES:
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)

    def address(self, pid: int | None = None) -> tuple[str, int] | None:
        """Return the address of the node's server; None if no node server has run here.

        Args:
            pid: process id of a node server; if given, return None unless the address is that of this process.
        """
        content = self.read("node_server.json")
        if content is None or pid not in (None, content.get("pid")):
            return None
        return content["host"], content["port"]

    def read(self, name: str) -> Message | None:
        """Read the JSON file ``name`` in the node's folder; None if it is missing or incomplete.

        Raises:
            ConfigError: other users can write to the file.
        """
        try:
            return parse_message(read_text(self.folder / name).encode())
        except (OSError, UnicodeError):
            return None

    def write(self, name: str, content: Mapping[str, object]) -> None:
        """Replace the JSON file ``name`` in the node's folder; a reader gets the old or the new content.

        Raises:
            OSError: it cannot be written, such as when no page of shared memory is left, not even a reserved one.
        """
        text = json.dumps(content).encode()
        draft = self.folder / f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            _write_new(draft, text)
        except OSError as error:
            draft.unlink(missing_ok=True)
            if error.errno not in _FULL_ERRNOS:
                raise
            self._write_spare(draft, name, text)
        os.replace(draft, self.folder / name)

    def stock_spares(self) -> None:
        """Reserve up to `_NUM_SPARES` pages, with which `write` works even when the shared memory is full."""
        for number in range(_NUM_SPARES):
            path = self.folder / f".spare-{number}"
            if path.exists():
                continue
            try:
                _write_new(path, bytes(_SPARE_BYTES))
            except OSError:
                path.unlink(missing_ok=True)
                return

    def _write_spare(self, draft: Path, name: str, text: bytes) -> None:
        """Write a draft into a reserved page. The page of the file that it replaces becomes the next reserve.

        Example: ``.spare-3`` is renamed to the draft and written; the present ``beat-w.json`` gets a second name
        ``.spare-3``; then `write` renames the draft to ``beat-w.json``. The number of pages stays the same.
        """
        if len(text) > _SPARE_BYTES:
            raise OSError(errno.ENOSPC, f"no room for {len(text):,} bytes in shared memory, which is full", str(draft))
        for spare in sorted(self.folder.glob(".spare-*")):
            try:
                os.rename(spare, draft)
            except FileNotFoundError:  # another process has just taken it
                continue
            descriptor = open_file(draft, os.O_WRONLY)
            try:
                os.pwrite(descriptor, text, 0)
                os.ftruncate(descriptor, len(text))
            finally:
                os.close(descriptor)
            with contextlib.suppress(OSError):  # there is no file to replace yet
                os.link(self.folder / name, spare)
            return
        raise OSError(errno.ENOSPC, "no page is left in shared memory, which is full", str(self.folder))

    def show_life(self, worker: str, pid: int, round_number: int, *, has_stepped: bool) -> None:
        """Write the heartbeat of a worker, which its agent reads.

        Args:
            has_stepped: whether the worker has done an optimizer step in this round.
        """
        self.write(f"beat-{worker}.json", {"pid": pid, "round": round_number, "has_stepped": has_stepped})

    def remove(self, name: str) -> None:
        """Delete the file ``name`` in the node's folder if it exists."""
        (self.folder / name).unlink(missing_ok=True)


_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: OSError) -> bool:
    """Return True if an error says that the file system or the quota is full."""
    return error.errno in _FULL_ERRNOS


def _write_new(path: Path, text: bytes) -> None:
    """Create a file that does not exist yet, which only this user may read."""
    with open(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(text)


def token_of(job: str, variables: Mapping[str, str] | None = None) -> bytes:
    """Return the token of a job, derived from the secret in the environment or in this user's cache folder.

    Nodes that do not share a home folder need the variable.

    Raises:
        ConfigError: the secret is too short, or cannot be stored.
    """
    variables = os.environ if variables is None else variables
    secret = variables.get(TOKEN)
    if secret is None:
        cache = Path(variables.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        secret = _stored_secret(cache / "ds_hetero")
    if len(secret) < 16:
        raise ConfigError(f"{TOKEN} must have 16 characters or more; it has {len(secret)}.")
    return hmac.new(secret.encode(), job.encode(), hashlib.sha256).digest()


def _stored_secret(folder: Path) -> str:
    """Return the user's secret; the first process draws it. Raises `ConfigError`: it cannot be stored or read."""
    path = folder / "elastic-token"
    remedy = f"Or do without this file: set {TOKEN} to the same secret of 16 characters or more on all nodes."
    try:
        make_cache_folder(folder)
        if not path.exists():
            draft = folder / f".elastic-token.{secrets.token_hex(8)}"
            _write_new(draft, secrets.token_hex(32).encode())
            with contextlib.suppress(FileExistsError):  # another process was first: use its secret
                os.link(draft, path)
            draft.unlink()
        return read_text(path, is_secret=True)
    except ConfigError as error:
        raise ConfigError(f"{error} {remedy}") from error
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"no token for the job can be stored in {folder}: {error}. {remedy}") from error
