//! State of a disk that survives the process: what a new disk gives to the keeper, and what the
//! next process finds.

use super::exports;
use super::life::is_needed;
use super::memory;
use super::session::KeeperSession;
use crate::record::Guest;
use anyhow::{Context, Result, anyhow};
use config::disk::DiskSpec;
use config::spec::ControllerSpec;
use controller::Subsystem;
use keeper::{KeepError, KeeperClient, Ledger};
use rustix::net::{Shutdown, shutdown};
use serde::{Deserialize, Serialize};
use state_memory::{
    Area, Descriptor, DescriptorKind, DescriptorLedger, Layout, LedgerError, StateMemory,
};
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use sync::Unpoisoned;
use vfio_user::{Journal, Listener, Pipe};

/// Name of a disk's state memory, after the disk's prefix. The state memory describes the disk's
/// other descriptors.
const STATE: &str = "s";

/// Pages of this process that a disk's client may map. Each client has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum ClientPages {
    /// Page of doorbell registers. The numeric values are stored with the keeper.
    Doorbells = 0,
    /// Controller memory buffer.
    MemoryBuffer = 1,
}

/// Detail of a kept descriptor that identifies the pipe of replies.
const REPLIES: u64 = 0;
const COUNTER: u64 = 1;

/// Identity of a disk that survives its process: kind, name and socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Kind of disk: `controller`, `vhost-user-blk`, `ublk`.
    pub kind: String,
    /// Name of the disk.
    pub name: String,
    /// Path of the socket that clients connect to; `None` for a kind without one.
    pub socket: Option<PathBuf>,
}

impl Identity {
    /// Returns the identity of a controller.
    pub fn of(spec: &ControllerSpec) -> Self {
        Self {
            kind: "controller".into(),
            name: spec.any_name(),
            socket: Some(spec.socket.clone()),
        }
    }

    /// Writes the identity into a disk's state memory. The length is written last: a state memory
    /// without a length belongs to a disk that was being made, and not all of that disk is kept.
    fn write(&self, area: &Area, kept: impl FnOnce() -> Result<()>) -> Result<()> {
        let text = serde_json::to_vec(self)?;
        let len = u32::try_from(text.len())?;
        area.store(4, &text).context("identity: too long")?;
        crash::point!("vnvme.disk.described");
        kept()?;
        crash::point!("vnvme.disk.kept");
        area.store(0, &len.to_le_bytes())?;
        crash::point!("vnvme.disk.made");
        Ok(())
    }

    /// Reads the identity from a disk's state memory; `None` if the disk was not kept completely.
    fn read(area: &Area) -> Result<Option<Self>> {
        let mut len = [0; 4];
        area.load(0, &mut len)?;
        let len = u32::from_le_bytes(len) as usize;
        if len == 0 {
            return Ok(None);
        }
        let mut text = vec![0; len.min(area.len())];
        area.load(4, &mut text)?;
        Ok(Some(serde_json::from_slice(&text)?))
    }
}

/// Descriptors and state of a disk that a previous process has left with the keeper.
#[derive(Debug)]
pub struct PreviousDisk {
    prefix: String,
    /// Number in the prefix. A disk that was created later has a greater number.
    age: u32,
    /// Identity of the disk; `None` if the disk was not kept completely.
    identity: Option<Identity>,
    /// Whether a newer state of the same disk exists, which has the disk's client.
    is_succeeded: bool,
    pub state: StateMemory,
    noted: Vec<Descriptor>,
    /// Kept descriptors of the disk, by the keeper's numbers.
    pub fds: BTreeMap<NonZeroU32, OwnedFd>,
}

