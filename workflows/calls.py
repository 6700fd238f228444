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

TRY_CANCEL = ActivityCancellationType.TRY_CANCEL
"""The workflow goes on at once: for what leaves nothing half done, or is asked to end by other means."""

WAIT_CANCELLED = ActivityCancellationType.WAIT_CANCELLATION_COMPLETED
"""The workflow waits until the activity has cleaned up after itself."""

ResultT = TypeVar("ResultT")


# -- control plane ----------------------------------------------------------------------------------------------------


async def resolve_model(request: ResolveRequest) -> ResolvedModel:
    """registry: two minutes, for a hub that says "wait"."""
    return await _run_or_cancelled(
        contract.RESOLVE_MODEL,
        request,
        ResolvedModel,
        within=timedelta(minutes=2),
        retry=QUICK_RETRY,
        # It leaves nothing half done, and a hub that hangs holds its thread for 20 s.
        on_cancel=TRY_CANCEL,
        summary=f"look up {request.repo}",
    )


async def mirror_model(request: MirrorRequest) -> MirrorResult:
    """mirror: a day, for a terabyte over 100 Mbit/s; the heartbeat tells a dead worker in 5 s."""
    return await _run_or_cancelled(
        contract.MIRROR_MODEL,
        request,
        MirrorResult,
        within=timedelta(days=1),
        retry=LONG_RETRY,
        summary=f"mirror {len(request.resolved.files)} files of {request.resolved.repo}",
    )


async def discard_weights(weights: Weights) -> None:
    """After a check that found the files unusable: their copy in the mirror goes."""
    await _run(
        contract.DISCARD_WEIGHTS,
        weights,
        type(None),
        within=timedelta(minutes=2),
        retry=QUICK_RETRY,
        summary=f"discard {weights.model_id}",
    )


async def check_fit(request: CheckRequest) -> CheckResult:
    """check: reads a header and asks Fleet; 30 s is long."""
    return await _run_or_cancelled(
        contract.CHECK_FIT,
        request,
        CheckResult,
        within=timedelta(seconds=30),
        retry=QUICK_RETRY,
        summary=f"estimate {request.weights.model_id}",
    )


async def check_repo(request: CheckRepoRequest) -> CheckResult:
    """check alone: reads the headers where the repo lies; a hundred of them from a slow hub take a minute."""
    return await _run_or_cancelled(
        contract.CHECK_REPO,
        request,
        CheckResult,
        within=timedelta(minutes=3),
        retry=QUICK_RETRY,
        summary=f"check {request.resolved.repo}",
    )


async def place(request: PlaceRequest) -> PassPlan:
    """One pass's decision: 10 s for a full plan of 2,000 replicas, twice that for the commit's retries."""
    return await _run(
        contract.PLACE,
        request,
        PassPlan,
        within=timedelta(seconds=20),
        retry=QUICK_RETRY,
        summary="plan this pass",
    )


async def smoke_test(request: SmokeRequest) -> SmokeResult:
    """smoke test: one completion; a cold 70B model needs seconds, a swapping one a minute."""
    return await _run_or_cancelled(
        contract.SMOKE_TEST,
        request,
        SmokeResult,
        within=timedelta(seconds=90),
        retry=RetryPolicy(maximum_attempts=2),
        summary=f"one completion of {request.model}",
    )


# -- nodes ------------------------------------------------------------------------------------------------------------


async def preflight(node: str, request: PreflightRequest) -> PreflightResult:
    """Asks a candidate; one that does not answer in 10 s is asked again behind the others."""
    return await _run_or_cancelled(
        node_contract.PREFLIGHT,
        request,
        PreflightResult,
        node=node,
        queue_wait=timedelta(seconds=10),
        within=timedelta(seconds=20),
        retry=QUICK_RETRY,
        on_cancel=TRY_CANCEL,
        summary=f"preflight on {node}",
    )


async def prepare_shard(node: str, request: StartShard) -> PreparedShard:
    """Weights and install of a shard of a gang: as long, and tried again, as a start."""
    shard = request.shard
    return await _run(
        node_contract.PREPARE_SHARD,
        request,
        PreparedShard,
        node=node,
        within=timedelta(days=1),
        retry=START_RETRY,
        summary=f"prepare {shard.replica}/{shard.rank} (generation {shard.generation}) on {node}",
    )


async def reserve_port(node: str, request: ReservePort) -> ReservedPort:
    """Looks at a thousand ports at most, each in microseconds: 20 s are long."""
    return await _run(
        node_contract.RESERVE_PORT,
        request,
        ReservedPort,
        node=node,
        within=timedelta(seconds=20),
        retry=START_RETRY,
        on_cancel=TRY_CANCEL,
        summary=f"a port for the rendezvous of {request.shard.replica} on {node}",
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
        node=node,
        within=timedelta(days=1),
        retry=START_RETRY,
        summary=f"start {shard.replica}/{shard.rank} (generation {shard.generation}) on {node}",
    )


async def drain_shard(node: str, request: DrainShard) -> DrainedShard:
    """The drain's deadline and 30 s for the way."""
    return await _run(
        node_contract.DRAIN_SHARD,
        request,
        DrainedShard,
        node=node,
        within=timedelta(seconds=request.deadline_s + 30),
        retry=QUICK_RETRY,
        on_cancel=TRY_CANCEL,
        summary=f"drain {request.shard.replica}/{request.shard.rank} on {node}",
    )


async def stop_shard(node: str, request: StopShard) -> StoppedShard:
    """TERM, KILL and the GPU's memory back: two minutes are long."""
    return await _run(
        node_contract.STOP_SHARD,
        request,
        StoppedShard,
        node=node,
        within=timedelta(minutes=2),
        retry=QUICK_RETRY,
        on_cancel=TRY_CANCEL,
        summary=f"stop {request.shard.replica}/{request.shard.rank} on {node}",
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
        cancellation_type=TRY_CANCEL,
        summary=short(f"lease of {request.node}"),
    )


async def _run(
    activity: str,
    request: Record,
    result: type[ResultT],
    *,
    within: timedelta,
    retry: RetryPolicy,
    summary: str,
    on_cancel: ActivityCancellationType = WAIT_CANCELLED,
    node: str = "",
    queue_wait: timedelta = NODE_QUEUE_WAIT,
) -> ResultT:
    """One activity, on the control plane or on a node; `within` is the longest of one attempt."""
    answer: ResultT = await workflow.execute_activity(
        activity,
        request,
        result_type=result,
        task_queue=contract.node_queue(node) if node else None,
        schedule_to_start_timeout=queue_wait if node else None,
        start_to_close_timeout=within,
        heartbeat_timeout=HEARTBEAT,
        retry_policy=retry,
        cancellation_type=on_cancel,
        summary=short(summary),
    )
    return answer


async def _run_or_cancelled(activity: str, request: Record, result: type[ResultT], **how: Any) -> ResultT:
    return await or_cancelled(_run(activity, request, result, **how))


def short(summary: str) -> str:
    """A summary as Temporal takes it: below 200 bytes."""
    return summary.encode()[:190].decode(errors="ignore")
