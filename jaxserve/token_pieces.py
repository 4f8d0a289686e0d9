"""The bytes that each token of a vocabulary adds to a text, for `tokenizer`."""

import json
from typing import Any

from jaxserve.errors import CheckpointError


class TokenPieces:
    """The bytes that each token adds to a text, derived from the tokenizer's decoder.

    Two kinds of decoder cover current language models: byte-level BPE represents bytes by stand-in characters (GPT-2's
    table), sentencepiece marks spaces with U+2581 and writes rare bytes as tokens `<0xE2>`.
    """

    def __init__(self, backend: Any):
        """Read the decoder of `backend`, a tokenizer of the `tokenizers` library. Raises CheckpointError if it is of
        another kind.
        """
        self._id_to_token = backend.id_to_token
        self._cache: dict[int, bytes] = {}
        self._is_byte_level = False
        self._has_byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self.strips_first_space = False
        decoder = backend.decoder
        for step in _decoder_steps(json.loads(decoder.__getstate__())) if decoder is not None else []:
            match step:
                case {"type": "ByteLevel"}:
                    self._is_byte_level = True
                case {"type": "ByteFallback"}:
                    self._has_byte_fallback = True
                case {"type": "Fuse"}:
                    pass  # joins tokens: there is nothing between them here either
                case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                    self._replacements.append((pattern, content))
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                    self.strips_first_space = True
                case {"type": "Metaspace", "replacement": replacement}:
                    self._replacements.append((replacement, " "))
                    self.strips_first_space = step.get("prepend_scheme", "always") != "never"
                case _:
                    raise CheckpointError(f"tokenizers with a {step.get('type')} decoder are not supported: {step}")

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; empty for an unknown id."""
        piece = self._cache.get(token_id)
        if piece is None:
            token = self._id_to_token(token_id) if token_id >= 0 else None
            if token is None:
                return b""
            piece = self._cache[token_id] = self._spell(token)
        return piece

    def _spell(self, token: str) -> bytes:
        if self._is_byte_level:
            try:
                return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
            except KeyError:  # an added token is its own text
                return token.encode()
        if self._has_byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        return token.encode()


def _decoder_steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for child in decoder["decoders"] for step in _decoder_steps(child)]


def _byte_level_table() -> dict[str, int]:
    """Return GPT-2's spelling of bytes: printable Latin-1 as itself, the other bytes, in order, from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_table()
