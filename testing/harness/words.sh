#!/bin/sh
# Fails on comment lines over 100 columns (tables and what stands between ``` may be longer), and
# on words of a private vocabulary: CONTRIBUTING.md, "Words", has the field's. A phrase is found
# across the end of a comment line, too. Without files, the whole tree is checked, and so are its
# openings of comments and filler words (prose.awk) and the subjects of its commits.
# Usage: words.sh [FILE...]
set -eu
cd "$(dirname "$0")/../.."

# A subject names the place and the change: "crate: three words or more". Checked are the commits
# since origin/main, or the last one where there is no such ref (a shallow clone has none).
subjects() {
    base=$(git merge-base origin/main HEAD 2>/dev/null) || base=
    if [ -n "$base" ]; then
        git log --no-merges --format=%s "$base..HEAD"
    else
        git log -1 --format=%s 2>/dev/null || true
    fi | awk '
        /^(Merge|Revert) / { next }
        {
            place = index($0, ": ")
            if (place < 2 || split(substr($0, place + 2), word, " ") < 3) {
                print "a commit names no change (\"crate: what changed\"): " $0
                failed = 1
            }
        }
        END { exit failed }'
}

failed=0
if [ $# = 0 ]; then
    # shellcheck disable=SC2046 # No file of ours has a space in its name.
    awk -f testing/harness/prose.awk testing/harness/prose.limits $(find crates examples testing docs ./*.md \
        -name target -prune -o -name tests -prune -o -name artifacts -prune -o \
        \( -name '*.rs' -o -name '*.md' \) -print | sed 's|^\./||') || failed=1
    subjects || failed=1
    # shellcheck disable=SC2046 # No file of ours has a space in its name.
    set -- $(find crates examples testing docs ./*.md \
        -name target -prune -o -name artifacts -prune -o \
        \( -name '*.rs' -o -name '*.md' -o -name '*.sh' -o -name Cargo.toml \) -print |
        sed 's|^\./||' | grep -v '^testing/harness/words\.sh$' | sort)
fi

awk '
BEGIN {
    # Between two of these words, or a word and an underscore, nothing else stands.
    gap = "[ _]+"
    words = "in" gap "vain|somebody" gap "else|whoever|forerunners?|patience|parcels?|entrances?" \
        "|hand(s|ed|ing)?" gap "out|let(s|ting)?" gap "go|t(ake|akes|aken|aking|ook)" gap "back" \
        "|g(ive|ives|iven|iving|ave)" gap "back|glanc(e|es|ed|ing)|doz(e|es|ed|ing)|bells?" \
        "|hears?|heard|tend(s|ed|ing)?"
    words = "[^a-z](" words ")[^a-z]"
}
function report(what) {
    printf "%s:%d: %s\n", FILENAME, FNR, what
    failed = 1
}
FNR == 1 {
    fence = 0
    before = ""
    rust = FILENAME ~ /\.rs$/
}
{
    comment = rust && $0 ~ /^[ \t]*\/\//
    text = $0
    if (comment) {
        sub(/^[ \t]*\/\/[\/!]?/, "", text)
        if (text ~ /^ *```/)
            fence = !fence
        else if (length($0) > 100 && !fence && text !~ /^ *\|/)
            report("a comment line of " length($0) " columns")
    } else
        fence = 0
    text = tolower(text)
    # The end of the line before counts only together with this one.
    line = before " " text " "
    if (match(line, words) && RSTART + RLENGTH - 1 > length(before) + 1)
        report("say what happens, to what: \"" substr(line, RSTART + 1, RLENGTH - 2) "\"")
    else if (match(" " text " ", words))
        report("say what happens, to what: \"" substr(" " text " ", RSTART + 1, RLENGTH - 2) "\"")
    n = split(text, part, /[ \t]+/)
    before = (comment || !rust) && n > 0 ? " " part[n - (part[n] == "" && n > 1)] : ""
}
END { exit failed }
' "$@" || failed=1
exit $failed
