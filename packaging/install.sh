#!/bin/sh
# Installs vnvme, or removes what it installed: `make install` and `make uninstall` call it.
#
#   packaging/install.sh install|uninstall|sources PROGRAM
#
# `sources` prints the files that are installed, where they are now, without the program.
# Variables: DESTDIR (before every path, for packages; may have spaces), PREFIX (/usr/local),
# SYSCONFDIR (/etc), UNITDIR ($PREFIX/lib/systemd/system), SYSUSERSDIR, TMPFILESDIR.
# Nothing is started, and no user is made: systemd does that (systemd-sysusers, systemctl). Files of
# configuration that are there are not replaced, and not removed.
set -eu

usage() {
    sed -n 's/^# \{0,1\}//; 2,10p' "$0" >&2
    exit 2
}
[ $# = 2 ] || usage
action=$1
program=$2
source=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)

dest=${DESTDIR:-}
prefix=${PREFIX:-/usr/local}
sysconf=${SYSCONFDIR:-/etc}
units=${UNITDIR:-$prefix/lib/systemd/system}
sysusers=${SYSUSERSDIR:-$prefix/lib/sysusers.d}
tmpfiles=${TMPFILESDIR:-$prefix/lib/tmpfiles.d}
share=$prefix/share

# MODE SOURCE TARGET, one a line, of what is always replaced.
list() {
    echo "755	$program	$prefix/bin/vnvme"
    for page in "$source"/docs/man/*.1; do
        echo "644	$page	$share/man/man1/$(basename "$page")"
    done
    for page in "$source"/docs/man/*.5; do
        echo "644	$page	$share/man/man5/$(basename "$page")"
    done
    echo "644	$source/packaging/completions/vnvme.bash	$share/bash-completion/completions/vnvme"
    echo "644	$source/packaging/completions/_vnvme	$share/zsh/site-functions/_vnvme"
    echo "644	$source/packaging/completions/vnvme.fish	$share/fish/vendor_completions.d/vnvme.fish"
    echo "644	$source/packaging/systemd/vnvme.service	$units/vnvme.service"
    echo "644	$source/packaging/systemd/vnvme@.service	$units/vnvme@.service"
    echo "644	$source/packaging/systemd/vnvme.sysusers	$sysusers/vnvme.conf"
    echo "644	$source/packaging/systemd/vnvme.tmpfiles	$tmpfiles/vnvme.conf"
    echo "644	$source/packaging/examples/vnvme.toml	$share/doc/vnvme/examples/vnvme.toml"
    echo "755	$source/packaging/libvirt/qemu	$share/doc/vnvme/examples/libvirt-hook"
    echo "644	$source/README.md	$share/doc/vnvme/README.md"
    echo "644	$source/CHANGELOG.md	$share/doc/vnvme/CHANGELOG.md"
    echo "644	$source/packaging/debian/copyright	$share/doc/vnvme/copyright"
    # Where links of these documents lead.
    for page in "$source"/docs/*.md "$source"/docs/*.svg "$source"/docs/openapi.json; do
        echo "644	$page	$share/doc/vnvme/docs/$(basename "$page")"
    done
    echo "644	$source/SECURITY.md	$share/doc/vnvme/SECURITY.md"
    echo "644	$source/packaging/grafana/vnvme.json	$share/doc/vnvme/packaging/grafana/vnvme.json"
}

# Configuration: it is the administrator's once it is there.
configuration() {
    echo "644	$source/packaging/apparmor/vnvme	$sysconf/apparmor.d/abstractions/libvirt-qemu.d/vnvme"
}

# Directories that are ours, the innermost first.
directories() {
    echo "$share/doc/vnvme/examples"
    echo "$share/doc/vnvme/docs"
    echo "$share/doc/vnvme/packaging/grafana"
    echo "$share/doc/vnvme/packaging"
    echo "$share/doc/vnvme"
}

tab=$(printf '\t')
case $action in
install)
    [ -x "$program" ] || {
        echo "$program is no program: build it with cargo build --release -p vnvme" >&2
        exit 1
    }
    # The units name the program where it is.
    bin=$prefix/bin/vnvme
    list | while IFS=$tab read -r mode from to; do
        install -D -m "$mode" -- "$from" "$dest$to"
        case $to in
        *.service) sed -i "s|/usr/bin/vnvme|$bin|" "$dest$to" ;;
        esac
    done
    configuration | while IFS=$tab read -r mode from to; do
        [ -e "$dest$to" ] || install -D -m "$mode" -- "$from" "$dest$to"
    done
    install -d -m 755 -- "$dest$sysconf/vnvme"
    ;;
uninstall)
    list | while IFS=$tab read -r _ _ to; do
        rm -f -- "$dest$to"
    done
    directories | while read -r directory; do
        rmdir -- "$dest$directory" 2>/dev/null || true
    done
    echo "left, as it is configuration: $dest$sysconf/vnvme" \
        "$dest$sysconf/apparmor.d/abstractions/libvirt-qemu.d/vnvme"
    ;;
sources)
    { list && configuration; } | while IFS=$tab read -r _ from _; do
        [ "$from" = "$program" ] || echo "$from"
    done
    ;;
*) usage ;;
esac
