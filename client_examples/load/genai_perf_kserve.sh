#!/usr/bin/env bash
# Load by genai-perf: gRPC streams with the tensors of Triton's vLLM backend.
#
#   client_examples/load/genai_perf_kserve.sh [HOST:GRPC_PORT] [MODEL] [more arguments for genai-perf profile]
#
# The settings of common.sh may stand before it, such as CONCURRENCY=16 REQUESTS=100.
TOOL=genai-perf DEFAULT_URL=127.0.0.1:8001
. "$(dirname -- "$(readlink -f -- "$0")")/common.sh"

genai_perf --endpoint-type kserve --backend vllm --output-tokens-mean-deterministic "$@"
