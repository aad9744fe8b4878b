//! Live migration of a device: its states, and the calls of a [`Connection`](crate::Connection).
//!
//! The second version of VFIO's migration protocol (`<linux/vfio.h>`,
//! `VFIO_DEVICE_FEATURE_MIGRATION`), without the optional states:
//!
//! ```text
//!                     .-> STOP_COPY  (the state is read)
//! RUNNING <-> STOP <--|
//!                     '-> RESUMING   (the state is written)
//! ```
//!
//! A client may request any of these states; the device goes through STOP in between. ERROR ends
//! with a reset, as every other state does: a device that was reset is RUNNING.

use crate::device::OperationOutcome;
use rustix::io::Errno;

/// Size in bytes of the pages in the log of written pages.
pub const DIRTY_PAGE: u64 = 4096;

/// Migration state of a device (`enum vfio_device_mig_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MigrationState {
    /// The device has failed and must be reset.
    Error = 0,
    /// The device is stopped.
    Stop = 1,
    /// The device operates normally.
    Running = 2,
    /// The device is stopped, and its state can be read.
    StopCopy = 3,
    /// The device is stopped, and its state can be written.
    Resuming = 4,
}

impl MigrationState {
    /// Returns the state of this number; `None` if no client may request it.
    pub fn of(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::Stop),
            2 => Some(Self::Running),
            3 => Some(Self::StopCopy),
            4 => Some(Self::Resuming),
            _ => None,
        }
    }

    /// Returns the next state on the way to `wanted`, or `wanted` itself if the device is in it;
    /// `None` if there is no way.
    pub fn next(self, wanted: Self) -> Option<Self> {
        match (self, wanted) {
            (Self::Error, _) | (_, Self::Error) => None,
            (from, to) if from == to => Some(to),
            (Self::Stop, to) => Some(to),
            _ => Some(Self::Stop),
        }
    }
}

/// A device that can migrate, see [`Device::migration`](crate::Device::migration).
///
/// Errors are answered with the error number, as those of [`Device`](crate::Device).
pub trait Migration {
    /// Returns the migration state.
    fn state(&self) -> MigrationState;

    /// Changes the migration state. [`MigrationState::next`] has a way to `wanted`. After an error
    /// the device may be in any state.
    fn set_state(&mut self, wanted: MigrationState) -> Result<OperationOutcome, Errno>;

    /// Reads the next bytes of the state into `data`, in STOP_COPY. Returns how many there were;
    /// 0 at the end.
    fn read_state(&mut self, data: &mut [u8]) -> Result<usize, Errno>;

    /// Takes further bytes of the state, in RESUMING. They may be anything.
    fn write_state(&mut self, data: &[u8]) -> Result<(), Errno>;

    /// Begins to log the pages of client memory that the device writes. The answer must wait until
    /// everything that the device has yet to write will be in the log.
    fn start_log(&mut self) -> Result<OperationOutcome, Errno>;

    /// Ends the log of written pages.
    fn stop_log(&mut self) -> Result<(), Errno>;

    /// Removes the pages of a range from the log, and calls `each` with the address of every one.
    fn take_dirty(
        &mut self,
        iova: u64,
        length: u64,
        each: &mut dyn FnMut(u64),
    ) -> Result<(), Errno>;
}

#[cfg(test)]
mod tests {
    use super::MigrationState::{self, Error, Resuming, Running, Stop, StopCopy};

    #[test]
    fn states_change_by_arcs_of_protocol_only() {
        let arcs = [
            (Running, Stop),
            (Stop, Running),
            (Stop, StopCopy),
            (StopCopy, Stop),
            (Stop, Resuming),
            (Resuming, Stop),
        ];
        let all = [Error, Stop, Running, StopCopy, Resuming];
        for from in all {
            assert_eq!(
                MigrationState::of(from as u32),
                Some(from).filter(|s| *s != Error)
            );
            for to in all {
                let mut at = from;
                let mut steps = 0;
                while let Some(next) = at.next(to).filter(|next| *next != at) {
                    assert!(arcs.contains(&(at, next)), "{at:?} to {next:?}");
                    at = next;
                    steps += 1;
                }
                assert!(steps <= 2);
                let possible = from == to || (from != Error && to != Error);
                assert_eq!(at == to, possible, "{from:?} to {to:?}");
            }
        }
        for number in [0, 5, 6, 7, 8, u32::MAX] {
            assert_eq!(MigrationState::of(number), None);
        }
    }
}
