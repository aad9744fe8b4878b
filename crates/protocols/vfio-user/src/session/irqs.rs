//! Requests that describe interrupts and act on them.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::{flag, split};
use crate::device::{Device, IrqAction, IrqData, OperationOutcome, SetIrqs};
use crate::wire;

pub(super) fn irq_info(
    payload: &[u8],
    device: &mut dyn Device,
    reply: &mut Vec<u8>,
) -> Result<(), Errno> {
    let (request, _) = split::<wire::IrqInfo>(payload)?;
    if (request.argsz as usize) < size_of::<wire::IrqInfo>()
        || request.index >= device.info().num_irqs
    {
        return Err(Errno::INVAL);
    }
    let info = device.irq(request.index).unwrap_or_default();
    let wire_info = wire::IrqInfo {
        argsz: size_of::<wire::IrqInfo>() as u32,
        flags: flag(info.eventfd, wire::irq::EVENTFD)
            | flag(info.maskable, wire::irq::MASKABLE)
            | flag(info.automasked, wire::irq::AUTOMASKED)
            | flag(info.noresize, wire::irq::NORESIZE),
        index: request.index,
        count: info.count,
    };
    reply.extend_from_slice(wire_info.as_bytes());
    Ok(())
}

pub(super) fn set_irqs(
    payload: &[u8],
    fds: Vec<OwnedFd>,
    device: &mut dyn Device,
) -> Result<OperationOutcome, Errno> {
    use wire::irq_set as set;

    let (request, data) = split::<wire::IrqSet>(payload)?;
    if (request.argsz as usize) < size_of::<wire::IrqSet>()
        || request.flags & !(set::DATA_MASK | set::ACTION_BITS) != 0
    {
        return Err(Errno::INVAL);
    }
    let action = match request.flags & set::ACTION_BITS {
        set::ACTION_MASK => IrqAction::Mask,
        set::ACTION_UNMASK => IrqAction::Unmask,
        set::ACTION_TRIGGER => IrqAction::Trigger,
        _ => return Err(Errno::INVAL),
    };
    if request.index >= device.info().num_irqs {
        return Err(Errno::INVAL);
    }
    let available = device.irq(request.index).unwrap_or_default().count;
    let end = request
        .start
        .checked_add(request.count)
        .ok_or(Errno::INVAL)?;
    let data_kind = request.flags & set::DATA_MASK;
    let tear_down =
        data_kind == set::DATA_NONE && action == IrqAction::Trigger && request.start == 0;
    if end > available || (request.count == 0 && !tear_down) {
        return Err(Errno::INVAL);
    }
    let count = request.count as usize;
    let data = match data_kind {
        set::DATA_NONE if fds.is_empty() => IrqData::None,
        set::DATA_BOOL if fds.is_empty() => {
            let booleans = data.get(..count).ok_or(Errno::INVAL)?;
            IrqData::Bool(booleans.iter().map(|boolean| *boolean != 0).collect())
        }
        set::DATA_EVENTFD if fds.len() == count => {
            IrqData::Eventfd(fds.into_iter().map(Some).collect())
        }
        set::DATA_EVENTFD if fds.is_empty() => IrqData::Eventfd((0..count).map(|_| None).collect()),
        _ => return Err(Errno::INVAL),
    };
    device.set_irqs(SetIrqs {
        index: request.index,
        start: request.start,
        count: request.count,
        action,
        data,
    })
}
