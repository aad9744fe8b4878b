//! `vnvme upgrade`.

use super::target::DaemonTarget;
use anyhow::{Context, Result, bail};
use clap::Args;
use control::Client;
use control::api::Stats;
use output::outln;
use serde_json::json;
use std::time::{Duration, Instant};

/// Time limit for the new process, and for a second attempt with the old program.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause between two queries whether the new process serves.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Options of `vnvme upgrade`.
#[derive(Args)]
pub struct UpgradeArgs {
    #[command(flatten)]
    target: DaemonTarget,
}

impl UpgradeArgs {
    /// Replaces the running process, and prints the new version.
    pub fn run(self) -> Result<()> {
        let client = self.target.client()?;
        let before = client.stats()?.measured.process;
        client.upgrade().context("no upgrade")?;
        let after = wait_ready(&client, before.pid)?.measured.process;
        let ended = after.last_end.unwrap_or_default();
        // The keeper reports `REPLACED` after an upgrade, and otherwise the reason for the failure.
        if ended != keeper::REPLACED {
            bail!("{ended}");
        }
        let pause = after.last_pause_ns.map(Duration::from_nanos);
        let answer = json!({
            "pid": after.pid,
            "version": after.version,
            "version_before": before.version,
            "pause_ns": after.last_pause_ns,
        });
        self.target.print(&answer, |_| {
            let pause = pause.map_or(String::new(), |pause| {
                format!(" after a pause of {:.1} ms", pause.as_secs_f64() * 1e3)
            });
            outln!(
                "upgraded: version {} serves{pause} (before: {}), process {}",
                after.version,
                before.version,
                after.pid
            );
            Ok(())
        })
    }
}

/// Waits until a process with an ID other than `before` serves, and returns its counters.
fn wait_ready(client: &Client, before: u32) -> Result<Stats> {
    let began = Instant::now();
    loop {
        let answer = client.stats();
        if let Ok(stats) = &answer
            && stats.measured.process.pid != before
            && stats.measured.process.ready
        {
            return Ok(stats.clone());
        }
        if began.elapsed() > START_TIMEOUT {
            answer?;
            bail!(
                "no process serves after {} s: see the log of vnvme",
                START_TIMEOUT.as_secs()
            );
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}
