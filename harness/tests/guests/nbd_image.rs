//! An image with backing files, on qemu-nbd, as a guest's virtio disk, whose daemon is killed again
//! and again under load. The guest finds its data, and the image is in order.
//!
//! `VNVME_KILLS` has it killed more often than a few times.

use std::path::PathBuf;

use crate::common::nbd::{LIMIT, QEMU, qemu_nbd, tree};
use crate::common::rounds::{rounds, wait_requests};
use crate::common::{Disks, LONG};
use anyhow::{Context, Result, ensure};
use harness::progress::skip;
use harness::served::Controller;
use harness::{Daemon, Guest};

/// Kills, where nothing else is said.
const KILLS: usize = 4;
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
    server: PathBuf,
}

impl Export {
    fn serve(&self) -> Result<Daemon> {
        let socket = self.server.display();
        // A controller stands beside it, which nobody uses.
        Daemon::builder("nbd-image")
            .volume("mem://1M")
            .arg("--control")
            .arg(self.dir.path().join("c"))
            .arg("--vhost-user-blk")
            .arg(self.dir.path().join("v"))
            .arg(format!(
                "nbd+unix:///vm0?socket={socket}&queues=2&serial=IMAGE"
            ))
            .start()
    }

    /// Waits until the guest has made so many more.
    fn wait_requests(&self, more: u64) -> Result<()> {
        wait_requests(&self.dir.path().join("c"), more, LIMIT)
    }
}

#[test]
fn an_image_survives_a_daemon_that_is_killed_under_load() -> Result<()> {
    if Controller::chosen()? != Controller::Vnvme {
        skip("nbd::image", "the tests run against QEMU's controller");
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
    let images = LAYERS.map(|name| disks.dir().join(name).display().to_string());
    for (number, image) in images.iter().enumerate() {
        let create = ["create", "-q", "-f", "qcow2"];
        let words = match number.checked_sub(1) {
            None => [&create[..], &[image, "256M"]].concat(),
            Some(below) => [&create[..], &["-b", &images[below], "-F", "qcow2", image]].concat(),
        };
        tree.run("qemu-img", &words)?;
        let own = format!("write -P {} {}M 1M", number + 1, OWN + number);
        tree.run("qemu-io", &["-f", "qcow2", "-c", &own, image])?;
    }
    let below = images[..3]
        .iter()
        .map(|image| harness::cache::sha256_file(image.as_ref()))
        .collect::<Result<Vec<_>>>()?;
    let export = Export {
        dir: tempfile::Builder::new().prefix("vnvme-").tempdir()?,
        server: disks.dir().join("nbd.sock"),
    };
    let server = qemu_nbd(&tree, &export.server, &images[3])?;
    let mut daemon = export.serve()?;
    let chardev = format!(
        "socket,id=v0,path={},reconnect-ms=100",
        export.dir.path().join("v").display()
    );
    let guest = Guest::builder("nbd-image")
        .qemu_args(["-chardev", &chardev])
        .qemu_args(["-device", "vhost-user-blk-pci,chardev=v0"])
        .boot()?;
    run(&guest, &rounds(":"))?;
    let works = || {
        let said = || run(&guest, "cat /tmp/status /tmp/fio.log; true").unwrap_or_default();
        export.wait_requests(100).with_context(said)
    };
    for _ in 0..kills {
        works()?;
        daemon.kill()?;
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
    eprintln!("nbd image: {kills} kills, {} rounds of fio", rounds.trim());
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
    server.signal(rustix::process::Signal::TERM)?;
    server.wait(LIMIT)?;
    for image in &images {
        tree.run("qemu-img", &["check", "-q", image])?;
    }
    for (image, before) in images.iter().zip(below) {
        let now = harness::cache::sha256_file(image.as_ref())?;
        ensure!(now == before, "{image} was written, and is a backing file");
    }
    Ok(())
}
