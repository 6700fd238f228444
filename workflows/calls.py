"""Every call out of a workflow: its queue, its timeouts, its retries and how it is cancelled, each with its why.

Cancellation is never ABANDON: such an activity that later fails or times out leaves its workflow stuck for ever.
"""

from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    CancelledError,
    FailureError,
    TimeoutType,
    is_cancelled_exception,
)
from temporalio.exceptions import TimeoutError as ActivityTimeout
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
from fleet.facts import ReplicaEvent
from fleet.reasons import Failure, Reason, read_failure
from fleet.records import Record
from fleet.spec import ResolvedModel, Weights

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

SIGNAL_RETRY_MAX_S = 30.0

ResultT = TypeVar("ResultT", bound=Record)


# -- control plane ----------------------------------------------------------------------------------------------------


async def resolve_model(request: ResolveRequest) -> ResolvedModel:
    """registry: two minutes, for a hub that says "wait"."""
    return await _run(
        contract.RESOLVE_MODEL,
        request,
        ResolvedModel,
        start_to_close_timeout=timedelta(minutes=2),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=QUICK_RETRY,
        # It leaves nothing half done, and a hub that hangs holds its thread for 20 s.
        cancellation_type=ActivityCancellationType.TRY_CANCEL,
        summary=_short(f"look up {request.repo}"),
    )


async def mirror_model(request: MirrorRequest) -> MirrorResult:
    """mirror: a day, for a terabyte over 100 Mbit/s; the heartbeat tells a dead worker in 5 s."""
    return await _run(
        contract.MIRROR_MODEL,
        request,
        MirrorResult,
        start_to_close_timeout=timedelta(days=1),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=LONG_RETRY,
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        summary=_short(f"mirror {len(request.resolved.files)} files of {request.resolved.repo}"),
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
        summary=_short(f"discard {weights.model_id}"),
    )


async def check_fit(request: CheckRequest) -> CheckResult:
    """check: reads a header and asks Fleet; 30 s is long."""
    return await _run(
        contract.CHECK_FIT,
        request,
        CheckResult,
        start_to_close_timeout=timedelta(seconds=30),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=QUICK_RETRY,
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        summary=_short(f"estimate {request.weights.model_id}"),
    )


async def check_repo(request: CheckRepoRequest) -> CheckResult:
    """check alone: reads the headers where the repo lies; a hundred of them from a slow hub take a minute."""
    return await _run(
        contract.CHECK_REPO,
        request,
        CheckResult,
        start_to_close_timeout=timedelta(minutes=3),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=QUICK_RETRY,
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        summary=_short(f"check {request.resolved.repo}"),
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
    return await _run(
        contract.SMOKE_TEST,
        request,
        SmokeResult,
        start_to_close_timeout=timedelta(seconds=90),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=RetryPolicy(maximum_attempts=2),
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        summary=_short(f"one completion of {request.model}"),
    )


# -- nodes ------------------------------------------------------------------------------------------------------------


async def preflight(node: str, request: PreflightRequest) -> PreflightResult:
    """Asks a candidate; one that does not answer in 10 s is asked again behind the others."""
    return await _run(
        node_contract.PREFLIGHT,
        request,
        PreflightResult,
        task_queue=contract.node_queue(node),
        schedule_to_start_timeout=timedelta(seconds=10),
        start_to_close_timeout=timedelta(seconds=20),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=QUICK_RETRY,
        cancellation_type=ActivityCancellationType.TRY_CANCEL,
        summary=_short(f"preflight on {node}"),
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
        summary=_short(f"prepare {shard.replica}/{shard.rank} (generation {shard.generation}) on {node}"),
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
        summary=_short(f"a port for the rendezvous of {request.shard.replica} on {node}"),
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
        summary=_short(f"start {shard.replica}/{shard.rank} (generation {shard.generation}) on {node}"),
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
        summary=_short(f"drain {request.shard.replica}/{request.shard.rank} on {node}"),
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
        summary=_short(f"stop {request.shard.replica}/{request.shard.rank} on {node}"),
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
        summary=_short(f"lease of {request.node}"),
    )


# -- other workflows --------------------------------------------------------------------------------------------------


async def tell(workflow_id: str, signal: str, message: Record) -> bool:
    """Signal another workflow once; False when it does not run."""
    try:
        await workflow.get_external_workflow_handle(workflow_id).signal(signal, message)
    except CancelledError:
        raise
    except FailureError:
        return False
    return True


async def tell_surely(workflow_id: str, signal: str, message: Record, *, give_up_after_s: float | None = None) -> bool:
    """Signal another workflow until it takes it; False when it still does not run after `give_up_after_s`."""
    wait, deadline = 0.5, None if give_up_after_s is None else workflow.time() + give_up_after_s
    while not await tell(workflow_id, signal, message):
        if deadline is not None and workflow.time() >= deadline:
            return False
        await workflow.sleep(wait, summary=_short(f"{workflow_id} does not run"))
        wait = min(SIGNAL_RETRY_MAX_S, wait * 2)
    return True


async def tell_fleet(cell: str, event: ReplicaEvent) -> None:
    """Tell Fleet about a replica, for as long as it takes: a lost event would leave a reservation for ever."""
    await tell_surely(contract.fleet_id(cell), "replica_changed", event)


async def _run(activity: str, request: Record, result_type: type[ResultT], **options: Any) -> ResultT:
    result: ResultT = await workflow.execute_activity(activity, request, result_type=result_type, **options)
    return result


# -- what came back ---------------------------------------------------------------------------------------------------


def failure_of(error: BaseException, *, node: str = "") -> Failure:
    """The cause of a failed call as data."""
    if isinstance(error, ActivityError) and error.cause is not None:
        return failure_of(error.cause, node=node)
    if is_cancelled_exception(error):
        return Failure(reason=Reason.CANCELLED, detail="it was cancelled", node=node)
    if isinstance(error, ActivityTimeout):
        if error.type in (TimeoutType.SCHEDULE_TO_START, TimeoutType.HEARTBEAT) and node:
            return Failure(reason=Reason.NODE_UNREACHABLE, detail=f"the agent of {node} does not answer", node=node)
        return Failure(reason=Reason.INTERNAL, detail=f"it took too long ({error.type and error.type.name})", node=node)
    if isinstance(error, ApplicationError):
        if error.details and isinstance(error.details[0], dict) and "reason" in error.details[0]:
            found = read_failure(error.details[0])
            if found is None:
                return Failure(reason=Reason.INTERNAL, detail=f"{error.type}: {error.message}", node=node)
            return found if found.node or not node else found.model_copy(update={"node": node})
        reason = Reason(error.type) if error.type in set(Reason) else Reason.INTERNAL
        return Failure(reason=reason, detail=error.message, node=node)
    return Failure(reason=Reason.INTERNAL, detail=str(error) or type(error).__name__, node=node)


def ended_ns(error: BaseException) -> int:
    """When the failed call ended where it ran, by that machine's clock; 0 where nobody said so."""
    cause = error.cause if isinstance(error, ActivityError) else error
    said = cause.details[1] if isinstance(cause, ApplicationError) and len(cause.details) > 1 else 0
    return said if isinstance(said, int) else 0


def failed(failure: Failure) -> ApplicationError:
    """A workflow's own failure: the type is the reason, the detail the Failure."""
    return ApplicationError(
        failure.sentence, failure.model_dump(mode="json"), type=failure.reason.value, non_retryable=True
    )


def _short(summary: str) -> str:
    # Temporal refuses summaries of 200 bytes and more.
    return summary.encode()[:190].decode(errors="ignore")
