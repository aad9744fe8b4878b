//! Requests of live migration: device features, and transfers of the device's state.

use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::{MessageResult, Session, split};
use crate::device::{Device, OperationOutcome};
use crate::migration::{DIRTY_PAGE, Migration, MigrationState};
use crate::wire::{self, feature, migration};

/// Operations of `VFIO_USER_DEVICE_FEATURE` that a feature supports; `None` for unknown features.
fn operations(feature: u32) -> Option<u32> {
    match feature {
        feature::MIGRATION | feature::DMA_LOGGING_REPORT => Some(feature::GET),
        feature::MIG_DEVICE_STATE => Some(feature::GET | feature::SET),
        feature::DMA_LOGGING_START | feature::DMA_LOGGING_STOP => Some(feature::SET),
        _ => None,
    }
}

impl Session {
    pub(super) fn device_feature(
        &self,
        payload: &[u8],
        device: &mut dyn Device,
        reply: &mut Vec<u8>,
    ) -> Result<MessageResult, Errno> {
        let device = device.migration().ok_or(Errno::NOTSUP)?;
        let (request, data) = split::<wire::DeviceFeature>(payload)?;
        let feature = request.flags & feature::MASK;
        let asked = request.flags & !feature::MASK;
        let possible = operations(feature).ok_or(Errno::NOTTY)?;
        if asked & !(possible | feature::PROBE) != 0 {
            return Err(Errno::INVAL);
        }
        let argsz = request.argsz as usize;
        if asked & feature::PROBE != 0 {
            return echo(payload, argsz, reply);
        }
        match asked {
            feature::GET => {
                let value = self.feature_value(feature, data, argsz, device)?;
                let size = size_of::<wire::DeviceFeature>() + value.len();
                if argsz < size {
                    return Err(Errno::INVAL);
                }
                let argsz = size as u32;
                reply.extend_from_slice(wire::DeviceFeature { argsz, ..request }.as_bytes());
                reply.extend_from_slice(&value);
                Ok(MessageResult::Reply(None))
            }
            feature::SET if argsz < payload.len() => Err(Errno::INVAL),
            feature::SET => set_feature(feature, (payload, data), device, reply),
            _ => Err(Errno::INVAL),
        }
    }

    /// Returns the bytes of a feature's value.
    fn feature_value(
        &self,
        feature: u32,
        data: &[u8],
        argsz: usize,
        device: &mut dyn Migration,
    ) -> Result<Vec<u8>, Errno> {
        match feature {
            feature::MIGRATION => Ok(migration::STOP_COPY.to_ne_bytes().to_vec()),
            feature::MIG_DEVICE_STATE => {
                let state = wire::MigState {
                    device_state: device.state() as u32,
                    data_fd: -1,
                };
                Ok(state.as_bytes().to_vec())
            }
            _ => self.dirty_pages(data, argsz, device),
        }
    }

    /// Returns the reply to a report of dirty pages: the range, and a bitmap of 64-bit words.
    fn dirty_pages(
        &self,
        data: &[u8],
        argsz: usize,
        device: &mut dyn Migration,
    ) -> Result<Vec<u8>, Errno> {
        let (range, _) = split::<wire::DmaLoggingReport>(data)?;
        let wire::DmaLoggingReport {
            iova,
            length,
            page_size,
        } = range;
        let before_end = length.checked_sub(1).ok_or(Errno::INVAL)?;
        iova.checked_add(before_end).ok_or(Errno::INVAL)?;
        if !page_size.is_power_of_two()
            || page_size < DIRTY_PAGE
            || !iova.is_multiple_of(DIRTY_PAGE)
        {
            return Err(Errno::INVAL);
        }
        // Larger pages do not make a report cover more, because the device looks at all of its own.
        let limit = self.told.as_ref().map_or(0, |told| told.max_data_xfer_size);
        if before_end / DIRTY_PAGE / 64 >= limit / 8 {
            return Err(Errno::INVAL);
        }
        let words = before_end / page_size / 64 + 1;
        let mut bitmap = vec![0u64; words as usize];
        let size =
            size_of::<wire::DeviceFeature>() + range.as_bytes().len() + bitmap.as_bytes().len();
        // The pages leave the log only when the client can take them.
        if argsz < size {
            return Err(Errno::INVAL);
        }
        device.take_dirty(iova, length, &mut |page| {
            let bit = page.saturating_sub(iova) / page_size;
            if let Some(word) = bitmap.get_mut((bit / 64) as usize) {
                *word |= 1 << (bit % 64);
            }
        })?;
        Ok([range.as_bytes(), bitmap.as_bytes()].concat())
    }

