"""How the fork server and its owner talk: frames of a JSON head and raw blobs on a byte stream.

Standard library only: the server has nothing else.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any


def pack_frame(meta: dict[str, Any], blobs: Sequence[bytes]) -> bytes:
    """Encode one frame: two lengths, a JSON head, then the blobs."""
    head = json.dumps({**meta, "sizes": [len(blob) for blob in blobs]}).encode()
    return struct.pack("!IQ", len(head), sum(map(len, blobs))) + head + b"".join(blobs)


class FrameReader:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
        """Take more bytes; yield each frame that is now complete, as (head, blobs)."""
        self._buffer += data
        prefix = struct.calcsize("!IQ")
        while len(self._buffer) >= prefix:
            head_size, body_size = struct.unpack_from("!IQ", self._buffer)
            end = prefix + head_size + body_size
            if len(self._buffer) < end:
                return
            meta: dict[str, Any] = json.loads(self._buffer[prefix : prefix + head_size])
            blobs: list[bytes] = []
            at = prefix + head_size
            for size in meta["sizes"]:
                blobs.append(bytes(self._buffer[at : at + size]))
                at += size
            del self._buffer[:end]
            yield meta, blobs
