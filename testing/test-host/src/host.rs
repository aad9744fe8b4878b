//! An NVMe host over vfio-user: memory, queue pairs, and all kinds of doorbells.

use crate::{Command, Completion, GuestMemory, Link, Pair, Shadow, Windows, doorbell};
use anyhow::{Context, Result, ensure};
use dma::Memory;
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use zerocopy::{Immutable, IntoBytes};

/// Value of CC for enabling: entries of 64 and 16 bytes, the NVM command set, pages of 4 KiB.
const CC: u32 = 4 << 20 | 6 << 16;
const CC_EN: u32 = 1;

/// An NVMe host with its connection, which is closed when the host is dropped.
pub struct Host {
    /// Connection to the controller's registers and configuration space.
    pub link: Link,
    /// Guest memory, in which the host's queues and data lie.
    pub ram: Windows,
    /// Existing queue pairs, by identifier.
    pub pairs: BTreeMap<u16, Pair>,
    /// Time limit for CSTS.RDY and for a command.
    pub limit: Duration,
    /// Whether doorbell registers are written without waiting for a reply, whatever
    /// [`Link::posted`] is.
    pub posted_doorbells: bool,
    /// Mapping of BAR0, through which doorbells are written if present.
    pub mapped: Option<Memory>,
    /// Shadow doorbells of the I/O queues, if used.
    pub shadow: Option<Shadow>,
    /// Whether the server has ended, so that doorbells are not written.
    pub silent: bool,
    next_cid: u16,
}

impl Deref for Host {
    type Target = Link;

    fn deref(&self) -> &Link {
        &self.link
    }
}

impl DerefMut for Host {
    fn deref_mut(&mut self) -> &mut Link {
        &mut self.link
    }
}

impl Host {
    /// Creates a host without queues; `limit` is the time limit for each command and for CSTS.RDY.
    pub fn new(link: Link, ram: Windows, limit: Duration) -> Self {
        Self {
            link,
            ram,
            pairs: BTreeMap::new(),
            limit,
            posted_doorbells: false,
            mapped: None,
            shadow: None,
            silent: false,
            next_cid: 0,
        }
    }

    /// Returns the queue pair with this identifier; an error if it does not exist.
    pub fn pair(&mut self, qid: u16) -> Result<&mut Pair> {
        self.pairs.get_mut(&qid).context("no such queue pair")
    }

    /// Resets the controller and enables it with these Admin queues.
    pub fn enable(&mut self, admin: Pair) -> Result<()> {
        let limit = self.limit;
        self.link.disable(limit)?;
        self.pairs.clear();
        if let Some(shadow) = self.shadow.take() {
            self.ram.write(shadow.doorbells, &[0; 4096])?;
            self.ram.write(shadow.event_idx, &[0; 4096])?;
        }
        admin.clear(&self.ram)?;
        let csts = self.link.enable(&admin, CC | CC_EN, limit)?;
        self.pairs.insert(0, admin);
        ensure!(csts & 1 != 0, "the controller fails: CSTS is {csts:#x}");
        Ok(())
    }

    /// Creates an I/O queue pair with this interrupt vector.
    pub fn create_pair(&mut self, qid: u16, pair: Pair, vector: Option<u16>) -> Result<()> {
        pair.clear(&self.ram)?;
        for command in pair.create(qid, vector) {
            self.admin(&command)?;
        }
        self.pairs.insert(qid, pair);
        Ok(())
    }

    /// Enables shadow doorbells for I/O queues.
    pub fn use_shadow(&mut self, shadow: Shadow) -> Result<()> {
        self.admin(&shadow.configure())?;
        self.shadow = Some(shadow);
        Ok(())
    }

    /// Writes a doorbell through the mapped page, the shadow buffer or a register.
    pub fn ring(&mut self, qid: u16, cq: bool, value: u32) -> Result<()> {
        let offset = doorbell(qid, cq, 0);
        if self.silent {
            return Ok(());
        }
        if let Some(page) = &self.mapped {
            let cell = page.atomic_u32(offset as usize).context("no doorbell")?;
            cell.store(value.to_le(), Ordering::Release);
            return Ok(());
        }
        if let Some(shadow) = self.shadow.filter(|_| qid != 0)
            && !shadow.store(&self.ram, offset, value)?
        {
            return Ok(());
        }
        let posted = self.link.posted;
        self.link.posted |= self.posted_doorbells;
        let written = self.link.write32(offset, value);
        self.link.posted = posted;
        written
    }

