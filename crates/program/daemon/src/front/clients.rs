//! The clients of a controller: acceptance, messages, disconnection.

use super::nvme::{NvmeFront, TOKEN_CLIENT, TOKEN_INTAKE};
use crate::keep::ClientPages;
use control::api::EventKind;
use controller::ConfigError;
use rustix::event::PollFlags;
use rustix::io::Errno;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Instant;
use sync::readiness;
use vfio_user::{Connection, ConnectionError, ConnectionStatus, Interest};

impl NvmeFront {
    /// Answers a VMM that waits for the end of a mapping, an unmap or a reset, once that has ended.
    #[inline]
    pub(super) fn finish_waiting(&mut self) -> bool {
        if !self.device.wait_is_over() {
            return false;
        }
        let result = self.device.end_wait();
        let Some(connection) = &mut self.connection else {
            return false;
        };
        let status = connection.complete(&mut self.device, result);
        self.after(status);
        true
    }

    /// Keeps clients from connecting. `false`: there is one, commands are outstanding, or another
    /// process may get the volume.
    pub fn withhold(&mut self) -> bool {
        if self.connection.is_some() || !self.device.is_unused() {
            return false;
        }
        self.withheld = true;
        self.listen(false);
        true
    }

    /// Lets clients connect again; one may be waiting.
    pub fn admit_clients(&mut self) {
        self.withheld = false;
        self.listen(!self.intake.is_crowded() && !self.is_receiving());
    }

    /// Returns the path of the socket on which the controller's clients connect.
    fn socket(&self) -> &Path {
        self.acceptor.listener().path()
    }

    /// Accepts clients again after a pause in which none could be accepted.
    pub(super) fn resume_accepting(&mut self, now: Instant) {
        let resumed = self.acceptor.resume(now);
        self.say_closed(resumed);
    }

    fn say_closed(&self, result: Result<(), Errno>) {
        if let Err(error) = result {
            let (socket, log) = (self.socket().display(), &self.accept_log);
            log.line(|left_out| {
                tracing::error!(%socket, %error, left_out, "no client can connect");
            });
        }
    }

    /// Accepts a client that waits at the listening socket.
    pub(super) fn accept(&mut self) {
        if self.withheld {
            self.listen(false);
            return;
        }
        // The old client's disconnection may not have been noticed yet.
        self.serve();
        if self.intake.is_crowded() || self.is_receiving() {
            // The receiver process has to answer first.
            self.listen(false);
            return;
        }
        self.close_if_gone();
        let socket = self.socket().display().to_string();
        let fd = match self.acceptor.accept(Instant::now()) {
            Ok(Some(fd)) => fd,
            Ok(None) => return,
            Err(error) => {
                let log = &self.accept_log;
                log.line(|left_out| tracing::warn!(socket, %error, left_out, "accept"));
                return;
            }
        };
        if self.connection.is_some() {
            self.log.line("second client", |left_out| {
                tracing::warn!(
                    socket,
                    left_out,
                    "refused a second client: the disk already has one"
                );
            });
            vfio_user::refuse(&fd, Errno::BUSY);
            self.intake.dismiss(fd);
            return;
        }
        if let Err(error) = self.renew_doorbells() {
            self.log.line("no doorbell page", |left_out| {
                let error: &dyn std::error::Error = &error;
                tracing::error!(socket, error, left_out, "client refused: no doorbell page");
            });
            vfio_user::refuse(&fd, Errno::NOMEM);
            self.intake.dismiss(fd);
            return;
        }
        self.admit(fd, None);
    }

    /// Replaces the doorbell page where an earlier client may still have it mapped: that client
    /// could ring the next client's queues.
    fn renew_doorbells(&mut self) -> Result<(), ConfigError> {
        let controller = &mut self.device.controller;
        if self.had_client && controller.config().mapped_doorbells {
            controller.renew_doorbells()?;
            self.had_client = false;
        }
        Ok(())
    }

    /// Begins to serve the client with the socket `fd`, which the keeper may keep already.
    pub(super) fn admit(&mut self, fd: OwnedFd, kept: Option<NonZeroU32>) {
        let limits = self.device.protocol_limits();
        let socket = self.intake.admit(fd);
        let controller = &self.device.controller;
        let doorbells = controller.bar0_pages().fd();
        let mut pages = vec![(ClientPages::Doorbells, doorbells)];
        let buffer = controller.cmb_pages();
        pages.extend(buffer.map(|buffer| (ClientPages::MemoryBuffer, buffer.fd())));
        let connection = match &self.survival {
            None => Connection::over(socket, limits),
            Some(survival) => match survival.connect(socket, limits, kept, &pages) {
                Ok(connection) => connection,
                Err(error) => {
                    let (error, log) = (&error as &dyn std::error::Error, &self.log);
                    log.line("not kept", |left_out| {
                        tracing::error!(error, left_out, "client refused")
                    });
                    return;
                }
            },
        };
        self.connected(connection, "client connected");
    }

