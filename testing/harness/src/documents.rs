//! Commands and configuration of the operators' pages, which tests run as printed.
//!
//! Each fenced block, and each command or setting in the running text of [`PAGES`], is in exactly
//! one list: those that a test runs ([`IN_MACHINE`], [`ON_HOST`], [`BY_PROMTOOL`]), and the few
//! that none runs, with the reason. The test of this module fails for a piece that is in none. A
//! test takes the pieces of its list from a [`Script`], which fails for pieces that were not taken.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context, Result, ensure};
use testkit::pages::{Piece, pieces};

use crate::cache::checkout;

/// Pages whose commands are run.
pub const PAGES: [&str; 4] = [
    "README.md",
    "docs/systemd.md",
    "docs/metrics.md",
    "docs/operations.md",
];

/// Beginnings of the blocks, and the spans, that `tests/guests/systemd.rs` runs in a machine with
/// systemd, as root. Substitutions: `sudo` is `setpriv`; `cargo` and `cc` build nothing, since the
/// program was built before; `...` is a socket and a volume.
pub const IN_MACHINE: &[&str] = &[
    "cargo build --release -p vnvme && sudo make install",
    "cp /usr/share/doc/vnvme/examples/vnvme.toml",
    "journalctl -u vnvme -p warning",
    "make package && sudo dpkg",
    "make uninstall",
    "metrics = \"127.0.0.1:9469\"",
    "sandbox: landlock",
    "systemctl disable --now vnvme",
    "systemctl reload vnvme",
    "systemctl status",
    "systemctl status vnvme",
    "sudo -u vnvme vnvme daemon --config",
    "systemd-analyze security --offline",
    "[Unit]\nBefore=vnvme.service",
    "vnvme check /etc/vnvme",
    "vnvme devices",
    "vnvme info disk.raw",
    "vnvme list --all",
    "vnvme metrics --all",
    "vnvme reload",
    "vnvme save",
    "vnvme serve --metrics 127.0.0.1:9469 ...",
    "vnvme stats",
    "vnvme stats --json",
    "vnvme top",
    "vnvme top --all",
    "vnvme upgrade",
];

/// Beginnings of the blocks that `tests/guests/documents.rs` runs on this machine. Substitutions:
/// the address of the repository; `cargo` builds nothing, since the programs were built before;
/// `/tmp` is a folder of the test; `-enable-kvm` is `-accel tcg` where KVM runs no guest; `...` is
/// the guest of the harness.
pub const ON_HOST: &[&str] = &[
    "cargo build --release\n",
    "git clone <this repository>",
    "qemu-system-x86_64 -enable-kvm",
];

/// Beginnings of the configuration files that Prometheus' own checker reads
/// (`tests/guests/metrics.rs`).
pub const BY_PROMTOOL: &[&str] = &["# prometheus.yml"];

/// Beginnings of pieces that no test runs as printed, each with the reason.
pub const NOT_RUN: &[(&str, &str)] = &[
    (
        "bpftrace -e 'usdt:",
        "traces the kernel, as root; tests/guests/documents.rs finds the probe in the program",
    ),
    (
        "cargo build --release -p vnvme --no-default-features",
        "`make minimal`, a step of `make test-guests`, checks and tests that program",
    ),
    (
        "cloud-hypervisor --memory",
        "no package of Debian; crates/protocols/vfio-user/tests/it/clients.rs sends its messages",
    ),
    ("make test", "runs this test"),
    (
        "ssh -L 8080:/run/vnvme/control.sock HOST",
        "needs a second host; tests/guests/metrics.rs loads the page in a browser",
    ),
    (
        "vnvme info nvme://0000:44:00.0",
        "needs a device; tests/guests/vfio.rs has one in a guest",
    ),
    // Names of commands that take arguments.
    ("vnvme add", "a name"),
    ("vnvme bind", "a name"),
    ("vnvme check", "a name"),
    ("vnvme check --offline", "a name"),
    ("vnvme daemon", "a name"),
    ("vnvme export", "a name"),
    ("vnvme limits", "a name"),
    ("vnvme remove", "a name"),
    ("vnvme resize", "a name"),
    ("vnvme ublk", "a name"),
];

/// First words of commands in the running text.
const PROGRAMS: [&str; 8] = [
    "bpftrace",
    "cargo",
    "journalctl",
    "make",
    "ssh",
    "systemctl",
    "systemd-analyze",
    "vnvme",
];

/// Returns the blocks of the pages, and the commands and settings of their running text.
fn code() -> Result<Vec<Piece>> {
    let mut found = Vec::new();
    for page in PAGES {
        let text = fs::read_to_string(checkout().join(page)).context(page)?;
        found.extend(pieces(page, &text));
    }
    found.retain(|piece| piece.is_block || is_command(&piece.text) || is_setting(&piece.text));
    Ok(found)
}

fn is_command(span: &str) -> bool {
    let program = span.split_once(' ').map(|(program, _)| program);
    program.is_some_and(|program| PROGRAMS.contains(&program))
}

/// Whether a span is a key with a value, as in a configuration file.
fn is_setting(span: &str) -> bool {
    span.split_once(" = ")
        .is_some_and(|(key, _)| key.bytes().all(|b| b.is_ascii_lowercase() || b == b'-'))
}

/// Returns whether a name is that of a span, or the beginning of a block.
fn is_named(piece: &Piece, name: &str) -> bool {
    piece.text == name || (piece.is_block && piece.text.starts_with(name))
}

/// Pieces of a list, taken one after the other by the test that runs them.
#[derive(Debug)]
pub struct Script {
    pieces: Vec<Piece>,
    left: BTreeSet<&'static str>,
}

impl Script {
    /// Reads the pages.
    pub fn open(list: &[&'static str]) -> Result<Script> {
        Ok(Script {
            pieces: code()?,
            left: list.iter().copied().collect(),
        })
    }

    /// Returns the piece that a list names, to be run; the same name may be taken more than once.
    pub fn take(&mut self, name: &'static str) -> Result<&Piece> {
        self.left.remove(name);
        let named = self.pieces.iter().filter(|piece| is_named(piece, name));
        // A name may be a span and the beginning of a block.
        let shortest = named.min_by_key(|piece| piece.text.len());
        shortest.with_context(|| format!("{name}: on no page"))
    }

    /// Fails for pieces that were not taken.
    pub fn finish(self) -> Result<()> {
        ensure!(self.left.is_empty(), "not run: {:?}", self.left);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn every_command_of_the_pages_is_run_or_excused() {
        let excused = NOT_RUN.iter().map(|(name, _)| *name);
        let lists = [IN_MACHINE, ON_HOST, BY_PROMTOOL];
        let names: Vec<&str> = lists.concat().into_iter().chain(excused).collect();
        let unique: BTreeSet<&str> = names.iter().copied().collect();
        assert_eq!(unique.len(), names.len(), "a name is in two lists");
        let mut unused = unique;
        let mut texts = BTreeMap::new();
        for piece in code().unwrap() {
            let named = names.iter().filter(|name| is_named(&piece, name));
            let Some(name) = named.max_by_key(|name| name.len()) else {
                panic!(
                    "{piece}: in no list of testing/harness/src/documents.rs: {}",
                    piece.text
                );
            };
            unused.remove(name);
            let text = texts.entry(*name).or_insert_with(|| piece.text.clone());
            assert_eq!(*text, piece.text, "{piece}: only the first {name:?} is run");
        }
        assert!(unused.is_empty(), "on no page any more: {unused:?}");
    }
}
