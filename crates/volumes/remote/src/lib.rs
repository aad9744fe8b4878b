//! Common parts of volumes on servers, for any protocol: its properties ([`RemoteKind`]),
//! addresses, connecting within a time limit, threads that reconnect, the end of the previous
//! process's connections, a worker's queue ([`queue`]), and reporting of the connection state.
//!
//! This crate handles sockets and threads, and reaches guest memory only through the segments of
//! requests. It contains no protocol.
#![forbid(unsafe_code)]

mod address;
mod connection_state;
mod kind;
mod previous;
pub mod queue;
mod reconnect;
mod socket;
mod split_requests;

pub use address::{Address, HostPort, HostPortError, decode, encode};
pub use connection_state::{ConnectionState, ReachWatch, Reachable};
pub use kind::{RemoteKind, volume_kinds};
pub use previous::{ConnectionGuard, ConnectionKeeper, PreviousError, end_previous};
pub use reconnect::{LOG_INTERVAL, pause, spawn};
pub use socket::{Conversation, connect_tcp, connect_unix};

/// Returns text of a server as it may be shown: control characters are escaped.
pub fn printable(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let shown = text.chars().map(|c| {
        if c.is_control() {
            c.escape_default().to_string()
        } else {
            c.to_string()
        }
    });
    shown.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_server_is_shown_without_control_characters() {
        let shown = printable(b"QEMU\x1b[2J\nforged \xff");
        assert_eq!(shown, "QEMU\\u{1b}[2J\\nforged \u{fffd}");
    }
}
