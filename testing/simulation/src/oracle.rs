//! The blocks of a namespace, as far as its guest can know them.
//!
//! Each block has a list of versions, one for each write that may still be visible or durable. A
//! version is visible from the submission of its write until the completion of a later write that
//! began after its own had completed. Writes that overlap in time have no order. A version that is
//! no longer visible stays possible after a loss of power, until a flush that began later, or the
//! durable write that replaced it, has completed.

use anyhow::{Result, ensure};

/// Number of an event of the guest: submission or completion.
pub type Moment = u64;

/// Content of a block: every eight bytes hold this number. Zero is the content of a zeroed block.
pub type Stamp = u64;

#[derive(Clone, Debug)]
struct Version {
    write: u64,
    stamp: Stamp,
    began: Moment,
    /// Completion of the write; `None` while it is outstanding.
    ended: Option<Moment>,
    /// Time from which a read cannot return the version any more.
    replaced: Option<Moment>,
    /// Whether a loss of power may still leave this version.
    may_survive: bool,
}

/// Result of a write, as its guest knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteEnd {
    /// The write has succeeded. `true`: it is durable.
    Done(bool),
    /// The write has failed, was aborted or deleted: it may have been done or not.
    Unknown,
}

/// Blocks of one namespace.
#[derive(Debug)]
pub struct Oracle {
    blocks: Vec<Vec<Version>>,
    now: Moment,
    next: u64,
}

impl Oracle {
    /// Creates the oracle of a zeroed namespace.
    pub fn new(blocks: usize) -> Self {
        let zeroes = Version {
            write: 0,
            stamp: 0,
            began: 0,
            ended: Some(0),
            replaced: None,
            may_survive: true,
        };
        Self {
            blocks: vec![vec![zeroes]; blocks],
            now: 0,
            next: 0,
        }
    }

    /// Begins a new event and returns its number.
    pub fn tick(&mut self) -> Moment {
        self.now += 1;
        self.now
    }

    fn range(&mut self, lba: u64, count: u64) -> impl Iterator<Item = &mut Vec<Version>> {
        let blocks = self.blocks.iter_mut();
        blocks.skip(lba as usize).take(count as usize)
    }

    /// Records that a write has been submitted. Returns its number.
    pub fn begin_write(&mut self, lba: u64, stamps: &[Stamp]) -> u64 {
        let began = self.tick();
        self.next += 1;
        let write = self.next;
        for (block, stamp) in self.range(lba, stamps.len() as u64).zip(stamps) {
            block.push(Version {
                write,
                stamp: *stamp,
                began,
                ended: None,
                replaced: None,
                may_survive: true,
            });
        }
        write
    }

    /// Records that a write has ended.
    pub fn end_write(&mut self, write: u64, lba: u64, count: u64, end: WriteEnd) {
        let now = self.tick();
        for block in self.range(lba, count) {
            let Some(own) = block.iter_mut().find(|version| version.write == write) else {
                continue;
            };
            own.ended = Some(now);
            let began = own.began;
            let WriteEnd::Done(durable) = end else {
                continue;
            };
            for version in block.iter_mut() {
                let is_before = version.ended.is_some_and(|ended| ended < began);
                if version.write != write && is_before {
                    version.replaced.get_or_insert(now);
                    if durable {
                        version.may_survive = false;
                    }
                }
            }
        }
    }

    /// Records that a flush that was submitted at `began` has succeeded.
    pub fn flushed(&mut self, began: Moment) {
        self.tick();
        for version in self.blocks.iter_mut().flatten() {
            if version.replaced.is_some_and(|replaced| replaced < began) {
                version.may_survive = false;
            }
        }
    }

    /// Records a loss of power: outstanding writes have ended, and every version that may have
    /// survived is visible.
    pub fn power_lost(&mut self) {
        let now = self.tick();
        for block in &mut self.blocks {
            block.retain(|version| version.may_survive);
            for version in block {
                version.ended.get_or_insert(now);
                version.replaced = None;
            }
        }
    }

    /// Whether a block may have this content at some time since `began`.
    pub fn may_be(&self, lba: u64, stamp: Stamp, began: Moment) -> bool {
        let block = self.blocks.get(lba as usize);
        block.is_some_and(|block| {
            let visible = |one: &Version| one.replaced.is_none_or(|replaced| replaced > began);
            block.iter().any(|one| one.stamp == stamp && visible(one))
        })
    }

    /// Whether a block may have another content at some time since `began`.
    pub fn may_differ(&self, lba: u64, stamp: Stamp, began: Moment) -> bool {
        let block = self.blocks.get(lba as usize);
        block.is_some_and(|block| {
            let visible = |one: &Version| one.replaced.is_none_or(|replaced| replaced > began);
            block.iter().any(|one| one.stamp != stamp && visible(one))
        })
    }

    /// Returns the newest content that a block may have.
    pub fn newest(&self, lba: u64) -> Stamp {
        let block = self.blocks.get(lba as usize).into_iter().flatten();
        let mut visible = block.filter(|version| version.replaced.is_none());
        visible.next_back().map_or(0, |version| version.stamp)
    }

    /// Checks the result of a read that was submitted at `began`.
    ///
    /// # Errors
    /// The block could not have this content.
    pub fn check_read(&mut self, lba: u64, stamp: Stamp, began: Moment) -> Result<()> {
        let now = self.tick();
        ensure!(
            self.may_be(lba, stamp, began),
            "block {lba} reads as {stamp:#x}; possible: {}",
            self.possible(lba, began)
        );
        let Some(block) = self.blocks.get_mut(lba as usize) else {
            return Ok(());
        };
        // Without a write since the read began, the block keeps the content that was read.
        let quiet = |version: &Version| version.ended.is_some_and(|ended| ended < began);
        if block.iter().all(quiet) {
            for version in block.iter_mut().filter(|version| version.stamp != stamp) {
                version.replaced.get_or_insert(now);
            }
        }
        Ok(())
    }

    fn possible(&self, lba: u64, began: Moment) -> String {
        let block = self.blocks.get(lba as usize).into_iter().flatten();
        let visible = block.filter(|one| one.replaced.is_none_or(|replaced| replaced > began));
        let stamps: Vec<String> = visible.map(|one| format!("{:#x}", one.stamp)).collect();
        stamps.join(", ")
    }

    /// Forgets versions that no outstanding read may return and no loss of power may leave.
    /// `oldest` is the beginning of the oldest outstanding read.
    pub fn forget(&mut self, oldest: Option<Moment>) {
        let oldest = oldest.unwrap_or(self.now);
        for block in &mut self.blocks {
            let gone = |one: &Version| one.replaced.is_some_and(|replaced| replaced <= oldest);
            block.retain(|version| version.may_survive || !gone(version));
        }
    }
}
