"""What the mock engine reads and says: a tokenizer of word pieces, and answers that follow from what came before.

There is no language model here: answers are words without meaning, the same ones for the same tokens and seed.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from string import ascii_lowercase
from zlib import crc32

VOCABULARY = 2**17
"""Token ids are below this."""
MEAN_ANSWER_TOKENS = 256
"""Of an answer that ends by itself: its length is geometric, so that what was said so far tells nothing of the rest."""
_LETTERS = len(ascii_lowercase)
WORDS = _LETTERS**3
"""The ids below this are the words that answers consist of: a blank and three letters."""
END = WORDS
"""The token that ends an answer; it has no text."""
_PIECE = re.compile(r"\s?\S{1,5}|\s")
_WORD = re.compile(r" [a-z]{3}")
_MODULUS = 2**61 - 1
_MULTIPLIER = 0x1F3D5B79A8642C01
_SPREAD = 0x9E3779B97F4A7C15
_ENDS_BELOW = 2**20 // MEAN_ANSWER_TOKENS


class Tokenizer:
    """Cuts text into pieces of at most five characters and the white space before them: English has about four
    characters a token.

    Text that begins with white space never changes the tokens of the text in front of it. The words of answers have
    ids of their own, any other piece gets one by its checksum, and two pieces may share one; `decode` then gives the
    piece seen last.
    """

    def __init__(self) -> None:
        self._seen: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """The text's token ids."""
        ids = []
        for piece in _PIECE.findall(text):
            if _WORD.fullmatch(piece):
                first, second, third = (ord(letter) - ord("a") for letter in piece[1:])
                ids.append((first * _LETTERS + second) * _LETTERS + third)
            else:
                number = END + 1 + crc32(piece.encode("utf-8", "surrogatepass")) % (VOCABULARY - END - 1)
                self._seen[number] = piece
                ids.append(number)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; an id of a piece never seen is a replacement character."""
        return "".join(words((number,)) if number <= END else self._seen.get(number, "\ufffd") for number in ids)


def words(ids: Sequence[int]) -> str:
    """The text of an answer's token ids."""
    text = []
    for number in ids:
        if number < END:
            rest, third = divmod(number, _LETTERS)
            first, second = divmod(rest, _LETTERS)
            text.append(f" {ascii_lowercase[first]}{ascii_lowercase[second]}{ascii_lowercase[third]}")
    return "".join(text)


def answer(
    prompt: Sequence[int], seed: int, max_tokens: int, min_tokens: int = 0, ignore_eos: bool = False
) -> tuple[list[int], bool]:
    """The answer's token ids, at most ``max_tokens``, and whether it ended by itself.

    Each token follows from all before it and the seed, so that an answer asked for in pieces, each with the ids so
    far as its prompt, is the same as in one. One in `MEAN_ANSWER_TOKENS` ends it, unless ``ignore_eos`` or before
    ``min_tokens``.
    """
    state = (seed * _SPREAD + 1) % _MODULUS
    for token in prompt:
        state = (state * _MULTIPLIER + token + 1) % _MODULUS
    ids: list[int] = []
    for number in range(max_tokens):
        drawn = state * _SPREAD % 2**64
        if drawn >> 20 & 0xFFFFF < _ENDS_BELOW and not ignore_eos and number >= min_tokens:
            return [*ids, END], True
        token = (drawn >> 40) % WORDS
        ids.append(token)
        state = (state * _MULTIPLIER + token + 1) % _MODULUS
    return ids, False


def block_hashes(ids: Sequence[int], block_tokens: int) -> list[int]:
    """Of each whole block a name for its tokens and all before them, which is what a prefix cache goes by."""
    data = array("I", ids)
    name = b""
    names = []
    for end in range(block_tokens, len(data) + 1, block_tokens):
        name = blake2b(name + data[end - block_tokens : end].tobytes(), digest_size=16).digest()
        names.append(int.from_bytes(name))
    return names
