//! Control API of this process: its sockets, and the calls behind them (crate `control`).

mod instances;
mod questions;
mod served_process;
mod socket_path;

pub use instances::{Instance, Instances};
pub(crate) use served_process::ServedProcess;
pub(crate) use socket_path::ControlPlace;
pub use socket_path::{VARIABLE, client_paths};

use crate::confine::Unconfined;
use crate::keep::{KeeperSession, ProcessSocket};
use anyhow::{Context, Result, ensure};
use config::access::{Principal, SocketAccess};
use control::Daemon;
use control::server::{Access, Endpoint, RunningServer, Server};
use receive::{AcceptedDescriptors, Intake, Receiver};
use std::os::fd::AsFd;
use std::sync::Arc;
use vfio_user::Listener;
use worker::ConnectRate;

/// Descriptors that clients of the control socket may send: none.
const WANTED: AcceptedDescriptors = AcceptedDescriptors {
    max_fds: 0,
    streams: false,
};

fn endpoint(
    listener: Listener,
    access: Access,
    rate: ConnectRate,
    receiver: &Receiver,
) -> Result<Endpoint> {
    let mut intake = Intake::new(receiver, WANTED);
    intake.connect(listener.as_fd()).context("control socket")?;
    Ok(Endpoint {
        listener: Box::new(listener),
        intake,
        access,
        rate: rate.0,
    })
}

/// The control socket. Its clients wait until they are answered.
pub struct ControlSocket(Server);

impl ControlSocket {
    /// Listens, if there is a path for the control socket. Listens at a second socket beside it if
    /// a group has read-only access.
    ///
    /// # Errors
    /// A socket cannot be made, and it was configured.
    pub fn listen(
        _outside: &Unconfined,
        place: &ControlPlace,
        group: Option<&Principal>,
        rate: ConnectRate,
        receiver: &Receiver,
        keeper: &KeeperSession,
    ) -> Result<Option<Self>> {
        let Some(path) = &place.path else {
            ensure!(
                group.is_none(),
                "control-group: its read-only socket needs a control socket beside it"
            );
            if place.is_default {
                tracing::warn!(
                    "no control socket, so vnvme list and other commands cannot reach this \
                     process: the user has no XDG_RUNTIME_DIR; name a socket with --control PATH"
                );
            }
            return Ok(None);
        };
        let inherited = keeper.inherited.listener(path, &SocketAccess::default())?;
        let bound = inherited.or_else(|| ProcessSocket::Control.left(keeper, path));
        let bind = || {
            // At the usual place another daemon may listen for as long as it lives.
            if !place.is_default {
                Listener::make_room(path)?;
            }
            Listener::bind(path)
        };
        let listener = match bound.map_or_else(bind, Ok) {
            Ok(listener) => listener,
            Err(error) if place.is_default && group.is_none() => {
                tracing::info!(%error, "no control socket; choose another path with --control PATH");
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        ProcessSocket::Control.keep_listener(keeper, &listener);
        let mut endpoints = vec![endpoint(listener, Access::Full, rate, receiver)?];
        if let Some(group) = group {
            let listener = questions::listen(path, group, keeper)?;
            endpoints.push(endpoint(listener, Access::ReadOnly, rate, receiver)?);
        }
        let server = Server::new(endpoints).context("control socket")?;
        Ok(Some(Self(server)))
    }

    /// Starts the thread that answers requests to the management API.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(self, daemon: Arc<dyn Daemon>) -> Result<RunningServer> {
        self.0.start(daemon).context("control thread")
    }
}
