"""Every call out of a workflow: its queue, its timeouts, its retries and how it is cancelled, each with its why.

Cancellation is never ABANDON: such an activity that later fails or times out leaves its workflow stuck for ever.
"""

from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.workflow import ActivityCancellationType

from activities import contract, node_contract
from activities.contract import (
    CheckRepoRequest,
    CheckRequest,
    CheckResult,
    MirrorRequest,
    MirrorResult,
    PassPlan,
    PlaceRequest,
    ResolveRequest,
    SmokeRequest,
    SmokeResult,
)
from activities.node_contract import (
    AttendRequest,
    DrainedShard,
    DrainShard,
    LeaseTerms,
    PreflightRequest,
    PreflightResult,
    PreparedShard,
    ReservedPort,
    ReservePort,
    StartedShard,
    StartShard,
    StoppedShard,
    StopShard,
)
from fleet.reasons import Reason
from fleet.records import Record
from fleet.spec import ResolvedModel, Weights
from workflows.cancels import or_cancelled

TASK_TIMEOUT = timedelta(seconds=5)
"""Of every workflow: how long a task lost with a killed worker is waited for. Our longest task takes 0.2 s."""

PASS_TIMEOUT = timedelta(minutes=5)
"""Of a pass: it never waits for what it starts, so one that lives this long is stuck, and Fleet goes on without it."""

QUICK_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=0.5),
    maximum_interval=timedelta(seconds=10),
    maximum_attempts=5,
    non_retryable_error_types=[Reason.GPU_COUNT.value],  # a node with more GPUs does not come within seconds
)
"""For calls that mostly fail for good: about 8 s in all."""

LONG_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=30), maximum_attempts=6
)
"""For transfers, which resume: a hub or a disk that is away for half a minute is waited for."""

START_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=0.5),
    maximum_interval=timedelta(seconds=5),
    maximum_attempts=10,
    non_retryable_error_types=[reason.value for reason in Reason],
)
"""Only a lost agent (heartbeat timeout) is tried again: a failure with a reason goes to Fleet, which decides."""

HUB_WAIT_MAX_S = 1800.0
"""How long in all a job waits because a hub asks it to: hubs count requests in windows of minutes."""

PREFLIGHT_WAIT_S = 60.0
"""How long in all a job asks candidates that do not answer: as `NODE_QUEUE_WAIT`, and for the same reason."""

NODE_QUEUE_WAIT = timedelta(seconds=60)
"""How long a call waits for its node. Without it a dead node is never noticed; the lease (10 s + 20 s) tells first
when the agent is gone, so this is for an agent that lives and does not poll."""

HEARTBEAT = timedelta(seconds=5)
"""Of every call that is no lease: what a killed worker or agent was doing is tried again after it. Beats come from
`runtime/interceptors.py`; such calls are few at a time, so they cost the server nothing to speak of."""

ResultT = TypeVar("ResultT", bound=Record)


# -- control plane ----------------------------------------------------------------------------------------------------


async def resolve_model(request: ResolveRequest) -> ResolvedModel:
    """registry: two minutes, for a hub that says "wait"."""
    return await _run_or_cancelled(
        contract.RESOLVE_MODEL,
        request,
        ResolvedModel,
        start_to_close_timeout=timedelta(minutes=2),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=QUICK_RETRY,
        # It leaves nothing half done, and a hub that hangs holds its thread for 20 s.
        cancellation_type=ActivityCancellationType.TRY_CANCEL,
        summary=short(f"look up {request.repo}"),
    )


async def mirror_model(request: MirrorRequest) -> MirrorResult:
    """mirror: a day, for a terabyte over 100 Mbit/s; the heartbeat tells a dead worker in 5 s."""
    return await _run_or_cancelled(
        contract.MIRROR_MODEL,
        request,
        MirrorResult,
        start_to_close_timeout=timedelta(days=1),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=LONG_RETRY,
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        summary=short(f"mirror {len(request.resolved.files)} files of {request.resolved.repo}"),
    )


async def discard_weights(weights: Weights) -> None:
    """After a check that found the files unusable: their copy in the mirror goes."""
    await workflow.execute_activity(
        contract.DISCARD_WEIGHTS,
        weights,
        start_to_close_timeout=timedelta(minutes=2),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=QUICK_RETRY,
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        summary=short(f"discard {weights.model_id}"),
    )


async def check_fit(request: CheckRequest) -> CheckResult:
    """check: reads a header and asks Fleet; 30 s is long."""
    return await _run_or_cancelled(
        contract.CHECK_FIT,
        request,
        CheckResult,
        start_to_close_timeout=timedelta(seconds=30),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=QUICK_RETRY,
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        summary=short(f"estimate {request.weights.model_id}"),
    )


async def check_repo(request: CheckRepoRequest) -> CheckResult:
    """check alone: reads the headers where the repo lies; a hundred of them from a slow hub take a minute."""
    return await _run_or_cancelled(
        contract.CHECK_REPO,
        request,
        CheckResult,
        start_to_close_timeout=timedelta(minutes=3),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=QUICK_RETRY,
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        summary=short(f"check {request.resolved.repo}"),
    )


async def place(request: PlaceRequest) -> PassPlan:
    """One pass's decision: 10 s for a full plan of 2,000 replicas, twice that for the commit's retries."""
    return await _run(
        contract.PLACE,
        request,
        PassPlan,
        start_to_close_timeout=timedelta(seconds=20),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=QUICK_RETRY,
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        summary="plan this pass",
    )


