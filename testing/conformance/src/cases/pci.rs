//! The function on the bus: configuration space (NVMe over PCIe Transport 1.1, 3.8).

use crate::bytes::{u8_at, u16_at, u32_at};
use crate::case::{Need::*, cases};
use crate::host::{Host, admin};
use crate::verdict::{Check, Expect, failed, require, same};
use nvme::AdminOpcode;

cases! {
    pci_class_code, ["10-a"], Always, Disabled, "PCIe Transport 1.1, 3.8",
        "the class code is mass storage, non-volatile memory, NVM Express I/O controller";
    pci_identity_matches, ["10-b"], Always, Admin, "PCIe Transport 1.1, 3.8; Base 2.1, 5.1.13.2.1",
        "vendor and subsystem vendor are those that Identify Controller tells";
    pci_bar0_is_64_bit_memory, ["10-c"], Always, Disabled, "PCIe Transport 1.1, 3.8",
        "BAR0 and BAR1 are one memory BAR of 64 bits, whose size is that of all doorbells at least";
    pci_capability_list, ["10-d"], Always, Disabled, "PCIe Transport 1.1, 3.8",
        "the capability list ends, and has power management, PCI Express and a kind of MSI";
    pci_power_state_d0, ["10-e"], Always, Disabled, "PCIe Transport 1.1, 3.8",
        "the function is in D0, and returns there from D3hot";
    pci_read_only_fields, ["10-f"], Always, Disabled, "PCIe Transport 1.1, 3.8",
        "identifiers and class code do not change by writes";
    pci_memory_space_off, [], Always, Disabled, "PCIe Transport 1.1, 3.8",
        "without Memory Space Enable the registers are not decoded, and are there again with it";
    pci_bus_master_off, ["10-g"], Always, Admin, "PCIe Transport 1.1, 3.8",
        "without Bus Master Enable nothing is fetched; with it the command completes";
}

fn pci_class_code(host: &mut Host) -> Check {
    let [interface, subclass, class] = host.read_config::<3>(9)?;
    same!(class, 1u8, "base class");
    same!(subclass, 8u8, "subclass");
    same!(interface, 2u8, "programming interface");
    Ok(())
}

fn pci_identity_matches(host: &mut Host) -> Check {
    let header = host.read_config::<64>(0)?;
    let controller = host.controller()?;
    same!(
        u16_at(&controller.0, 0),
        u16_at(&header, 0),
        "VID of Identify Controller"
    );
    same!(
        u16_at(&controller.0, 2),
        u16_at(&header, 0x2c),
        "SSVID of Identify Controller"
    );
    Ok(())
}

fn pci_bar0_is_64_bit_memory(host: &mut Host) -> Check {
    let old = host.read_config::<8>(0x10)?;
    let low = u32_at(&old, 0);
    same!(low & 1, 0u32, "BAR0 bit 0, memory space");
    same!(low >> 1 & 3, 2u32, "BAR0 bits 2:1, 64 bits");
    host.write_config(0x10, &[0xff; 4])?;
    host.write_config(0x14, &[0xff; 4])?;
    let sized = host.read_config::<8>(0x10)?;
    host.write_config(0x10, &old)?;
    let mask = u64::from(u32_at(&sized, 4)) << 32 | u64::from(u32_at(&sized, 0) & !0xf);
    let size = mask.wrapping_neg();
    require!(
        size.is_power_of_two(),
        "BAR0 has no size that is a power of two: {mask:#x}"
    );
    let least = host.doorbell(1, true) + 4;
    require!(
        size >= least,
        "BAR0 is of {size:#x} bytes, and doorbells reach to {least:#x}"
    );
    Ok(())
}

/// Returns the PCI capabilities: identifier and offset in configuration space of each.
pub(super) fn capabilities(host: &mut Host) -> Check<Vec<(u8, u64)>> {
    let [status, _] = host.read_config::<2>(6)?;
    require!(
        status & 0x10 != 0,
        "the status register says that there is no capability list"
    );
    let [mut at] = host.read_config::<1>(0x34)?;
    let mut found = Vec::new();
    while at & !3 != 0 {
        let [id, next] = host.read_config::<2>(u64::from(at & !3))?;
        found.push((id, u64::from(at & !3)));
        require!(found.len() < 48, "the capability list does not end");
        at = next;
    }
    Ok(found)
}

fn pci_capability_list(host: &mut Host) -> Check {
    let found = capabilities(host)?;
    let has = |id: u8| found.iter().any(|(found, _)| *found == id);
    require!(has(0x01), "there is no power management capability");
    require!(has(0x10), "there is no PCI Express capability");
    require!(has(0x05) || has(0x11), "there is neither MSI nor MSI-X");
    Ok(())
}

fn pci_power_state_d0(host: &mut Host) -> Check {
    let found = capabilities(host)?;
    let Some((_, at)) = found.iter().find(|(id, _)| *id == 1).copied() else {
        return failed("there is no power management capability");
    };
    let control = host.read_config::<2>(at + 4)?;
    same!(u16_at(&control, 0) & 3, 0u16, "PMCSR power state");
    host.write_config(at + 4, &(u16_at(&control, 0) | 3).to_le_bytes())?;
    let there = host.read_config::<2>(at + 4)?;
    same!(
        u16_at(&there, 0) & 3,
        3u16,
        "PMCSR power state after D3hot was set"
    );
    host.write_config(at + 4, &(u16_at(&control, 0) & !3).to_le_bytes())?;
    let there = host.read_config::<2>(at + 4)?;
    same!(
        u16_at(&there, 0) & 3,
        0u16,
        "PMCSR power state after D0 was set"
    );
    host.decode()?;
    let cap = host.read64(0)?;
    same!(cap, host.cap.into_bits(), "CAP in D0 again");
    Ok(())
}

fn pci_read_only_fields(host: &mut Host) -> Check {
    let old = host.read_config::<64>(0)?;
    for at in [0u64, 8, 0x2c] {
        host.write_config(at, &[0xff; 4])?;
        host.write_config(at, &[0; 4])?;
    }
    let new = host.read_config::<64>(0)?;
    for at in [0, 1, 2, 3, 8, 9, 10, 11, 0x2c, 0x2d, 0x2e, 0x2f] {
        same!(
            u8_at(&new, at),
            u8_at(&old, at),
            "byte {at:#x} of the header after writes"
        );
    }
    Ok(())
}

fn pci_memory_space_off(host: &mut Host) -> Check {
    host.write_config(4, &0x0404u16.to_le_bytes())?;
    // The server may refuse the access, or answer as a bus does where nothing answers.
    let answered = host.read32(0);
    host.decode()?;
    if let Ok(value) = answered {
        same!(value, u32::MAX, "CAP where memory space is not decoded");
    }
    same!(
        host.read64(0)?,
        host.cap.into_bits(),
        "CAP after Memory Space Enable"
    );
    Ok(())
}

fn pci_bus_master_off(host: &mut Host) -> Check {
    let at = host.alloc(4096)?;
    host.write_config(4, &0x0402u16.to_le_bytes())?;
    let command = admin(AdminOpcode::IDENTIFY, 0).prp(at, 0).dw(10, 1);
    let cid = host.submit(0, command)?;
    host.stays_quiet(0, "without Bus Master Enable")?;
    require!(
        host.get(at, 4096)?.iter().all(|byte| *byte == 0),
        "memory was written without Bus Master Enable"
    );
    host.decode()?;
    // A doorbell that was written before need not be remembered.
    host.ring_tail(0)?;
    host.wait_for(0, cid)?
        .succeeds("Identify after Bus Master Enable")
}
