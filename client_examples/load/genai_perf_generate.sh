#!/usr/bin/env bash
# Load by genai-perf: HTTP /generate_stream. (/generate itself, which genai-perf calls by default, gives one response
# and has no TTFT; genai-perf then counts the prompt among the output.)
#
#   client_examples/load/genai_perf_generate.sh [HOST:HTTP_PORT] [MODEL] [more arguments for genai-perf profile]
#
# The settings of common.sh may stand before it, such as CONCURRENCY=16 REQUESTS=100.
TOOL=genai-perf DEFAULT_URL=127.0.0.1:8000
. "$(dirname -- "$(readlink -f -- "$0")")/common.sh"

genai_perf --endpoint-type generate --endpoint "v2/models/$MODEL/generate_stream" --extra-inputs ignore_eos:true "$@"