async def smoke_test(request: SmokeRequest) -> SmokeResult:
    """smoke test: one completion; a cold 70B model needs seconds, a swapping one a minute."""
    return await _run_or_cancelled(
        contract.SMOKE_TEST,
        request,
        SmokeResult,
        start_to_close_timeout=timedelta(seconds=90),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=RetryPolicy(maximum_attempts=2),
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        summary=short(f"one completion of {request.model}"),
    )


# -- nodes ------------------------------------------------------------------------------------------------------------


async def preflight(node: str, request: PreflightRequest) -> PreflightResult:
    """Asks a candidate; one that does not answer in 10 s is asked again behind the others."""
    return await _run_or_cancelled(
        node_contract.PREFLIGHT,
        request,
        PreflightResult,
        task_queue=contract.node_queue(node),
        schedule_to_start_timeout=timedelta(seconds=10),
        start_to_close_timeout=timedelta(seconds=20),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=QUICK_RETRY,
        cancellation_type=ActivityCancellationType.TRY_CANCEL,
        summary=short(f"preflight on {node}"),
    )


async def prepare_shard(node: str, request: StartShard) -> PreparedShard:
    """Weights and install of a shard of a gang: as long, and tried again, as a start."""
    shard = request.shard
    return await _run(
        node_contract.PREPARE_SHARD,
        request,
        PreparedShard,
        task_queue=contract.node_queue(node),
        schedule_to_start_timeout=NODE_QUEUE_WAIT,
        start_to_close_timeout=timedelta(days=1),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=START_RETRY,
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        summary=short(f"prepare {shard.replica}/{shard.rank} (generation {shard.generation}) on {node}"),
    )


async def reserve_port(node: str, request: ReservePort) -> ReservedPort:
    """Looks at a thousand ports at most, each in microseconds: 20 s are long."""
    return await _run(
        node_contract.RESERVE_PORT,
        request,
        ReservedPort,
        task_queue=contract.node_queue(node),
        schedule_to_start_timeout=NODE_QUEUE_WAIT,
        start_to_close_timeout=timedelta(seconds=20),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=START_RETRY,
        cancellation_type=ActivityCancellationType.TRY_CANCEL,
        summary=short(f"a port for the rendezvous of {request.shard.replica} on {node}"),
    )


async def start_shard(node: str, request: StartShard) -> StartedShard:
    """A day for weights and install; the engine's own deadline runs on the node.

    Attempts go on while the node can be reached: each goes on from what the last one left.
    """
    shard = request.shard
    return await _run(
        node_contract.START_SHARD,
        request,
        StartedShard,
        task_queue=contract.node_queue(node),
        schedule_to_start_timeout=NODE_QUEUE_WAIT,
        start_to_close_timeout=timedelta(days=1),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=START_RETRY,
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        summary=short(f"start {shard.replica}/{shard.rank} (generation {shard.generation}) on {node}"),
    )


async def drain_shard(node: str, request: DrainShard) -> DrainedShard:
    """The drain's deadline and 30 s for the way."""
    return await _run(
        node_contract.DRAIN_SHARD,
        request,
        DrainedShard,
        task_queue=contract.node_queue(node),
        schedule_to_start_timeout=NODE_QUEUE_WAIT,
        start_to_close_timeout=timedelta(seconds=request.deadline_s + 30),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=QUICK_RETRY,
        cancellation_type=ActivityCancellationType.TRY_CANCEL,
        summary=short(f"drain {request.shard.replica}/{request.shard.rank} on {node}"),
    )


async def stop_shard(node: str, request: StopShard) -> StoppedShard:
    """TERM, KILL and the GPU's memory back: two minutes are long."""
    return await _run(
        node_contract.STOP_SHARD,
        request,
        StoppedShard,
        task_queue=contract.node_queue(node),
        schedule_to_start_timeout=NODE_QUEUE_WAIT,
        start_to_close_timeout=timedelta(minutes=2),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=QUICK_RETRY,
        cancellation_type=ActivityCancellationType.TRY_CANCEL,
        summary=short(f"stop {request.shard.replica}/{request.shard.rank} on {node}"),
    )


async def attend(request: AttendRequest, terms: LeaseTerms) -> None:
    """The lease: one attempt for as long as the agent process lives.

    Ten years stand for "for ever". The queue is the process's own, so nobody else can take the task.
    """
    await workflow.execute_activity(
        node_contract.ATTEND,
        request,
        task_queue=contract.lease_queue(request.node, request.incarnation),
        schedule_to_start_timeout=timedelta(seconds=terms.heartbeat_timeout_s),
        start_to_close_timeout=timedelta(days=3650),
        heartbeat_timeout=timedelta(seconds=terms.heartbeat_timeout_s),
        retry_policy=RetryPolicy(maximum_attempts=1),
        cancellation_type=ActivityCancellationType.TRY_CANCEL,
        summary=short(f"lease of {request.node}"),
    )


async def _run(activity: str, request: Record, result_type: type[ResultT], **options: Any) -> ResultT:
    result: ResultT = await workflow.execute_activity(activity, request, result_type=result_type, **options)
    return result


async def _run_or_cancelled(activity: str, request: Record, result_type: type[ResultT], **options: Any) -> ResultT:
    return await or_cancelled(_run(activity, request, result_type, **options))


def short(summary: str) -> str:
    """A summary as Temporal takes it: below 200 bytes."""
    return summary.encode()[:190].decode(errors="ignore")
