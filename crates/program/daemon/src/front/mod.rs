//! Front-ends of this process's workers: every kind in one enum, so that no call in the path of a
//! command is virtual.

mod clients;
mod controller;
pub mod device;
pub mod irq_eventfd;
pub(crate) mod kind;
mod nvme;
mod nvme_tcp;
mod remote;
mod survival;
pub mod ublk;
mod vhost_blk;

pub use nvme::{NvmeFront, ServedController, intake};
pub use nvme_tcp::{NvmeTcpHost, NvmeTcpListener};
pub use remote::Remote;
pub use vhost_blk::VhostBlk;

use crate::parts;
use rustix::net::UCred;
use std::any::Any;
use std::time::Instant;
use volume::{Budget, Completion, PinPace};
use worker::Frontend;

/// Front-end that a worker serves, of any kind.
pub enum Front {
    /// NVMe controller that a VMM uses through a vfio-user socket.
    Nvme(Box<NvmeFront>),
    /// Queues of a controller that another worker controls.
    Remote(Box<Remote>),
    /// vhost-user-blk export: a virtio block device.
    VhostBlk(Box<VhostBlk>),
    /// Listening socket of an NVMe/TCP subsystem.
    NvmeTcpListener(Box<NvmeTcpListener>),
    /// Controller that a host uses over NVMe/TCP.
    NvmeTcpHost(Box<NvmeTcpHost>),
    /// Queue of a ublk block device.
    Ublk(Box<parts::ublk::Queue>),
}

/// Error with which a front-end has ended.
#[derive(Debug, thiserror::Error)]
pub enum FrontError {
    /// Error of a vhost-user-blk export.
    #[error(transparent)]
    VhostBlk(#[from] parts::vhost_blk::Error),
    /// Error of a queue of a ublk block device.
    #[error(transparent)]
    Ublk(#[from] parts::ublk::UblkError),
}

/// Worker of this process: a thread that serves front-ends.
pub type Worker = worker::Worker<Front>;
/// Handle by which other threads reach a worker.
pub type Handle = worker::Handle<Front>;

macro_rules! each {
    ($front:expr, $of:ident => $call:expr) => {
        match $front {
            Front::Nvme($of) => $call,
            Front::Remote($of) => $call,
            Front::VhostBlk($of) => $call,
            Front::NvmeTcpListener($of) => $call,
            Front::NvmeTcpHost($of) => $call,
            Front::Ublk($of) => $call,
        }
    };
}

impl Front {
    /// Returns the parts of a removed and closed front-end that may be dropped on another thread,
    /// which waits while sockets are closed and memory is unmapped. The rest is dropped here.
    pub fn into_remains(self) -> Option<Box<dyn Any + Send>> {
        match self {
            Self::Nvme(front) => Some(Box::new(front.into_remains())),
            Self::VhostBlk(front) => Some(Box::new(front.into_remains())),
            Self::NvmeTcpListener(front) => Some(Box::new(front.into_remains())),
            Self::Remote(_) | Self::NvmeTcpHost(_) | Self::Ublk(_) => None,
        }
    }

    /// Returns the client of the front-end; `Some(None)` for one without a process of its own: the
    /// kernel, a host.
    pub fn client(&mut self) -> Option<Option<UCred>> {
        match self {
            Self::Nvme(front) => front.has_client().then(|| front.client()),
            Self::VhostBlk(front) => front.has_client().then(|| front.client()),
            Self::NvmeTcpListener(front) => front.has_client().then_some(None),
            Self::Remote(_) | Self::NvmeTcpHost(_) | Self::Ublk(_) => Some(None),
        }
    }

    /// Disconnects the clients of a front-end that is about to be removed, where it needs to be
    /// told.
    pub fn dismiss(&mut self) {
        match self {
            Self::Nvme(front) => front.dismiss(),
            Self::NvmeTcpListener(front) => front.dismiss(),
            Self::VhostBlk(_) | Self::Remote(_) | Self::NvmeTcpHost(_) | Self::Ublk(_) => {}
        }
    }
}

impl Frontend for Front {
    type Error = FrontError;

    #[inline]
    fn poll(&mut self, now: Instant, budget: &mut Budget) -> bool {
        each!(self, front => front.poll(now, budget))
    }

    #[inline]
    fn complete(&mut self, completion: Completion) {
        each!(self, front => front.complete(completion));
    }

    #[inline]
    fn poll_volumes(&mut self, out: &mut Vec<Completion>) {
        each!(self, front => front.poll_volumes(out));
    }

    #[inline]
    fn finish_round(&mut self) -> bool {
        each!(self, front => front.finish_round())
    }

    #[inline]
    fn has_news(&self) -> bool {
        each!(self, front => front.has_news())
    }

    #[inline]
    fn in_flight(&self) -> usize {
        each!(self, front => front.in_flight())
    }

    #[inline]
    fn must_poll(&self) -> bool {
        each!(self, front => front.must_poll())
    }

    #[inline]
    fn keeps_window(&self) -> bool {
        each!(self, front => front.keeps_window())
    }

    #[inline]
    fn has_more(&self) -> bool {
        each!(self, front => front.has_more())
    }

    #[inline]
    fn is_trapped(&self) -> bool {
        each!(self, front => front.is_trapped())
    }

    fn arm(&mut self) -> bool {
        each!(self, front => front.arm())
    }

    fn needs_recheck(&self) -> bool {
        each!(self, front => front.needs_recheck())
    }

    fn recheck(&mut self) -> bool {
        each!(self, front => front.recheck())
    }

    fn deadline(&self) -> Option<Instant> {
        each!(self, front => front.deadline())
    }

    fn drain_messages(&mut self) -> bool {
        each!(self, front => front.drain_messages())
    }

    fn update_volumes(&mut self) {
        each!(self, front => front.update_volumes());
    }

    fn housekeeping(&mut self, now: Instant) {
        each!(self, front => front.housekeeping(now));
    }

    fn is_pinning(&self) -> bool {
        each!(self, front => front.is_pinning())
    }

    fn pin(&mut self, pace: &mut PinPace) {
        each!(self, front => front.pin(pace));
    }

    fn ready(&mut self, token: u32) {
        each!(self, front => front.ready(token));
    }

    fn read_on(&mut self) {
        each!(self, front => front.read_on());
    }

    fn flush(&mut self) {
        each!(self, front => front.flush());
    }

    fn is_drained(&self) -> bool {
        each!(self, front => front.is_drained())
    }

    fn close(&mut self) -> Result<(), FrontError> {
        match self {
            Front::Nvme(front) => front.close().map_err(|never| match never {}),
            Front::Remote(front) => front.close().map_err(|never| match never {}),
            Front::NvmeTcpListener(front) => front.close().map_err(|never| match never {}),
            Front::NvmeTcpHost(front) => front.close().map_err(|never| match never {}),
            Front::VhostBlk(front) => Ok(front.close()?),
            Front::Ublk(front) => Ok(front.close()?),
        }
    }

    fn has_ended(&self) -> bool {
        each!(self, front => front.has_ended())
    }
}
