//! A VMM that moves a guest from one vfio-user server to another (live migration).
//!
//! The VMM copies guest memory while the guest runs at the source, and again the pages that are
//! written meanwhile: those of the guest, which the VMM of a real guest learns from the hypervisor,
//! and those of the device, which the source's log names. Then it stops the guest and the source,
//! moves the state of the device and the last pages, and starts the target.

use crate::Link;
use anyhow::{Context, Result, bail, ensure};
use dma::Memory;
use std::ops::Range;
use vfio_user::{DIRTY_PAGE, MigrationState, wire};

/// Number of bytes of the state that one message transfers.
const STATE_CHUNK: usize = 1000;

/// Move of a guest whose memory is one window at the same address on both sides.
pub struct Move {
    target: Link,
    base: u64,
    from: Memory,
    /// Guest memory at the target.
    pub to: Memory,
    /// Number of pages that the source's log has named so far.
    pub logged: u64,
}

impl Move {
    /// Begins a move: has the source log what it writes, and copies all memory. The window at
    /// `base` is mapped on both sides, `from` at the source and `to` at the target.
    ///
    /// # Errors
    /// One of the servers offers no migration, and errors of the connections.
    pub fn begin(
        source: &mut Link,
        mut target: Link,
        base: u64,
        from: Memory,
        to: Memory,
    ) -> Result<Self> {
        for link in [&mut *source, &mut target] {
            let flags = link.client.migration_flags().context("no migration")?;
            ensure!(flags & wire::migration::STOP_COPY != 0, "flags {flags:#x}");
        }
        ensure!(from.len() == to.len(), "guest memory of different sizes");
        source.client.start_log(&[(base, from.len() as u64)])?;
        let moved = Move {
            target,
            base,
            from,
            to,
            logged: 0,
        };
        let all = 0..moved.from.len() as u64;
        moved.copy(all)?;
        Ok(moved)
    }

    fn copy(&self, range: Range<u64>) -> Result<()> {
        let mut page = [0; DIRTY_PAGE as usize];
        for at in range.step_by(DIRTY_PAGE as usize) {
            self.from.read(at as usize, &mut page)?;
            self.to.write(at as usize, &page)?;
        }
        Ok(())
    }

    /// Copies the pages that were written since the last call: those of the source's log, and
    /// `guest`, the ranges of memory that the guest itself writes.
    ///
    /// # Errors
    /// Errors of the connection.
    pub fn copy_dirty(&mut self, source: &mut Link, guest: &[Range<u64>]) -> Result<()> {
        let len = self.from.len() as u64;
        let bitmap = source.client.dirty_pages(self.base, len, DIRTY_PAGE)?;
        for (at, word) in (0..).zip(bitmap) {
            for bit in (0..64).filter(|bit| word >> bit & 1 != 0) {
                let page = (at * 64 + bit) * DIRTY_PAGE;
                self.copy(page..page + DIRTY_PAGE)?;
                self.logged += 1;
            }
        }
        guest.iter().try_for_each(|range| self.copy(range.clone()))
    }

    /// Stops the device at the source, and copies the last pages. Returns the device's state. The
    /// guest must have stopped.
    ///
    /// # Errors
    /// Errors of the connection.
    pub fn stop(&mut self, source: &mut Link, guest: &[Range<u64>]) -> Result<Vec<u8>> {
        source
            .client
            .set_migration_state(MigrationState::StopCopy)?;
        let mut state = Vec::new();
        loop {
            let more = source.client.read_state(STATE_CHUNK as u32)?;
            if more.is_empty() {
                break;
            }
            state.extend(more);
        }
        self.copy_dirty(source, guest)?;
        Ok(state)
    }

    /// Returns the offsets of the pages in which both sides' memory differs.
    ///
    /// # Errors
    /// The memory's file was cut.
    pub fn differences(&self) -> Result<Vec<u64>> {
        let (mut a, mut b) = ([0; DIRTY_PAGE as usize], [0; DIRTY_PAGE as usize]);
        let mut differences = Vec::new();
        for at in (0..self.from.len()).step_by(DIRTY_PAGE as usize) {
            self.from.read(at, &mut a)?;
            self.to.read(at, &mut b)?;
            if a != b {
                differences.push(at as u64);
            }
        }
        Ok(differences)
    }

    /// Gives the state to the target and starts it. Returns the target, to which the guest's
    /// accesses go from now on.
    ///
    /// # Errors
    /// The target refuses the state, and errors of the connection.
    pub fn start(self, state: &[u8]) -> Result<Link> {
        let mut target = self.target;
        load(&mut target, state)?;
        target.client.set_migration_state(MigrationState::Running)?;
        Ok(target)
    }

    /// Gives the target back without starting it.
    pub fn cancel(self) -> Link {
        self.target
    }
}

/// Gives a state to a server, which checks it and stays stopped.
///
/// # Errors
/// The server refuses the state, and errors of the connection.
pub fn load(target: &mut Link, state: &[u8]) -> Result<()> {
    target
        .client
        .set_migration_state(MigrationState::Resuming)?;
    for chunk in state.chunks(STATE_CHUNK) {
        target.client.write_state(chunk)?;
    }
    target.client.set_migration_state(MigrationState::Stop)?;
    let state = target.client.migration_state()?;
    if state != MigrationState::Stop as u32 {
        bail!("the target is in state {state}");
    }
    Ok(())
}
