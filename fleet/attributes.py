"""Every attribute of a span or an event, with its meaning.

Names follow OpenTelemetry's semantic conventions where there are some; the rest begins with `llmgw.`. A test holds that
whatever the code sets stands here, and that whatever stands here is set.
"""

ATTRIBUTES: dict[str, str] = {
    # who made the span
    "service.name": "`llmgw-worker`, `llmgw-agent`, `llmgw-gateway`, `llmgw-ctl`, or `tracing.service_name`",
    "service.namespace": "`llmgw`",
    "service.version": "llmgw's version",
    "service.instance.id": "the node of an agent; of others host and pid",
    "host.name": "the machine",
    "host.arch": "its architecture",
    "process.pid": "the process that made the span; on `launch engine` and `stop engine` the engine",
    # jobs
    "llmgw.job": "the job's workflow id",
    "llmgw.repo": "what it was asked to serve",
    "llmgw.state": "how a job or a step ended",
    "llmgw.detail": "what a step found, or why it failed",
    # passes
    "llmgw.pass": "the pass's run",
    "llmgw.decision": "a placement in one sentence",
    "llmgw.score": "the chosen node's, the sum of its parts",
    "llmgw.score.<part>": "each part, 0 to 1",
    "llmgw.need": "bytes (or a count, by the reason) that a node would have had to have",
    "llmgw.free": "what it had",
    # replicas
    "llmgw.model": "the name clients use",
    "llmgw.replica": "the replica",
    "llmgw.generation": "which start of it",
    "llmgw.rank": "the shard",
    "llmgw.nodes": "the nodes of a gang, by rank",
    "llmgw.rendezvous": "`address:port` where the shards of a gang meet",
    "llmgw.node": "the node",
    "llmgw.engine": "`llamacpp`, `vllm` or `sglang`",
    "llmgw.version": "the engine's version",
    "llmgw.reason": "why it failed, as in operations.md; on a pass and its acts, why it is done, in a sentence",
    "error.type": "the same reason, where it failed; at the gateway the code of the error, or the status",
    # starts
    "llmgw.weights.outcome": "where the weights came from: `local`, `peer`, `mirror` or `hub`",
    "llmgw.bytes": "bytes fetched",
    "llmgw.bytes.<source>": "bytes by where they came from",
    "llmgw.file": "a file that a source did not give",
    "llmgw.source": "the kind of that source",
    "llmgw.from": "its name",
    "llmgw.port": "the engine's port",
    "llmgw.polls": "looks at an engine until it served",
    # ends
    "llmgw.left_in_flight": "requests that the deadline of a drain cut off",
    "llmgw.killed": "whether it took KILL",
    "llmgw.held": "who holds what of it; empty where all is back",
    "llmgw.shards": "engines that an agent found when it came back",
    "llmgw.unclaimed": "those among them that the fleet did not claim",
    # requests, and the smoke test
    "gen_ai.operation.name": "`chat`, `text_completion`, `embeddings` or `rerank`",
    "gen_ai.request.model": "the model that was asked for",
    "gen_ai.response.model": "the model that the engine says it is",
    "gen_ai.usage.input_tokens": "tokens read, where the engine states them",
    "gen_ai.usage.output_tokens": "tokens made, where the engine states them",
    "server.address": "the engine's host",
    "server.port": "its port",
    "http.request.method": "`POST`",
    "http.route": "the path, or `/v1/{path}` for one of no operation",
    "http.response.status_code": "what the client got",
    "url.path": "the path as it came",
    "llmgw.attempts": "replicas tried",
    "llmgw.held_s": "seconds for which it waited for the model to start",
    "llmgw.attempt": "which attempt of a start a killed agent was at",
    "llmgw.phase": "what it was doing",
    "llmgw.turned_down.<reason>": "nodes that turned a placement down, where there are too many for an event each",
    "gen_ai.response.time_to_first_chunk": "seconds from the request to the first token",
    "llmgw.client_gone": "the client left before the answer was out",
}
