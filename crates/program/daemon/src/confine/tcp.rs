//! Addresses that this process listens at.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

/// Time to wait for another process that listens at the address: it may be ending, as one does
/// after its keeper was killed.
const ENDING: Duration = Duration::from_secs(1);
/// Interval between two attempts to listen at an address.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Opens a TCP socket that listens at an address.
///
/// # Errors
/// The error of the last attempt.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    listen_within(address, ENDING)
}

fn listen_within(address: SocketAddr, limit: Duration) -> io::Result<TcpListener> {
    let end = Instant::now() + limit;
    loop {
        match TcpListener::bind(address) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < end => {
                std::thread::sleep(RETRY_INTERVAL);
            }
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listen_waits_for_address_in_use() {
        let first = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = first.local_addr().unwrap();
        assert_eq!(
            listen(address).unwrap_err().kind(),
            io::ErrorKind::AddrInUse
        );
        std::thread::scope(|scope| {
            // Long enough for any machine: it ends as soon as the address is free.
            let second = scope.spawn(|| listen_within(address, Duration::from_secs(60)));
            std::thread::sleep(10 * RETRY_INTERVAL);
            drop(first);
            second.join().unwrap().unwrap();
        });
    }
}
