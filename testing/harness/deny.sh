#!/bin/sh
# Runs cargo-deny by deny.toml: licences, sources, versions, and known vulnerabilities of what stands
# below. Without cargo-deny, or without its database of vulnerabilities, that is a skip.
set -eu
cd "$(dirname "$0")/../.."
cargo=${CARGO:-cargo}

if ! "$cargo" deny --version >/dev/null 2>&1; then
    testing/harness/skips.sh --skip "make deny: cargo-deny" \
        "not installed: cargo install --locked cargo-deny"
    # What this repository knows by itself.
    exec "$cargo" test --quiet -p testkit --test it dependencies::
fi
"$cargo" deny --all-features check licenses bans sources
if "$cargo" deny fetch db; then
    "$cargo" deny --all-features check --disable-fetch advisories
else
    testing/harness/skips.sh --skip "make deny: advisories" "the advisory database cannot be fetched"
fi
