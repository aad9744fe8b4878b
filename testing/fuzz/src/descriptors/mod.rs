//! Descriptors of every kind that a client can send, in messages of both protocols.
//!
//! The input is a script of messages: their contents, the number and kinds of their descriptors,
//! and whether a message is sent in two parts with descriptors in either. The servers read in
//! place, so that every kind reaches the code that takes descriptors. For any script, only memory
//! files are mapped, only eventfds become interrupts and kicks, and all other descriptors are
//! closed. Descriptors that can block their reader are for the receiver process, and for
//! `crates/program/vnvme/tests/poison`.

mod kinds;
mod vfio_user;
mod vhost_user;

use std::os::fd::BorrowedFd;

use kinds::Kinds;

/// A message, as the script has it.
#[derive(Clone, Copy)]
struct Message {
    what: u8,
    a: u8,
    b: u8,
    /// Number of attached descriptors.
    fds: u8,
}

/// First message of a client.
const VERSION: Message = Message {
    what: 0,
    a: 0,
    b: 0,
    fds: 0,
};

enum Server {
    VfioUser(Box<vfio_user::Server>),
    VhostUser(Box<vhost_user::Server>),
}

impl Server {
    fn message(&self, message: Message) -> Vec<u8> {
        match self {
            Server::VfioUser(server) => server.message(message),
            Server::VhostUser(server) => server.message(message),
        }
    }

    fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        match self {
            Server::VfioUser(server) => server.send(bytes, fds),
            Server::VhostUser(server) => server.send(bytes, fds),
        }
    }

    fn work(&mut self) {
        match self {
            Server::VfioUser(server) => server.work(),
            Server::VhostUser(server) => server.work(),
        }
    }

    fn end(self) -> u32 {
        match self {
            Server::VfioUser(server) => server.end(),
            Server::VhostUser(server) => server.end(),
        }
    }
}

/// Runs a script.
///
/// # Panics
///
/// If a descriptor is used as the wrong kind, or leaks.
pub fn descriptors(data: &[u8]) {
    run(data);
}

/// Runs a script; answers how many descriptors were taken.
fn run(data: &[u8]) -> u32 {
    let Some((&setup, script)) = data.split_first() else {
        return 0;
    };
    // Without descriptors nothing can be tried.
    let (Ok(kinds), Ok(vfio_user)) = (Kinds::new(), vfio_user::Server::new()) else {
        return 0;
    };
    kinds.check();
    let mut server = match setup & 1 {
        0 => Server::VfioUser(Box::new(vfio_user)),
        _ => Server::VhostUser(Box::new(vhost_user::Server::new())),
    };
    if setup & 2 == 0 {
        server.send(&server.message(VERSION), &[]);
        server.work();
    }
    for step in script.chunks_exact(6) {
        let [what, a, b, how, first, second] = *step else {
            continue;
        };
        // Mostly one, sometimes more than any protocol takes.
        let fds = match how & 15 {
            0 => 0,
            1..8 => 1,
            15 => 20,
            count => count - 6,
        };
        let fill = |start: u8| -> Vec<BorrowedFd<'_>> {
            let step = if how & 16 == 0 { 0 } else { second };
            let index = |i: u8| start.wrapping_add(i.wrapping_mul(step));
            (0..fds).map(|i| kinds.get(index(i)).1).collect()
        };
        let message = Message { what, a, b, fds };
        let bytes = server.message(message);
        if let Server::VhostUser(server) = &mut server {
            server.expect(message, kinds.get(first).0);
        }
        // Neither part is empty: a stream has no descriptors without a byte.
        let (head, rest) = bytes.split_at(1 + usize::from(b) % (bytes.len() - 1));
        match how >> 5 {
            0..6 => server.send(&bytes, &fill(first)),
            // In two parts; those of the second belong to no message.
            6 => {
                server.send(head, &fill(first));
                server.work();
                server.send(rest, &[]);
            }
            _ => {
                server.send(head, &[]);
                server.work();
                server.send(rest, &fill(first));
            }
        }
        server.work();
    }
    let taken = server.end();
    kinds.gone();
    taken
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::Chance;

    #[test]
    fn random_scripts_take_descriptors() {
        let mut chance = Chance::new();
        let mut taken = [0, 0];
        for _ in 0..1500 {
            // Mostly negotiated: little happens otherwise.
            let data = chance.script(300, |setup| *setup &= !2);
            let protocol = data.first().map_or(0, |setup| usize::from(setup & 1));
            taken[protocol] += run(&data);
        }
        assert!(taken.iter().all(|&n| n > 200), "{taken:?} were taken");
    }
}
