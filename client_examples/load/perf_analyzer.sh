#!/usr/bin/env bash
# Load by perf_analyzer: gRPC streams.
#
#   client_examples/load/perf_analyzer.sh [HOST:GRPC_PORT] [MODEL] [more arguments for perf_analyzer]
#
# The settings of common.sh may stand before it, such as CONCURRENCY=16 REQUESTS=100.
TOOL=perf_analyzer DEFAULT_URL=127.0.0.1:8001
. "$(dirname -- "$(readlink -f -- "$0")")/common.sh"

PROGRAM=$(provision perf_analyzer)
bounded "$PROGRAM" -m "$MODEL" -u "$URL" -i grpc --streaming --async \
    --input-data "${INPUT_DATA:-$HERE/prompts.json}" \
    --request-parameter "max_tokens:$OUTPUT_TOKENS:int" --request-parameter ignore_eos:true:bool \
    --concurrency-range "$CONCURRENCY" --request-count "$REQUESTS" \
    --profile-export-file "$RESULTS/profile_export.json" "$@"
"$PYTHON" "$HERE/figures.py" "$RESULTS/profile_export.json"
