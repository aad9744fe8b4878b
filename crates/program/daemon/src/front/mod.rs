//! Front-ends of this process's workers: every kind in one enum, so that no call in the path of a
//! command is virtual.

mod clients;
mod controller;
pub mod device;
pub mod irq_eventfd;
pub(crate) mod kind;
mod live;
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

use crate::export::Pump;
use crate::parts;
use rustix::net::UCred;
use std::any::Any;
use std::convert::Infallible;

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
    /// Requests of the clients of an export over NBD.
    Export(Box<Pump>),
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

impl From<Infallible> for FrontError {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

/// Worker of this process: a thread that serves front-ends.
pub type Worker = worker::Worker<Front>;
/// Handle by which other threads reach a worker.
pub type Handle = worker::Handle<Front>;

impl Front {
    /// Returns the parts of a removed and closed front-end that may be dropped on another thread,
    /// which waits while sockets are closed and memory is unmapped. The rest is dropped here.
    pub fn into_remains(self) -> Option<Box<dyn Any + Send>> {
        match self {
            Self::Nvme(front) => Some(Box::new(front.into_remains())),
            Self::VhostBlk(front) => Some(Box::new(front.into_remains())),
            Self::NvmeTcpListener(front) => Some(Box::new(front.into_remains())),
            Self::Remote(_) | Self::NvmeTcpHost(_) | Self::Ublk(_) | Self::Export(_) => None,
        }
    }

    /// Returns the client of the front-end; `Some(None)` for one without a process of its own: the
    /// kernel, a host.
    pub fn client(&mut self) -> Option<Option<UCred>> {
        match self {
            Self::Nvme(front) => front.has_client().then(|| front.client()),
            Self::VhostBlk(front) => front.has_client().then(|| front.client()),
            Self::NvmeTcpListener(front) => front.has_client().then_some(None),
            Self::Remote(_) | Self::NvmeTcpHost(_) | Self::Ublk(_) | Self::Export(_) => Some(None),
        }
    }

    /// Keeps clients from connecting, until [`Front::admit_clients`]. `false`: the front-end has a
    /// client, commands of one are outstanding, another process may get the volume, or its kind
    /// cannot wait.
    pub fn withhold(&mut self) -> bool {
        match self {
            Self::Nvme(front) => front.withhold(),
            Self::VhostBlk(front) => front.withhold(),
            _ => false,
        }
    }

    /// Ends [`Front::withhold`].
    pub fn admit_clients(&mut self) {
        match self {
            Self::Nvme(front) => front.admit_clients(),
            Self::VhostBlk(front) => front.admit_clients(),
            _ => {}
        }
    }

    /// Disconnects the clients of a front-end that is about to be removed, where it needs to be
    /// told.
    pub fn dismiss(&mut self) {
        match self {
            Self::Nvme(front) => front.dismiss(),
            Self::NvmeTcpListener(front) => front.dismiss(),
            Self::VhostBlk(_)
            | Self::Remote(_)
            | Self::NvmeTcpHost(_)
            | Self::Ublk(_)
            | Self::Export(_) => {}
        }
    }
}

worker::frontend_enum! {
    Front, FrontError: Nvme, Remote, VhostBlk, NvmeTcpListener, NvmeTcpHost, Ublk, Export
}
