"""Where the processes of an elastic job on one node find each other: environment variables and small files.

DS_HETERO_ELASTIC_JOB      name of the job
DS_HETERO_ELASTIC_NODE     name of the node; the host's, if it is not set
DS_HETERO_ELASTIC_AGENT    name of the agent, given to its workers
DS_HETERO_ELASTIC_AGENT_PID    its process id, given to its workers
DS_HETERO_ELASTIC_CARD     what the driver calls the agent's card
DS_HETERO_ELASTIC_ROUND    number of the round, given to workers
DS_HETERO_ELASTIC_TOKEN    secret of the job; else the user's, in the cache folder
DS_HETERO_ELASTIC_SHM      folder of the shared memory; /dev/shm, if it is not set

Shared memory is where every user of the machine can make files: see `ds_hetero.common.private_files`.
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
_NUM_SPARES = 8
_SMALL_FILES = (
    *("beat-*.json", "end-*.json", "broken-*.json", "done-*.json", "meeting-*.json"),
    *(".got-*", ".*.json.*.*", "warm.sock*"),  # locks, drafts of writers that were killed, sockets
)


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """A node of a job.

    Small files are written when the shared memory is full as well: a job then still says what it does. Pages for them
    are set aside (`stock_spares`).
    """

    job: str
    node: str
    folder: Path  # of its segments and small files, in shared memory
    root: Path | None = None  # in which others have folders, too; the folder above ``folder``, if left out

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
        root = Path(variables.get(SHM, "/dev/shm"))
        place = NodePlace(job=job, node=node, folder=root / f"ds_hetero-{os.geteuid()}" / job / node, root=root)
        expect_own_folders(root, *place._parts)
        return place

    @property
    def _root(self) -> Path:
        return self.folder.parent if self.root is None else self.root

    @property
    def _parts(self) -> tuple[str, ...]:
        return self.folder.relative_to(self._root).parts

    def make(self) -> None:
        """Make the folder, which nobody else may read.

        Raises:
            ConfigError: somebody else has made it, or a folder above it.
            OSError: it cannot be made.
        """
        make_own_folders(self._root, *self._parts)
        self.stock_spares()

    def clear(self) -> None:
        """Delete the small files of a job of this name that has ended; its segments stay, and what is set aside."""
        for pattern in _SMALL_FILES:
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)

    def address(self, of: int | None = None) -> tuple[str, int] | None:
        """Where the node's keeper listens; None where none has ever run.

        Args:
            of: process id of the keeper; of others there is none.
        """
        content = self.read("keeper.json")
        if content is None or of not in (None, content.get("pid")):
            return None
        return content["host"], content["port"]

    def read(self, name: str) -> Message | None:
        """A small file; None where there is none that is whole. Raises `ConfigError`: it is not this user's alone."""
        try:
            return parse_message(read_text(self.folder / name).encode())
        except (OSError, UnicodeError):
            return None

    def write(self, name: str, content: Mapping[str, object]) -> None:
        """Replace a small file; a reader gets the old or the new content.

        Raises:
            OSError: it cannot be written; also where no page of shared memory is left, nor one that was set aside.
        """
        text = json.dumps(content).encode()
        draft = self.folder / f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            _write_new(draft, text)
        except OSError as error:
            draft.unlink(missing_ok=True)
            if error.errno not in _NO_ROOM:
                raise
            self._write_spare(draft, name, text)
        os.replace(draft, self.folder / name)

    def stock_spares(self) -> None:
        """Set pages aside for small files, as far as there is room."""
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
        """Write a draft into a page that was set aside; the page of the file that it will replace takes its place."""
        if len(text) > _SPARE_BYTES:
            raise OSError(errno.ENOSPC, f"no room for {len(text):,} bytes in shared memory, which is full", str(draft))
        for spare in sorted(self.folder.glob(".spare-*")):
            try:
                os.rename(spare, draft)
            except FileNotFoundError:  # another process was faster
                continue
            descriptor = open_file(draft, os.O_WRONLY)
            try:
                os.pwrite(descriptor, text, 0)
                os.ftruncate(descriptor, len(text))
            finally:
                os.close(descriptor)
            with contextlib.suppress(OSError):  # there is none yet
                os.link(self.folder / name, spare)
            return
        raise OSError(errno.ENOSPC, "no page is left in shared memory, which is full", str(self.folder))

    def show_life(self, worker: str, pid: int, round_number: int, *, has_stepped: bool) -> None:
        """Write the sign of life of a worker, at which its agent looks.

        Args:
            has_stepped: it has done an optimizer step in this round.
        """
        self.write(f"beat-{worker}.json", {"pid": pid, "round": round_number, "has_stepped": has_stepped})

    def remove(self, name: str) -> None:
        """Delete a small file if it is there."""
        (self.folder / name).unlink(missing_ok=True)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: OSError) -> bool:
    """Whether an error says that there is no room."""
    return error.errno in _NO_ROOM


def _write_new(path: Path, text: bytes) -> None:
    with open(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(text)


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
    remedy = f"Or set {TOKEN} to the same secret of 16 characters or more on all nodes."
    try:
        make_cache_folder(folder)
        if not path.exists():
            draft = folder / f".elastic-token.{secrets.token_hex(8)}"
            _write_new(draft, secrets.token_hex(32).encode())
            with contextlib.suppress(FileExistsError):  # another process was first, and its secret counts
                os.link(draft, path)
            draft.unlink()
        return read_text(path, is_secret=True)
    except ConfigError as error:
        raise ConfigError(f"{error} {remedy}") from error
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"no token for the job can be kept in {folder}: {error}. {remedy}") from error
