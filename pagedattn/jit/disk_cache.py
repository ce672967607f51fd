"""Compiled kernels on disk, one file each, shared by any number of processes.

A file is written aside and renamed into place, so a reader finds a whole one or none. Each holds a checksum, so one
that a crash or a full disk damaged reads as absent and is built again. A folder that cannot be written is no error:
kernels then live in memory only.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pagedattn import env

logger = logging.getLogger(__name__)

_MAGIC = b"pagedattn kernel 1\n"


@dataclass(frozen=True)
class Binary:
    """A compiled kernel: the cubin, and the mangled name of the kernel in it."""

    cubin: bytes
    entry: str


class DiskCache:
    """A folder of compiled kernels; by default the one of :func:`default_directory`, looked up at each use."""

    def __init__(self, directory: str | Path | None = None) -> None:
        self._directory = Path(directory) if directory is not None else None
        self._warned = False

    @property
    def directory(self) -> Path | None:
        """The folder, which may not exist yet; None when there is no place for one."""
        return self._directory or default_directory()

    def get(self, name: str) -> Binary | None:
        """Return an entry, or None if it is absent, unreadable or damaged."""
        directory = self.directory
        if directory is None:
            return None
        try:
            data = (directory / name).read_bytes()
        except OSError:
            return None
        binary = _decode(name, data)
        if binary is None:
            logger.warning("%s is damaged; the kernel is compiled again", directory / name)
        return binary

    def put(self, name: str, binary: Binary) -> None:
        """Store an entry, whole or not at all; of two writers of one name either wins, for their contents are equal."""
        directory = self.directory
        if directory is None:
            return
        try:
            write_whole(directory / name, _encode(name, binary))
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "compiled kernels are kept in memory only, for %s cannot be written: %s", directory, error
                )


def default_directory() -> Path | None:
    """Return the folder that PAGEDATTN_CACHE_DIR names, else ``pagedattn`` in the user's cache folder."""
    named = env.cache_dir()
    try:
        if named:
            return Path(named).expanduser()
        try:
            platformdirs = importlib.import_module("platformdirs")
        except ImportError:
            return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedattn"
        return Path(platformdirs.user_cache_dir("pagedattn", appauthor=False))
    except RuntimeError:  # the user has no home
        return None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def _checksum(name: str, body: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + body).hexdigest().encode()


def _encode(name: str, binary: Binary) -> bytes:
    body = binary.entry.encode() + b"\n" + binary.cubin
    return _MAGIC + _checksum(name, body) + b"\n" + body


def _decode(name: str, data: bytes) -> Binary | None:
    if not data.startswith(_MAGIC):
        return None
    checksum, _, body = data[len(_MAGIC) :].partition(b"\n")
    if checksum != _checksum(name, body):
        return None
    entry, _, cubin = body.partition(b"\n")
    return Binary(cubin, entry.decode())
