//! Resets of every kind, with commands in flight.

use anyhow::Result;
use nvme::pci::{self, command};
use std::time::{Duration, Instant};

use super::Context;
use super::work::{io, transfer};
use crate::hostile::client::nvme::{CONFIG, Guest};
use crate::hostile::test_daemon::{FILE_NSID, MEMORY_NSID};

/// PCI Express capability, and its Device Control with Initiate Function Level Reset (PCI Express
/// 6.0, 7.5.3.4).
const PCI_EXPRESS: u8 = 0x10;
const DEVICE_CONTROL: u64 = 8;
const INITIATE_FLR: u16 = 1 << 15;

/// A guest with commands in flight.
fn busy(context: &Context, guest: &mut Guest) -> Result<()> {
    guest.enable()?;
    guest.create_queues(4, None)?;
    for qid in 1..=4 {
        let nsid = if qid % 2 == 0 { MEMORY_NSID } else { FILE_NSID };
        guest.fill(qid, &mut |at| {
            transfer(io(at), nsid, u64::from(at) * 32, 32, u64::from(at) * 16384)
        })?;
    }
    let deadline = Instant::now() + Duration::from_millis(1);
    guest.storm(1..=4, |_| Instant::now() < deadline)?;
    context.did(1);
    Ok(())
}

pub(super) fn resets(context: &Context) -> Result<()> {
    let mut guest = Guest::attach(&context.nvme())?;
    while context.running() {
        busy(context, &mut guest)?;
        for _ in 0..20 {
            guest.client.reset()?;
        }
    }
    Ok(())
}

pub(super) fn enables(context: &Context) -> Result<()> {
    let mut guest = Guest::attach(&context.nvme())?;
    while context.running() {
        busy(context, &mut guest)?;
        for _ in 0..20 {
            guest.enable()?;
            guest.disable()?;
        }
    }
    Ok(())
}

fn find_capability(guest: &mut Guest, id: u8) -> Result<Option<u64>> {
    let mut space = [0; 256];
    guest.client.region_read(CONFIG, 0, &mut space)?;
    let mut at = space.get(pci::CAPABILITIES_POINTER).copied().unwrap_or(0);
    for _ in 0..48 {
        let here = usize::from(at & !3);
        let (Some(found), Some(next)) = (space.get(here), space.get(here + 1)) else {
            break;
        };
        if *found == id {
            return Ok(Some(here as u64));
        }
        if *next == 0 {
            break;
        }
        at = *next;
    }
    Ok(None)
}

pub(super) fn flr(context: &Context) -> Result<()> {
    let mut guest = Guest::attach(&context.nvme())?;
    let express = find_capability(&mut guest, PCI_EXPRESS)?;
    let power = find_capability(&mut guest, pci::cap_id::POWER_MANAGEMENT)?;
    while context.running() {
        busy(context, &mut guest)?;
        let mut write = |at: u64, value: u16| {
            let written = guest.client.region_write(CONFIG, at, &value.to_le_bytes());
            written.map_err(anyhow::Error::from)
        };
        let all = command::MEMORY_SPACE | command::BUS_MASTER;
        for _ in 0..10 {
            write(pci::COMMAND as u64, command::MEMORY_SPACE)?;
            write(pci::COMMAND as u64, all)?;
            if let Some(power) = power {
                // D3hot and D0 again.
                write(power + 4, 3)?;
                write(power + 4, 0)?;
                write(pci::COMMAND as u64, all)?;
            }
            if let Some(express) = express {
                write(express + DEVICE_CONTROL, INITIATE_FLR)?;
            }
            write(pci::COMMAND as u64, all)?;
        }
    }
    Ok(())
}
