"""Content of a directory of weights, as chunks named by their hashes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field

CHUNK = 8 * 2**20
"""Bytes of a chunk: peers pass on a chunk once they have all of it, and unchanged chunks are not
sent."""
BASE = "base"
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[\w-][\w.-]*$", max_length=200)]


class Chunk(NamedTuple):
    """Place of a chunk."""

    digest: str
    """SHA-256 of its bytes."""
    file: str
    start: int
    size: int


class FileChunks(BaseModel):
    """A file and the digests of its chunks, in order."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: FileName
    size: Annotated[int, Field(ge=0, lt=2**48)]
    digests: list[Digest]


class Manifest(BaseModel):
    """Files of one policy, or of the base model of all."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    version: Annotated[int, Field(ge=0, lt=2**53)]
    chunk: Annotated[int, Field(ge=1, le=2**28)]
    """Bytes per chunk; the last of a file may have fewer."""
    files: Annotated[list[FileChunks], Field(min_length=1, max_length=10_000)]
    base: bool = False
    """Whether it is the model that adapters are sent for, which servers may need at any time."""

    @property
    def name(self) -> str:
        """Name of its directory."""
        return BASE if self.base else f"policy-{self.version}"

    @classmethod
    def of(cls, directory: Path, version: int, chunk: int = CHUNK, *, base: bool = False) -> Self:
        """Describe the files of a directory, without hidden ones. Reads all of them."""
        paths = sorted(
            path for path in directory.iterdir() if path.is_file() and not path.name.startswith(".")
        )
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:

            def digests(path: Path) -> list[str]:
                def digest(start: int) -> str:
                    return sha256(read(path, start, chunk)).hexdigest()

                return list(pool.map(digest, range(0, path.stat().st_size, chunk)))

            files = [
                FileChunks(name=path.name, size=path.stat().st_size, digests=digests(path))
                for path in paths
            ]
        return cls(version=version, chunk=chunk, files=files, base=base)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def chunks(self) -> Iterator[Chunk]:
        """Yield all chunks in order."""
        for file in self.files:
            for number, digest in enumerate(file.digests):
                start = number * self.chunk
                yield Chunk(digest, file.name, start, min(self.chunk, file.size - start))

    def fault(self) -> str:
        """Return what is inconsistent, or an empty string."""
        names = [file.name for file in self.files]
        if len(set(names)) < len(names):
            return "names a file twice"
        for file in self.files:
            chunks = -(-file.size // self.chunk)
            if len(file.digests) != chunks:
                return f"has {file.name} with another number of chunks than its size needs"
        return ""


def read(path: Path, start: int, size: int) -> bytes:
    """Read a part of a file."""
    with path.open("rb") as file:
        return os.pread(file.fileno(), size, start)
