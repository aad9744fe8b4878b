#!/bin/sh
# Runs every fuzz target under libFuzzer, from the inputs of testing/fuzz/corpus. What is found stays in target/fuzz: the
# corpus, from which the next run goes on, and the inputs of crashes. Without a C++ compiler, which libFuzzer needs, the
# targets' own tests run instead.
#
#   run.sh SECONDS [TARGET...]    each target, or those that are named, for so many seconds
#   run.sh build                  only builds them
#   run.sh replay TARGET FILE     one input again
#   run.sh minimise [TARGET...]   makes testing/fuzz/corpus, which is in git, anew: of what is there and what runs found, the
#                                 fewest and shortest inputs that still cover every edge
set -eu
cd "$(dirname "$0")/../.."

seconds=${1:?usage: run.sh SECONDS [TARGET...], run.sh build, run.sh replay TARGET FILE or run.sh minimise [TARGET...]}
shift
cargo=${CARGO:-cargo}
out=${FUZZ_DIR:-$PWD/target/fuzz}
host=$(rustc -vV | sed -n 's/^host: //p')
mkdir -p "$out"

compiles_cxx() {
    printf '#include <vector>\nint main() { return std::vector<int>().size(); }\n' |
        "${CXX:-c++}" -x c++ -o "$out/cxx-works" - >/dev/null 2>&1
}
if ! compiles_cxx && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "fuzz: installing g++" >&2
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq g++; } >"$out/apt.log" 2>&1 || true
fi
if ! compiles_cxx; then
    [ "$seconds" != build ] || exit 0
    testing/harness/skips.sh --skip "testing/fuzz/run.sh: libFuzzer (only random inputs are tried)" \
        "no C++ compiler: apt-get install g++"
    exec "$cargo" test --quiet -p fuzz
fi

# Coverage as libFuzzer wants it. An explicit --target keeps build scripts out of it.
RUSTFLAGS="${RUSTFLAGS-} --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
 -Cllvm-args=-sanitizer-coverage-trace-compares"
RUSTFLAGS=$(echo $RUSTFLAGS) CARGO_TARGET_DIR=$out/build \
    "$cargo" build --quiet -p fuzz --features libfuzzer --bin libfuzzer --profile fuzz --target "$host"
program=$out/build/$host/fuzz/libfuzzer
[ "$seconds" != build ] || exit 0

if [ "$seconds" = replay ]; then
    FUZZ_TARGET=${1:?which target} exec "$program" "${2:?which file}"
fi

targets=${*:-$("$program")}
[ -n "$targets" ] || { echo "fuzz: the program names no targets" >&2; exit 1; }

if [ "$seconds" = minimise ]; then
    for target in $targets; do
        kept=testing/fuzz/corpus/$target
        new=$out/minimised/$target
        rm -rf "$new"
        mkdir -p "$new" "$kept" "$out/corpus/$target"
        # Edges, without how often each was taken: an input for each count would be many times as many.
        FUZZ_TARGET=$target "$program" -merge=1 -use_counters=0 -max_len=4096 -timeout=20 -rss_limit_mb=2048 \
            "$new" "$kept" "$out/corpus/$target" >"$out/$target.minimise.log" 2>&1 ||
            { tail -n 20 "$out/$target.minimise.log" >&2; exit 1; }
        rm -rf "$kept"
        mv "$new" "$kept"
        echo "fuzz: $target: $(find "$kept" -type f | wc -l) inputs, $(du -bs "$kept" | cut -f1) bytes"
    done
    exit 0
fi
# One target; says what came of it.
fuzz_one() {
    corpus=$out/corpus/$1
    artifacts=$out/artifacts/$1
    log=$out/$1.log
    seeds=testing/fuzz/corpus/$1
    [ -d "$seeds" ] || seeds=
    mkdir -p "$corpus" "$artifacts"
    failed=0
    # Long inputs from the start: they are scripts, and short ones end before anything is set up.
    FUZZ_TARGET=$1 "$program" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -reload=0 \
        -max_len=4096 -len_control=0 -print_final_stats=1 -artifact_prefix="$artifacts/" "$corpus" \
        ${seeds:+"$seeds"} >"$log" 2>&1 || failed=$?
    if [ "$failed" = 0 ]; then
        runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
        edges=$(sed -n 's/^#.*DONE *cov: \([0-9]*\).*/\1/p' "$log")
        echo "fuzz: $1: $runs inputs in $seconds s, $edges edges covered, nothing found"
        return 0
    fi
    grep -v '^#' "$log" | tail -n 40 >&2
    input=$(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1)
    echo "fuzz: $1: failed; log: $log; again by: testing/fuzz/run.sh replay $1 ${input:-FILE}" >&2
    return 1
}

# As many side by side as there are processors: each takes its seconds, so they end together.
jobs=$(nproc)
status=0
pids=
for target in $targets; do
    fuzz_one "$target" &
    pids="$pids $!"
    if [ "$(echo $pids | wc -w)" -ge "$jobs" ]; then
        for pid in $pids; do wait "$pid" || status=1; done
        pids=
    fi
done
for pid in $pids; do wait "$pid" || status=1; done
exit $status