    /// Appends a command without ringing; returns its identifier and the queue's new tail.
    pub fn push(&mut self, qid: u16, command: &(impl IntoBytes + Immutable)) -> Result<(u16, u32)> {
        let cid = self.next_cid;
        self.next_cid = cid.wrapping_add(1);
        let pair = self.pairs.get_mut(&qid).context("no such queue pair")?;
        let command = Command::of(command).with_cid(cid);
        pair.sq.push(&self.ram, &command)?;
        Ok((cid, pair.sq.tail))
    }

    /// Writes a command and rings the doorbell; returns the command identifier.
    pub fn submit(&mut self, qid: u16, command: &(impl IntoBytes + Immutable)) -> Result<u16> {
        let (cid, tail) = self.push(qid, command)?;
        self.ring(qid, false, tail)?;
        Ok(cid)
    }

    /// Returns the next completion if it has arrived, and writes the head doorbell.
    pub fn poll(&mut self, qid: u16) -> Result<Option<Completion>> {
        let pair = self.pairs.get_mut(&qid).context("no such queue pair")?;
        let entry = pair.pop(&self.ram)?;
        let head = pair.cq.head;
        if entry.is_some() {
            self.ring(qid, true, head)?;
        }
        Ok(entry)
    }

    /// Waits for the next completion on queue pair `qid`, up to the host's time limit.
    pub fn wait(&mut self, qid: u16) -> Result<Completion> {
        let limit = self.limit;
        let deadline = Instant::now() + limit;
        loop {
            if let Some(entry) = self.poll(qid)? {
                return Ok(entry);
            }
            ensure!(
                Instant::now() < deadline,
                "queue {qid}: no completion within {limit:?}"
            );
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Submits a command and waits for its completion; no other command may be outstanding in the
    /// queue.
    pub fn run(&mut self, qid: u16, command: &(impl IntoBytes + Immutable)) -> Result<Completion> {
        self.submit(qid, command)?;
        self.wait(qid)
    }

    /// Executes an admin command, and fails unless it succeeds.
    pub fn admin(&mut self, command: &(impl IntoBytes + Immutable)) -> Result<()> {
        let status = self.run(0, command)?.status_bits();
        ensure!(
            status == 0,
            "status {status:#x} of {:?}",
            Command::of(command)
        );
        Ok(())
    }

    /// Takes all available completions, and writes the head doorbell once.
    pub fn reap(&mut self, qid: u16) -> Result<Vec<Completion>> {
        let pair = self.pairs.get_mut(&qid).context("no such queue pair")?;
        let mut reaped = Vec::new();
        // The loop is bounded, in case the controller overruns its queue.
        while reaped.len() < pair.cq.size as usize
            && let Some(entry) = pair.pop(&self.ram)?
        {
            reaped.push(entry);
        }
        let head = pair.cq.head;
        if !reaped.is_empty() {
            self.ring(qid, true, head)?;
        }
        Ok(reaped)
    }

    /// Writes all entries of a submission queue, without ringing the doorbell. `make` returns the
    /// command for an index, which is also its identifier.
    pub fn fill<C>(&mut self, qid: u16, mut make: impl FnMut(u16) -> C) -> Result<()>
    where
        C: IntoBytes + Immutable,
    {
        let sq = self.pair(qid)?.sq;
        for at in 0..sq.size {
            let command = Command::of(&make(at as u16)).with_cid(at as u16);
            sq.put(&self.ram, at, &command)?;
        }
        Ok(())
    }

    /// Rings the doorbell for `count` more entries, which [`Host::fill`] wrote.
    pub fn post(&mut self, qid: u16, count: u32) -> Result<()> {
        let sq = &mut self.pair(qid)?.sq;
        sq.tail = (sq.tail + count) % sq.size;
        let tail = sq.tail;
        if count > 0 {
            self.ring(qid, false, tail)?;
        }
        Ok(())
    }
}
