#!/bin/sh
# Sees to it that this machine has what a make target needs: installs it when it may (as root), else prints the one line
# that does. Usage: setup.sh build | guest | check | aarch64 | packages TARGET | image | bench DIRECTORY | tests DIRECTORY
set -eu

# have_or_install PROGRAM PACKAGE...: PROGRAM is there, or becomes so.
have_or_install() {
    wanted=$1
    shift
    command -v "$wanted" >/dev/null 2>&1 && return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "setup: installing $* (for $wanted)" >&2
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >&2
        return
    fi
    echo "setup: $wanted is missing; this line installs it: sudo apt-get update && sudo apt-get install -y $*" >&2
    exit 1
}

# fetch DIRECTORY PACKAGE...: Debian packages are unpacked in a directory, without their dependencies.
fetch() {
    fetched=$1
    shift
    mkdir -p "$fetched/bin"
    (
        cd "$fetched"
        apt-get download -qq "$@" >&2 || exit 1
        for package; do
            dpkg-deb -x "$package"_*.deb . || exit 1
        done
    )
}

# wrapper FILE VARIABLE VALUE PROGRAM: FILE starts PROGRAM with this environment variable.
wrapper() {
    printf '#!/bin/sh\n%s="%s" exec "%s" "$@"\n' "$2" "$3" "$4" >"$1"
    chmod +x "$1"
}

case ${1-} in
build)
    if ! command -v "${CARGO:-cargo}" >/dev/null 2>&1; then
        echo "setup: cargo is missing; this line installs it: curl -sSf https://sh.rustup.rs | sh -s -- -y" >&2
        exit 1
    fi
    have_or_install cc gcc
    # gcc alone does not bring the C library's start-up files, which every program is linked with.
    if ! echo 'int main(void){return 0;}' | cc -x c -o /dev/null - 2>/dev/null; then
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
            apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libc6-dev >&2
        else
            echo "setup: cc cannot link; this line helps: sudo apt-get update && sudo apt-get install -y libc6-dev" >&2
            exit 1
        fi
    fi
    ;;
guest)
    have_or_install apt-get apt
    have_or_install dpkg-deb dpkg
    if [ "$(uname -m)" != x86_64 ]; then
        echo "setup: the guest and its QEMU are x86-64 programs; this machine is $(uname -m)" >&2
        exit 1
    fi
    ;;
check)
    for component in fmt clippy; do
        "${CARGO:-cargo}" "$component" --version >/dev/null 2>&1 && continue
        name=$component
        [ "$component" = fmt ] && name=rustfmt
        if ! rustup component add "$name" >&2; then
            echo "setup: cargo $component is missing; this line installs it: rustup component add $name" >&2
            exit 1
        fi
    done
    ;;
bench)
    # valgrind, for the suite cost: installed as root, else fetched into the directory that is named. The suite says so
    # when it is nowhere.
    dir=${2:?directory}
    if command -v valgrind >/dev/null 2>&1 || [ -x "$dir/bin/valgrind" ]; then
        exit 0
    fi
    if [ "$(id -u)" = 0 ] && (have_or_install valgrind valgrind); then
        exit 0
    fi
    if ! fetch "$dir" valgrind; then
        echo "setup: this line installs valgrind: sudo apt-get update && sudo apt-get install -y valgrind" >&2
        "$(dirname "$0")/skips.sh" --skip "bench: suite cost" "valgrind cannot be fetched"
        exit 0
    fi
    # The packaged script calls the program by its installed path.
    program=$dir/usr/bin/valgrind.bin
    [ -x "$program" ] || program=$dir/usr/bin/valgrind
    wrapper "$dir/bin/valgrind" VALGRIND_LIB "$dir/usr/libexec/valgrind" "$program"
    ;;
tests)
    # cryptsetup, for the tests of encrypted volumes, and libnbd's nbdinfo and nbdcopy, for those of exports: installed as
    # root, else fetched into the directory that is named. Tests that do not find them say so. Likewise rpmbuild, of which
    # there are tests as root only.
    dir=${2:?directory}
    if [ "$(id -u)" = 0 ]; then
        (have_or_install rpmbuild rpm) || true
    fi
    PATH=$PATH:/usr/sbin:$dir/bin
    # or_fetched PROGRAM PACKAGE LIBRARY...: PROGRAM is there, or becomes so.
    or_fetched() {
        program=$1 package=$2
        command -v "$program" >/dev/null 2>&1 && return 0
        [ "$(id -u)" = 0 ] && (have_or_install "$program" "$package") && return 0
        shift
        # Their other libraries are those of systemd or GnuTLS, which Debian has everywhere.
        if fetch "$dir" "$@"; then
            # Older packages have them in /lib and /sbin.
            libraries=$(find "$dir" -name 'lib*.so.*' -exec dirname {} + | sort -u | paste -s -d :)
            found=$(find "$dir/usr" "$dir" -path "*bin/$program" ! -path "$dir/bin/*" | head -n 1)
            wrapper "$dir/bin/$program" LD_LIBRARY_PATH "$libraries" "$found"
            "$dir/bin/$program" --version >&2 && return 0
            rm "$dir/bin/$program"
        fi
        echo "setup: this line installs $program: sudo apt-get update && sudo apt-get install -y $package" >&2
    }
    or_fetched cryptsetup cryptsetup-bin libcryptsetup12 libpopt0
    or_fetched nbdinfo libnbd-bin libnbd0 libfuse3-3
    or_fetched nbdcopy libnbd-bin libnbd0 libfuse3-3
    ;;
aarch64)
    # Succeeds when the AArch64 standard library is there; else says why that check is left out.
    target=aarch64-unknown-linux-gnu
    [ -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ] && exit 0
    if command -v rustup >/dev/null 2>&1 && rustup target add "$target" >&2; then
        exit 0
    fi
    "$(dirname "$0")/skips.sh" --skip "make check: aarch64" "rustup target add $target fails"
    exit 1
    ;;
packages)
    # What packaging/build.sh needs for a target of Rust: its standard library, its linker, rpmbuild and mmdebstrap.
    target=${2:?target}
    if ! [ -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ]; then
        rustup target add "$target" >&2
    fi
    machine=${target%%-*}
    if [ "$machine" != "$(uname -m)" ]; then
        case $machine in
        x86_64) package=gcc-x86-64-linux-gnu libc=libc6-dev-amd64-cross ;;
        *) package=gcc-aarch64-linux-gnu libc=libc6-dev-arm64-cross ;;
        esac
        have_or_install "$machine-linux-gnu-gcc" "$package" "$libc"
    fi
    have_or_install rpmbuild rpm
    have_or_install mmdebstrap mmdebstrap
    ;;
image)
    # What testing/harness/image.sh runs an image with.
    have_or_install umoci umoci
    have_or_install runc runc
    ;;
*)
    echo "usage: setup.sh build | guest | check | aarch64 | packages TARGET | image | bench DIRECTORY | tests DIRECTORY" >&2
    exit 2
    ;;
esac
