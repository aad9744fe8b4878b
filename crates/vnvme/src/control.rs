//! The control socket: asks a running `vnvme serve` for its counters.
//!
//! A request is one line of JSON, `{"method":"stats"}`,
//! `{"method":"limits","volume":"a.raw","iops":1000}`,
//! `{"method":"path","path":"generic","all":true}` or
//! `{"method":"device","device":"0000:44:00.0","action":"suspend"}`; the answer is one line of
//! JSON. A thread of its own answers: it reads the workers' counters and sets limits without
//! stopping them.

use crate::counters::Stats;
use crate::devices::{DeviceChange, DeviceStatus};
use crate::direct::{PathChange, PathChoice};
use crate::limits::{Change, VolumeLimits};
use crate::registry::Registry;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use vfio_user::Listener;

/// Longest request, in bytes.
const REQUEST_MAX: u64 = 4096;
/// How long a client may take for its request and our answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// How long a device may take to shut down or to come up.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Serialize, Deserialize)]
struct Request {
    method: String,
    #[serde(flatten)]
    arguments: serde_json::Map<String, serde_json::Value>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Reply {
    Stats(Stats),
    Limits(Vec<VolumeLimits>),
    Paths(Vec<(PathBuf, u32, PathChoice)>),
    Device(DeviceStatus),
    Error(String),
}

/// Answers on `listener` until the process ends.
pub fn answer(listener: &Listener, registry: &Registry) {
    loop {
        let mut poll = [rustix::event::PollFd::new(
            listener,
            rustix::event::PollFlags::IN,
        )];
        match rustix::event::poll(&mut poll, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "control socket");
                return;
            }
        }
        match listener.accept() {
            Ok(Some(fd)) => {
                if let Err(error) = serve_one(UnixStream::from(fd), registry) {
                    tracing::debug!(error = format_args!("{error:#}"), "control client");
                }
            }
            Ok(None) => {}
            Err(error) => {
                // Out of descriptors, most likely: not a reason to spin.
                tracing::warn!(%error, "control socket");
                std::thread::sleep(TIMEOUT);
            }
        }
    }
}

fn serve_one(stream: UnixStream, registry: &Registry) -> Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut line = String::new();
    BufReader::new((&stream).take(REQUEST_MAX))
        .read_line(&mut line)
        .context("request")?;
    let reply = match serde_json::from_str::<Request>(&line) {
        Ok(request) if request.method == "stats" => Reply::Stats(registry.snapshot()),
        Ok(request) if request.method == "limits" => change_limits(registry, request.arguments),
        Ok(request) if request.method == "path" => change_paths(registry, request.arguments),
        Ok(request) if request.method == "device" => change_device(registry, request.arguments),
        Ok(request) => Reply::Error(format!(
            "unknown method \"{}\"; known: stats, limits, path, device",
            request.method
        )),
        Err(error) => Reply::Error(format!("no request: {error}")),
    };
    let mut text = serde_json::to_vec(&reply)?;
    text.push(b'\n');
    (&stream).write_all(&text).context("reply")
}

fn change_limits(
    registry: &Registry,
    arguments: serde_json::Map<String, serde_json::Value>,
) -> Reply {
    let change = serde_json::from_value::<Change>(arguments.into()).map_err(|e| e.to_string());
    match change.and_then(|change| registry.limits.change(&change)) {
        Ok(limits) => Reply::Limits(limits),
        Err(error) => Reply::Error(error),
    }
}

fn change_paths(
    registry: &Registry,
    arguments: serde_json::Map<String, serde_json::Value>,
) -> Reply {
    let change = serde_json::from_value::<PathChange>(arguments.into()).map_err(|e| e.to_string());
    match change.and_then(|change| registry.paths.change(&change)) {
        Ok(paths) => Reply::Paths(paths),
        Err(error) => Reply::Error(error),
    }
}

