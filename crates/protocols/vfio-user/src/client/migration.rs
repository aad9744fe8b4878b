//! Live migration: the client's side, as a VMM uses it.
//!
//! A migration takes these steps; [`Client::migration_flags`] tells whether the device offers it.
//!
//! | source | destination |
//! |---|---|
//! | [`start_log`](Client::start_log), then copy all guest memory | map the same memory |
//! | [`dirty_pages`](Client::dirty_pages) of all memory, copy these pages; repeat | |
//! | stop the guest, [`set_migration_state`](Client::set_migration_state) STOP_COPY | RESUMING |
//! | [`read_state`](Client::read_state) to the end | [`write_state`](Client::write_state) |
//! | `dirty_pages` once more: the device writes nothing after STOP_COPY | |
//! | | STOP: the device checks the state |
//! | | RUNNING, then let the guest go on |
//!
//! Whatever fails before RUNNING: set the source to RUNNING again.

use super::{Client, ClientError};
use crate::migration::MigrationState;
use crate::wire::{self, Command, feature};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

impl Client {
    fn device_feature(
        &mut self,
        flags: u32,
        data: &[&[u8]],
        answer: usize,
    ) -> Result<(), ClientError> {
        let header = size_of::<wire::DeviceFeature>();
        let asked: usize = data.iter().map(|part| part.len()).sum();
        let request = wire::DeviceFeature {
            argsz: (header + asked.max(answer)) as u32,
            flags,
        };
        let parts: Vec<&[u8]> = std::iter::once(request.as_bytes())
            .chain(data.iter().copied())
            .collect();
        let fds = self.call(Command::DEVICE_FEATURE, &parts, &[])?;
        self.no_fds(&fds)
    }

    /// Returns the value of a feature in the reply.
    fn feature_value<T: FromBytes + KnownLayout + Immutable>(
        &mut self,
    ) -> Result<(T, &[u8]), ClientError> {
        let at = size_of::<wire::DeviceFeature>();
        let value = self
            .reply
            .get(at..)
            .and_then(|rest| T::read_from_prefix(rest).ok());
        if value.is_none() {
            self.broken = true;
        }
        value.ok_or(ClientError::Malformed("device feature"))
    }

    /// Returns whether the device supports an operation ([`feature::GET`], [`feature::SET`]) of a
    /// feature.
    ///
    /// # Errors
    /// Those of the connection; a refusal is `false`.
    pub fn probe_feature(&mut self, feature: u32, operation: u32) -> Result<bool, ClientError> {
        match self.device_feature(feature | operation | feature::PROBE, &[], 0) {
            Ok(()) => Ok(true),
            Err(ClientError::Refused { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns the flags of the migration that the device offers ([`wire::migration`]).
    ///
    /// # Errors
    /// [`ClientError::Refused`] when it offers none, and those of the connection.
    pub fn migration_flags(&mut self) -> Result<u64, ClientError> {
        self.device_feature(feature::MIGRATION | feature::GET, &[], 8)?;
        Ok(self.feature_value::<u64>()?.0)
    }

    /// Returns the number of the device's migration state.
    ///
    /// # Errors
    /// [`ClientError::Refused`] when the device does not migrate, and those of the connection.
    pub fn migration_state(&mut self) -> Result<u32, ClientError> {
        let size = size_of::<wire::MigState>();
        self.device_feature(feature::MIG_DEVICE_STATE | feature::GET, &[], size)?;
        Ok(self.feature_value::<wire::MigState>()?.0.device_state)
    }

    /// Changes the device's migration state, and waits until it is reached.
    ///
    /// # Errors
    /// [`ClientError::Refused`] when the device does not go there, and those of the connection.
    pub fn set_migration_state(&mut self, state: MigrationState) -> Result<(), ClientError> {
        let wanted = wire::MigState {
            device_state: state as u32,
            data_fd: -1,
        };
        let flags = feature::MIG_DEVICE_STATE | feature::SET;
        self.device_feature(flags, &[wanted.as_bytes()], 0)
    }

    /// Has the device log the pages that it writes in these ranges, given as IOVA and length.
    ///
    /// # Errors
    /// [`ClientError::Refused`], and those of the connection.
    pub fn start_log(&mut self, ranges: &[(u64, u64)]) -> Result<(), ClientError> {
        let control = wire::DmaLoggingControl {
            page_size: crate::migration::DIRTY_PAGE,
            num_ranges: ranges.len() as u32,
            reserved: 0,
        };
        let ranges: Vec<wire::DmaLoggingRange> = ranges
            .iter()
            .map(|&(iova, length)| wire::DmaLoggingRange { iova, length })
            .collect();
        let flags = feature::DMA_LOGGING_START | feature::SET;
        self.device_feature(flags, &[control.as_bytes(), ranges.as_bytes()], 0)
    }

    /// Ends the log of written pages.
    ///
    /// # Errors
    /// [`ClientError::Refused`], and those of the connection.
    pub fn stop_log(&mut self) -> Result<(), ClientError> {
        self.device_feature(feature::DMA_LOGGING_STOP | feature::SET, &[], 0)
    }

    /// Removes the pages of a range from the log, and returns them as a bitmap: bit 0 of the first
    /// word stands for the page at `iova`.
    ///
    /// # Errors
    /// [`ClientError::Refused`], and those of the connection.
    pub fn dirty_pages(
        &mut self,
        iova: u64,
        length: u64,
        page_size: u64,
    ) -> Result<Vec<u64>, ClientError> {
        let range = wire::DmaLoggingReport {
            iova,
            length,
            page_size,
        };
        let words = length.div_ceil(page_size.max(1)).div_ceil(64) as usize;
        let size = size_of::<wire::DmaLoggingReport>() + 8 * words;
        let flags = feature::DMA_LOGGING_REPORT | feature::GET;
        self.device_feature(flags, &[range.as_bytes()], size)?;
        let (_, bitmap) = self.feature_value::<wire::DmaLoggingReport>()?;
        let (bitmap, _) = bitmap.as_chunks::<8>();
        let bitmap: Vec<u64> = bitmap
            .iter()
            .map(|word| u64::from_ne_bytes(*word))
            .collect();
        if bitmap.len() != words {
            return Err(self.malformed("dirty pages"));
        }
        Ok(bitmap)
    }

    /// Reads at most `count` further bytes of the device's state; none at its end.
    ///
    /// # Errors
    /// [`ClientError::Refused`], and those of the connection.
    pub fn read_state(&mut self, count: u32) -> Result<Vec<u8>, ClientError> {
        let request = wire::MigData {
            argsz: (size_of::<wire::MigData>() as u32).saturating_add(count),
            size: count,
        };
        let fds = self.call(Command::MIG_DATA_READ, &[request.as_bytes()], &[])?;
        self.no_fds(&fds)?;
        let (reply, data) = self.parse::<wire::MigData>("device state")?;
        if reply.size > count || reply.size as usize != data.len() {
            return Err(self.malformed("device state"));
        }
        Ok(data.to_vec())
    }

    /// Writes further bytes of the device's state.
    ///
    /// # Errors
    /// [`ClientError::Refused`], and those of the connection.
    pub fn write_state(&mut self, data: &[u8]) -> Result<(), ClientError> {
        let request = wire::MigData {
            argsz: (size_of::<wire::MigData>() + data.len()) as u32,
            size: data.len() as u32,
        };
        let fds = self.call(Command::MIG_DATA_WRITE, &[request.as_bytes(), data], &[])?;
        self.no_fds(&fds)
    }
}
