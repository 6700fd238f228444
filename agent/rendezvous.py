"""Where the agents of a gang meet before their engines start: at the port on rank 0's node that the engines use next.

Each shard's agent comes when its node has engine and weights. So engines start at the same time however long one node
fetched, a way that is shut is found before minutes of loading, and it is known which node did not come.

Rank 0 listens. Each other rank sends one line of JSON, `Hello`, and gets one, `Word`: that all have come and where
rank 0's engine will answer, or who has not. Whoever asks closes first, so that the port is free at once for the engine.
Nobody proves who it is: who reaches the port could also reach the engine's own rendezvous, and gets nothing from it.
"""

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, field

from pydantic import ValidationError

from activities.node_contract import GangPlace, ShardRef
from agent.ports import holder_of
from fleet.reasons import Reason, StepError
from fleet.records import Record

AGAIN_S = 0.2
"""Between two tries to reach rank 0, whose agent may not listen yet."""
HELLO_S = 5.0
"""From a connection to its line: whoever takes longer is no agent."""
CLOSE_S = 2.0
"""For the others to close when they have been told."""
MAX_LINE = 16 * 1024
"""Bytes: a line holds a replica's name, an address, or the names of 64 nodes."""


class Hello(Record):
    """Who comes."""

    shard: ShardRef


class Word(Record):
    """What rank 0 says; exactly one is set."""

    endpoint: str = ""
    """All are there, and rank 0's engine will answer here."""
    missed: str = ""
    """They are not, in a sentence."""
    refused: str = ""
    """Whoever said hello does not belong here."""


@dataclass(frozen=True)
class Meeting:
    """One shard's view of it."""

    shard: ShardRef
    place: GangPlace
    within_s: float

    @property
    def where(self) -> str:
        """`address:port`."""
        host = self.place.address
        return f"[{host}]:{self.place.port}" if ":" in host else f"{host}:{self.place.port}"


async def gather(meeting: Meeting, endpoint: str) -> None:
    """As rank 0: wait for all others and tell them to start.

    Raises StepError: PORT_IN_USE where it cannot listen, RENDEZVOUS that names who did not come.
    """
    room = _Room(meeting)
    place = meeting.place
    try:
        server = await asyncio.start_server(room.receive, place.address, place.port, limit=MAX_LINE)
    except OSError as error:
        holder = await asyncio.to_thread(holder_of, place.address, place.port)
        if holder.pid:
            why = f"was taken by pid {holder.pid} ({holder.name}) before the rendezvous could open it"
        else:
            why = f"could not be opened for the rendezvous: {os.strerror(error.errno or 0)}"
        raise StepError(Reason.PORT_IN_USE, f"{meeting.where} {why}") from error
    try:
        try:
            async with asyncio.timeout(meeting.within_s):
                await room.full.wait()
        except TimeoutError:
            sentence = f"{room.missing()} did not come to the rendezvous at {meeting.where} in {meeting.within_s:.0f} s"
            await room.tell(Word(missed=sentence))
            raise StepError(Reason.RENDEZVOUS, sentence) from None
        await room.tell(Word(endpoint=endpoint))
    finally:
        server.close()
        await room.close()


async def come(meeting: Meeting) -> str:
    """As any other rank: go there until all have come; returns where rank 0's engine will answer.

    Raises StepError(RENDEZVOUS) where rank 0 is not reached in time, or says who is missing.
    """
    deadline = time.monotonic() + meeting.within_s
    lead = meeting.place.nodes[0]
    while True:
        try:
            word = await _ask(meeting)
        except (OSError, TimeoutError, ValueError) as error:
            why = str(error) or "no answer"
        else:
            if word.endpoint:
                return word.endpoint
            if word.missed:
                raise StepError(Reason.RENDEZVOUS, word.missed)
            why = word.refused
        if time.monotonic() >= deadline:
            raise StepError(
                Reason.RENDEZVOUS,
                f"{lead} was not met at the rendezvous at {meeting.where} in {meeting.within_s:.0f} s: {why}",
            )
        await asyncio.sleep(AGAIN_S)


async def _ask(meeting: Meeting) -> Word:
    async with asyncio.timeout(meeting.within_s):
        reader, writer = await asyncio.open_connection(meeting.place.address, meeting.place.port, limit=MAX_LINE)
    try:
        writer.write(_line(Hello(shard=meeting.shard)))
        # Twice as long: rank 0 has the same deadline and began at another moment, and it knows who is missing.
        async with asyncio.timeout(2 * meeting.within_s):
            line = await reader.readline()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if not line:
        raise OSError("it closed the connection")
    try:
        return Word.model_validate_json(line)
    except ValidationError:
        raise ValueError("somebody else answers there") from None


@dataclass
class _Room:
    """Who is there."""

    meeting: Meeting
    full: asyncio.Event = field(default_factory=asyncio.Event)
    _present: dict[int, asyncio.StreamWriter] = field(default_factory=dict)
    _visits: set["asyncio.Task[None]"] = field(default_factory=set)

    async def receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until the other side closes it."""
        visit = asyncio.current_task()
        if visit is not None:
            self._visits.add(visit)
            visit.add_done_callback(self._visits.discard)
        try:
            await self._visited(reader, writer)
        except (OSError, TimeoutError, ValueError):
            pass  # it is gone, or speaks another language: it has not come
        finally:
            writer.close()

    async def _visited(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HELLO_S):
            shard = Hello.model_validate_json(await reader.readline()).shard
        ours = self.meeting.shard
        others = range(1, len(self.meeting.place.nodes))
        if (shard.replica, shard.generation) != (ours.replica, ours.generation) or shard.rank not in others:
            writer.write(_line(Word(refused=f"generation {ours.generation} of {ours.replica} meets here")))
            await writer.drain()
            return
        before = self._present.pop(shard.rank, None)
        if before is not None:
            before.close()  # its agent was restarted, and comes again
        self._present[shard.rank] = writer
        if len(self._present) == len(others):
            self.full.set()
        try:
            await reader.read(1)
        finally:
            if self._present.get(shard.rank) is writer and not self.full.is_set():
                del self._present[shard.rank]

    def missing(self) -> str:
        """`n2, n3`."""
        return ", ".join(
            node for rank, node in enumerate(self.meeting.place.nodes) if rank and rank not in self._present
        )

    async def tell(self, word: Word) -> None:
        """Say it to all who are there, and let them go."""
        for writer in list(self._present.values()):
            with contextlib.suppress(OSError):
                writer.write(_line(word))
                await writer.drain()
        if self._visits:
            await asyncio.wait(self._visits, timeout=CLOSE_S)

    async def close(self) -> None:
        """Send everybody away."""
        visits = set(self._visits)
        for visit in visits:
            visit.cancel()
        if visits:
            await asyncio.wait(visits)


def _line(record: Record) -> bytes:
    return record.model_dump_json(exclude_defaults=True).encode() + b"\n"