impl PreviousDisk {
    /// Finds the kept state of the disk with this prefix.
    fn find(
        keeper: &KeeperSession,
        age: u32,
        prefix: &str,
        numbers: &[NonZeroU32],
    ) -> Result<Self> {
        let state = keeper.take(&format!("{prefix}.{STATE}"));
        let state = StateMemory::open(state.context("there is no state memory")?)?;
        let identity = Identity::read(&state.identity()).context("identity")?;
        let noted: Vec<Descriptor> = state.descriptors()?.iter().collect();
        let mut fds = BTreeMap::new();
        for number in numbers {
            // A descriptor without a record is left with the keeper, and is removed with all that
            // is not taken.
            if noted.iter().any(|noted| noted.number == *number)
                && let Some(fd) = keeper.take(&format!("{prefix}.{number}"))
            {
                fds.insert(*number, fd);
            }
        }
        Ok(Self {
            prefix: prefix.to_owned(),
            age,
            identity,
            is_succeeded: false,
            state,
            noted,
            fds,
        })
    }

    /// Returns whether the state belongs to this disk.
    fn is_of(&self, disk: &DiskSpec) -> bool {
        let identity = self.identity.as_ref();
        identity.is_some_and(|identity| {
            identity.kind == "controller"
                && matches!(disk, DiskSpec::Controller(_))
                && identity.name == disk.name()
                && identity.socket.as_deref() == disk.socket()
        })
    }

    /// Returns the number of the kept descriptor of this kind, and with this detail if one is
    /// given.
    fn of_kind(&self, kind: DescriptorKind, detail: Option<u64>) -> Option<NonZeroU32> {
        let mut noted = self.noted.iter();
        let is_it = |noted: &&Descriptor| {
            noted.kind == kind
                && detail.is_none_or(|detail| detail == noted.detail)
                && self.fds.contains_key(&noted.number)
        };
        noted.find(is_it).map(|noted| noted.number)
    }

    fn take(&mut self, kind: DescriptorKind, detail: Option<u64>) -> Option<OwnedFd> {
        let number = self.of_kind(kind, detail)?;
        self.fds.remove(&number)
    }

    fn copy(&self, kind: DescriptorKind, detail: Option<u64>) -> Option<OwnedFd> {
        let number = self.of_kind(kind, detail)?;
        self.fds.get(&number)?.try_clone().ok()
    }

    /// Returns the listening socket, and the inode of its file.
    pub fn listener(&self) -> Option<(OwnedFd, u64)> {
        let number = self.of_kind(DescriptorKind::LISTENER, None)?;
        let noted = self.noted.iter().find(|noted| noted.number == number)?;
        Some((self.fds.get(&number)?.try_clone().ok()?, noted.detail))
    }

    /// Returns the memory file of the controller memory buffer that the client has mapped.
    pub fn memory_buffer(&self) -> Option<OwnedFd> {
        self.copy(
            DescriptorKind::PAGES,
            Some(ClientPages::MemoryBuffer as u64),
        )
    }

    fn pipe(&mut self, which: u64) -> Option<Pipe> {
        Some(Pipe {
            reader: self.take(DescriptorKind::PIPE_READ, Some(which))?,
            writer: self.take(DescriptorKind::PIPE_WRITE, Some(which))?,
        })
    }

    /// Removes and returns the socket of the client that is connected.
    pub fn take_client(&mut self) -> Option<OwnedFd> {
        self.take(DescriptorKind::CLIENT, None)
    }

    /// Disconnects the disk's client, and makes the keeper close all descriptors of the disk. The
    /// keeper closes them before this process does: data that a client has sent may make the last
    /// `close` of its socket block, and that `close` must not be the keeper's.
    pub fn discard(self, keeper_client: &mut KeeperClient, why: &str) {
        for noted in &self.noted {
            let is_client = noted.kind == DescriptorKind::CLIENT && !self.is_succeeded;
            let fd = self.fds.get(&noted.number);
            if let Some(socket) = fd.filter(|_| is_client) {
                let _ = shutdown(socket, Shutdown::Both);
                match &self.identity {
                    Some(Identity { name, .. }) => {
                        tracing::error!(disk = name, "its client is disconnected: {why}");
                    }
                    // The client was passed to a disk that was not finished: no process has
                    // answered it.
                    None => tracing::warn!(
                        "a client has to connect again: the process has died while it made its disk"
                    ),
                }
            }
        }
        for number in self.noted.iter().map(|noted| noted.number) {
            let _ = keeper_client.remove(&format!("{}.{number}", self.prefix));
        }
        let _ = keeper_client.remove(&format!("{}.{STATE}", self.prefix));
        let _ = settled(keeper_client);
        sync::discard(self.fds);
    }
}

