// SPDX-License-Identifier: GPL-2.0-or-later

//! The outside of the mediated device, as QEMU offers it.

use std::collections::BTreeMap;
use std::mem;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ap::card::Notify;
use ap::outside::{
    CannotPin, CannotRegister, Clock, GuestPage, HostAddress, HostSubclass, InterruptTarget,
    PAGE_SIZE, Pages, Subclasses,
};
use ap::{Apqn, Subclass};

use crate::ffi;
use sync::Unpoisoned;

/// Guest pages. Under QEMU they stay where they are, so a pin is only counted, and the
/// host's address is the guest's.
#[derive(Debug, Default)]
pub(crate) struct GuestPages(BTreeMap<GuestPage, u32>);

impl GuestPages {
    /// Returns the number of page pins that are held.
    pub(crate) fn held(&self) -> u32 {
        self.0.values().sum()
    }
}

impl Pages for GuestPages {
    fn pin(&mut self, page: GuestPage) -> Result<HostAddress, CannotPin> {
        let address = page.0.checked_mul(PAGE_SIZE).ok_or(CannotPin)?;
        if !ffi::load_absolute(address, &mut [0]) {
            return Err(CannotPin);
        }
        *self.0.entry(page).or_default() += 1;
        Ok(HostAddress(address))
    }

    fn unpin(&mut self, page: GuestPage) {
        take_one(&mut self.0, page);
    }
}

/// Registry of interruption subclasses, in which host and guest numbers are the same.
#[derive(Debug, Default)]
pub(crate) struct Registry(BTreeMap<Subclass, u32>);

impl Registry {
    /// Returns the number of subclass registrations that are held.
    pub(crate) fn held(&self) -> u32 {
        self.0.values().sum()
    }
}

impl Subclasses for Registry {
    fn register(&mut self, subclass: Subclass) -> Result<HostSubclass, CannotRegister> {
        *self.0.entry(subclass).or_default() += 1;
        Ok(HostSubclass(subclass.get()))
    }

    fn unregister(&mut self, subclass: Subclass) {
        take_one(&mut self.0, subclass);
    }
}

fn take_one<K: Ord>(counts: &mut BTreeMap<K, u32>, key: K) {
    if let Some(count) = counts.get_mut(&key) {
        *count = count.saturating_sub(1);
        if *count == 0 {
            counts.remove(&key);
        }
    }
}

/// Clock of the cards: the host's time since the plugin was started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WallClock(Instant);

impl WallClock {
    pub(crate) fn new() -> WallClock {
        WallClock(Instant::now())
    }
}

impl Clock for WallClock {
    fn now(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn wait(&mut self, nanoseconds: u64) {
        std::thread::sleep(Duration::from_nanos(nanoseconds));
    }
}

/// Notifications: the byte is written at once, by way of the processor that executes an AP
/// instruction or looks after the cards; the interruptions wait here until that has ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outbox(Arc<Mutex<Vec<Subclass>>>);

impl Outbox {
    /// Returns and clears the subclasses of all notifications since the last call.
    pub(crate) fn take(&self) -> Vec<Subclass> {
        mem::take(&mut self.0.lock().unpoisoned())
    }
}

impl Notify for Outbox {
    fn notify(&mut self, _apqn: Apqn, target: InterruptTarget) {
        ffi::store_absolute(target.notification.0, &[1]);
        let mut subclasses = self.0.lock().unpoisoned();
        subclasses.push(target.guest);
    }
}
