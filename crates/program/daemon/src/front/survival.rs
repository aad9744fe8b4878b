//! A controller with a client that survives this process.

use super::nvme::{NvmeFront, TOKEN_KEEPER};
use crate::front::device::NvmeDevice;
use crate::keep::{ClientPages, PreviousDisk, Survival, keep_pages};
use keeper::Ledger;
use receive::Socket;
use rustix::io::Errno;
use state_memory::{DescriptorLedger, StateMemory, Ticket};
use std::cell::RefCell;
use std::num::NonZeroU32;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};
use vfio_user::{Connection, Journal, JournalError, JournalSetup, Pipe, ServerLimits};

/// Maximum time at the end to remove kept descriptors from the keeper. systemd takes ten messages
/// at a time, and usually reads them at once. The next process removes the rest.
const REMOVAL_TIMEOUT: Duration = Duration::from_millis(20);
const CHECK_INTERVAL: Duration = Duration::from_micros(200);

/// State of a front-end that survives this process: descriptors with the keeper, and the journal.
pub struct FrontSurvival {
    pub ledger: Rc<RefCell<Ledger>>,
    state: StateMemory,
    replies: Pipe,
    counter: Pipe,
    /// Keeper's answer for which the connection is watched in the epoll set.
    watched: Option<Ticket>,
}

impl FrontSurvival {
    /// Splits the kept state: the front-end's part, the state that a previous process has left of a
    /// client, and the socket of a client without state.
    pub fn new(survival: Survival) -> (Self, Option<PreviousDisk>, Option<(OwnedFd, NonZeroU32)>) {
        let Survival {
            ledger,
            state,
            replies,
            counter,
            left,
            waiting,
            ..
        } = survival;
        let kept = Self {
            ledger: Rc::new(RefCell::new(ledger)),
            state,
            replies,
            counter,
            watched: None,
        };
        (kept, left, waiting)
    }

    fn setup(&self) -> Result<JournalSetup, Errno> {
        Ok(JournalSetup {
            area: self.state.session(),
            ledger: self.ledger.clone(),
            replies: copy(&self.replies)?,
            counter: copy(&self.counter)?,
        })
    }

    /// Makes the connection of a new client. Its `pages` and the client are kept first; the client
    /// only if it is not kept yet, under the number `kept`.
    pub fn connect(
        &self,
        socket: Socket,
        limits: ServerLimits,
        kept: Option<NonZeroU32>,
        pages: &[(ClientPages, BorrowedFd<'_>)],
    ) -> Result<Connection, JournalError> {
        for (which, file) in pages {
            // After a failure nothing more is kept, which the connection reports.
            let _ = keep_pages(&mut self.ledger.borrow_mut(), *which, *file);
        }
        let setup = self.setup().map_err(JournalError::Pipe)?;
        let journal = Journal::new(setup)?;
        Ok(Connection::kept(socket, limits, journal, kept))
    }

    /// Resumes the connection that a client had with the previous process.
    pub fn resume(
        &self,
        socket: Socket,
        limits: ServerLimits,
        left: &PreviousDisk,
        device: &NvmeDevice,
    ) -> Result<Connection, JournalError> {
        let setup = self.setup().map_err(JournalError::Pipe)?;
        let fd = |number: NonZeroU32| left.fds.get(&number)?.try_clone().ok();
        Connection::resume(socket, limits, setup, fd, device)
    }

    /// Returns the time at which the keeper's answers have to be checked at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        self.ledger.borrow().deadline()
    }
}

fn copy(pipe: &Pipe) -> Result<Pipe, Errno> {
    let copy = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 0);
    Ok(Pipe {
        reader: copy(&pipe.reader)?,
        writer: copy(&pipe.writer)?,
    })
}

impl NvmeFront {
    /// Continues to serve the client of a previous process.
    pub(super) fn resume(&mut self, mut left: PreviousDisk) {
        let Some(survival) = &self.survival else {
            return;
        };
        let limits = self.device.protocol_limits();
        let Some(socket) = left.take_client() else {
            tracing::error!("the socket of the client was not kept");
            return self.device.controller.disconnect();
        };
        let socket = self.intake.admit(socket);
        match survival.resume(socket, limits, &left, &self.device) {
            Ok(connection) => {
                self.connected(connection, "client goes on");
                self.more = true;
            }
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::error!(error, "the client is disconnected");
                self.forget_client();
                self.device.controller.disconnect();
            }
        }
    }

    /// Removes the state of the disconnected client, so that no process resumes it.
    fn forget_client(&mut self) {
        let Some(survival) = &self.survival else {
            return;
        };
        if let Ok(journal) = survival
            .setup()
            .map_err(JournalError::Pipe)
            .and_then(Journal::new)
        {
            journal.discard();
        }
    }

    /// Handles answers of the keeper, or their delay.
    pub(super) fn keeper_ready(&mut self) {
        let Some(survival) = &self.survival else {
            return;
        };
        // The connection reports the reason of a failure.
        let _ = survival.ledger.borrow_mut().advance(Instant::now());
        if let Some(connection) = &mut self.connection {
            connection.keeper_answered();
        }
        if self.connection.as_ref().is_some_and(Connection::is_keeping) {
            self.serve();
        }
        self.watch_keeper();
    }

    /// Updates the epoll set: the keeper's connection is watched while answers are missing.
    pub(super) fn watch_keeper(&mut self) {
        let Some(survival) = &mut self.survival else {
            return;
        };
        let ledger = survival.ledger.borrow();
        let next = ledger.next_answer();
        if next == survival.watched {
            return;
        }
        // The one before was closed, and so is not in the set any more.
        survival.watched = next;
        if let Some(fd) = ledger.fd()
            && let Err(error) = self
                .descriptors
                .add(fd, TOKEN_KEEPER, worker::Interest::Readable)
        {
            let fd = fd.as_raw_fd();
            self.log.line(
                "epoll",
                |left_out| tracing::error!(%error, fd, left_out, "epoll"),
            );
        }
    }

    /// Withdraws the front-end's descriptors from the keeper, and waits briefly for the answer.
    pub(super) fn release(&mut self) {
        let Some(survival) = &self.survival else {
            return;
        };
        let mut ledger = survival.ledger.borrow_mut();
        ledger.close();
        let end = Instant::now() + REMOVAL_TIMEOUT;
        while ledger.is_waiting() && Instant::now() < end && ledger.advance(Instant::now()).is_ok()
        {
            std::thread::sleep(CHECK_INTERVAL);
        }
    }
}
