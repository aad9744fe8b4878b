//! Figures of disks on a Ceph cluster: starts a real one of one host, makes two images alike, and
//! has `vnvme-bench --suite rbd` compare vnvme with qemu-storage-daemon on them, both with the same
//! version of librbd. It prints figures, and no figure makes it fail:
//!
//! ```sh
//! cargo build --release -p vnvme -p bench
//! export VNVME_BIN=$PWD/target/release/vnvme
//! cargo test -p harness --test rbd_figures -- --ignored --nocapture
//! ```
//!
//! `VNVME_BENCH_WORDS` adds options of `vnvme-bench`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::common::ceph::{Cluster, tree};
use anyhow::{Context, Result, ensure};
use harness::cache::{Cache, checkout};
use harness::daemon::program;
use harness::tree::{PackageSet, Tree};

/// QEMU with its driver for images of Ceph clusters, of the cluster's release.
const QEMU: PackageSet = PackageSet {
    name: "qemu-rbd",
    suites: &["bookworm"],
    release: None,
    packages: &["qemu-utils", "qemu-block-extra", "qemu-system-common"],
    without: &["perl", "python3", "adduser", "debconf", "systemd"],
};

/// A program that starts qemu-storage-daemon of the packages.
fn storage_daemon(tree: &Tree, path: &Path) -> Result<()> {
    let daemon = tree.program("qemu-storage-daemon")?;
    let mut words = tree.tool_words(&daemon)?;
    let lib = tree.root().join("usr/lib/x86_64-linux-gnu");
    // Its drivers are libraries of their own.
    if let Some(dirs) = words.get_mut(2) {
        dirs.push_str(&format!(":{0}:{0}/ceph", lib.display()));
    }
    let (words, lib) = (words.join("' '"), lib.display());
    let text = format!("#!/bin/sh\nQEMU_MODULE_DIR={lib}/qemu exec '{words}' \"$@\"\n");
    fs::write(path, text)?;
    Ok(fs::set_permissions(
        path,
        fs::Permissions::from_mode(0o755),
    )?)
}

#[test]
#[ignore = "measures, on a machine without other work: make test-long"]
fn figures_beside_qemu_storage_daemon_are_measured() -> Result<()> {
    let ceph = tree().context("no packages of Ceph")?;
    let qemu = Tree::fetch(&Cache::open()?, &QEMU, |_| Ok(()))?;
    let dir = tempfile::tempdir()?;
    let qsd = dir.path().join("qemu-storage-daemon");
    storage_daemon(&qemu, &qsd)?;
    let cluster = Cluster::start(ceph, 256)?;
    cluster.rbd(&["create", "--size", "256M", "img2"])?;
    for image in ["img", "img2"] {
        // All of it is there.
        cluster.rbd(&[
            "bench",
            "--io-type",
            "write",
            "--io-pattern",
            "seq",
            "--io-size",
            "4M",
            "--io-total",
            "256M",
            image,
        ])?;
    }
    let urls = ["rbd/img", "rbd/img2"].map(|name| cluster.url(name));
    let words = std::env::var("VNVME_BENCH_WORDS").unwrap_or_default();
    let mut command = Command::new(program()?.with_file_name("vnvme-bench"));
    command
        .current_dir(checkout())
        .args(["--suite", "rbd", "--rbd", &urls.join(","), "--qsd"])
        .arg(&qsd)
        .args(words.split_whitespace())
        .envs(cluster.library());
    let status = command.status().context("vnvme-bench")?;
    ensure!(status.success(), "vnvme-bench: {status}");
    Ok(())
}
