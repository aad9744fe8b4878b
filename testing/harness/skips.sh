#!/bin/sh
# Runs a command, and says at its end, however it ended, what the tests in it skipped: the lines of
# target/skips.txt. With CI set, a line that .ci/skips does not list is a failure. The command's own
# exit code comes first.
#
#   skips.sh COMMAND [ARGUMENT...]
#
# A shell script in it skips by: skips.sh --skip WHAT REASON
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)

if [ "${1-}" = --skip ]; then
    line="${2:?what is skipped}: ${3:?why}"
    echo "skipped: $line" >&2
    [ -z "${VNVME_SKIPS-}" ] || echo "$line" >>"$VNVME_SKIPS"
    exit 0
fi

: "${1:?usage: skips.sh COMMAND [ARGUMENT...]}"
file=${VNVME_SKIPS:-$root/target/skips.txt}
list=${VNVME_SKIPS_LIST:-$root/.ci/skips}
mkdir -p "$(dirname "$file")"
: >"$file"

status=0
VNVME_SKIPS=$file "$@" || status=$?

echo "skips: $(sort -u "$file" | wc -l) ($file)"
sort "$file" | uniq -c
# Patterns for whole lines; without any, no line passes.
accepted=$(grep -v -e '^#' -e '^ *$' "$list") || accepted='#'
found=0
unknown=$(sort -u "$file" | grep -vxE -e "$accepted") || found=$?
# 1: every line is listed. More than that is a pattern that grep refuses: then no line passes.
[ "$found" != 1 ] || exit "$status"
[ "$found" = 0 ] || unknown="(${list#"$root/"} has a pattern that is none)"
echo "skips: not on the list ${list#"$root/"}:"
echo "$unknown"
[ -z "${CI-}" ] || [ "$status" != 0 ] || status=1
exit "$status"
