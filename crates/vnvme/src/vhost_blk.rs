//! `vhost-user-blk` exports: a volume for a guest with a virtio driver.

use crate::control::Registry;
use crate::identity;
use crate::open::{Opened, Opener, is_within};
use crate::options::{Url, url};
use crate::outln;
use crate::output::OutputError;
use crate::parts::vhost_blk::{Attach, Backend, DiskOptions, Export, QueueStats, Stats};
use crate::sizes::Sizes;
use crate::spec::NamespaceSpec;
use anyhow::{Context as _, Result};
use driver::NvmeVolume;
use probes::LogLimit;
use rustix::event::{EventfdFlags, eventfd};
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use vfio_user::Listener;
use worker::Context;

/// One export: a socket and its volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VhostBlkSpec {
    /// Where the VMM connects.
    pub socket: PathBuf,
    /// Path or URL.
    pub volume: Url,
    /// Most request queues.
    pub queues: Option<u16>,
    /// Entries of a queue that requests are made for.
    pub queue_size: Option<u16>,
    /// Serial number.
    pub serial: Option<String>,
    /// Logical block size in bytes.
    pub block_size: Option<u32>,
    /// Refuse writes.
    pub read_only: Option<bool>,
    /// Volatile write cache on at first.
    pub write_cache: Option<bool>,
}

impl VhostBlkSpec {
    /// An export of a volume at a socket; the URL's options that are the export's are taken out of
    /// it.
    ///
    /// # Errors
    /// One of them cannot be read.
    pub fn parse(socket: &str, text: &str) -> Result<Self> {
        let spec = VhostBlkSpec {
            socket: socket.into(),
            ..url::parse(text)?
        };
        Ok(spec)
    }
}

/// An export that a worker serves.
pub struct VhostBlk {
    backend: Backend,
    /// Its file goes when this goes.
    _listener: Listener,
}

impl VhostBlk {
    /// Opens the volume and listens.
    pub fn new(
        spec: &VhostBlkSpec,
        max_in_flight: usize,
        context: &Context<'_>,
        opener: &Opener,
        registry: &Registry,
        sizes: &Sizes,
    ) -> Result<Self> {
        let span = tracing::error_span!("export", socket = %spec.socket.display());
        let _entered = span.clone().entered();
        // The socket comes first: a process that serves it already has the volume, too, and is the
        // better explanation.
        let listener = Listener::bind(&spec.socket)?;
        let Opened { volume, device, .. } = opener.open(&NamespaceSpec {
            volume: spec.volume.clone(),
            block_size: spec.block_size,
            read_only: spec.read_only,
            ..NamespaceSpec::default()
        })?;
        let serial = spec.serial.clone();
        let serial = serial.unwrap_or_else(|| identity::serial(&[volume.id()]));
        let defaults = DiskOptions::default();
        let disk = DiskOptions {
            serial,
            queues: spec.queues.unwrap_or(defaults.queues),
            queue_size: spec.queue_size.unwrap_or(defaults.queue_size),
            block_size: spec.block_size,
            write_cache: spec.write_cache.unwrap_or(defaults.write_cache),
        };
        let serial = disk.serial.clone();
        let resized = match is_within(&spec.volume) {
            true => None,
            false => {
                let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
                let resized = Arc::new(eventfd(0, flags).context("eventfd")?);
                sizes.watch(volume.clone(), &resized);
                Some(resized)
            }
        };
        let export = Export {
            volume,
            disk,
            listener: listener.as_fd().try_clone_to_owned().context("socket")?,
            max_in_flight,
            attach: device.map(attach),
            resized,
            span,
        };
        let backend = Backend::new(export, context).with_context(|| spec.volume.clone())?;
        tracing::info!(serial, "listening for vhost-user-blk");
        registry.enter_vhost_blk(&spec.socket, backend.stats());
        Ok(VhostBlk {
            backend,
            _listener: listener,
        })
    }
}

impl Deref for VhostBlk {
    type Target = Backend;

    fn deref(&self) -> &Backend {
        &self.backend
    }
}

impl DerefMut for VhostBlk {
    fn deref_mut(&mut self) -> &mut Backend {
        &mut self.backend
    }
}

