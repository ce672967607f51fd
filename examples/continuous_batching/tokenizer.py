"""The byte-fallback BPE tokenizer of llama2.c: ``tokenizer.bin``."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

BOS, EOS = 1, 2
FIRST_BYTE = 3  # token of byte 0


class Tokenizer:
    def __init__(self, path: str | Path, vocab_size: int) -> None:
        data = Path(path).read_bytes()
        self.pieces: list[bytes] = []
        self.scores: list[float] = []
        offset = 4  # the longest piece's length, not needed here
        for token in range(vocab_size):
            if offset + 8 > len(data):
                raise ValueError(f"{path}: holds {token} tokens, the model has {vocab_size}.")
            score, length = struct.unpack_from("<fi", data, offset)
            self.scores.append(score)
            self.pieces.append(data[offset + 8 : offset + 8 + length])
            offset += 8 + length
        self.ids = {piece: token for token, piece in reversed(list(enumerate(self.pieces)))}

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, after BOS."""
        tokens = [self.ids[b" "]] if text else []
        for character in text:
            raw = character.encode()
            tokens += [self.ids[raw]] if raw in self.ids else [byte + FIRST_BYTE for byte in raw]
        while True:
            joined = [self.ids.get(self.pieces[left] + self.pieces[right]) for left, right in pairwise(tokens)]
            merges = [at for at, token in enumerate(joined) if token is not None]
            if not merges:
                return [BOS, *tokens]
            best = max(merges, key=lambda at: self.scores[joined[at]])  # the leftmost of equals
            tokens[best : best + 2] = [joined[best]]

    def piece(self, token: int, previous: int | None = None) -> bytes:
        """Bytes that a token adds to a text."""
        if token in (BOS, EOS):
            return b""
        piece = self.pieces[token]
        if byte := re.fullmatch(rb"<0x([0-9A-Fa-f]{2})>", piece):
            return bytes.fromhex(byte[1].decode())
        return piece.removeprefix(b" ") if previous == BOS else piece

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a sequence that starts with BOS."""
        previous = [None, *tokens[:-1]]
        return b"".join(map(self.piece, tokens, previous)).decode(errors="replace")
