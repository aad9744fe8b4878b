//! The descriptors of one disk: noted in its state memory, then kept.

use crate::client::{KeepError, KeeperClient};
use crate::link::{Keeping, Link};
use receive::kind;
use rustix::fs::{Mode, OFlags, fcntl_getfl, open};
use rustix::io::Errno;
use state_memory::{
    Descriptor, DescriptorKind, DescriptorLedger, DescriptorTable, LedgerError, Ticket,
};
use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Instant;

/// Kept descriptors of a disk. Each has a number, under which it is noted in the disk's state
/// memory before the keeper gets it, so that the next process knows the use of each. The keeper
/// knows it by the disk's name here, a dot, and that number.
///
/// A descriptor that only the keeper has is garbage. A descriptor that only the state memory notes
/// was about to be kept, or removed: its owner knows that it is not needed.
#[derive(Debug)]
pub struct Ledger {
    prefix: String,
    table: DescriptorTable,
    client: KeeperClient,
    /// Name of the state memory's descriptor, after the prefix; `None` until it is kept.
    state: Option<String>,
    failed: Option<LedgerError>,
}

impl Ledger {
    /// Creates the ledger of a disk. The names of its descriptors begin with `prefix`.
    pub fn new(prefix: String, table: DescriptorTable, link: &Link) -> Self {
        Self {
            prefix,
            table,
            client: KeeperClient::new(link),
            state: None,
            failed: None,
        }
    }

    /// Returns the name under which the keeper keeps the descriptor with this number.
    pub fn name(&self, number: NonZeroU32) -> String {
        format!("{}.{number}", self.prefix)
    }

    /// Returns the connection to the keeper.
    pub fn link(&self) -> &Link {
        self.client.link()
    }

    /// Returns the prefix of the names of the disk's descriptors.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns the entry of the descriptor with this number in the state memory.
    pub fn find(&self, number: NonZeroU32) -> Option<Descriptor> {
        self.table.iter().find(|noted| noted.number == number)
    }

    /// Creates the ledger where a previous process has had the state memory kept, under the name
    /// `state` after the prefix.
    pub fn resume(prefix: String, table: DescriptorTable, link: &Link, state: &str) -> Self {
        let mut ledger = Self::new(prefix, table, link);
        ledger.state = Some(state.to_owned());
        ledger
    }

    /// Has the state memory itself kept, which notes all other descriptors: under this name after
    /// the prefix.
    ///
    /// # Errors
    /// The errors of [`Ledger::keep`].
    pub fn keep_state(&mut self, name: &str, fd: BorrowedFd<'_>) -> Result<(), LedgerError> {
        self.check()?;
        let stored = self.client.store(&format!("{}.{name}", self.prefix), fd);
        self.state = Some(name.to_owned());
        self.checked(stored.map_err(refused))
    }

    /// Removes everything of the disk from the keeper, because the disk no longer exists.
    pub fn close(&mut self) {
        // Without the state memory the remaining descriptors are garbage: the next process removes
        // them.
        if let Some(name) = self.state.take() {
            let _ = self.client.remove(&format!("{}.{name}", self.prefix));
        }
        for noted in self.noted() {
            self.forget(noted.number);
        }
    }

    /// Returns the barrier that is to be answered next: each one has its own descriptor to be
    /// watched.
    pub fn next_answer(&self) -> Option<Ticket> {
        self.client.next_answer()
    }

    /// See [`KeeperClient::settle`].
    ///
    /// # Errors
    /// The errors of [`Ledger::keep`].
    pub fn settle(&mut self, ticket: Ticket) -> Result<(), LedgerError> {
        self.check()?;
        let settled = self.client.settle(ticket);
        self.checked(settled.map_err(refused))
    }

