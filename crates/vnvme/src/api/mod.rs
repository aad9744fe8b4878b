//! The control API of this process: its sockets, and what answers there (crate `control`).

mod place;
mod served;

pub use place::{ControlPlace, VARIABLE, client_paths};
pub use served::Served;

use anyhow::{Context, Result};
use control::Daemon;
use control::server::{Access, Endpoint, Running, Server};
use receive::{Intake, Receiver, Wanted};
use std::os::fd::AsFd;
use std::sync::Arc;
use vfio_user::Listener;
use worker::ConnectRate;

/// No descriptors.
const WANTED: Wanted = Wanted {
    max_fds: 0,
    streams: false,
};

/// The control socket, whose clients wait until they are answered.
pub struct ControlSocket(Server);

impl ControlSocket {
    /// Listens, if there is to be a control socket.
    ///
    /// # Errors
    /// The socket cannot be made, and it was asked for.
    pub fn listen(
        place: &ControlPlace,
        rate: ConnectRate,
        receiver: &Receiver,
    ) -> Result<Option<Self>> {
        let Some(path) = &place.path else {
            return Ok(None);
        };
        let listener = match Listener::bind(path) {
            Ok(listener) => listener,
            Err(error) if place.is_default => {
                tracing::info!(%error, "no control socket: --control PATH makes another one");
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        let mut intake = Intake::new(receiver, WANTED);
        intake.connect(listener.as_fd()).context("control socket")?;
        let endpoint = Endpoint {
            listener: Box::new(listener),
            intake,
            access: Access::Full,
            rate: rate.0,
        };
        let server = Server::new(vec![endpoint]).context("control socket")?;
        Ok(Some(Self(server)))
    }

    /// Starts the thread that answers.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(self, daemon: Arc<dyn Daemon>) -> Result<Running> {
        self.0.start(daemon).context("control thread")
    }
}
