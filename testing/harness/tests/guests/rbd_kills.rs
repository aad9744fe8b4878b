//! A disk on a real Ceph cluster of one host under a guest's load with verification, while its
//! daemon is killed again and again. The next one takes the image's lock over, the cluster serves
//! the dead one no more, and the guest continues without an error. A daemon that stands still while
//! another one takes its lock writes nothing more either.
//!
//! `VNVME_KILLS` sets the number of kills.

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::Checks;
use crate::common::ceph::{Cluster, LIMIT, tree};
use crate::common::kill_loop::{KillLoop, kills, possible};
use anyhow::{Result, ensure};
use harness::Daemon;
use harness::daemon::{DaemonBuilder, program};
use rustix::process::Signal;

/// Returns a daemon with the cluster's library. Signals go to the process that serves.
fn builder(cluster: &Cluster) -> DaemonBuilder {
    let builder = Daemon::builder("rbd-kills").arg("--keeper").arg("off");
    let library = cluster.library();
    library
        .iter()
        .fold(builder, |builder, (name, path)| builder.env(name, *path))
}

/// Clients that the cluster serves no more.
fn fenced(cluster: &Cluster) -> Result<usize> {
    let said = cluster.ceph(&["osd", "blocklist", "ls", "--format", "json"])?;
    // Newer versions print a second list, of ranges.
    Ok(said.matches("\"addr\"").count())
}

#[test]
fn a_daemon_that_is_killed_or_stopped_loses_its_lock() -> Result<()> {
    let Some(tree) = tree() else {
        return Ok(());
    };
    let cluster = Cluster::start(tree, 256)?;
    let mut checks = Checks::new("rbd kills");
    if possible("rbd::kills")? {
        checks.check("a guest goes on when its daemon is killed", || {
            goes_on(&cluster)
        });
    }
    checks.check("a daemon that has lost its lock writes no more", || {
        writes_no_more(&cluster)
    });
    checks.finish();
    Ok(())
}

fn goes_on(cluster: &Cluster) -> Result<()> {
    let kills = kills(4)?;
    let kill_loop = KillLoop {
        name: "rbd-kills",
        daemon: builder(cluster),
        volume: cluster.url("rbd/img"),
        each_round: ":",
        taken_over: "the lock is taken from",
        after_kill: Box::new(|_| Ok(())),
    };
    kill_loop.run(kills, |_| {
        let fenced = fenced(cluster)?;
        eprintln!("rbd-kills: the cluster serves {fenced} clients no more");
        ensure!(fenced >= kills, "{fenced} of {kills} were fenced");
        Ok(())
    })
}

/// A process that is not dead, only slow: its remaining writes have no effect.
fn writes_no_more(cluster: &Cluster) -> Result<()> {
    cluster.rbd(&["create", "--size", "64M", "stopped"])?;
    let url = cluster.url("rbd/stopped");
    let before = fenced(cluster)?;
    let bench = |daemon: &Daemon, words: &[&str]| {
        let target = format!("vfio-user://{}", daemon.socket().display());
        let load = ["bench", &target, "--bs", "4k", "--size", "32m"];
        let mut command = Command::new(program()?);
        let command = command.args(load).args(words);
        anyhow::Ok(
            command
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()?,
        )
    };
    let verified = ["--rw", "randrw", "--verify", "--destroy-data"];
    let first = builder(cluster).volume(url.clone()).start()?;
    let words = ["--rw", "randwrite", "--destroy-data", "--iodepth", "32"];
    let load = bench(&first, &[&words[..], &["--runtime", "60"]].concat())?;
    std::thread::sleep(Duration::from_secs(2));
    first.process().signal(Signal::STOP)?;
    let second = builder(cluster)
        .volume(format!("{url}&lock=break"))
        .start()?;
    let during = bench(&second, &[&verified[..], &["--runtime", "6"]].concat())?;
    second.wait_log("the lock is taken from", LIMIT)?;
    std::thread::sleep(Duration::from_secs(2));
    ensure!(fenced(cluster)? > before, "nobody was fenced");
    // Its writes are on their way again, while the other one verifies its own.
    first.process().signal(Signal::CONT)?;
    let during = during.wait_with_output()?;
    let said = String::from_utf8_lossy(&during.stderr).into_owned();
    ensure!(during.status.success(), "{said}\n{}", second.log()?);
    let load = load.wait_with_output()?;
    ensure!(!load.status.success(), "the first one has written");
    first.must_live()?;
    second.terminate()
}
