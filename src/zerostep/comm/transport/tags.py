"""Tags of messages between two ranks, such that messages of different length never meet."""

from __future__ import annotations

from struct import Struct
from zlib import crc32

_WORDS = Struct("<qq")
_MOST = 0x7FFFFFFF  # Gloo takes tags of 31 bits


def message_tag(kind: int, bucket: int, piece: int = 0) -> int:
    """The tag of one message of a bucket: its kind, of 16 bits, the bucket, and the number of the message in it."""
    return kind | bucket << 16 | piece << 40


def kind_of(tag: int) -> int:
    """The kind that a tag was made of."""
    return tag & 0xFFFF


def wire_tag(tag: int, nbytes: int) -> int:
    """The number by which a backend matches a send and a receive: a hash of the tag and of the length.

    Gloo ends the process when a message is longer than the memory that waits for it. Ranks that do not make the same
    calls must wait for each other instead, until a time-out or an error says so.
    """
    return crc32(_WORDS.pack(tag, nbytes)) & _MOST