    pub(super) fn migration_read(
        &self,
        payload: &[u8],
        device: &mut dyn Device,
        reply: &mut Vec<u8>,
    ) -> Result<(), Errno> {
        let device = device.migration().ok_or(Errno::NOTSUP)?;
        let (request, _) = split::<wire::MigData>(payload)?;
        let count = self.check_transfer(&request)?;
        if device.state() != MigrationState::StopCopy {
            return Err(Errno::INVAL);
        }
        let mut data = vec![0; count];
        let read = device.read_state(&mut data)?;
        let data = data.get(..read).unwrap_or_default();
        let answer = wire::MigData {
            argsz: (size_of::<wire::MigData>() + data.len()) as u32,
            size: data.len() as u32,
        };
        reply.extend_from_slice(answer.as_bytes());
        reply.extend_from_slice(data);
        Ok(())
    }

    pub(super) fn migration_write(
        &self,
        payload: &[u8],
        device: &mut dyn Device,
    ) -> Result<(), Errno> {
        let device = device.migration().ok_or(Errno::NOTSUP)?;
        let (request, data) = split::<wire::MigData>(payload)?;
        let count = self.check_transfer(&request)?;
        let data = data.get(..count).ok_or(Errno::INVAL)?;
        if device.state() != MigrationState::Resuming {
            return Err(Errno::INVAL);
        }
        device.write_state(data)
    }

    fn check_transfer(&self, request: &wire::MigData) -> Result<usize, Errno> {
        let limit = self.told.as_ref().map_or(0, |told| told.max_data_xfer_size);
        let needed = size_of::<wire::MigData>() as u64 + u64::from(request.size);
        if u64::from(request.size) > limit || u64::from(request.argsz) < needed {
            return Err(Errno::INVAL);
        }
        Ok(request.size as usize)
    }
}

/// Changes a feature. The reply repeats the request.
fn set_feature(
    feature: u32,
    (payload, data): (&[u8], &[u8]),
    device: &mut dyn Migration,
    reply: &mut Vec<u8>,
) -> Result<MessageResult, Errno> {
    match feature {
        feature::MIG_DEVICE_STATE => {
            let (wanted, _) = split::<wire::MigState>(data)?;
            let wanted = MigrationState::of(wanted.device_state).ok_or(Errno::INVAL)?;
            device.state().next(wanted).ok_or(Errno::INVAL)?;
            if device.set_state(wanted)? == OperationOutcome::Pending {
                return Ok(MessageResult::Deferred(payload.to_vec()));
            }
        }
        feature::DMA_LOGGING_START => {
            let (control, ranges) = split::<wire::DmaLoggingControl>(data)?;
            let count = u64::from(control.num_ranges);
            let size = size_of::<wire::DmaLoggingRange>() as u64;
            if ranges.len() as u64 != count * size || !control.page_size.is_power_of_two() {
                return Err(Errno::INVAL);
            }
            let outcome = device.start_log()?;
            // The device selects the page size. It logs all memory, not only the ranges.
            let page_size = DIRTY_PAGE;
            let selected = wire::DmaLoggingControl {
                page_size,
                ..control
            };
            let header = payload.get(..size_of::<wire::DeviceFeature>());
            let header = header.unwrap_or_default();
            let answer = [header, selected.as_bytes(), ranges].concat();
            if outcome == OperationOutcome::Pending {
                return Ok(MessageResult::Deferred(answer));
            }
            reply.extend_from_slice(&answer);
            return Ok(MessageResult::Reply(None));
        }
        _ => device.stop_log()?,
    }
    reply.extend_from_slice(payload);
    Ok(MessageResult::Reply(None))
}

fn echo(payload: &[u8], argsz: usize, reply: &mut Vec<u8>) -> Result<MessageResult, Errno> {
    if argsz < payload.len() {
        return Err(Errno::INVAL);
    }
    reply.extend_from_slice(payload);
    Ok(MessageResult::Reply(None))
}
