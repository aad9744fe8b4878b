//! Interrupts (NVMe over PCIe Transport 1.1, 3.5).

use crate::bytes::{u16_at, u32_at};
use crate::case::{Need::*, cases};
use crate::host::{Host, QUIET_TIME, nvm};
use crate::verdict::{Check, Expect, not_applicable, require, same};
use nvme::NvmOpcode;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::time::Timespec;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;
use vfio_user::IrqAction;
use vfio_user::client::Irqs;

cases! {
    msix_capability, ["10-i"], If("MSI-X"), Disabled, "PCIe Transport 1.1, 3.8",
        "the MSI-X table and its pending bits lie in the BAR that they name, and do not overlap";
    msix_table_masked, ["10-i"], If("MSI-X"), Disabled, "PCI Express Base, 7.7.2",
        "the vectors of the MSI-X table are masked after a reset of the device";
    msix_fires, ["6-a"], If("MSI-X"), Admin, "PCIe Transport 1.1, 3.5.1",
        "a completion interrupts by the vector of its queue, and by no other";
    msix_not_enabled_for_queue, ["6-b"], If("MSI-X"), Admin, "Base 2.1, 5.2.1",
        "a completion queue made without interrupts has none";
    msix_each_batch, ["6-a"], If("MSI-X"), Admin, "PCIe Transport 1.1, 3.5.1",
        "every command that completes alone interrupts anew";
}

/// Index of MSI-X among the interrupt types of vfio-user (`VFIO_PCI_MSIX_IRQ_INDEX`).
const MSIX: u32 = 2;

fn capability(host: &mut Host) -> Check<(u64, [u8; 12])> {
    let found = super::pci::capabilities(host)?;
    match found.iter().find(|(id, _)| *id == 0x11) {
        Some((_, at)) => Ok((*at, host.read_config::<12>(*at)?)),
        None => not_applicable("there is no MSI-X"),
    }
}

fn msix_capability(host: &mut Host) -> Check {
    let (_, bytes) = capability(host)?;
    let count = u64::from(u16_at(&bytes, 2) & 0x7ff) + 1;
    let (table, pending) = (u32_at(&bytes, 4), u32_at(&bytes, 8));
    for (name, value) in [("table", table), ("pending bits", pending)] {
        require!(
            value & 7 <= 5,
            "the {name} of MSI-X are in BAR {}",
            value & 7
        );
    }
    let (table_at, pending_at) = (u64::from(table & !7), u64::from(pending & !7));
    let (table_end, pending_end) = (table_at + 16 * count, pending_at + count.div_ceil(64) * 8);
    require!(
        table & 7 != pending & 7 || table_end <= pending_at || pending_end <= table_at,
        "table {table_at:#x} and pending bits {pending_at:#x} overlap"
    );
    let doorbells = host.doorbell(1, true) + 4;
    require!(
        table & 7 != 0 || table_at >= doorbells,
        "the MSI-X table at {table_at:#x} lies over doorbells"
    );
    Ok(())
}

fn msix_table_masked(host: &mut Host) -> Check {
    let (_, bytes) = capability(host)?;
    let (count, table) = (u64::from(u16_at(&bytes, 2) & 0x7ff) + 1, u32_at(&bytes, 4));
    if table & 7 != 0 {
        return not_applicable("the MSI-X table is not in BAR0");
    }
    host.client.reset()?;
    host.decode()?;
    // The table may be the VMM's alone, which reads as zero then.
    let mut entries = Vec::new();
    for vector in 0..count {
        entries.push(host.read32(u64::from(table & !7) + 16 * vector + 12)?);
    }
    let masked = entries.iter().filter(|entry| **entry & 1 != 0).count();
    if masked == 0 {
        return not_applicable("the MSI-X table is kept by the VMM, not by the server");
    }
    same!(masked as u64, count, "vectors that are masked");
    Ok(())
}

