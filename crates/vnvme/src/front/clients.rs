//! The clients of a controller: who is accepted, what they send, when they go.

use super::nvme::{NvmeFront, TOKEN_CLIENT};
use crate::device::Waiting;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vfio_user::{Connection, ConnectionError, ConnectionStatus, Interest};

impl NvmeFront {
    /// Answers a VMM that waits for an unmap or a reset, once that has ended.
    #[inline]
    pub(super) fn finish_waiting(&mut self) -> bool {
        if !self.device.wait_is_over() {
            return false;
        }
        self.device.waiting = Waiting::No;
        let Some(connection) = &mut self.connection else {
            return false;
        };
        let status = connection.complete(&mut self.device, Ok(()));
        self.after(status);
        true
    }

    /// Accepts a client.
    pub(super) fn accept(&mut self) {
        // The old client may be gone without our having noticed yet.
        self.serve();
        self.close_if_gone();
        let socket = self.listener.path().display().to_string();
        let fd = match self.listener.accept() {
            Ok(Some(fd)) => fd,
            Ok(None) => return,
            Err(error) => {
                let log = &self.log;
                log.line(|left_out| tracing::warn!(socket, %error, left_out, "accept"));
                return;
            }
        };
        if self.connection.is_some() {
            self.log.line(|left_out| {
                tracing::warn!(
                    socket,
                    left_out,
                    "a second client was refused: this disk has one already"
                );
            });
            return;
        }
        let connection = Connection::with_limits(fd, self.device.protocol_limits());
        let pid = connection.peer().ok().map(|p| p.pid.as_raw_nonzero().get());
        let log = &self.log;
        log.line(|left_out| tracing::info!(socket, pid, left_out, "client connected"));
        self.connection = Some(connection);
        self.rewatch();
    }

    /// Ends the connection of a client that has closed its socket: what it left there is handled
    /// first, but nothing is waited for.
    fn close_if_gone(&mut self) {
        let gone = self.connection.as_ref().is_some_and(|connection| {
            let mut fds = [PollFd::new(connection, PollFlags::empty())];
            poll(&mut fds, Some(&Timespec::default())).is_ok()
                && fds.iter().any(|fd| fd.revents().contains(PollFlags::HUP))
        });
        if !gone {
            return;
        }
        // It cannot send more, so this ends.
        while std::mem::take(&mut self.more) {
            self.serve();
        }
        if let Some(mut connection) = self.connection.take() {
            let socket = self.listener.path().display();
            let log = &self.log;
            log.line(|left_out| tracing::info!(%socket, left_out, "client disconnected"));
            connection.close(&mut self.device);
            drop(connection);
            self.rewatch();
        }
    }

    /// Handles what a client has sent.
    pub(super) fn serve(&mut self) {
        let Some(connection) = &mut self.connection else {
            return;
        };
        let status = connection.on_ready(&mut self.device);
        self.after(status);
    }

    fn after(&mut self, status: Result<ConnectionStatus, ConnectionError>) {
        let socket = self.listener.path().display();
        match status {
            Ok(ConnectionStatus::Open | ConnectionStatus::Pending) => {}
            Ok(ConnectionStatus::MoreWork) => self.more = true,
            Ok(ConnectionStatus::Closed) => {
                let log = &self.log;
                log.line(|left_out| tracing::info!(%socket, left_out, "client disconnected"));
                self.connection = None;
            }
            Err(error) => {
                self.log.line(|left_out| {
                    tracing::warn!(%socket, %error, left_out, "client disconnected");
                });
                self.connection = None;
            }
        }
        self.rewatch();
    }

    /// Keeps the epoll set in step with what the connection waits for.
    fn rewatch(&mut self) {
        let Some(connection) = &self.connection else {
            // Closing its socket removed it from the set.
            self.watched = Interest::None;
            self.more = false;
            return;
        };
        let wanted = connection.interest();
        if wanted == self.watched {
            return;
        }
        let interest = match wanted {
            Interest::Writable => worker::Interest::Writable,
            _ => worker::Interest::Readable,
        };
        let result = match (self.watched, wanted) {
            (_, Interest::None) => self.descriptors.remove(connection),
            (Interest::None, _) => self.descriptors.add(connection, TOKEN_CLIENT, interest),
            _ => self.descriptors.modify(connection, TOKEN_CLIENT, interest),
        };
        match result {
            Ok(()) => self.watched = wanted,
            Err(error) => tracing::error!(%error, "epoll"),
        }
    }
}
