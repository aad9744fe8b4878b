#!/bin/sh
# Fails on comment lines over 100 columns (tables and what stands between ``` may be longer), and
# on words of a private vocabulary: CONTRIBUTING.md, "Words", has the field's. A phrase is found
# across the end of a comment line, too. Usage: words.sh [FILE...]; without files, the whole tree.
set -eu
cd "$(dirname "$0")/.."

if [ $# = 0 ]; then
    # shellcheck disable=SC2046 # No file of ours has a space in its name.
    set -- $(find crates harness fuzz docs ./*.md \
        -name target -prune -o -name artifacts -prune -o \
        \( -name '*.rs' -o -name '*.md' -o -name '*.sh' -o -name Cargo.toml \) -print |
        sed 's|^\./||' | grep -v '^harness/words\.sh$' | sort)
fi

exec awk '
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
' "$@"
