//! The control socket: asks a running `vnvme serve` for its counters.
//!
//! A request is one line of JSON, `{"method":"stats"}`,
//! `{"method":"limits","volume":"a.raw","iops":1000}`,
//! `{"method":"path","path":"generic","all":true}` or
//! `{"method":"device","device":"0000:44:00.0","action":"suspend"}`; the answer is one line of
//! JSON, and the connection ends. A thread of its own serves all clients ([`server`]): it reads the
//! workers' counters and sets limits without stopping them, and waits for no client.

mod client;
mod peer;
mod requests;
mod server;

pub use client::{device, limits, paths, stats};
pub use server::{ControlServer, ControlSocket};

use crate::counters::Stats;
use crate::devices::DeviceStatus;
use crate::direct::PathChoice;
use crate::limits::VolumeLimits;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Longest request, in bytes.
const REQUEST_MAX: usize = 4096;
/// How long a client may take for its request, and again for our answer.
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
    Stats(Box<Stats>),
    Limits(Vec<VolumeLimits>),
    Paths(Vec<(PathBuf, u32, PathChoice)>),
    Device(DeviceStatus),
    Error(String),
}
