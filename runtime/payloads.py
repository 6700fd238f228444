"""Large payloads travel compressed: the state of a thousand nodes is 2.5 MiB of JSON, and a payload holds 2 MiB."""

import asyncio
import zlib
from collections.abc import Sequence

from temporalio.api.common.v1 import Payload
from temporalio.converter import PayloadCodec

ENCODING = b"binary/zlib"

LARGE = 128 * 1024
"""Bytes from which on a payload is compressed. What people look at in the web UI and the CLI is smaller, and stays
readable there; a fleet of about fifty nodes is as large."""

MOST = 64 * 1024**2
"""Bytes a payload may unpack to: more is no payload of ours."""


class LargePayloads(PayloadCodec):
    """Compresses what is large, and reads both."""

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [await asyncio.to_thread(_pack, one) if len(one.data) >= LARGE else one for one in payloads]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [
            await asyncio.to_thread(_unpack, one) if one.metadata.get("encoding") == ENCODING else one
            for one in payloads
        ]


def _pack(payload: Payload) -> Payload:
    return Payload(metadata={"encoding": ENCODING}, data=zlib.compress(payload.SerializeToString(), 1))


def _unpack(payload: Payload) -> Payload:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(payload.data, MOST)
    if unpacker.unconsumed_tail:
        raise ValueError(f"a payload of more than {MOST} bytes is none of llmgw's")
    return Payload.FromString(data)
