//! A thread's view of the registered memory, including older tables that its outstanding commands
//! still use.

use std::sync::Arc;

use super::{Mapper, RegionTable};

/// The table of registered memory and earlier versions of it, each kept as long as commands use its
/// addresses. Belongs to one thread, which compares the mapper's generation (one load) and takes
/// the lock only when it has changed.
#[derive(Debug)]
pub struct Tables {
    mapper: Arc<Mapper>,
    generation: u64,
    current: Arc<RegionTable>,
    number: u64,
    users: u32,
    old: Vec<(u64, u32, Arc<RegionTable>)>,
}

impl Tables {
    /// Creates a view of the mapper's current table, which no command uses yet.
    pub fn new(mapper: &Arc<Mapper>) -> Self {
        // Read the generation first: if the table turns out newer, it is only fetched again.
        let generation = mapper.generation();
        Self {
            generation,
            current: mapper.table(),
            mapper: mapper.clone(),
            number: 0,
            users: 0,
            old: Vec::new(),
        }
    }

    /// Returns the newest table of registered memory that this thread has fetched.
    #[inline]
    pub fn current(&self) -> &RegionTable {
        &self.current
    }

    /// Returns the number of the present table, which commands pass to [`Tables::release`] when
    /// they end.
    #[inline]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Fetches the mapper's table if it has changed. Returns whether it has.
    #[inline]
    pub fn keep_up(&mut self) -> bool {
        if self.mapper.generation() == self.generation {
            return false;
        }
        self.replace();
        true
    }

    #[cold]
    fn replace(&mut self) {
        self.generation = self.mapper.generation();
        let before = std::mem::replace(&mut self.current, self.mapper.table());
        if self.users > 0 {
            self.old.push((self.number, self.users, before));
        }
        self.number += 1;
        self.users = 0;
    }

    /// Counts a command that uses addresses of the present table, which keeps the table's mappings.
    #[inline]
    pub fn hold(&mut self) {
        self.users += 1;
    }

    /// Counts the end of a command that used the table with this number.
    #[inline]
    pub fn release(&mut self, number: u64) {
        if number == self.number {
            self.users = self.users.saturating_sub(1);
            return;
        }
        self.release_old(number);
    }

    #[cold]
    fn release_old(&mut self, number: u64) {
        if let Some(at) = self.old.iter().position(|(old, ..)| *old == number)
            && let Some((_, users, _)) = self.old.get_mut(at)
        {
            *users = users.saturating_sub(1);
            if *users == 0 {
                self.old.swap_remove(at);
            }
        }
    }
}
