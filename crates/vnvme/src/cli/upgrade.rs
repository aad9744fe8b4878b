//! `vnvme upgrade`.

use super::target::Target;
use anyhow::{Context, Result, bail};
use clap::Args;
use control::Client;
use control::api::Stats;
use output::outln;
use serde_json::json;
use std::time::{Duration, Instant};

/// How long the process that follows may take until it serves, should both programs be tried.
const LIMIT: Duration = Duration::from_secs(30);
/// Between two questions.
const PAUSE: Duration = Duration::from_millis(20);

/// Options of `vnvme upgrade`.
#[derive(Args)]
pub struct UpgradeArgs {
    #[command(flatten)]
    target: Target,
}

impl UpgradeArgs {
    /// Has the running process replaced by the program that is where it was found, and says by
    /// which.
    pub fn run(self) -> Result<()> {
        let client = self.target.client()?;
        let before = client.stats()?.measured.process;
        client.upgrade().context("no upgrade")?;
        let after = wait_ready(&client, before.pid)?.measured.process;
        let ended = after.last_end.unwrap_or_default();
        // The keeper says so of one that has been replaced, and else why it has not been.
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

/// Waits until another process than the one of this number serves.
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
        if began.elapsed() > LIMIT {
            answer?;
            bail!(
                "no process serves within {} s: the log of vnvme says why",
                LIMIT.as_secs()
            );
        }
        std::thread::sleep(PAUSE);
    }
}
