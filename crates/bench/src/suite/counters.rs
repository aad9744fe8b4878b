//! A server's counters, asked for by its control socket: what the suites use of all that
//! `vnvme stats` shows.

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long the server may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The answer to `stats`.
#[derive(Debug, Deserialize)]
pub struct Stats {
    /// One for each controller.
    pub controllers: Vec<ControllerCounters>,
    /// One for each vhost-user-blk export; how many there are is all that is asked.
    pub vhost_user_blk: Vec<serde::de::IgnoredAny>,
}

/// Counters of one controller since the process began.
#[derive(Debug, Deserialize)]
pub struct ControllerCounters {
    /// Queue pairs that were used.
    pub queues: Vec<QueueCounters>,
    /// Namespaces that have a direct path to a device.
    pub direct: Vec<PathCounters>,
}

/// Counters of one queue pair.
#[derive(Debug, Deserialize)]
pub struct QueueCounters {
    /// Queue ID; 0 is the admin queue.
    pub qid: usize,
    /// Commands fetched.
    pub commands: u64,
    /// Doorbells that came as messages.
    pub mmio_doorbells: u64,
    /// Cycles to send interrupts.
    pub interrupt_cycles: Cycles,
}

/// Counters of a namespace's direct path.
#[derive(Debug, Deserialize)]
pub struct PathCounters {
    /// One for each physical queue pair.
    pub lanes: Vec<LaneCounters>,
}

/// Counters of one physical queue pair's share for a namespace.
#[derive(Debug, Deserialize)]
pub struct LaneCounters {
    pub translate: Cycles,
    pub complete: Cycles,
}

/// Cycles of one kind of work.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Cycles {
    pub count: u64,
    pub total: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Reply {
    Stats(Stats),
    Error(String),
}

/// Asks the server behind the control socket at `path`.
pub fn ask(path: &Path) -> Result<Stats> {
    let stream = UnixStream::connect(path).with_context(|| format!("{}", path.display()))?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    (&stream)
        .write_all(b"{\"method\":\"stats\"}\n")
        .context("request")?;
    let mut line = String::new();
    BufReader::new(&stream)
        .read_line(&mut line)
        .context("answer")?;
    match serde_json::from_str(&line).context("answer")? {
        Reply::Stats(stats) => Ok(stats),
        Reply::Error(error) => bail!("{}: {error}", path.display()),
    }
}
