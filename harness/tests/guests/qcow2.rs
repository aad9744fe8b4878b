//! A qcow2 image with backing files as a guest's virtio disk, served by a daemon that is killed
//! again and again under load. The guest goes on and finds its data, and the image is in order.
//!
//! `VNVME_KILLS` has it killed more often than a few times.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::nbd::{LIMIT, QEMU, tree};
use crate::common::rounds::{rounds, wait_requests};
use crate::common::{Disks, LONG};
use anyhow::{Context, Result, bail, ensure};
use harness::progress::skip;
use harness::served::Controller;
use harness::tree::Tree;
use harness::{Daemon, Guest};
use serde_json::Value;

/// Kills, where nothing else is said.
const KILLS: usize = 6;
/// The images, the lowest first. Each has some bytes of its own, by its number.
const LAYERS: [&str; 4] = ["base", "one", "two", "top"];
/// Where those of the lowest begin, in MiB; the guest's load lies before.
const OWN: usize = 128;

/// `$d` is the disk's device.
const FIND: &str = "set -e
for s in /sys/block/vd*/serial; do [ $(cat $s) = IMAGE ] && d=/dev/$(basename ${s%/serial}); done
[ $d ] || { echo no such disk >&2; exit 1; }";

fn run(guest: &Guest, script: &str) -> Result<String> {
    guest.run_for(LONG, &format!("{FIND}\n{script}"))
}

struct Export {
    dir: tempfile::TempDir,
    image: PathBuf,
}

impl Export {
    fn serve(&self) -> Result<Daemon> {
        let (image, folder) = (self.image.display(), self.image.parent().unwrap().display());
        // A controller stands beside it, which nobody uses.
        Daemon::builder("qcow2")
            .volume("mem://1M")
            .arg("--control")
            .arg(self.dir.path().join("c"))
            .arg("--vhost-user-blk")
            .arg(self.dir.path().join("v"))
            .arg(format!(
                "qcow2://{image}?backing={folder}&queues=2&serial=IMAGE"
            ))
            .start()
    }

    /// Waits until the guest has made so many more.
    fn wait_requests(&self, more: u64) -> Result<()> {
        wait_requests(&self.dir.path().join("c"), more, LIMIT)
    }
}

