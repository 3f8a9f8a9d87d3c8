#!/usr/bin/env bash
# Checks every kernel against its definition on the GPU at hand, then times attention and every operation.
#
#   tests/gpu/run.sh [FOLDER]     results go to FOLDER (default ./gpu-results): checks.log, attention.csv, attention.log,
#                                 operations.csv, operations.log
#
# Takes less than 8 minutes. Needs torch, Triton-lang and pytest, and no network; nothing is installed. PYTHON names the
# interpreter (default python3), NEREID_COMMIT the commit where this is a copy without its history.
# Ends with 0 where all checks passed and all problems were measured; whether goals are met does not count.
set -u -o pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHON=${PYTHON:-python3}
OUT=${1:-gpu-results}
CHECKS_S=210 ATTENTION_S=170 OPERATIONS_S=75 # together with their starts less than 8 minutes

fail() {
    printf 'run.sh: %s\n' "$*" >&2
    exit 1
}

LACKING='
import importlib.util
missing = [name for name in ("torch", "triton", "pytest") if importlib.util.find_spec(name) is None]
if missing:
    print("needs the Python packages", ", ".join(missing))
else:
    import torch
    if not torch.cuda.is_available():
        print("needs a GPU; torch", torch.__version__, "sees none")
'

hint= # at the project's own environment, where it is there and is not what was tried
own=$ROOT/.venv/bin
[ ! -x "$own/python" ] || [ "$(dirname -- "$(command -v -- "$PYTHON")")" -ef "$own" ] ||
    hint="; try PYTHON=$([ "$PWD" = "$ROOT" ] || printf '%s/' "$ROOT").venv/bin/python"

command -v -- "$PYTHON" >/dev/null || fail "needs Python; there is no $PYTHON (PYTHON names another)$hint"
lacking=$("$PYTHON" -c "$LACKING") || fail "$PYTHON cannot import torch$hint"
[ -z "$lacking" ] || fail "$lacking$hint"
mkdir -p -- "$OUT" && OUT=$(cd -- "$OUT" && pwd) || fail "cannot make the folder $OUT"

cd -- "$ROOT" || exit 1
unset TRITON_INTERPRET
export PYTHONPATH=$ROOT:$ROOT/kernels:$ROOT/backend${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
status=0

step() { # step NAME SECONDS COMMAND...: its output goes to NAME.log as well
    local name=$1 seconds=$2
    shift 2
    printf '\n== %s\n' "$name"
    timeout "$seconds" "$@" 2>&1 | tee -- "$OUT/$name.log" || {
        printf 'run.sh: %s failed, or took longer than %s s\n' "$name" "$seconds" >&2
        status=1
    }
}

# The project's own pytest settings and top conftest.py ask for packages that only its own environment has.
settings=(-c /dev/null --rootdir "$ROOT" --confcutdir "$ROOT/tests/kernels" -o "markers=slow: too long" -m 'not slow')
parallel=()
"$PYTHON" -c 'import xdist' 2>/dev/null && parallel=(-n 12) # what takes time is compiling

step checks "$CHECKS_S" \
    "$PYTHON" -m pytest -q -rs -p no:cacheprovider "${settings[@]}" ${parallel[@]+"${parallel[@]}"} tests/kernels/triton_lang
step attention "$ATTENTION_S" \
    "$PYTHON" -m tests.gpu.bench_attention --csv "$OUT/attention.csv" --seconds $((ATTENTION_S - 50))
step operations "$OPERATIONS_S" \
    "$PYTHON" -m tests.gpu.bench_operations --csv "$OUT/operations.csv" --seconds $((OPERATIONS_S - 30))
exit "$status"
