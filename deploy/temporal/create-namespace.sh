#!/bin/sh
# Makes the namespace llmgw works in, unless it is there. Jobs stay visible for a week after their end.
set -eu

namespace=${TEMPORAL_NAMESPACE:-default}
temporal operator namespace describe -n "$namespace" >/dev/null 2>&1 ||
    temporal operator namespace create --retention 168h -n "$namespace"
