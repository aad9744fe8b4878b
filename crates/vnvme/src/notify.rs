//! The service manager that started this process, if one wants to know when it serves
//! (sd_notify(3)).

use anyhow::{Context, Result};
use std::ffi::{OsStr, OsString};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Names its socket.
const NAME: &str = "NOTIFY_SOCKET";

/// A connection to it, made while sockets can be reached by their paths.
pub struct ServiceManager(Option<UnixDatagram>);

impl ServiceManager {
    /// The one that the environment names. That it cannot be reached is logged: it will find out.
    pub fn from_environment() -> Self {
        let name = std::env::var_os(NAME).filter(|name| !name.is_empty());
        let socket = name.and_then(|name: OsString| match connect(&name) {
            Ok(socket) => Some(socket),
            Err(error) => {
                tracing::warn!(socket = ?name, error = format_args!("{error:#}"), "{NAME}");
                None
            }
        });
        Self(socket)
    }

    /// Says that clients are served from now on.
    pub fn ready(self) {
        let sent = self.0.map_or(Ok(0), |socket| socket.send(b"READY=1\n"));
        if let Err(error) = sent {
            tracing::warn!(%error, "{NAME}");
        }
    }
}

/// Its socket: a path, or "@" and an abstract name.
fn connect(name: &OsStr) -> Result<UnixDatagram> {
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(name),
    };
    let socket = UnixDatagram::unbound().context("socket")?;
    socket
        .connect_addr(&address.context("address")?)
        .context("connect")?;
    socket.set_nonblocking(true).context("socket")?;
    Ok(socket)
}
