//! Asks the process behind a control socket.

use super::{DEVICE_TIMEOUT, Reply, Request, TIMEOUT};
use crate::counters::Stats;
use crate::devices::{DeviceChange, DeviceStatus};
use crate::direct::{PathChange, PathChoice};
use crate::limits::{Change, VolumeLimits};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Asks the process behind a control socket for its counters.
pub fn stats(path: &Path) -> Result<Stats> {
    match ask(path, "stats", &serde_json::Map::new(), TIMEOUT)? {
        Reply::Stats(stats) => Ok(*stats),
        reply => refused(path, reply),
    }
}

/// Changes limits in the process behind a control socket; answers those of the volumes that were
/// meant.
pub fn limits(path: &Path, change: &Change) -> Result<Vec<VolumeLimits>> {
    match ask(path, "limits", change, TIMEOUT)? {
        Reply::Limits(limits) => Ok(limits),
        reply => refused(path, reply),
    }
}

/// Changes paths in the process behind a control socket; answers socket, namespace and path of
/// those that were meant.
pub fn paths(path: &Path, change: &PathChange) -> Result<Vec<(PathBuf, u32, PathChoice)>> {
    match ask(path, "path", change, TIMEOUT)? {
        Reply::Paths(paths) => Ok(paths),
        reply => refused(path, reply),
    }
}

/// Suspends or resumes a device of the process behind a control socket; answers how it is then.
pub fn device(path: &Path, change: &DeviceChange) -> Result<DeviceStatus> {
    match ask(path, "device", change, DEVICE_TIMEOUT)? {
        Reply::Device(status) => Ok(status),
        reply => refused(path, reply),
    }
}

fn refused<T>(path: &Path, reply: Reply) -> Result<T> {
    match reply {
        Reply::Error(error) => bail!("{}: {error}", path.display()),
        _ => bail!("{}: an answer to another question", path.display()),
    }
}

fn ask(path: &Path, method: &str, arguments: &impl Serialize, timeout: Duration) -> Result<Reply> {
    let arguments = match serde_json::to_value(arguments)? {
        serde_json::Value::Object(arguments) => arguments,
        _ => serde_json::Map::new(),
    };
    let stream = UnixStream::connect(path).with_context(|| {
        format!(
            "{} (is a vnvme serve --control {} running?)",
            path.display(),
            path.display()
        )
    })?;
    stream.set_read_timeout(Some(timeout))?;
    let mut request = serde_json::to_vec(&Request {
        method: method.into(),
        arguments,
    })?;
    request.push(b'\n');
    (&stream).write_all(&request).context("request")?;
    let mut line = String::new();
    BufReader::new(&stream)
        .read_line(&mut line)
        .context("answer")?;
    serde_json::from_str(&line).context("answer")
}
