//! Boot Partitions (NVMe Base 2.1, 8.1.3).

use crate::bytes::{u8_at, u32_at};
use crate::case::{Need::*, cases};
use crate::host::{Host, PAGE, admin};
use crate::verdict::{Check, Expect, applies_if, require, same};
use nvme::AdminOpcode;
use nvme::log::Lid;
use nvme::regs::{self, BootReadStatus, Bpinfo, Bprsel};
use std::time::Instant;

cases! {
    boot_read, ["11.1-b"], If("CAP.BPS"), Disabled, "Base 2.1, 3.1.4.13 to 3.1.4.15, 8.1.3.1",
        "a write to BPRSEL has a part of a boot partition copied to BPMBL, no more, and BPINFO.BRS \
         says so";
    boot_read_beyond, ["11.1-c"], If("CAP.BPS"), Disabled, "Base 2.1, 3.1.4.13, 3.1.4.14",
        "a read beyond a boot partition's end transfers nothing, and BPINFO.BRS is 11b";
    boot_log, ["11.1-d"], If("CAP.BPS"), Admin, "Base 2.1, 5.1.12.1.19",
        "the log page Boot Partition has the size that BPINFO has, and the data that registers \
         read";
}

/// Value of the field BRS in BPINFO after a successful read of a Boot Partition.
const SUCCESS: u8 = BootReadStatus::SUCCESS.into_bits();
const ERROR: u8 = BootReadStatus::ERROR.into_bits();

/// Returns the size of each Boot Partition in units of 4 KiB.
fn units(host: &mut Host) -> Check<u32> {
    applies_if(host.cap.bps(), "CAP.BPS is 0")?;
    let size = Bpinfo::from_bits(host.read32(regs::BPINFO)?).bpsz();
    require!(size > 0, "BPINFO.BPSZ is 0");
    Ok(u32::from(size) * 32)
}

/// Reads `units` units of 4 KiB of a Boot Partition from unit `from` on into guest memory. Returns
/// the read status (BRS).
fn read(host: &mut Host, buffer: u64, id: bool, from: u32, units: u16) -> Check<u8> {
    host.write64(regs::BPMBL, buffer)?;
    let select = Bprsel::new()
        .with_bpid(id)
        .with_bprof(from)
        .with_bprsz(units);
    host.write32(regs::BPRSEL, select.into_bits())?;
    let limit = Instant::now() + host.ready_time();
    loop {
        let status = Bpinfo::from_bits(host.read32(regs::BPINFO)?).brs();
        if status != BootReadStatus::IN_PROGRESS {
            return Ok(status.into_bits());
        }
        require!(Instant::now() < limit, "BPINFO.BRS stays 01b");
    }
}

fn boot_read(host: &mut Host) -> Check {
    let units = units(host)?;
    let buffer = host.alloc(3 * PAGE)?;
    let untouched = vec![0xee; PAGE as usize];
    let page = |host: &Host, number: u64| host.get(buffer + number * PAGE, PAGE as usize);
    for id in [false, true] {
        host.put(buffer, &untouched.repeat(3))?;
        let status = read(host, buffer, id, 0, 2)?;
        same!(status, SUCCESS, "BPINFO.BRS");
        let second = page(host, 1)?;
        require!(
            page(host, 2)? == untouched,
            "more was transferred than asked for"
        );
        let status = read(host, buffer, id, 1, 1)?;
        same!(status, SUCCESS, "the second page");
        require!(
            page(host, 0)? == second,
            "the second page differs from itself"
        );
        let status = read(host, buffer, id, units - 1, 1)?;
        same!(status, SUCCESS, "the last page");
    }
    Ok(())
}

fn boot_read_beyond(host: &mut Host) -> Check {
    let units = units(host)?;
    let buffer = host.alloc(2 * PAGE)?;
    let untouched = vec![0xee; 2 * PAGE as usize];
    host.put(buffer, &untouched)?;
    for from in [units - 1, units, 0xf_ffff] {
        let status = read(host, buffer, false, from, 2)?;
        same!(status, ERROR, "BPINFO.BRS from unit {from} on");
    }
    require!(
        host.get(buffer, untouched.len())? == untouched,
        "something was transferred"
    );
    Ok(())
}

fn boot_log(host: &mut Host) -> Check {
    let units = units(host)?;
    let (buffer, list) = (host.alloc(2 * PAGE)?, host.alloc(PAGE)?);
    let log = |host: &mut Host, offset: u64| {
        let mut command = admin(AdminOpcode::GET_LOG_PAGE, 0);
        command = command
            .dw(
                10,
                (PAGE as u32 / 4 - 1) << 16 | u32::from(Lid::BOOT_PARTITION.0),
            )
            .dw(12, offset as u32)
            .prp(list, 0);
        host.admin(command)?.succeeds("Get Log Page")?;
        host.get(list, PAGE as usize)
    };
    let first = log(host, 0)?;
    same!(u8_at(&first, 0), Lid::BOOT_PARTITION.0, "LID");
    let info = Bpinfo::from_bits(u32_at(&first, 4));
    same!(
        u32::from(info.bpsz()) * 32,
        units,
        "the size in the log page"
    );
    for from in [0, units - 1] {
        let status = read(host, buffer, false, from, 1)?;
        same!(status, SUCCESS, "BPINFO.BRS");
        let wanted = host.get(buffer, PAGE as usize)?;
        let logged = log(host, 16 + u64::from(from) * PAGE)?;
        require!(logged == wanted, "unit {from} in the log page is another");
    }
    Ok(())
}