    /// See [`KeeperClient::fd`].
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.client.fd()
    }

    /// Returns the time of the next call, see [`KeeperClient::deadline`].
    pub fn deadline(&self) -> Option<Instant> {
        self.client.deadline()
    }

    /// Sends and receives what is possible, see [`KeeperClient::advance`].
    ///
    /// # Errors
    /// The errors of [`Ledger::keep`].
    pub fn advance(&mut self, now: Instant) -> Result<bool, LedgerError> {
        self.check()?;
        let advanced = self.client.advance(now);
        self.checked(advanced.map_err(refused))
    }

    fn check(&self) -> Result<(), LedgerError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn checked<T>(&mut self, result: Result<T, LedgerError>) -> Result<T, LedgerError> {
        if let Err(error) = &result {
            self.failed.get_or_insert_with(|| error.clone());
        }
        result
    }
}

impl DescriptorLedger for Ledger {
    fn noted(&self) -> Vec<Descriptor> {
        self.table.iter().collect()
    }

    fn keep(
        &mut self,
        kind: DescriptorKind,
        detail: u64,
        fd: BorrowedFd<'_>,
    ) -> Result<NonZeroU32, LedgerError> {
        let number = self.note(kind, detail)?;
        crash::point!("keeper.ledger.noted");
        let own = opened_anew(fd, self.link().keeping());
        let fd = own.as_ref().map_or(fd, AsFd::as_fd);
        let stored = self.client.store(&self.name(number), fd);
        crash::point!("keeper.ledger.stored");
        self.checked(stored.map_err(refused))?;
        Ok(number)
    }

    fn note(&mut self, kind: DescriptorKind, detail: u64) -> Result<NonZeroU32, LedgerError> {
        self.check()?;
        let number = self.table.add(kind, detail);
        self.checked(number.map_err(Into::into))
    }

    fn set_detail(&mut self, number: NonZeroU32, detail: u64) {
        self.table.set_detail(number, detail);
    }

    fn forget(&mut self, number: NonZeroU32) {
        if self.find(number).is_none() {
            return;
        }
        let removed = self.client.remove(&self.name(number));
        crash::point!("keeper.ledger.removed");
        self.table.remove(number);
        let _ = self.checked(removed.map_err(refused));
    }

    fn barrier(&mut self) -> Result<Ticket, LedgerError> {
        self.check()?;
        let asked = self.client.barrier();
        self.checked(asked.map_err(refused))
    }

    fn is_answered(&self, ticket: Ticket) -> bool {
        self.client.is_answered(ticket)
    }

    fn is_waiting(&self) -> bool {
        self.client.is_waiting()
    }

    fn is_late(&self) -> bool {
        self.client.is_late()
    }

    fn is_sent(&self) -> bool {
        self.client.is_sent()
    }

    fn backlog(&self) -> usize {
        self.client.backlog()
    }

    fn failed(&self) -> Option<&LedgerError> {
        self.failed.as_ref()
    }
}

/// Converts the error of a request to the keeper.
fn refused(error: KeepError) -> LedgerError {
    LedgerError::Keeper(error.to_string())
}

/// Memory as an open file of its own, where systemd keeps: of descriptors of one open file it keeps
/// the first, whatever their names, and two disks of one machine have its memory from one open
/// file. `None`: it stays as it is, for it need not be opened anew, or cannot be.
fn opened_anew(fd: BorrowedFd<'_>, keeping: Keeping) -> Option<OwnedFd> {
    if keeping != Keeping::Systemd || !kind::is_memory(fd) {
        return None;
    }
    let opened = || -> Result<OwnedFd, Errno> {
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let flags = fcntl_getfl(fd)? & OFlags::RWMODE;
        open(path, flags | OFlags::CLOEXEC, Mode::empty())
    };
    opened().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, SeekFrom, fstat, memfd_create, seek, tell};

    #[test]
    fn systemd_gets_own_open_file_per_memory() {
        let memory = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        let anew = opened_anew(memory.as_fd(), Keeping::Systemd).unwrap();
        let inode = |fd: &OwnedFd| fstat(fd).unwrap().st_ino;
        assert_eq!(inode(&anew), inode(&memory));
        // Descriptors of one open file have one position.
        seek(&memory, SeekFrom::Start(7)).unwrap();
        assert_eq!(tell(&anew).unwrap(), 0);
        assert!(opened_anew(memory.as_fd(), Keeping::Process(1)).is_none());
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(opened_anew(socket.as_fd(), Keeping::Systemd).is_none());
    }
}
