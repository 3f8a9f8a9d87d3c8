#!/usr/bin/env bash
# Load by aiperf: the OpenAI API of the gateway (`./nereid gateway`), /v1/chat/completions, streamed.
#
#   client_examples/load/aiperf.sh [HOST:GATEWAY_PORT] [MODEL] [more arguments for aiperf profile]
#
# The settings of common.sh may stand before it, such as CONCURRENCY=16 REQUESTS=100; ENDPOINT=completions calls
# /v1/completions.
TOOL=aiperf DEFAULT_URL=127.0.0.1:9000
. "$(dirname -- "$(readlink -f -- "$0")")/common.sh"

PROGRAM=$(provision aiperf)
TOKENIZER=${TOKENIZER:-$(provision tokenizer)}
bounded "$PROGRAM" profile -m "$MODEL" -u "http://$URL" --endpoint-type "${ENDPOINT:-chat}" --streaming \
    --tokenizer "$TOKENIZER" --synthetic-input-tokens-mean "$INPUT_TOKENS" --synthetic-input-tokens-stddev 0 \
    --output-tokens-mean "$OUTPUT_TOKENS" --extra-inputs ignore_eos:true \
    --concurrency "$CONCURRENCY" --request-count "$REQUESTS" --workers-max 2 \
    --ui none --log-level ERROR --no-gpu-telemetry --artifact-dir "$RESULTS" "$@"
