"""PNG as arrays of colours, as far as a browser writes them: 8 bits, RGB or RGBA, not interlaced."""

from __future__ import annotations

import struct
import zlib

import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {2: 3, 6: 4}  # by colour type


def read_png(body: bytes) -> np.ndarray:
    """Colours from 0 to 255: [height, width, 3]."""
    assert body.startswith(SIGNATURE)
    chunks, place = [], len(SIGNATURE)
    while place < len(body):
        (length,) = struct.unpack(">I", body[place : place + 4])
        chunks.append((body[place + 4 : place + 8], body[place + 8 : place + 8 + length]))
        place += 12 + length
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", dict(chunks)[b"IHDR"])
    assert depth == 8 and not interlaced
    data = zlib.decompress(b"".join(content for name, content in chunks if name == b"IDAT"))
    lines = np.frombuffer(data, np.uint8).reshape(height, 1 + width * CHANNELS[kind])
    return _unfiltered(lines, CHANNELS[kind]).reshape(height, width, CHANNELS[kind])[..., :3]


def _unfiltered(lines: np.ndarray, step: int) -> np.ndarray:
    """Each byte was stored less what the bytes to its left and above foretell; the first of a line says how."""
    n_bytes = lines.shape[1] - 1
    above = [0] * (step + n_bytes)
    found = np.zeros((len(lines), n_bytes), np.uint8)
    for index, (way, *stored) in enumerate(lines.tolist()):
        now = [0] * step
        foretold = FORETOLD[way]
        for place, byte in enumerate(stored):
            now.append((byte + foretold(now[place], above[place + step], above[place])) & 255)
        above, found[index] = now, now[step:]
    return found


def _nearest(left: int, up: int, corner: int) -> int:
    near = left + up - corner
    return min((left, up, corner), key=lambda value: abs(near - value))


# By the first byte of a line: of the bytes to the left, above, and above to the left.
FORETOLD = (
    lambda left, up, corner: 0,
    lambda left, up, corner: left,
    lambda left, up, corner: up,
    lambda left, up, corner: (left + up) // 2,
    _nearest,
)


def blurred(picture: np.ndarray, *, cell: int) -> np.ndarray:
    """The mean colour of each square of `cell` pixels; what does not fill one is left out."""
    height, width = (size // cell * cell for size in picture.shape[:2])
    squares = picture[:height, :width].reshape(height // cell, cell, width // cell, cell, 3)
    return squares.mean(axis=(1, 3))
