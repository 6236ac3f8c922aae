"""Files and folders that only this user may write; those that somebody else could have written are refused.

Other users of the machine can make files in shared memory, and beside a cache folder. We trust the content of our files
there, so every one of our folders, and every file in it, must be owned by this user, must not be a symbolic link, and
must not be writable by its group or others. Checks use an open descriptor, so that nobody can replace the file between
the check and its use.

    make_own_folders     the folders below a root, mode 0700
    open_file       a file in a folder of ours, mode 0600 where it is made
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
    """Make the missing folders of ``root/part/part``; the root must exist, and is not ours.

    Raises:
        ConfigError: a part is not this user's alone, or others can rename entries of the root.
        OSError: a folder cannot be made.
    """
    _walk(root, parts, makes=True)


def expect_own_folders(root: Path, *parts: str) -> None:
    """Check the existing folders of ``root/part/part``. Raises `ConfigError`: see `make_own_folders`."""
    with suppress(FileNotFoundError, NotADirectoryError):
        _walk(root, parts, makes=False)


def make_cache_folder(folder: Path) -> None:
    """Make a folder, and those above it, mode 0700; check the folder if it exists.

    Raises:
        ConfigError: it is not this user's alone.
        OSError: it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    os.close(_open_folder(folder))


def expect_own_file(path: Path) -> None:
    """Check a file that is read later; nobody else can change it until then. Raises as `open_file`."""
    os.close(open_file(path))


def _walk(root: Path, parts: Sequence[str], *, makes: bool) -> None:
    """Walk from folder to folder by their descriptors, so that nobody can replace a folder on the way."""
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
    """Open a regular file in one of our folders, not through links; return its descriptor, which is closed by an exec.

    Args:
        is_secret: whether others must not read it either.

    Raises:
        ConfigError: the folder or the file is not this user's alone.
        OSError: it cannot be opened.
    """
    folder = _open_folder(path.parent)
    try:
        # O_NONBLOCK: a pipe in its place would be waited for
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
            raise ConfigError(f"{path} holds a secret, and others may read it: give it mode 0600, or delete it.")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def reading(path: Path, *, is_secret: bool = False) -> Iterator[IO[bytes]]:
    """Open a file for reading; see `open_file`."""
    with open(open_file(path, is_secret=is_secret), "rb") as file:
        yield file


def read_text(path: Path, *, is_secret: bool = False) -> str:
    """Read the text of a file; see `open_file`."""
    with reading(path, is_secret=is_secret) as file:
        return file.read().decode()


def _open_root(root: Path) -> int:
    """Open the folder that contains ours, also through links. Others may make files there, but must not rename ours."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    facts = os.fstat(descriptor)
    is_guarded = bool(facts.st_mode & stat.S_ISVTX) or not facts.st_mode & _OTHERS_WRITE
    if not is_guarded or facts.st_uid not in _trusted():
        os.close(descriptor)
        seen = f"is owned by user {facts.st_uid} and has mode {stat.S_IMODE(facts.st_mode):04o}"
        raise ConfigError(
            f"{root} cannot hold files that are believed: it {seen}, so that others can rename what is in it. Name "
            "another folder, or take the right to write from others (chmod go-w), or let them rename their own files "
            "alone (chmod +t)."
        )
    return descriptor


def _trusted() -> tuple[int, ...]:
    """Users who may own the root: this user, and those who have all rights anyway."""
    return (os.geteuid(), 0, *_unmapped())


def _unmapped() -> tuple[int, ...]:
    """In a user namespace, the number that stands for all users outside, such as the host's root."""
    try:
        if int(Path("/proc/self/uid_map").read_text().split()[2]) == 2**32 - 1:
            return ()
        return (int(Path("/proc/sys/kernel/overflowuid").read_text()),)
    except (OSError, ValueError, IndexError):
        return ()


def _open_folder(path: Path, shown: Path | None = None, dir_fd: int | None = None) -> int:
    shown = path if shown is None else shown
    try:
        descriptor = os.open(path, _FOLDER_FLAGS, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(shown):
            raise ConfigError(_refusal(shown, "is a symbolic link")) from None
        raise
    try:
        _expect_own(descriptor, shown, is_folder=True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _expect_own(descriptor: int, path: Path, *, is_folder: bool) -> None:
    facts = os.fstat(descriptor)
    if facts.st_uid != os.geteuid():
        raise ConfigError(_refusal(path, f"is owned by user {facts.st_uid}, and this process is user {os.geteuid()}"))
    if facts.st_mode & _OTHERS_WRITE:
        raise ConfigError(_refusal(path, f"has mode {stat.S_IMODE(facts.st_mode):04o}: others can write to it"))
    if not is_folder and not stat.S_ISREG(facts.st_mode):
        raise ConfigError(_refusal(path, "is not a regular file"))


def _refusal(path: Path, seen: str) -> str:
    return (
        f"{path} {seen}; what is read there is believed, so it has to be this user's alone. If you did not make it so, "
        "somebody may want you to use it: look at it, then delete it, or make it yours alone (chown, chmod go-w)."
    )
