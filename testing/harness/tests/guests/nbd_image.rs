//! An image with backing files, on qemu-nbd, as a guest's virtio disk. Its daemon is killed again
//! and again under load. The guest finds its data, and the image is in order.
//!
//! `VNVME_KILLS` sets the number of kills.

use crate::common::Disks;
use crate::common::kill_loop::{KillLoop, kills, possible};
use crate::common::layers::Layers;
use crate::common::nbd::{LIMIT, QEMU, qemu_nbd, tree};
use anyhow::Result;
use harness::Daemon;

#[test]
fn image_survives_daemon_killed_under_load() -> Result<()> {
    if !possible("nbd::image")? {
        return Ok(());
    }
    let Some(tree) = tree(&QEMU) else {
        return Ok(());
    };
    let disks = Disks::new()?;
    let layers = Layers::create(&tree, disks.dir(), false)?;
    let socket = disks.dir().join("nbd.sock");
    let server = qemu_nbd(&tree, &socket, layers.top())?;
    let kill_loop = KillLoop {
        name: "nbd-image",
        daemon: Daemon::builder("nbd-image"),
        volume: format!("nbd+unix:///vm0?socket={}", socket.display()),
        each_round: ":",
        taken_over: "front-end connected",
        after_kill: Box::new(|_| Ok(())),
    };
    kill_loop.run(kills(4)?, |guest| layers.verify(guest))?;
    server.signal(rustix::process::Signal::TERM)?;
    server.wait(LIMIT)?;
    layers.check()
}