/// Registers each client's memory with the device below.
fn attach(device: Arc<NvmeVolume>) -> Box<dyn Fn() -> Attach> {
    let copied = Arc::new(LogLimit::default());
    Box::new(move || {
        let (device, copied) = (device.clone(), copied.clone());
        Box::new(move |memory| match device.register(memory) {
            Ok(registration) => Some(Box::new(registration) as Box<dyn Any>),
            Err(error) => {
                copied.line(|left_out| {
                    let text = "guest memory is copied on its way to a device";
                    tracing::warn!(%error, left_out, "{text}");
                });
                None
            }
        })
    })
}

/// Counters of one export since the process began.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct VhostBlkCounters {
    /// Its socket.
    pub socket: PathBuf,
    /// A front-end is there.
    pub connected: bool,
    /// Front-ends that connected.
    pub connections: u64,
    /// Requests of an earlier process that were begun again.
    pub resubmitted: u64,
    /// Queues that were used, by index.
    pub queues: Vec<VhostBlkQueueCounters>,
}

/// Counters of one request queue.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct VhostBlkQueueCounters {
    /// Index.
    pub queue: usize,
    /// Requests fetched.
    pub requests: u64,
    /// Bytes read by the guest.
    pub bytes_read: u64,
    /// Bytes written by the guest.
    pub bytes_written: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Times that the guest rang.
    pub kicks: u64,
    /// Times that the queue was armed.
    pub arms: u64,
    /// Interrupts sent.
    pub notifications: u64,
}

impl VhostBlkCounters {
    pub fn of(socket: &Path, stats: &Stats) -> Self {
        let queue = |(queue, q): (usize, &QueueStats)| VhostBlkQueueCounters {
            queue,
            requests: q.requests.get(),
            bytes_read: q.bytes_read.get(),
            bytes_written: q.bytes_written.get(),
            errors: q.errors.get(),
            kicks: q.kicks.get(),
            arms: q.arms.get(),
            notifications: q.notifications.get(),
        };
        VhostBlkCounters {
            socket: socket.to_owned(),
            connected: stats.is_connected(),
            connections: stats.connections.get(),
            resubmitted: stats.resubmitted.get(),
            queues: stats
                .queues
                .iter()
                .enumerate()
                .map(queue)
                .filter(|q| q.requests + q.kicks > 0)
                .collect(),
        }
    }

    /// For people.
    pub fn print(&self) -> Result<(), OutputError> {
        outln!("{} (vhost-user-blk)", self.socket.display());
        outln!(
            "  {}   connections {}   resubmitted {}",
            if self.connected {
                "connected"
            } else {
                "not connected"
            },
            self.connections,
            self.resubmitted
        );
        outln!(
            "  {:>5} {:>12} {:>10} {:>10} {:>8} {:>10} {:>10} {:>13} {:>9}",
            "queue",
            "requests",
            "MB read",
            "MB written",
            "errors",
            "kicks",
            "arms",
            "notifications",
            "kicks/req"
        );
        for q in &self.queues {
            outln!(
                "  {:>5} {:>12} {:>10} {:>10} {:>8} {:>10} {:>10} {:>13} {:>9.3}",
                q.queue,
                q.requests,
                q.bytes_read / 1_000_000,
                q.bytes_written / 1_000_000,
                q.errors,
                q.kicks,
                q.arms,
                q.notifications,
                q.kicks as f64 / q.requests.max(1) as f64
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exports_options_are_taken_out_of_the_url() {
        let text = "/d/a.raw?direct=off&queues=4&serial=ROOT&queue-size=256&write-cache=off&iops=9";
        let spec = VhostBlkSpec::parse("/run/a", text).unwrap();
        assert_eq!(spec.socket, Path::new("/run/a"));
        assert_eq!(spec.volume.0, "/d/a.raw?direct=off&iops=9");
        assert_eq!((spec.queues, spec.queue_size), (Some(4), Some(256)));
        assert_eq!(spec.serial.as_deref(), Some("ROOT"));
        assert_eq!((spec.write_cache, spec.read_only), (Some(false), None));
        let plain = VhostBlkSpec::parse("s", "mem://1G?block-size=4096").unwrap();
        assert_eq!((&*plain.volume, plain.block_size), ("mem://1G", Some(4096)));
        for bad in [
            "a?queues=many",
            "a?queues=70000",
            "a?write-cache=maybe",
            "a?what",
        ] {
            assert!(VhostBlkSpec::parse("s", bad).is_err(), "{bad}");
        }
    }
}
