"""Private files and folders: only this user may write them; files that another user could have written are refused.

Other users of the machine can make files in shared memory, and beside a cache folder. The job trusts the content of its
files there. Therefore each of its folders, and every file in them, must be owned by this user, must not be a symbolic
link, and must not be writable by its group or others. Checks use an open descriptor, so that nobody can replace the
file between the check and its use.

    make_own_folders   makes the folders below a root, with mode 0700
    open_file          opens a file in such a folder, and makes it with mode 0600 if the flags say so
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ds_hetero.errors import ConfigError

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_own_folders(root: Path, *parts: str) -> None:
    """Make the missing folders of ``root/part/part``; the root must exist, and may belong to another user.

    Raises:
        ConfigError: another user owns a part or can write to it, or others can rename entries of the root.
        OSError: a folder cannot be made.
    """
    _walk(root, parts, makes=True)


def expect_own_folders(root: Path, *parts: str) -> None:
    """Raise `ConfigError`, as `make_own_folders` does, for folders of ``root/part/part`` that exist; make none."""
    with suppress(FileNotFoundError, NotADirectoryError):
        _walk(root, parts, makes=False)


def make_cache_folder(folder: Path) -> None:
    """Make a folder and its parents with mode 0700; if the folder exists, check it.

    Raises:
        ConfigError: another user owns the folder or can write to it.
        OSError: it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    os.close(_open_folder(folder))


def expect_own_file(path: Path) -> None:
    """Check that no other user can change a file, which is read later. Raises as `open_file` does."""
    os.close(open_file(path))


def _walk(root: Path, parts: Sequence[str], *, makes: bool) -> None:
    """Open and check each folder of ``root/part/part``, and make the missing ones if ``makes``.

    Each is opened relative to the descriptor of the folder before it, so that nobody can replace a folder on the way.
    """
    descriptor = _open_root(root)
    path = root
    try:
        for part in parts:
            path /= part
            if makes:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=descriptor)
            inner = _open_folder(Path(part), path, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
    finally:
        os.close(descriptor)


def open_file(path: Path, flags: int = os.O_RDONLY, *, is_secret: bool = False) -> int:
    """Open a regular file in a private folder, and return its descriptor, which programs started by exec do not get.

    Args:
        flags: flags of `os.open`; links are never followed.
        is_secret: whether others must not be able to read it either.

    Raises:
        ConfigError: another user owns the folder or the file, or can write to it.
        OSError: the file cannot be opened.
    """
    folder = _open_folder(path.parent)
    try:
        # O_NONBLOCK: opening a pipe would otherwise wait for its other end.
        descriptor = os.open(path.name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(_refusal(path, "is a symbolic link")) from None
        raise
    finally:
        os.close(folder)
    try:
        _expect_own(descriptor, path, is_folder=False)
        if is_secret and os.fstat(descriptor).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"{path} holds a secret, and other users may read it. Give it mode 0600 (chmod 600), or delete it."
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def reading(path: Path, *, is_secret: bool = False) -> Iterator[IO[bytes]]:
    """Open a file of a private folder for reading bytes; raises as `open_file` does."""
    with open(open_file(path, is_secret=is_secret), "rb") as file:
        yield file


def read_text(path: Path, *, is_secret: bool = False) -> str:
    """Return the text of a file of a private folder; raises as `open_file` does."""
    with reading(path, is_secret=is_secret) as file:
        return file.read().decode()


def _open_root(root: Path) -> int:
    """Open the folder that contains the private ones, also through links.

    Others may make files in it, but must not be able to rename this user's.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    is_protected = bool(status.st_mode & stat.S_ISVTX) or not status.st_mode & _OTHERS_WRITE
    if not is_protected or status.st_uid not in _trusted_owners():
        os.close(descriptor)
        problem = f"is owned by user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}"
        raise ConfigError(
            f"{root} cannot hold trusted files: it {problem}, so that other users can rename files in it. Name another "
            "folder, or forbid others to write to this one (chmod go-w), or to rename files of others (chmod +t)."
        )
    return descriptor


def _trusted_owners() -> tuple[int, ...]:
    """Return the users who may own the root: this user, and those who have all rights anyway."""
    return (os.geteuid(), 0, *_overflow_user())


def _overflow_user() -> tuple[int, ...]:
    """Return the id that stands for all users outside this user namespace, such as the host's root.

    Empty if this process is not in a user namespace.
    """
    try:
        if int(Path("/proc/self/uid_map").read_text().split()[2]) == 2**32 - 1:
            return ()
        return (int(Path("/proc/sys/kernel/overflowuid").read_text()),)
    except (OSError, ValueError, IndexError):
        return ()


def _open_folder(path: Path, shown_path: Path | None = None, dir_fd: int | None = None) -> int:
    """Open and check a private folder.

    Args:
        shown_path: path for messages, if ``path`` is relative to ``dir_fd``.
    """
    shown_path = path if shown_path is None else shown_path
    try:
        descriptor = os.open(path, _FOLDER_FLAGS, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(shown_path):
            raise ConfigError(_refusal(shown_path, "is a symbolic link")) from None
        raise
    try:
        _expect_own(descriptor, shown_path, is_folder=True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _expect_own(descriptor: int, path: Path, *, is_folder: bool) -> None:
    """Refuse an open file or folder that another user owns or can write to, or a file that is not a regular one."""
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        raise ConfigError(_refusal(path, f"is owned by user {status.st_uid}, and this process is user {os.geteuid()}"))
    if status.st_mode & _OTHERS_WRITE:
        raise ConfigError(_refusal(path, f"has mode {stat.S_IMODE(status.st_mode):04o}: others can write to it"))
    if not is_folder and not stat.S_ISREG(status.st_mode):
        raise ConfigError(_refusal(path, "is not a regular file"))


def _refusal(path: Path, problem: str) -> str:
    """Return the message on a file or folder that is not private."""
    return (
        f"{path} {problem}; the job trusts its content, so no other user may be able to write it. If you did not make "
        "it so, somebody may want you to use it: look at it, then delete it, or make it yours alone (chown, "
        "chmod go-w)."
    )
