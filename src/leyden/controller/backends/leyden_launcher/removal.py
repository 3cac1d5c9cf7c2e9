"""Removes what strangers left: folders of any depth, without permissions, immutable; links are never followed.

A path can be longer than the kernel takes (PATH_MAX) and a folder deeper than a process may hold descriptors or frames.
So nothing is descended into: the folders of a folder are moved up to the top one, under names of their own, until the
top one holds no folder that holds another.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct

GET_FLAGS, SET_FLAGS = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS; see ioctl_iflags(2)
IMMUTABLE, APPEND_ONLY = 0x10, 0x20


def remove(path: str) -> None:
    """Delete what lies at a path, whatever it is; nothing there is fine. Raises OSError for what cannot be deleted."""
    try:
        above = _opened(os.path.dirname(os.path.abspath(path)), None)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        name = os.path.basename(path)
        if not _unlinked(name, above):
            top = _opened(name, above)
            try:
                _empty(top)
            finally:
                os.close(top)
            os.rmdir(name, dir_fd=above)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(above)


def open_up(path: str) -> None:
    """Give the owner a folder of theirs back: all permissions of the owner, no attribute that forbids changes."""
    os.close(_opened(path, None))


def _empty(top: int) -> None:
    """Each round takes every folder that the one before moved up, and leaves none of them; a round that frees nothing
    has met what cannot be deleted."""
    prefix, moved = os.urandom(8).hex(), 0
    while True:
        names = os.listdir(top)
        if not names:
            return
        freed, problem = 0, None
        for name in names:
            try:
                if not _unlinked(name, top):
                    moved = _spread(name, top, prefix, moved)
                    os.rmdir(name, dir_fd=top)
                freed += 1
            except FileNotFoundError:
                freed += 1
            except OSError as error:
                problem = error
        if problem is not None and not freed:
            raise problem


def _spread(name: str, top: int, prefix: str, moved: int) -> int:
    """Empty a folder of the top one: its files go, its folders move up. Answers how many have been moved so far."""
    folder = _opened(name, top)
    try:
        for inner in os.listdir(folder):
            if not _unlinked(inner, folder):
                moved += 1
                os.close(_opened(inner, folder))  # to move a folder changes it too
                os.rename(inner, f"{prefix}-{moved}", src_dir_fd=folder, dst_dir_fd=top)
    finally:
        os.close(folder)
    return moved


def _unlinked(name: str, folder: int) -> bool:
    """Delete what is no folder; False for a folder."""
    try:
        facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return True
    if stat.S_ISDIR(facts.st_mode):
        return False
    try:
        os.unlink(name, dir_fd=folder)
    except PermissionError:
        if not stat.S_ISREG(facts.st_mode):
            raise
        _clear_flags(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder))
        os.unlink(name, dir_fd=folder)
    return True


def _opened(name: str, above: int | None) -> int:
    """A folder, opened for its entries to be listed and changed."""
    place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        mode = stat.S_IMODE(os.fstat(place).st_mode)
        wanted = mode | stat.S_IRWXU
        if mode != wanted:
            with contextlib.suppress(PermissionError):  # an immutable folder; or another user's, as the next call says
                os.chmod(f"/proc/self/fd/{place}", wanted)
        folder = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _clear_flags(os.dup(folder))
        if mode != wanted and os.fstat(folder).st_mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(f"/proc/self/fd/{place}", wanted)
        return folder
    finally:
        os.close(place)


def _clear_flags(fd: int) -> None:
    """Take away what `chattr +i` and `+a` gave, and close the descriptor. Not every file system knows them."""
    try:
        with contextlib.suppress(OSError):
            (flags,) = struct.unpack("l", fcntl.ioctl(fd, GET_FLAGS, bytes(struct.calcsize("l"))))
            if flags & (IMMUTABLE | APPEND_ONLY):
                fcntl.ioctl(fd, SET_FLAGS, struct.pack("l", flags & ~(IMMUTABLE | APPEND_ONLY)))
    finally:
        os.close(fd)
