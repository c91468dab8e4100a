"""Cut passages of running text into documents of one length, and hold some passages out.

One rule for every length: each passage once, in the order of the data set, joined by blank lines;
that text is cut before a word into documents of at most so many bytes. The rest is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def is_held_out(document: str, modulus: int) -> bool:
    """Return whether a document is held out of training; equal documents are on the same side.

    By its hash one of ``modulus`` documents is, and none of 0.
    """
    digest = hashlib.sha256(document.encode()).digest()
    return modulus > 0 and int.from_bytes(digest[:8], "big") % modulus == 0


def cut(passages: Iterable[str], size: int) -> list[str]:
    """Return the documents of at most ``size`` bytes of UTF-8, each ending before a space.

    Raises:
        ValueError: A stretch of that size has no space.
    """
    text = "\n\n".join(dict.fromkeys(passages)).encode()
    documents, begin = [], 0
    while len(text) - begin > size:
        end = text.rindex(b" ", begin + 1, begin + size + 1)
        documents.append(text[begin:end].decode())
        begin = end + 1
    return documents