/// Waits until the keeper has done all that `keeper_client` has asked for. Only for times when no
/// client is served.
///
/// # Errors
/// The keeper has not done it, and keeps nothing more.
pub fn settled(keeper_client: &mut KeeperClient) -> Result<(), KeepError> {
    let ticket = keeper_client.barrier()?;
    keeper_client.settle(ticket)
}

/// Keeps a file of pages, in place of the one that was kept for an earlier client. A later
/// [`Ledger::barrier`] shows whether it is kept.
///
/// # Errors
/// The ledger keeps nothing more.
pub fn keep_pages(
    ledger: &mut Ledger,
    which: ClientPages,
    file: BorrowedFd<'_>,
) -> Result<(), LedgerError> {
    for noted in ledger.noted() {
        if noted.kind == DescriptorKind::PAGES && noted.detail == which as u64 {
            ledger.forget(noted.number);
        }
    }
    ledger
        .keep(DescriptorKind::PAGES, which as u64, file)
        .map(|_| ())
}

/// States of all disks that a previous process has left with the keeper.
#[derive(Debug, Default)]
pub struct Disks {
    left: Vec<PreviousDisk>,
    /// Number in the prefix that was assigned last.
    last: u32,
}

fn find_all(keeper: &KeeperSession) -> Disks {
    let mut numbers = BTreeMap::<String, Vec<NonZeroU32>>::new();
    for name in keeper.names() {
        let Some((prefix, rest)) = name.split_once('.') else {
            continue;
        };
        if prefix
            .strip_prefix('d')
            .is_some_and(|n| n.parse::<u32>().is_ok())
        {
            let all = numbers.entry(prefix.to_owned()).or_default();
            all.extend(rest.parse::<NonZeroU32>().ok());
        }
    }
    let mut disks = Disks::default();
    for (prefix, numbers) in numbers {
        let age = prefix.strip_prefix('d').and_then(|n| n.parse().ok());
        let age = age.unwrap_or(0);
        disks.last = disks.last.max(age);
        match PreviousDisk::find(keeper, age, &prefix, &numbers) {
            Ok(left) => disks.left.push(left),
            Err(error) => {
                let error = format_args!("{error:#}");
                tracing::error!(
                    error,
                    "what a previous process has left of a disk is not used"
                );
            }
        }
    }
    // The last of each disk counts: the process before has died while it made it anew.
    disks.left.sort_by_key(|left| std::cmp::Reverse(left.age));
    let mut seen = Vec::<Identity>::new();
    for left in &mut disks.left {
        if let Some(identity) = &left.identity {
            left.is_succeeded = seen.contains(identity);
            seen.push(identity.clone());
        }
    }
    disks
}

