//! Hosts, ports and names in URLs.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

/// Network address of a server: a Unix socket, or a TCP host and port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// Path of a Unix socket on this host.
    Unix(PathBuf),
    /// TCP host and port of the server.
    Tcp {
        /// Host name or IP address as configured, without brackets.
        host: String,
        /// TCP port of the server.
        port: u16,
    },
}

impl From<HostPort> for Address {
    fn from(HostPort { host, port }: HostPort) -> Self {
        Self::Tcp { host, port }
    }
}

/// Host name or IP address, and a TCP port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HostPort {
    /// Host name or IP address as configured, without brackets.
    pub host: String,
    /// TCP port on the host.
    pub port: u16,
}

/// Reason why the text of a host and port is invalid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostPortError {
    /// The text has no host.
    NoHost,
    /// An IPv6 address lacks its closing bracket.
    Bracket,
    /// The port is not a valid TCP port number.
    Port(String),
}

impl HostPort {
    /// Parses HOST, HOST:PORT or \[ADDRESS\]:PORT; `port` is the default.
    ///
    /// # Errors
    /// [`HostPortError`] when the host is empty, a bracket is missing, or the port is invalid.
    pub fn parse(text: &str, port: u16) -> Result<Self, HostPortError> {
        let (host, given) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']').ok_or(HostPortError::Bracket)?;
                match port.strip_prefix(':') {
                    None if !port.is_empty() => return Err(HostPortError::Port(port.into())),
                    port => (host, port),
                }
            }
            None => match text.rsplit_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            },
        };
        let port = match given {
            None => port,
            Some(text) => {
                let port = text.parse().ok().filter(|port| *port > 0);
                port.ok_or_else(|| HostPortError::Port(text.into()))?
            }
        };
        if host.is_empty() {
            return Err(HostPortError::NoHost);
        }
        let host = host.into();
        Ok(Self { host, port })
    }

    /// Resolves the host's name to addresses. Asks the system's resolver, which may take some time.
    ///
    /// # Errors
    /// The I/O error of the resolver.
    pub fn resolve(&self) -> std::io::Result<Vec<SocketAddr>> {
        Ok((self.host.as_str(), self.port).to_socket_addrs()?.collect())
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') {
            write!(f, "[{host}]:{port}")
        } else {
            write!(f, "{host}:{port}")
        }
    }
}

/// Decodes a part of a URL, in which bytes can be written as `%` and two hexadecimal digits.
///
/// # Errors
/// A message, if a `%` is not followed by two hexadecimal digits, encodes a zero byte, or the
/// result is not UTF-8.
pub fn decode(text: &str) -> Result<String, String> {
    let wrong = || format!("\"{text}\": a % is followed by two hexadecimal digits, and never 00");
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, others)) = rest.split_first() {
        rest = others;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let (digits, others) = rest.split_first_chunk::<2>().ok_or_else(wrong)?;
        let digits = digits.map(|digit| char::from(digit).to_digit(16));
        let [Some(high), Some(low)] = digits else {
            return Err(wrong());
        };
        // Two hexadecimal digits form a byte.
        match (high << 4 | low) as u8 {
            0 => return Err(wrong()),
            byte => bytes.push(byte),
        }
        rest = others;
    }
    String::from_utf8(bytes).map_err(|_| format!("\"{text}\" is not UTF-8"))
}

/// Encodes text as a part of a URL that [`decode`] reads. Reserved characters, and those that
/// affect a terminal, are written as `%` and two hexadecimal digits.
pub fn encode(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~:@!$'()*+,;=".contains(&byte);
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if plain(byte) {
            encoded.push(byte.into())
        } else {
            encoded += &format!("%{byte:02x}")
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_ports_are_parsed() {
        let of = |text: &str| HostPort::parse(text, 7).map(|place| place.to_string());
        for (text, place) in [
            ("host", "host:7"),
            ("host:1", "host:1"),
            ("10.0.0.1:65535", "10.0.0.1:65535"),
            ("[::1]", "[::1]:7"),
            ("[fe80::1]:8", "[fe80::1]:8"),
        ] {
            assert_eq!(of(text), Ok(place.into()), "{text}");
        }
        let port = |text: &str| Err(HostPortError::Port(text.into()));
        for (text, why) in [
            ("", Err(HostPortError::NoHost)),
            (":1", Err(HostPortError::NoHost)),
            ("[]:1", Err(HostPortError::NoHost)),
            ("[::1", Err(HostPortError::Bracket)),
            ("[::1]7", port("7")),
            ("host:0", port("0")),
            ("host:65536", port("65536")),
            ("host:", port("")),
        ] {
            assert_eq!(of(text), why, "{text}");
        }
    }

    #[test]
    fn percent_escapes_round_trip() {
        assert_eq!(decode("a%2Fb%20"), Ok("a/b ".into()));
        for text in ["nqn.2014-08.org:x_1", "a/b?c#d&e=%00\u{1b}[2J", "ü \n"] {
            assert_eq!(decode(&encode(text)).as_deref(), Ok(text));
            assert!(!encode(text).contains(['/', '?', '#', '&', ' ', '\u{1b}']));
        }
        assert_eq!(encode("nqn.2014-08.org:x_1"), "nqn.2014-08.org:x_1");
        for (text, why) in [
            ("%", "hexadecimal"),
            ("%0", "hexadecimal"),
            ("%0g", "hexadecimal"),
            ("%00", "never 00"),
            ("%ff", "UTF-8"),
        ] {
            assert!(decode(text).unwrap_err().contains(why), "{text}");
        }
    }
}
