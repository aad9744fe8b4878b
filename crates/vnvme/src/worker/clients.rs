//! The clients: who is let in, what they send, when they go.

use super::events::listener_token;
use super::{Slot, Worker};
use crate::device::Waiting;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use vfio_user::{Connection, ConnectionError, Interest, Status};

impl Worker {
    /// Answers a VMM that waits for an unmap or a reset, once that is over.
    pub(super) fn finish_waiting(&mut self, index: usize) -> bool {
        let Some(slot) = self.slots.get_mut(index) else {
            return false;
        };
        if !slot.device.wait_is_over() {
            return false;
        }
        slot.device.waiting = Waiting::No;
        let Some(connection) = &mut slot.connection else {
            return false;
        };
        let status = connection.complete(&mut slot.device, Ok(()));
        self.after(index, status);
        true
    }

    /// Lets a client in.
    pub(super) fn accept(&mut self, index: usize) {
        // The old client may be gone without our having noticed yet.
        self.serve(index);
        self.let_go_if_gone(index);
        let Some(slot) = self.slots.get_mut(index) else {
            return;
        };
        let socket = slot.listener.path().display().to_string();
        let fd = match slot.listener.accept() {
            Ok(Some(fd)) => fd,
            Ok(None) => return,
            Err(error) => {
                let log = &slot.log;
                log.line(|left_out| tracing::warn!(socket, %error, left_out, "accept"));
                return;
            }
        };
        if slot.connection.is_some() {
            slot.log.line(|left_out| {
                tracing::warn!(
                    socket,
                    left_out,
                    "a second client was refused: this disk has one already"
                );
            });
            return;
        }
        let connection = Connection::new(fd);
        let pid = connection.peer().ok().map(|p| p.pid.as_raw_nonzero().get());
        let log = &slot.log;
        log.line(|left_out| tracing::info!(socket, pid, left_out, "client connected"));
        slot.connection = Some(connection);
        self.rewatch(index);
    }

    /// Ends the connection of a client that has closed its socket: what it left there is handled first, but nothing is
    /// waited for.
    fn let_go_if_gone(&mut self, index: usize) {
        let gone = |slot: &Slot| {
            let Some(connection) = &slot.connection else {
                return false;
            };
            let mut fds = [PollFd::new(connection, PollFlags::empty())];
            poll(&mut fds, Some(&Timespec::default())).is_ok()
                && fds[0].revents().contains(PollFlags::HUP)
        };
        if !self.slots.get(index).is_some_and(gone) {
            return;
        }
        // It cannot send more, so this ends.
        while let Some(slot) = self.slots.get_mut(index)
            && std::mem::take(&mut slot.more)
        {
            self.serve(index);
        }
        if let Some(slot) = self.slots.get_mut(index)
            && let Some(mut connection) = slot.connection.take()
        {
            let socket = slot.listener.path().display();
            let log = &slot.log;
            log.line(|left_out| tracing::info!(%socket, left_out, "client disconnected"));
            connection.close(&mut slot.device);
            drop(connection);
            self.rewatch(index);
        }
    }

    /// Handles what a client has sent.
    pub(super) fn serve(&mut self, index: usize) {
        let Some(Slot {
            connection: Some(connection),
            device,
            ..
        }) = self.slots.get_mut(index)
        else {
            return;
        };
        let status = connection.on_ready(device);
        self.after(index, status);
    }

    fn after(&mut self, index: usize, status: Result<Status, ConnectionError>) {
        let Some(slot) = self.slots.get_mut(index) else {
            return;
        };
        let socket = slot.listener.path().display();
        match status {
            Ok(Status::Open | Status::Pending) => {}
            Ok(Status::MoreWork) => slot.more = true,
            Ok(Status::Closed) => {
                let log = &slot.log;
                log.line(|left_out| tracing::info!(%socket, left_out, "client disconnected"));
                slot.connection = None;
            }
            Err(error) => {
                slot.log.line(|left_out| {
                    tracing::warn!(%socket, %error, left_out, "client disconnected");
                });
                slot.connection = None;
            }
        }
        self.rewatch(index);
    }

    /// Keeps the epoll set in step with what the connection waits for.
    fn rewatch(&mut self, index: usize) {
        let Some(slot) = self.slots.get_mut(index) else {
            return;
        };
        let Some(connection) = &slot.connection else {
            // Closing its socket took it out of the set.
            slot.watched = Interest::None;
            slot.more = false;
            return;
        };
        let wanted = connection.interest();
        if wanted == slot.watched {
            return;
        }
        let data = epoll::EventData::new_u64(listener_token(index) + 1);
        let flags = match wanted {
            Interest::Writable => epoll::EventFlags::OUT,
            _ => epoll::EventFlags::IN,
        };
        let result = match (slot.watched, wanted) {
            (_, Interest::None) => epoll::delete(&self.epoll, connection),
            (Interest::None, _) => epoll::add(&self.epoll, connection, data, flags),
            _ => epoll::modify(&self.epoll, connection, data, flags),
        };
        match result {
            Ok(()) => slot.watched = wanted,
            Err(error) => tracing::error!(%error, "epoll"),
        }
    }
}