impl KeeperSession {
    fn disks(&self) -> MutexGuard<'_, Disks> {
        let disks = self.disks.get_or_init(|| Mutex::new(find_all(self)));
        disks.lock().unpoisoned()
    }

    /// Returns whether the keeper has a listening socket that clients of this path connect to.
    pub(crate) fn listens_at(&self, path: &Path) -> bool {
        let is_there = |left: &PreviousDisk| {
            let at = left.identity.as_ref().and_then(|it| it.socket.as_deref());
            at == Some(path) && left.listener().is_some()
        };
        self.disks().left.iter().any(is_there) || self.export_listens_at(path)
    }

    /// Removes and returns the state that a previous process has left of this disk.
    pub(crate) fn left_of(&self, identity: &Identity) -> Option<PreviousDisk> {
        let mut disks = self.disks();
        let mut left = disks.left.iter();
        let place = left.position(|left| left.identity.as_ref() == Some(identity))?;
        Some(disks.left.remove(place))
    }

    /// Calls `read` with the state that a previous process has left of this disk, if the disk has a
    /// client.
    fn with_client<T>(
        &self,
        identity: &Identity,
        read: impl FnOnce(&StateMemory) -> T,
    ) -> Option<T> {
        let disks = self.disks();
        let mut left = disks.left.iter();
        let left = left.find(|left| left.identity.as_ref() == Some(identity))?;
        Journal::client_in(&left.state.session())?;
        Some(read(&left.state))
    }

    /// Returns the guest that a previous process has left of this disk.
    pub(crate) fn client_of(&self, identity: &Identity) -> Guest {
        let shown = self.with_client(identity, controller::shown_identity);
        Guest {
            is_attached: shown.is_some(),
            shown: shown.flatten(),
        }
    }

    /// Has a subsystem take notice of the state that this disk of it has left, if it has a client.
    pub(crate) fn expect(&self, identity: &Identity, subsystem: &Subsystem) {
        self.with_client(identity, |state| subsystem.expect(state));
    }

    /// Makes the keeper close all that no disk has taken, once all configured disks are open. State
    /// of unavailable disks stays until they are served again.
    pub(crate) fn discard_rest(&self, unavailable: &[DiskSpec]) {
        let Some(mut keeper_client) = self.client() else {
            return;
        };
        let rest = {
            let left = &mut self.disks().left;
            let (theirs, rest) = std::mem::take(left)
                .into_iter()
                .partition::<Vec<_>, _>(|left| {
                    !left.is_succeeded && unavailable.iter().any(|disk| left.is_of(disk))
                });
            *left = theirs;
            rest
        };
        for left in rest {
            left.discard(&mut keeper_client, "no such disk is configured any more");
        }
        let mut fds = Vec::new();
        for name in self.names() {
            let mut disks = unavailable.iter();
            if disks.any(|disk| exports::is_of(&name, disk) || memory::is_of(&name, disk)) {
                continue;
            }
            let fd = self.take(&name);
            if !is_needed(&name, fd.as_ref()) {
                let _ = keeper_client.remove(&name);
            }
            fds.extend(fd);
        }
        let _ = settled(&mut keeper_client);
        sync::discard(fds);
    }

    /// Disconnects the client of an unavailable disk, and makes the keeper close all descriptors of
    /// the disk: it was removed, or the process ends. The file of the disk's socket is removed,
    /// too.
    pub(crate) fn give_up(&self, disk: &DiskSpec, why: &str) {
        let Some(mut keeper_client) = self.client() else {
            return;
        };
        let theirs = {
            let left = &mut self.disks().left;
            let (theirs, rest) = std::mem::take(left)
                .into_iter()
                .partition::<Vec<_>, _>(|left| left.is_of(disk));
            *left = rest;
            theirs
        };
        for left in theirs {
            if let (Some((socket, inode)), Some(path)) = (left.listener(), disk.socket()) {
                drop(Listener::kept(socket, path, inode));
            }
            left.discard(&mut keeper_client, why);
        }
        self.give_up_export(disk);
        for name in self.names() {
            if memory::is_of(&name, disk) {
                let memory = self.take(&name);
                let _ = keeper_client.remove(&name);
                sync::discard(memory);
            }
        }
        let _ = settled(&mut keeper_client);
    }
}

/// State of a disk that the keeper holds, so that the next process can continue the disk.
#[derive(Debug)]
pub struct Survival {
    keeper: Arc<KeeperSession>,
    identity: Identity,
    layout: Layout,
    pub ledger: Ledger,
    pub state: StateMemory,
    /// Pipe with replies to the client's messages, from which the next process repeats a reply.
    pub replies: Pipe,
    pub counter: Pipe,
    /// State that a previous process has left of the disk, with its client.
    pub left: Option<PreviousDisk>,
    /// Socket of a client that a previous process has accepted but not answered, with its number.
    pub waiting: Option<(OwnedFd, NonZeroU32)>,
}

/// Descriptors of a new disk that the keeper holds from the start.
#[derive(Debug)]
pub struct InitialDescriptors<'a> {
    /// Memory file of the disk's doorbell page.
    pub page: Option<BorrowedFd<'a>>,
    pub listener: &'a Listener,
    /// Socket of an accepted client that was not answered yet.
    pub client: Option<OwnedFd>,
}