fn change_device(
    registry: &Registry,
    arguments: serde_json::Map<String, serde_json::Value>,
) -> Reply {
    let change =
        serde_json::from_value::<DeviceChange>(arguments.into()).map_err(|e| e.to_string());
    match change.and_then(|change| registry.devices.change(&change)) {
        Ok(status) => Reply::Device(status),
        Err(error) => Reply::Error(error),
    }
}

/// Asks the process behind a control socket for its counters.
pub fn stats(path: &Path) -> Result<Stats> {
    match ask(path, "stats", serde_json::Map::new())? {
        Reply::Stats(stats) => Ok(stats),
        reply => refused(path, reply),
    }
}

/// Changes limits in the process behind a control socket; answers those of the volumes that were
/// meant.
pub fn limits(path: &Path, change: &Change) -> Result<Vec<VolumeLimits>> {
    let arguments = match serde_json::to_value(change)? {
        serde_json::Value::Object(arguments) => arguments,
        _ => serde_json::Map::new(),
    };
    match ask(path, "limits", arguments)? {
        Reply::Limits(limits) => Ok(limits),
        reply => refused(path, reply),
    }
}

/// Changes paths in the process behind a control socket; answers socket, namespace and path of
/// those that were meant.
pub fn paths(path: &Path, change: &PathChange) -> Result<Vec<(PathBuf, u32, PathChoice)>> {
    let arguments = match serde_json::to_value(change)? {
        serde_json::Value::Object(arguments) => arguments,
        _ => serde_json::Map::new(),
    };
    match ask(path, "path", arguments)? {
        Reply::Paths(paths) => Ok(paths),
        reply => refused(path, reply),
    }
}

/// Suspends or resumes a device of the process behind a control socket; answers how it is then.
pub fn device(path: &Path, change: &DeviceChange) -> Result<DeviceStatus> {
    let arguments = match serde_json::to_value(change)? {
        serde_json::Value::Object(arguments) => arguments,
        _ => serde_json::Map::new(),
    };
    match ask_for(path, "device", arguments, DEVICE_TIMEOUT)? {
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

fn ask(
    path: &Path,
    method: &str,
    arguments: serde_json::Map<String, serde_json::Value>,
) -> Result<Reply> {
    ask_for(path, method, arguments, TIMEOUT)
}

fn ask_for(
    path: &Path,
    method: &str,
    arguments: serde_json::Map<String, serde_json::Value>,
    timeout: Duration,
) -> Result<Reply> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use controller::ControllerStats;
    use std::sync::Arc;

    fn ask(registry: &Registry, request: &[u8]) -> String {
        let (client, server) = UnixStream::pair().unwrap();
        (&client).write_all(request).unwrap();
        serve_one(server, registry).unwrap();
        let mut text = String::new();
        (&client).read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn answers_stats_and_explains_the_rest() {
        let registry = Registry::default();
        let stats = Arc::new(ControllerStats::new(2, 1));
        registry.enter(Path::new("/tmp/vm0.sock"), stats.clone());
        if let Some(queue) = stats.queues.get(1) {
            queue.commands.add(7);
            queue.mmio_doorbells.add(2);
        }
        let text = ask(&registry, b"{\"method\":\"stats\"}\n");
        let Reply::Stats(stats) = serde_json::from_str(&text).unwrap() else {
            panic!("{text}");
        };
        assert_eq!(stats.controllers.len(), 1);
        let queues = &stats.controllers[0].queues;
        assert_eq!(queues.len(), 1, "unused queues are left out");
        assert_eq!(
            (queues[0].qid, queues[0].commands, queues[0].mmio_doorbells),
            (1, 7, 2)
        );
        assert!(ask(&registry, b"{\"method\":\"dance\"}\n").contains("dance"));
        assert!(ask(&registry, b"what?\n").contains("error"));
        let long = [b'x'; REQUEST_MAX as usize];
        assert!(ask(&registry, &long).contains("error"));
    }
}
