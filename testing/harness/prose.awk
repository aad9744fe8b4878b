# Counts comment blocks that open with a pronoun, and filler words, and compares them with limits.
# Usage: awk -f prose.awk LIMITS FILE...; LIMITS is testing/harness/prose.limits, which explains its lines.

# Crate of a file: its folder below testing/, or below a folder of crates/.
function crate_of(file, part) {
    split(file, part, "/")
    return part[1] "/" part[2] (part[1] == "crates" ? "/" part[3] : "")
}
# Adds the words of a text to the counts under a name.
function count(text, name, n, i, word) {
    gsub(/[^a-z']+/, " ", text)
    n = split(text, word, " ")
    words[name] += n
    for (i = 1; i <= n; i++)
        if (word[i] in filler)
            found[name, filler[word[i]]]++
}
function rate(name, which) {
    return words[name] ? 1000 * found[name, which] / words[name] : 0
}
function report(text) {
    print text
    failed = 1
}
BEGIN {
    opening = "^ (It|Its|They|Those|Them|What|Who|That|Of|Nobody|Nothing|One|Some|The same|Such|So|As|Else)"
    opening = opening "($|[^A-Za-z0-9_])"
}
FILENAME == ARGV[1] {
    if ($1 == "opening")
        ceiling[$2] = $3
    else if ($1 == "word") {
        limit[$2] = $3
        for (i = 4; i <= NF; i++)
            filler[$i] = $2
        filler[$2] = $2
    } else if ($1 == "pages")
        pages[$2] = $3
    next
}
FNR == 1 {
    is_page = FILENAME ~ /\.md$/
    name = is_page ? FILENAME : crate_of(FILENAME)
    if (is_page)
        is_of_page[name] = 1
    else
        is_crate[name] = 1
    after_comment = fence = 0
}
is_page {
    if ($0 ~ /^ *```/)
        fence = !fence
    else if (!fence)
        count(tolower($0), name)
    next
}
{
    if ($0 !~ /^[ \t]*\/\//) {
        after_comment = 0
        next
    }
    text = $0
    sub(/^[ \t]*\/\/[\/!]?/, "", text)
    if (!after_comment && text !~ /Copyright|Licensed/) {
        blocks[name]++
        if (text ~ opening) {
            opened[name]++
            place[name] = place[name] "\n    " FILENAME ":" FNR ":" text
        }
    }
    after_comment = text !~ /Copyright|Licensed/
    count(tolower(text), name)
}
END {
    for (name in is_crate) {
        share = blocks[name] ? 100 * opened[name] / blocks[name] : 0
        all += blocks[name]
        all_opened += opened[name]
        if (list)
            printf "%-24s %5d of %5d  %.2f%%\n", name, opened[name], blocks[name], share
        if (ceiling[name] > 2)
            report("testing/harness/prose.limits: " name ": a ceiling is at most 2%")
        if (share > ceiling[name] + 0)
            report(sprintf("%s: %.2f%% of its comments open with a pronoun, limit %s%%; name the subject:%s", \
                name, share, ceiling[name] + 0, place[name]))
        else if (share < ceiling[name] - 0.2)
            report(sprintf("%s: %.2f%% of its comments open with a pronoun: lower its limit of %s%% in testing/harness/prose.limits", \
                name, share, ceiling[name]))
        words["tree"] += words[name]
        for (which in limit)
            found["tree", which] += found[name, which]
    }
    for (name in ceiling)
        if (!(name in is_crate))
            report("testing/harness/prose.limits: there is no crate " name)
    for (which in limit) {
        if (list)
            printf "word %-6s %.2f per 1,000 words of comments\n", which, rate("tree", which)
        if (rate("tree", which) > limit[which])
            report(sprintf("\"%s\": %.2f per 1,000 words of comments, limit %s; use the noun or verb of the field", \
                which, rate("tree", which), limit[which]))
        for (name in is_crate)
            if (words[name] > 5000 && rate(name, which) > 2 * limit[which])
                report(sprintf("%s: \"%s\": %.2f per 1,000 words of comments, limit %s", \
                    name, which, rate(name, which), 2 * limit[which]))
    }
    for (name in is_of_page) {
        words["pages"] += words[name]
        found["pages", "what"] += found[name, "what"]
        if (words[name] > 500 && rate(name, "what") > pages["each"])
            report(sprintf("%s: \"what\": %.1f per 1,000 words, limit %s", name, rate(name, "what"), pages["each"]))
    }
    if (list)
        printf "tree %d of %d; pages: what %.2f per 1,000 words\n", all_opened, all, rate("pages", "what")
    if (rate("pages", "what") > pages["all"])
        report(sprintf("pages: \"what\": %.1f per 1,000 words, limit %s", rate("pages", "what"), pages["all"]))
    exit failed
}
