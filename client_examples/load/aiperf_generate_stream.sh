#!/usr/bin/env bash
# Load by aiperf without the gateway: HTTP /generate_stream, its body made from a template.
#
#   client_examples/load/aiperf_generate_stream.sh [HOST:HTTP_PORT] [MODEL] [more arguments for aiperf profile]
#
# The settings of common.sh may stand before it, such as CONCURRENCY=16 REQUESTS=100.
TOOL=aiperf DEFAULT_URL=127.0.0.1:8000
. "$(dirname -- "$(readlink -f -- "$0")")/common.sh"

BODY='{\"text_input\": {{ text|tojson }}, \"stream\": true, \"max_tokens\": {{ max_tokens }}, \"ignore_eos\": true}'
PROGRAM=$(provision aiperf)
TOKENIZER=${TOKENIZER:-$(provision tokenizer)}
bounded "$PROGRAM" profile -m "$MODEL" -u "http://$URL" --endpoint-type template --streaming \
    --endpoint "/v2/models/$MODEL/generate_stream" \
    --extra-inputs "{\"payload_template\": \"$BODY\", \"response_field\": \"text_output\"}" \
    --tokenizer "$TOKENIZER" --synthetic-input-tokens-mean "$INPUT_TOKENS" --synthetic-input-tokens-stddev 0 \
    --output-tokens-mean "$OUTPUT_TOKENS" \
    --concurrency "$CONCURRENCY" --request-count "$REQUESTS" --workers-max 2 \
    --ui none --log-level ERROR --no-gpu-telemetry --artifact-dir "$RESULTS" "$@"
