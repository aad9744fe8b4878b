//! The registered memory as one user follows it, with what its commands in flight still use.

use std::sync::Arc;

use super::{Mapper, Table};

/// The table of registered memory and its predecessors, each kept as long as commands use
/// addresses from it. One thread's; it looks at the mapper's generation (one load) and takes the
/// lock only when that has changed.
#[derive(Debug)]
pub struct Tables {
    mapper: Arc<Mapper>,
    generation: u64,
    current: Arc<Table>,
    number: u64,
    users: u32,
    old: Vec<(u64, u32, Arc<Table>)>,
}

impl Tables {
    /// The mapper's table now, used by nobody.
    pub fn new(mapper: &Arc<Mapper>) -> Self {
        // In this order: a table that is newer than its generation is only taken again.
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

    /// The newest table that was taken.
    #[inline]
    pub fn current(&self) -> &Table {
        &self.current
    }

    /// Its number: what a command that uses an address from it remembers, for [`Tables::release`].
    #[inline]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Takes the mapper's table if it is another one now. Whether it was.
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

    /// A command begins that uses addresses of the current table.
    #[inline]
    pub fn hold(&mut self) {
        self.users += 1;
    }

    /// A command that began under this number has completed.
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