/// Clusters that are counted and not used; anything else that is amiss is an error.
fn leaks(tree: &Tree, image: &Path) -> Result<u64> {
    let began = Instant::now();
    let output = loop {
        let mut command: Command = tree.tool("qemu-img")?;
        let output = command
            .args(["check", "--output=json"])
            .arg(image)
            .output()?;
        // The kernel carries on with what a killed process had under way, and keeps its lock.
        let said = String::from_utf8_lossy(&output.stderr);
        if !said.contains("lock") || began.elapsed() > LIMIT {
            break output;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let found: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let count = |name: &str| found[name].as_u64().unwrap_or(0);
    if count("corruptions") > 0 || count("check-errors") > 0 {
        bail!("{found}");
    }
    Ok(count("leaks"))
}

#[test]
fn an_image_survives_a_daemon_that_is_killed_under_load() -> Result<()> {
    if Controller::chosen()? != Controller::Vnvme {
        skip(
            "harness: a qcow2 image under kills",
            "the tests run against QEMU's controller",
        );
        return Ok(());
    }
    let Some(tree) = tree(&QEMU) else {
        return Ok(());
    };
    let kills = match std::env::var("VNVME_KILLS") {
        Ok(text) => text.parse().context("VNVME_KILLS is a number")?,
        Err(_) => KILLS,
    };
    let disks = Disks::new()?;
    let dir = disks.dir().canonicalize()?;
    let images = LAYERS.map(|name| dir.join(name).display().to_string());
    for (number, image) in images.iter().enumerate() {
        let create = ["create", "-q", "-f", "qcow2"];
        let words = match number.checked_sub(1) {
            None => [&create[..], &[image, "256M"]].concat(),
            Some(below) => [&create[..], &["-b", &images[below], "-F", "qcow2", image]].concat(),
        };
        tree.run("qemu-img", &words)?;
        let own = format!("write -P {} {}M 1M", number + 1, OWN + number);
        tree.run("qemu-io", &["-f", "qcow2", "-c", &own, image])?;
        if number == 0 {
            // What the guest overwrites at first is copied, and some of it decompressed.
            let fill = "write -P 9 0 32M";
            tree.run("qemu-io", &["-f", "qcow2", "-c", fill, image])?;
            let packed = format!("{image}.packed");
            tree.run(
                "qemu-img",
                &["convert", "-c", "-O", "qcow2", image, &packed],
            )?;
            std::fs::rename(packed, image)?;
        }
    }
    let hash = |image: &String| harness::cache::sha256_file(image.as_ref());
    let below = images[..3].iter().map(hash).collect::<Result<Vec<_>>>()?;
    let export = Export {
        dir: tempfile::Builder::new().prefix("vnvme-").tempdir()?,
        image: dir.join("top"),
    };
    let mut daemon = export.serve()?;
    let chardev = format!(
        "socket,id=v0,path={},reconnect-ms=100",
        export.dir.path().join("v").display()
    );
    let guest = Guest::builder("qcow2")
        .qemu_args(["-chardev", &chardev])
        .qemu_args(["-device", "vhost-user-blk-pci,chardev=v0"])
        .boot()?;
    // Each round has its part anew: written, verified, given to the host.
    let discard = "[ $((rounds % 3)) = 0 ] && blkdiscard -o $((part << 20)) -l $((16 << 20)) $d";
    run(&guest, &rounds(discard))?;
    let works = || {
        let said = || run(&guest, "cat /tmp/status /tmp/fio.log; true").unwrap_or_default();
        export.wait_requests(100).with_context(said)
    };
    let (mut leaking, mut most) = (0, 0);
    for kill in 0..kills {
        works()?;
        // At another moment each time.
        std::thread::sleep(Duration::from_millis(7 * kill as u64 % 100));
        daemon.kill()?;
        let leaks = leaks(&tree, &export.image).with_context(|| format!("after kill {kill}"))?;
        (leaking, most) = (leaking + u64::from(leaks > 0), most.max(leaks));
        daemon = export.serve()?;
        daemon.wait_log("front-end connected", LIMIT)?;
    }
    works()?;
    let rounds = run(
        &guest,
        "touch /tmp/stop
         for try in $(seq 500); do [ -s /tmp/status ] && break; sleep 0.1; done
         grep -q '^[0-9][0-9]*$' /tmp/status || { cat /tmp/status; tail -20 /tmp/fio.log; exit 1; }
         cat /tmp/status",
    );
    let rounds = rounds.with_context(|| daemon.log().unwrap_or_default())?;
    eprintln!(
        "qcow2: {kills} kills, {} rounds of fio; after {leaking} of them clusters were counted \
         that were not used, {most} at most",
        rounds.trim()
    );
    for (number, name) in LAYERS.iter().enumerate() {
        // What is left without the bytes that are to be there is nothing.
        let (skip, byte) = (OWN + number, number + 1);
        run(
            &guest,
            &format!(
                "own() {{ dd if=$d bs=1M skip={skip} count=1 iflag=direct 2>/dev/null; }}
                 n=$(own | tr -d '\\00{byte}' | wc -c)
                 m=$(own | wc -c)
                 [ $n = 0 ] && [ $m = 1048576 ]"
            ),
        )
        .with_context(|| format!("the bytes of {name}"))?;
    }
    guest.poweroff()?;
    daemon.terminate()?;
    for image in &images {
        tree.run("qemu-img", &["check", "-q", image])?;
    }
    for (image, before) in images.iter().zip(below) {
        ensure!(
            hash(image)? == before,
            "{image} was written, and is a backing file"
        );
    }
    Ok(())
}
