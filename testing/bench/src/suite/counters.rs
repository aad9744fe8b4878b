//! Query of a server's counters through its control socket.

pub use control::api::{ControllerCounters, Cycles};

use anyhow::{Context, Result, bail};
use control::api::Stats;
use control::{Client, ClientError};
use serde::Deserialize;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Time limit for an answer in the older protocol.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns the counters of the server behind the control socket at `path`.
pub fn ask(path: &Path) -> Result<Stats> {
    match Client::new(vec![path.to_owned()])?.stats() {
        Err(ClientError::NotControl(_)) => ask_former(path),
        stats => Ok(stats?),
    }
}

/// Returns the counters of a server older than the HTTP interface: sends one line, and reads the
/// answer.
fn ask_former(path: &Path) -> Result<Stats> {
    #[derive(Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Reply {
        Stats(Box<Stats>),
        Error(String),
    }
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
        Reply::Stats(stats) => Ok(*stats),
        Reply::Error(error) => bail!("{}: {error}", path.display()),
    }
}
