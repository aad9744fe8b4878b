//! Address of an NBD server and name of its export, parsed from a URL.

use remote::{Address, HostPort, HostPortError, decode};
use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};

/// Default TCP port of NBD (IANA).
pub const PORT: u16 = 10809;

/// Value that was parsed from a URL, or the error message.
pub type Parsed<T> = Result<T, String>;

/// Address of an NBD server, and the name of one of its exports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdServer {
    /// Network address or Unix socket of the NBD server.
    pub address: Address,
    /// Name of the export on the server; empty for the default export.
    pub export: String,
}

impl NbdServer {
    /// Parses an export behind a Unix socket: `name` is the part of the URL after `nbd+unix://`, a
    /// slash and the export.
    ///
    /// # Errors
    /// A message when `name` does not begin with a slash or its export cannot be decoded.
    pub fn unix(name: &str, socket: &str) -> Parsed<Self> {
        let Some(export) = name.strip_prefix('/') else {
            return Err(match name {
                "" => "nbd+unix:// is followed by a slash and the export's name: \
                       nbd+unix:///EXPORT?socket=PATH"
                    .into(),
                host => format!(
                    "nbd+unix:// names no host, but it has \"{host}\": \
                     nbd+unix:///EXPORT?socket=PATH"
                ),
            });
        };
        let socket = decode(socket)?;
        if socket.is_empty() {
            return Err("the server's socket has no name: socket=PATH".into());
        }
        Ok(Self {
            address: Address::Unix(socket.into()),
            export: decode(export)?,
        })
    }

    /// Parses an export behind TCP: `name` is the part of the URL after `nbd://`, that is HOST,
    /// HOST:PORT or \[ADDRESS\]:PORT, then a slash and the export.
    ///
    /// # Errors
    /// A message when the host, the port or the export is invalid.
    pub fn tcp(name: &str) -> Parsed<Self> {
        let (place, export) = name.split_once('/').unwrap_or((name, ""));
        let place = HostPort::parse(place, PORT).map_err(|wrong| match wrong {
            HostPortError::NoHost => {
                "nbd:// names the server's host: nbd://HOST:PORT/EXPORT".to_owned()
            }
            HostPortError::Bracket => {
                "an IPv6 address ends with a bracket: nbd://[::1]:10809/EXPORT".to_owned()
            }
            HostPortError::Port(text) => {
                format!("\"{text}\" is not a port: a number from 1 to 65535 follows the host")
            }
        })?;
        let HostPort { host, port } = place;
        Ok(Self {
            address: Address::Tcp { host, port },
            export: decode(export)?,
        })
    }

    /// Resolves the server's host name to addresses; the list is empty for a Unix socket. Asks the
    /// system's resolver, which may take some time.
    ///
    /// # Errors
    /// The I/O error of the resolver.
    pub fn resolve(&self) -> std::io::Result<Vec<SocketAddr>> {
        match &self.address {
            Address::Unix(_) => Ok(Vec::new()),
            Address::Tcp { host, port } => Ok((host.as_str(), *port).to_socket_addrs()?.collect()),
        }
    }
}

impl fmt::Display for NbdServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let export = self.export.escape_debug();
        match &self.address {
            Address::Unix(path) => {
                write!(f, "nbd+unix:///{export}?socket={}", path.display())
            }
            Address::Tcp { host, port } if host.contains(':') => {
                write!(f, "nbd://[{host}]:{port}/{export}")
            }
            Address::Tcp { host, port } => write!(f, "nbd://{host}:{port}/{export}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_server_and_export() {
        let server = NbdServer::unix("/vm%2f0", "/run/nbd%20a.sock").unwrap();
        assert_eq!(server.address, Address::Unix("/run/nbd a.sock".into()));
        assert_eq!(server.export, "vm/0");
        let of =
            |text: &str| NbdServer::tcp(text).map(|server| (server.to_string(), server.export));
        let good = |text: &str| of(text).unwrap();
        assert_eq!(good("host"), ("nbd://host:10809/".into(), String::new()));
        assert_eq!(
            good("host:1/a/b"),
            ("nbd://host:1/a/b".into(), "a/b".into())
        );
        assert_eq!(good("[::1]:7/x").0, "nbd://[::1]:7/x");
        assert_eq!(good("[::1]/x").0, "nbd://[::1]:10809/x");
        for (text, why) in [
            ("", "names the server's host"),
            (":1/x", "names the server's host"),
            ("host:0/x", "not a port"),
            ("host:99999", "not a port"),
            ("host:nbd", "not a port"),
            ("[::1", "bracket"),
            ("host/%", "hexadecimal"),
            ("host/%0", "hexadecimal"),
            ("host/%00", "never 00"),
            ("host/%ff", "UTF-8"),
        ] {
            assert!(of(text).unwrap_err().contains(why), "{text}");
        }
        assert!(
            NbdServer::unix("host/x", "s")
                .unwrap_err()
                .contains("host/x")
        );
        assert!(NbdServer::unix("", "s").unwrap_err().contains("slash"));
        assert!(
            NbdServer::unix("/", "")
                .unwrap_err()
                .contains("socket=PATH")
        );
    }
}
