//! A qcow2 image with backing files as a guest's virtio disk, served by a daemon that is killed
//! again and again under load. The guest continues and finds its data, and the image is in order.
//!
//! `VNVME_KILLS` sets the number of kills.

use std::time::{Duration, Instant};

use crate::common::Disks;
use crate::common::kill_loop::{KillLoop, kills, possible};
use crate::common::layers::Layers;
use crate::common::nbd::{LIMIT, QEMU, tree};
use anyhow::{Context, Result, bail};
use harness::Daemon;
use harness::tree::Tree;
use serde_json::Value;

/// Returns the clusters that are counted and not used; any other defect is an error.
fn leaks(tree: &Tree, image: &str) -> Result<u64> {
    let began = Instant::now();
    let output = loop {
        let mut command = tree.tool("qemu-img")?;
        let output = command.args(["check", "--output=json", image]).output()?;
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
fn image_survives_daemon_killed_under_load() -> Result<()> {
    if !possible("harness: a qcow2 image under kills")? {
        return Ok(());
    }
    let Some(tree) = tree(&QEMU) else {
        return Ok(());
    };
    let disks = Disks::new()?;
    let dir = disks.dir().canonicalize()?;
    // The load's first writes copy clusters, and decompress some of them.
    let layers = Layers::create(&tree, &dir, true)?;
    let (mut leaking, mut most) = (0, 0);
    let kill_loop = KillLoop {
        name: "qcow2",
        daemon: Daemon::builder("qcow2"),
        volume: format!("qcow2://{}?backing={}", layers.top(), dir.display()),
        // Each round has its part anew: written, verified, given to the host.
        each_round: "[ $((rounds % 3)) = 0 ] && blkdiscard -o $((part << 20)) -l $((16 << 20)) $d",
        taken_over: "front-end connected",
        after_kill: Box::new(|_| {
            let leaks = leaks(&tree, layers.top())?;
            (leaking, most) = (leaking + u64::from(leaks > 0), most.max(leaks));
            Ok(())
        }),
    };
    kill_loop.run(kills(6)?, |guest| layers.verify(guest))?;
    eprintln!(
        "qcow2: after {leaking} kills clusters were counted that were not used, {most} at most"
    );
    layers.check()
}