/// State from which a disk cannot be continued, and the reason.
type RecoveryError = Box<(PreviousDisk, anyhow::Error)>;

impl Survival {
    /// Makes the kept state of a new disk.
    ///
    /// # Errors
    /// There is no memory, or the keeper keeps nothing more.
    pub fn new(
        keeper: &Arc<KeeperSession>,
        identity: &Identity,
        layout: Layout,
        first: InitialDescriptors<'_>,
    ) -> Result<Self> {
        let link = keeper.link().context("nobody keeps anything")?;
        let prefix = {
            let mut disks = keeper.disks();
            disks.last = disks.last.checked_add(1).context("too many disks")?;
            format!("d{}", disks.last)
        };
        let state = StateMemory::create(layout)?;
        let table = state.descriptors()?;
        let mut ledger = Ledger::new(prefix, table, link);
        let (replies, counter) = (Pipe::new()?, Pipe::new()?);
        let mut client = None;
        identity.write(&state.identity(), || {
            ledger.keep_state(STATE, state.fd())?;
            for (pipe, which) in [(&replies, REPLIES), (&counter, COUNTER)] {
                ledger.keep(DescriptorKind::PIPE_READ, which, pipe.reader.as_fd())?;
                ledger.keep(DescriptorKind::PIPE_WRITE, which, pipe.writer.as_fd())?;
            }
            if let Some(page) = first.page {
                keep_pages(&mut ledger, ClientPages::Doorbells, page)?;
            }
            // Another's is there for the next process, too.
            if let Some(file) = first.listener.own_file() {
                let socket = first.listener.as_fd();
                ledger.keep(DescriptorKind::LISTENER, file, socket)?;
            }
            if let Some(socket) = first.client {
                let number = ledger.keep(DescriptorKind::CLIENT, 0, socket.as_fd())?;
                client = Some((socket, number));
            }
            let ticket = ledger.barrier()?;
            Ok(ledger.settle(ticket)?)
        })?;
        Ok(Self {
            keeper: keeper.clone(),
            identity: identity.clone(),
            layout,
            ledger,
            state,
            replies,
            counter,
            left: None,
            waiting: client,
        })
    }

    /// Discards the state of the previous process: its client is disconnected, and the disk is a
    /// new one with another page.
    ///
    /// # Errors
    /// As [`Survival::new`].
    pub fn renew(
        mut self,
        left: PreviousDisk,
        first: InitialDescriptors<'_>,
        why: &str,
    ) -> Result<Self> {
        let mut keeper_client = KeeperClient::new(self.ledger.link());
        left.discard(&mut keeper_client, why);
        self.ledger.close();
        Self::new(&self.keeper, &self.identity, self.layout, first)
    }

    /// Continues from the state of a disk with a client that a previous process has left, with its
    /// doorbell page. State from which the disk cannot continue is returned with the reason.
    /// `layout` is that of a new disk.
    pub fn resume(
        keeper: &Arc<KeeperSession>,
        mut left: PreviousDisk,
        identity: &Identity,
        layout: Layout,
    ) -> Result<(Self, Option<OwnedFd>), RecoveryError> {
        let Some(link) = keeper.link() else {
            return Err(Box::new((left, anyhow!("nobody keeps anything"))));
        };
        let table = match left.state.descriptors() {
            Ok(table) => table,
            Err(error) => return Err(Box::new((left, error.into()))),
        };
        let page = left.copy(DescriptorKind::PAGES, Some(ClientPages::Doorbells as u64));
        let (Some(replies), Some(counter)) = (left.pipe(REPLIES), left.pipe(COUNTER)) else {
            return Err(Box::new((left, anyhow!("its pipes were not kept"))));
        };
        let survival = Self {
            keeper: keeper.clone(),
            identity: identity.clone(),
            layout,
            ledger: Ledger::resume(left.prefix.clone(), table, link, STATE),
            state: left.state.clone(),
            replies,
            counter,
            left: Some(left),
            waiting: None,
        };
        Ok((survival, page))
    }
}