/// Enables MSI-X with an eventfd for vector 0 and one for vector 1.
fn listen(host: &mut Host) -> Check<[OwnedFd; 2]> {
    let (at, bytes) = capability(host)?;
    if u16_at(&bytes, 2) & 0x7ff < 1 {
        return not_applicable("there is one vector only");
    }
    let make = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    let fds = [make()?, make()?];
    let [first, second] = [Some(fds[0].as_fd()), Some(fds[1].as_fd())];
    host.client.set_irqs(
        MSIX,
        0,
        IrqAction::Trigger,
        Irqs::Eventfds(&[first, second]),
    )?;
    let table = u32_at(&bytes, 4);
    if table & 7 == 0 {
        for vector in 0..2 {
            let entry = u64::from(table & !7) + 16 * vector;
            host.write_bar(entry, &0xfee0_0000u32.to_le_bytes())?;
            host.write_bar(entry + 12, &[0; 4])?;
        }
    }
    let control = u16_at(&bytes, 2) & !0x4000 | 0x8000;
    host.write_config(at + 2, &control.to_le_bytes())?;
    Ok(fds)
}

/// Returns whether the eventfd was signalled within the time `within`, and resets it.
fn fired(fd: &OwnedFd, within: Duration) -> Check<bool> {
    let limit = Timespec {
        tv_sec: within.as_secs() as i64,
        tv_nsec: within.subsec_nanos().into(),
    };
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    if poll(&mut fds, Some(&limit))? == 0 {
        return Ok(false);
    }
    let mut count = [0; 8];
    rustix::io::read(fd, &mut count)?;
    Ok(true)
}

const INTERRUPT_TIMEOUT: Duration = Duration::from_secs(5);

/// Creates queue pair 1, with interrupts on vector 1 if `vector` is true, otherwise without
/// interrupts.
fn pair(host: &mut Host, vector: bool) -> Check {
    let (cq, sq) = host.pair_commands(1, 16)?;
    let flags = if vector { 1 << 16 | 3 } else { 1 };
    host.admin(cq.dw(11, flags))?
        .succeeds("completion queue 1")?;
    host.know_cq(1, cq.prp1(), 16);
    host.admin(sq)?.succeeds("submission queue 1")?;
    host.know_sq(1, sq.prp1(), 16, 1);
    Ok(())
}

fn msix_fires(host: &mut Host) -> Check {
    let [first, second] = listen(host)?;
    pair(host, true)?;
    require!(
        fired(&first, INTERRUPT_TIMEOUT)?,
        "admin completions have not interrupted by vector 0"
    );
    let ns = host.namespace()?;
    while fired(&first, QUIET_TIME)? {}
    while fired(&second, Duration::ZERO)? {}
    host.io(nvm(NvmOpcode::FLUSH, ns.nsid))?.succeeds("Flush")?;
    require!(
        fired(&second, INTERRUPT_TIMEOUT)?,
        "no interrupt by vector 1"
    );
    require!(
        !fired(&first, QUIET_TIME)?,
        "an interrupt by vector 0 for queue 1"
    );
    Ok(())
}

fn msix_not_enabled_for_queue(host: &mut Host) -> Check {
    let [first, second] = listen(host)?;
    pair(host, false)?;
    let ns = host.namespace()?;
    while fired(&first, QUIET_TIME)? {}
    host.io(nvm(NvmOpcode::FLUSH, ns.nsid))?.succeeds("Flush")?;
    require!(
        !fired(&first, QUIET_TIME)?,
        "an interrupt by vector 0 of a queue without interrupts"
    );
    require!(
        !fired(&second, QUIET_TIME)?,
        "an interrupt by vector 1 of a queue without interrupts"
    );
    Ok(())
}

fn msix_each_batch(host: &mut Host) -> Check {
    let [_first, second] = listen(host)?;
    pair(host, true)?;
    let ns = host.namespace()?;
    for round in 0..50 {
        let cid = host.submit(1, nvm(NvmOpcode::FLUSH, ns.nsid))?;
        require!(
            fired(&second, INTERRUPT_TIMEOUT)?,
            "round {round}: no interrupt"
        );
        host.wait_for(1, cid)?.succeeds("Flush")?;
    }
    Ok(())
}
