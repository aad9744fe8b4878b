#!/bin/sh
# Builds the workspace with the Rust that Cargo.toml promises (rust-version), by rustup, which
# fetches that toolchain when it is not there. Where it cannot be had, that is a skip.
set -eu
cd "$(dirname "$0")/../.."
version=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
[ -n "$version" ] || { echo "msrv: Cargo.toml has no rust-version" >&2; exit 1; }

if ! command -v rustup >/dev/null 2>&1; then
    exec testing/harness/skips.sh --skip "make msrv: Rust $version" "no rustup"
fi
if ! rustup run "$version" cargo --version >/dev/null 2>&1 &&
    ! rustup toolchain install "$version" --profile minimal >&2; then
    exec testing/harness/skips.sh --skip "make msrv: Rust $version" "rustup toolchain install $version fails"
fi
# Beside the usual target directory, which the compilers would take from each other. The lock file
# is the one that everybody builds with.
CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/msrv \
    rustup run "$version" cargo check --workspace --all-targets --locked
echo "msrv: the workspace builds with Rust $version"
