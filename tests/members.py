"""Nodes whose membership is the real agent's, on a line that may lose, repeat and delay what they say.

Their engines are entries in a dictionary, as a light node's are.
"""

import asyncio
import contextlib
import dataclasses
import random
from pathlib import Path
from typing import Any

from temporalio import activity
from temporalio.client import (
    Client,
    Interceptor,
    OutboundInterceptor,
    StartWorkflowUpdateInput,
    StartWorkflowUpdateWithStartInput,
    WorkflowUpdateFailedError,
    WorkflowUpdateHandle,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.service import RPCError, RPCStatusCode

from activities import node_contract
from activities.node_contract import (
    AttendRequest,
    JoinAnswer,
    RunningShard,
    ShardChange,
    ShardHealth,
    ShardRef,
    StartedShard,
    StartShard,
)
from agent.ledger import Ledger
from agent.membership import Membership
from agent.outbox import Outbox
from fleet.reasons import Failure, Reason
from runtime.config import AgentConfig, LeaseConfig
from tests.control import Cell
from tests.light_node import LightNode


class BadLine(Interceptor):
    """Loses `lost` of all updates (half of them only lose their answer), and makes some more come late or twice."""

    def __init__(self, chance: random.Random, *, lost: float = 0.3, late: float = 0.1, twice: float = 0.1) -> None:
        self._chance = chance
        self._bounds = (lost / 2, lost, lost + late, lost + late + twice)
        self.troubles = 0

    def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:
        return _Updates(next, self)

    async def carry(self, send: Any, input: Any) -> WorkflowUpdateHandle[Any]:
        """Send once, twice, later or never."""
        lost, unanswered, late, twice = self._bounds
        drawn = self._chance.random()
        self.troubles += drawn < twice
        if drawn >= late:
            if drawn < twice:
                await send(_again(input))
            handle: WorkflowUpdateHandle[Any] = await send(input)
            return handle
        error = RPCError("the line is bad", RPCStatusCode.UNAVAILABLE, b"")
        if drawn >= unanswered:
            loop = asyncio.get_running_loop()
            loop.call_later(self._chance.uniform(0.5, 2.0), lambda: loop.create_task(_send_late(send, _again(input))))
        elif drawn >= lost:
            await send(_again(input))
        if isinstance(input, StartWorkflowUpdateWithStartInput):
            input._on_start_error(error)
        raise error


def _again(input: Any) -> Any:
    """The same, without the callbacks: whoever sent it is told once."""
    if not isinstance(input, StartWorkflowUpdateWithStartInput):
        return input
    return dataclasses.replace(input, _on_start=lambda response: None, _on_start_error=lambda error: None)


async def _send_late(send: Any, input: Any) -> None:
    with contextlib.suppress(RPCError, WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError):
        await send(input)


class _Updates(OutboundInterceptor):
    def __init__(self, next: OutboundInterceptor, line: BadLine) -> None:
        super().__init__(next)
        self._line = line

    async def start_workflow_update(self, input: StartWorkflowUpdateInput) -> WorkflowUpdateHandle[Any]:
        return await self._line.carry(super().start_workflow_update, input)

    async def start_update_with_start_workflow(
        self, input: StartWorkflowUpdateWithStartInput
    ) -> WorkflowUpdateHandle[Any]:
        return await self._line.carry(super().start_update_with_start_workflow, input)


class MemberNode(LightNode):
    """A light node that joins, holds its lease and reports as an agent does. Leaving it is a crash.

    `running` may be handed on to the next one of the same name: engines outlive their agent.
    """

    def __init__(self, cell: Cell, name: str, home: Path, *, line: BadLine | None = None, **more: Any) -> None:
        super().__init__(cell.client, f"{name}-{cell.name}", cell=cell.name, **more)
        lease = LeaseConfig(heartbeat_timeout_s=self.terms.heartbeat_timeout_s, grace_s=self.terms.grace_s)
        config = AgentConfig(node=self.name, cell=cell.name, data=home / name, lease=lease)
        self.outbox = Outbox()
        self.joins = 0
        self.membership = Membership(
            config,
            self.incarnation,
            self.outbox,
            ledger=Ledger(home / name / "ledger.json"),
            measure=lambda: self.inventory,
            running=lambda: tuple(self.running.values()),
            adopt=self._adopt,
            reported=lambda change: None,
        )
        self._line = self.client if line is None else _on(line, self.client)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "MemberNode":
        await super().__aenter__()
        self._task = asyncio.create_task(self.membership.run(self._line))
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await super().__aexit__(*error)

    async def _adopt(self, shards: tuple[RunningShard, ...], answer: JoinAnswer) -> None:
        for shard in shards:
            if shard.shard not in answer.claimed and self.running.pop(shard.shard, None) is not None:
                self.stopped.append(shard.shard)
        self.joins += 1

    def engine_ends(self, shard: ShardRef) -> None:
        """An engine ended by itself; the agent reports it until it is taken."""
        del self.running[shard]
        failure = Failure(reason=Reason.EXITED, detail="it ended", node=self.name)
        self.outbox.put(ShardChange(shard=shard, health=ShardHealth.EXITED, failure=failure))

    @activity.defn(name=node_contract.ATTEND)
    async def attend(self, request: AttendRequest) -> None:
        await self.membership.attend(request)

    @activity.defn(name=node_contract.START_SHARD)
    async def start_shard(self, request: StartShard) -> StartedShard:
        for older in [shard for shard in self.running if shard.replica == request.shard.replica]:
            if older.generation < request.shard.generation:  # a newer generation takes its place
                del self.running[older]
                self.stopped.append(older)
        return await super().start_shard(request)


def _on(line: BadLine, client: Client) -> Client:
    config = client.config(active_config=True)
    config["interceptors"] = [*config["interceptors"], line]
    config["plugins"] = []  # what they add is in there already
    return Client(**config)