    /// Handles a new connection of a client; `how` describes it for the log.
    pub(super) fn connected(&mut self, connection: Connection, how: &str) {
        let socket = self.socket().display().to_string();
        let pid = connection.peer().ok().map(|p| p.pid.as_raw_nonzero().get());
        let log = &self.log;
        log.line("connected", |left_out| {
            tracing::info!(socket, pid, left_out, "{how}")
        });
        let message = pid.map(|pid| format!("pid {pid}"));
        self.happened(EventKind::Attached, message);
        self.connection = Some(connection);
        self.device.connected();
        self.had_client = true;
        self.device.controller.stats().connected.set(1);
        self.rewatch();
        self.watch_keeper();
    }

    fn is_receiving(&self) -> bool {
        self.connection
            .as_ref()
            .is_some_and(Connection::is_receiving)
    }

    /// Starts or stops watching the listening socket for clients.
    pub(super) fn listen(&mut self, wanted: bool) {
        if wanted && !self.withheld {
            let opened = self.acceptor.open(Instant::now());
            self.say_closed(opened);
        } else {
            self.acceptor.close();
        }
    }

    /// Handles a message of the receiver process.
    pub(super) fn intake_ready(&mut self) {
        self.intake.ready();
        if self.is_receiving() {
            self.serve();
        }
        self.listen(!self.intake.is_crowded() && !self.is_receiving());
    }

    /// Checks the outstanding requests to the receiver process, and the connection to it.
    pub(super) fn check_intake(&mut self, now: Instant) {
        if self.intake.deadline().is_some_and(|at| now >= at)
            && let Ok(true) = self.intake.connect(self.acceptor.listener().as_fd())
            && let Some(fd) = self.intake.fd()
        {
            let readable = worker::Interest::Readable;
            if let Err(error) = self.descriptors.add(fd, TOKEN_INTAKE, readable) {
                let log = &self.log;
                log.line(
                    "epoll",
                    |left_out| tracing::error!(%error, left_out, "epoll"),
                );
            }
            self.listen(true);
        }
        let late = |connection: &Connection| connection.deadline().is_some_and(|at| now >= at);
        if self.connection.as_ref().is_some_and(late) {
            self.serve();
            self.listen(!self.intake.is_crowded());
        }
    }

    /// Ends the connection of a client that has closed its socket. Unread messages are handled
    /// first, without waiting for anything.
    pub(super) fn close_if_gone(&mut self) {
        let gone = self.connection.as_ref().is_some_and(|connection| {
            readiness(connection, PollFlags::empty()).contains(PollFlags::HUP)
        });
        if !gone {
            return;
        }
        // The client cannot send more, so the loop ends.
        while std::mem::take(&mut self.more) {
            self.serve();
        }
        if let Some(mut connection) = self.connection.take() {
            let socket = self.acceptor.listener().path().display();
            let log = &self.log;
            log.line(
                "disconnected",
                |left_out| tracing::info!(%socket, left_out, "client disconnected"),
            );
            connection.close(&mut self.device);
            self.part_with(connection);
        }
    }

    /// Closes a connection that has ended. The receiver process has a duplicate of the socket, so
    /// that closing it does not take it out of the epoll set.
    pub(super) fn part_with(&mut self, connection: Connection) {
        if self.watched != Interest::None {
            let _ = self.descriptors.remove(&connection);
        }
        self.watched = Interest::None;
        self.more = false;
        self.happened(EventKind::Detached, None);
        self.device.controller.stats().connected.set(0);
    }

    /// Handles the messages that the client has sent, within a budget.
    pub(super) fn serve(&mut self) {
        let Some(connection) = &mut self.connection else {
            return;
        };
        let status = connection.on_ready(&mut self.device);
        self.after(status);
    }

    fn after(&mut self, status: Result<ConnectionStatus, ConnectionError>) {
        let socket = self.acceptor.listener().path().display();
        let ended = matches!(status, Err(_) | Ok(ConnectionStatus::Closed));
        match status {
            Ok(ConnectionStatus::Open | ConnectionStatus::Pending) => {}
            Ok(ConnectionStatus::MoreWork) => self.more = true,
            Ok(ConnectionStatus::Closed) => {
                let log = &self.log;
                log.line(
                    "disconnected",
                    |left_out| tracing::info!(%socket, left_out, "client disconnected"),
                );
            }
            Err(error) => {
                self.log.line("broken client", |left_out| {
                    tracing::warn!(%socket, %error, left_out, "client disconnected");
                });
            }
        }
        match self.connection.take_if(|_| ended) {
            Some(connection) => self.part_with(connection),
            None => self.rewatch(),
        }
        self.watch_keeper();
    }

    /// Updates the epoll set with the events that the connection waits for.
    fn rewatch(&mut self) {
        let Some(connection) = &self.connection else {
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
            Err(error) => {
                let log = &self.log;
                log.line(
                    "epoll",
                    |left_out| tracing::error!(%error, left_out, "epoll"),
                );
            }
        }
    }
}
