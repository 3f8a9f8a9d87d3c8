# Shared by the scripts beside this file, each of which sets TOOL and reads it first. Owns the settings of a load and
# the limit on its time.
#
# What always holds: a run ends, with all its processes, after LIMIT_S seconds; perf_analyzer waits for ever for a
# server that has died.
set -eu

HERE=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)
PYTHON=$HERE/../../.venv/bin/python

CONCURRENCY=${CONCURRENCY:-4}      # requests that run at once
REQUESTS=${REQUESTS:-20}           # requests in all
INPUT_TOKENS=${INPUT_TOKENS:-64}   # of a prompt, where the tool makes the prompts
OUTPUT_TOKENS=${OUTPUT_TOKENS:-16} # of an answer
LIMIT_S=${LIMIT_S:-300}            # the longest that a run may take
INPUT_DATA=${INPUT_DATA:-}         # perf_analyzer's requests in a file of its format, instead of prompts.json
RESULTS=${RESULTS:-}               # a folder for the tool's files; without it they are removed where all went well

fail() {
    printf '%s: %s\n' "$TOOL" "$*" >&2
    exit 1
}

remove_results() {
    local status=$?
    if [ "$status" -ne 1 ]; then # it went well, or was interrupted
        rm -rf -- "$RESULTS"
    elif ! rmdir -- "$RESULTS" 2>/dev/null; then
        printf '%s: what it wrote is kept in %s\n' "$TOOL" "$RESULTS" >&2
    fi
}

# provision NAME: prints the path of that tool's program, or of the tokenizer's folder
provision() { "$PYTHON" "$HERE/provision.py" "$1"; }

# bounded COMMAND...: runs it for at most LIMIT_S seconds. `timeout` has a process group of its own, which it ends
# whole; so it needs to be told of a Ctrl-C.
bounded() {
    local status=0 stopped=
    timeout --kill-after=10 "$LIMIT_S" "$@" </dev/null &
    local child=$!
    trap 'stopped=130; kill -TERM "$child" 2>/dev/null || true' INT TERM HUP
    wait "$child" || status=$?
    while kill -0 "$child" 2>/dev/null; do wait "$child" || status=$?; done # a signal ends `wait` early
    trap - INT TERM HUP
    [ -z "$stopped" ] || exit "$stopped"
    case $status in
        0) ;;
        124 | 137) fail "not done after $LIMIT_S s, and ended; is the server alive? LIMIT_S=SECONDS allows more" ;;
        *) fail "ended with status $status; is the server at $URL, and does it have $MODEL?" ;;
    esac
}

# genai_perf ARGUMENT...: a bounded run of genai-perf with the settings above.
genai_perf() {
    local program perf_analyzer
    program=$(provision genai-perf)
    perf_analyzer=$(provision perf_analyzer) # which genai-perf runs; it takes the first one on PATH
    TOKENIZER=${TOKENIZER:-$(provision tokenizer)}
    export PATH="${perf_analyzer%/*}:$PATH"
    bounded "$program" profile -m "$MODEL" -u "$URL" --streaming \
        --tokenizer "$TOKENIZER" --synthetic-input-tokens-mean "$INPUT_TOKENS" --synthetic-input-tokens-stddev 0 \
        --output-tokens-mean "$OUTPUT_TOKENS" \
        --concurrency "$CONCURRENCY" --request-count "$REQUESTS" --artifact-dir "$RESULTS" "$@"
}

case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit 0 ;; esac
[ -x "$PYTHON" ] || fail "there is no .venv yet; ./nereid serve makes it"
URL=${1:-$DEFAULT_URL}
MODEL=${2:-smollm2}
shift $(($# < 2 ? $# : 2))
if [ -z "$RESULTS" ]; then
    RESULTS=$(mktemp -d)
    trap remove_results EXIT
fi
mkdir -p -- "$RESULTS"
[ -t 1 ] || export COLUMNS=${COLUMNS:-120} # the width of the tools' tables
